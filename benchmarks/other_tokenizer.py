"""A draft model of another tokenizer than the target's, beside transformers' universal assisted generation.

    python benchmarks/families.py samples RUNS        # text that the target wrote
    python benchmarks/other_tokenizer.py RUNS         # some 20 minutes on two cores

A small Llama with a vocabulary of its own learns the text that the quickstart's target learnt, and no word of the
target's. transformers drafts with it by re-encoding the text each round. draftsmith gives it the target's vocabulary
once, before and after training on the target's text; a copy with random weights shows what its knowledge is worth.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.data.prompts.standard_library import stdlib_functions
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.environment import environment
from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.models.drafter_configs import DraftModelConfig
from draftsmith.models.drafters.draft_model import DraftModel
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train import train
from draftsmith.train.run_folder.checkpoint import checkpoint_name

END, LENGTH, ROWS = "<end>", 128, 16  # of a step of the small model's own training
NEW_TOKENS, DRAFT_LENGTH, REPEATS = 64, 4, 2


def own_tokenizer(functions: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of half as many tokens as the target's, which therefore cuts words otherwise."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(functions[::3], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def small_model(steps: int, folder: Path) -> None:
    """Train the small model on functions for some steps and save it; after none its weights are random."""
    functions = stdlib_functions(held_out=False)
    tokenizer = own_tokenizer(functions)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    stream = torch.tensor([token for text in functions for token in tokenizer(text)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(1, steps))
    for _ in range(steps):
        starts = torch.randint(len(stream) - LENGTH - 1, (ROWS,))
        rows = stream[starts[:, None] + torch.arange(LENGTH + 1)]
        logits = model(rows[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trained(model: Path, runs: Path, name: str, steps: int, target: Target) -> dict[int, Path]:
    """Train the model as a draft model on what the target wrote. Returns its checkpoints, by steps."""
    config = RECIPES["quickstart_draft_model"]()
    config.target, config.data.samples = str(EMBEDDED_TARGET), str(runs / "samples")
    config.drafter = DraftModelConfig(model=str(model))
    config.data.max_length, config.run.device = 256, "cpu"
    config.run.dir = str(runs / name)
    config.run.steps = config.run.checkpoint_every = steps
    config.evaluation.untrained = False
    before = runs / f"{name}-before"
    save_drafter(DraftModel.from_target(config.drafter, target), before)
    train(config)
    return {0: before, steps: runs / name / "checkpoints" / checkpoint_name(steps)}


# --- measuring


def plain_seconds(target: Target, prompts: list[str]) -> float:
    decoder = SpeculativeDecoder(target, load_drafter("none", target))
    start = time.perf_counter()
    decoder.generate(prompts, NEW_TOKENS, batch_size=1)
    return time.perf_counter() - start


def row(name: str, acceptance_length: float, speedups: list[float]) -> str:
    return f"{name:58} {acceptance_length:.2f} {', '.join(f'{speedup:.2f}' for speedup in speedups)}"


def own_row(name: str, checkpoint: Path, target: Target, prompts: list[str]) -> str:
    """Return a line of the table for a checkpoint, decoded by draftsmith one prompt at a time."""
    decoder = SpeculativeDecoder(target, load_drafter(checkpoint, target))
    speedups = []
    for _ in range(REPEATS):
        plain = plain_seconds(target, prompts)
        start = time.perf_counter()
        stats = decoder.generate(prompts, NEW_TOKENS, draft_length=DRAFT_LENGTH, batch_size=1).stats.total
        speedups.append(plain / (time.perf_counter() - start))
    return row(name, stats.mean_acceptance_length, speedups)


def transformers_row(model: Path, prompts: list[str]) -> str:
    """Return the line of transformers' universal assisted generation, beside its own plain decoding."""
    target: Any = LlamaForCausalLM.from_pretrained(EMBEDDED_TARGET)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED_TARGET)
    assistant = LlamaForCausalLM.from_pretrained(model)
    assistant.generation_config.num_assistant_tokens = DRAFT_LENGTH
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    universal = {
        "assistant_model": assistant,
        "tokenizer": tokenizer,
        "assistant_tokenizer": PreTrainedTokenizerFast.from_pretrained(model),
    }
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    target.register_forward_hook(count)
    seconds: dict[str, float] = {}
    speedups = []
    for _ in range(REPEATS):
        for name, options in {"plain": {}, "universal": universal}.items():
            start, passes, tokens = time.perf_counter(), 0, 0
            for prompt in prompts:
                ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
                output = target.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
                tokens += output.shape[1] - ids["input_ids"].shape[1]
            seconds[name] = time.perf_counter() - start
        speedups.append(seconds["plain"] / seconds["universal"])
    return row("transformers, universal assisted generation", tokens / passes, speedups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--own-steps", type=int, default=3000, help="of the small model's own training")
    parser.add_argument("--steps", type=int, default=400, help="of training on the target's text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    small_model(options.own_steps, options.runs / "own")
    small_model(0, options.runs / "random")
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    lines = (options.runs / "held_out.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    checkpoints = {
        name: trained(options.runs / name, options.runs, f"draft-{name}", options.steps, target)
        for name in ("own", "random")
    }
    env = environment(target)
    print(f"{env.device}, 1 thread, commit {env.git_commit}, {len(prompts)} prompts, {NEW_TOKENS} new tokens, greedy")
    print(f"{'drafter':58} acceptance length, {REPEATS} speedups over plain decoding by the same library")
    print(transformers_row(options.runs / "own", prompts))
    for name, steps in checkpoints.items():
        for step, checkpoint in steps.items():
            print(
                own_row(f"draftsmith, {name} weights, {step} steps on the target's text", checkpoint, target, prompts)
            )


if __name__ == "__main__":
    main()
