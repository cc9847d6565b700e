"""Fixtures of all tests: one thread, one seed, and a tiny random target with a tokenizer of its own.

Without a GPU kernels run in Triton's interpreter. Triton asks for it when a kernel is defined, its own among them, so
the variable is set before transformers imports triton.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.models import Target

CONTEXT = 128
MARK = "<|endoftext|>"  # begins and ends every text
TEXT = [
    "The smith heats the iron, strikes it, and heats it again.",
    "A draft is cheap to make and cheap to throw away.",
    "def strike(iron, times):\n    return [iron.hit() for _ in range(times)]",
]


@pytest.fixture(autouse=True)
def reproducible() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, the mark, and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[MARK], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    mark = tokenizer.token_to_id(MARK)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{MARK} $A", special_tokens=[(MARK, mark)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=MARK, eos_token=MARK, pad_token=MARK, model_max_length=CONTEXT
    )


def save_target(directory: Path, max_shard_size: str = "50GB", **changes: Any) -> Path:
    """Write a random Llama with its tokenizer; `changes` are fields of LlamaConfig.

    Wide weights make greedy text vary with the prompt and still repeat itself now and then, as n-grams need; a sharp
    head makes the distributions far from uniform.
    """
    tokenizer = tiny_tokenizer()
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes}))
    model.lm_head.weight.data *= 3
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def make_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Call it with fields of LlamaConfig for a target other than the tiny one."""
    return lambda **changes: save_target(tmp_path_factory.mktemp("target"), **changes)


@pytest.fixture(scope="session")
def tiny_target_dir(make_target_dir: Callable[..., Path]) -> Path:
    return make_target_dir()


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> Target:
    """On the CPU in fp32. Frozen, so that all tests may share it."""
    return Target.from_pretrained(tiny_target_dir, "cpu", torch.float32)
