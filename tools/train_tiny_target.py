"""Train the embedded default target: a small Llama that writes Python, from the standard library's source.

    python tools/train_tiny_target.py --out DIR [--steps 2600] [--seed 0]

The same seed on the same kind of machine gives the same weights. The result is what the package ships in
recipes/tiny_python/; its README.md there, written by this command, is the model card.
"""

import argparse
import hashlib
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions

END_OF_TEXT = "<|endoftext|>"


@dataclass
class TinyTargetConfig:
    """Thin and deep: on a CPU one decoding step costs operations, not width."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 14
    num_heads: int = 4
    num_key_value_heads: int = 2
    context: int = 512  # tokens, in training and at use
    rows_per_step: int = 8
    steps: int = 2600
    warmup_steps: int = 100
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    seed: int = 0
    threads: int = 2  # part of "the same machine kind": the order of sums depends on it


def train_tokenizer(functions: list[str], config: TinyTargetConfig) -> PreTrainedTokenizerFast:
    """Byte-level BPE; `<|endoftext|>` begins and ends every text and pads batches."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(functions, trainer)
    mark = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, mark)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=config.context,
        clean_up_tokenization_spaces=False,
    )


def build_model(config: TinyTargetConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def tokenize(functions: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """One list of ids per function: `<|endoftext|>` and the function; the next function's mark ends it."""
    ids = tokenizer(functions, add_special_tokens=False, verbose=False)["input_ids"]
    return [[tokenizer.bos_token_id, *function] for function in ids]


def packed_rows(documents: list[list[int]], context: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless rows [context + 1] of documents laid end to end, shuffled anew each epoch."""
    generator = torch.Generator().manual_seed(seed)
    left_over: list[int] = []
    while True:
        for index in torch.randperm(len(documents), generator=generator).tolist():
            left_over += documents[index]
            while len(left_over) > context:
                yield torch.tensor(left_over[: context + 1])
                left_over = left_over[context:]


def validation_loss(model: LlamaForCausalLM, documents: list[list[int]], context: int) -> float:
    """Mean cross-entropy in nats per token on the held-out files, each function from its start."""
    total, count = 0.0, 0
    with torch.no_grad():
        for document in documents:
            row = torch.tensor([*document, document[0]])[: context + 1][None]  # the mark ends it too
            total += cross_entropy(model, row).item() * (row.shape[1] - 1)
            count += row.shape[1] - 1
    return total / count


def cross_entropy(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def build_optimizer(model: LlamaForCausalLM, config: TinyTargetConfig) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate_factor(step: int, config: TinyTargetConfig) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def train(config: TinyTargetConfig, out: Path) -> None:
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    functions, held_out = stdlib_functions(held_out=False), stdlib_functions(held_out=True)
    tokenizer = train_tokenizer(functions, config)
    model = build_model(config, tokenizer)
    optimizer = build_optimizer(model, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config))
    documents, held_out_documents = tokenize(functions, tokenizer), tokenize(held_out, tokenizer)
    rows = packed_rows(documents, config.context, config.seed)

    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training the tiny target", total=config.steps)
        for step in range(config.steps):
            loss = cross_entropy(model, torch.stack([next(rows) for _ in range(config.rows_per_step)]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
            if (step + 1) % 250 == 0 or step + 1 == config.steps:
                held_out_loss = validation_loss(model.eval(), held_out_documents[::4], config.context)
                model.train()
                progress.console.print(
                    f"step {step + 1}: loss {loss.item():.3f}, held-out loss {held_out_loss:.3f}, "
                    f"{time.monotonic() - start:.0f} s"
                )
                save(model, tokenizer, out)
    final = validation_loss(model.eval(), held_out_documents, config.context)
    write_card(out, config, functions, documents, final, time.monotonic() - start, sample(model, tokenizer, held_out))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Weights go to disk in bfloat16, at half the size; computing with them in fp32 is exact."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(out, state_dict=weights)
    tokenizer.save_pretrained(out)


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: list[str]) -> str:
    """A greedy completion of a held-out function's first lines, for the card."""
    prompt = function_prompt(held_out[len(held_out) // 2])
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
    output = model.generate(  # type: ignore[misc]  # typed through a protocol that mypy does not match
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def write_card(
    out: Path,
    config: TinyTargetConfig,
    functions: list[str],
    documents: list[list[int]],
    held_out_loss: float,
    seconds: float,
    completion: str,
) -> None:
    num_parameters = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(out).parameters())
    tokens_per_epoch = sum(map(len, documents))
    trained_tokens = config.steps * config.rows_per_step * config.context
    digest = hashlib.sha256("\0".join(functions).encode()).hexdigest()[:16]
    settings = "\n".join(f"| {name} | {value} |" for name, value in asdict(config).items())
    flags = f"--out recipes/tiny_python --steps {config.steps} --seed {config.seed}"
    (out / "README.md").write_text(
        f"""# tiny_python

A Llama of {num_parameters / 1e6:.2f} M parameters that writes Python functions, after a fashion. It exists so that
`draftsmith quickstart` has a real target with nothing to download; it is of no other use.

* Text: {len(functions)} functions of the standard library of Python {platform.python_version()},
  {tokens_per_epoch} tokens, sha256 {digest}...; one file in sixteen held out. The source is under the PSF licence.
* Trained on {trained_tokens / 1e6:.1f} M tokens ({trained_tokens / tokens_per_epoch:.1f} epochs) in {seconds / 60:.0f}
  minutes on {config.threads} threads of a {platform.machine()} CPU with torch {torch.__version__}.
* Held-out loss: {held_out_loss:.3f} nats per token.
* Command: `python tools/train_tiny_target.py {flags}`

| setting | value |
|---|---|
{settings}

A greedy completion on a held-out file:

```python
{completion}
```
"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=TinyTargetConfig.steps)
    parser.add_argument("--seed", type=int, default=TinyTargetConfig.seed)
    args = parser.parse_args()
    train(TinyTargetConfig(steps=args.steps, seed=args.seed), args.out)


if __name__ == "__main__":
    main()
