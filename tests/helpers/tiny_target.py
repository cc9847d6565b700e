"""A tiny random target with a tokenizer of its own, written to a directory."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 128
MARK = "<|endoftext|>"  # begins and ends every text
TEXT = [
    "The smith heats the iron, strikes it, and heats it again.",
    "A draft is cheap to make and cheap to throw away.",
    "def strike(iron, times):\n    return [iron.hit() for _ in range(times)]",
]


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
