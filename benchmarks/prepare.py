"""`prepare` beside answering one prompt after the other with transformers' `model.generate`.

    python benchmarks/prepare.py [--prompts N] [--subsample N] [--batch-size N] [--drafter ngram] [--num-threads N]

Prompts are beginnings of the standard library's functions, from 4 to 384 tokens, on the quickstart target. `generate`
answers a random subsample of the same prompts, half of it before `prepare` and half after; its time for all prompts is
extrapolated by generated tokens. Greedy answers of both are compared. On a machine that others use, CPU time says more.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from draftsmith.data.answers.prepare import AnswerJob, PrepareSettings, prepare
from draftsmith.data.prompts.standard_library import stdlib_functions
from draftsmith.data.samples.folder import read_samples
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

SHORTEST, LONGEST = 4, 384  # tokens of a prompt, lengths between them log-uniform


def write_prompts(path: Path, target: Target, count: int) -> None:
    """Write so many prompts of very different lengths, cut from the functions of the standard library."""
    generator, rows = random.Random(0), []
    for function in generator.sample(stdlib_functions(held_out=False), count):
        length = round(SHORTEST * (LONGEST / SHORTEST) ** generator.random())
        assert target.tokenizer is not None
        text = str(target.tokenizer.decode(target.encode(function)[:length], skip_special_tokens=True))
        rows.append(json.dumps({"prompt": text.rstrip()}) + "\n")
    path.write_text("".join(rows))


def clock(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes: by the clock, and of CPU time."""
    start, start_cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - start_cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--subsample", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)

    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu", torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32).eval()
    sampling = Sampling(args.temperature)
    settings = PrepareSettings(args.max_new_tokens, (sampling,), args.batch_size, drafter=args.drafter)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "prompts.jsonl"
        write_prompts(source, target, args.prompts)
        job = AnswerJob(target, str(source), settings)
        chosen = random.Random(1).sample(job.kept, args.subsample)
        num_shares = len(job.shares())
        sampled = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}

        def generate(index: int) -> list[int]:
            ids = torch.tensor([job.dialogue(index).context])
            out = stock.generate(
                ids, max_new_tokens=args.max_new_tokens, attention_mask=torch.ones_like(ids), **sampled
            )
            return out[0, ids.shape[1] :].tolist()

        generate(chosen[0])  # warm-up, of both
        list(job.answers([chosen[:4]]))
        found: dict[int, list[int]] = {}
        half = args.subsample // 2
        before = clock(lambda: found.update({index: generate(index) for index in chosen[:half]}))
        prepared = clock(lambda: prepare(target, str(source), Path(folder) / "out", settings))
        after = clock(lambda: found.update({index: generate(index) for index in chosen[half:]}))
        samples = read_samples(Path(folder) / "out")

    num_tokens = int(samples.num_generated().sum())
    num_generated = sum(map(len, found.values()))
    same = sum(samples[index].generated() == found[index] for index in chosen)
    print(f"{platform.machine()}, {args.num_threads} thread(s), torch {torch.__version__}, commit {git_commit()}")
    print(
        f"{len(samples)} prompts of {min(job.lengths)} to {max(job.lengths)} tokens, median "
        f"{statistics.median(job.lengths):g}; up to {args.max_new_tokens} new ones, temperature {args.temperature:g}, "
        f"batch size {args.batch_size}, {num_shares} shares, drafter {args.drafter}\n"
    )
    for name, ours, first, second in zip(("by the clock", "CPU time"), prepared, before, after, strict=True):
        rate = num_generated / (first + second)
        print(f"{name}:")
        print(f"  prepare:  {num_tokens} tokens in {ours:.1f} s, {num_tokens / ours:.1f} tokens/s, all included")
        print(f"  generate: {rate:.1f} tokens/s on {len(chosen)} of the prompts, so {num_tokens / rate:.0f} s for all")
        print(f"  prepare is {num_tokens / rate / ours:.2f} times as fast (goal 3)")
    if sampling.greedy:
        print(f"the same answer to the token: {same} of {len(chosen)}")


if __name__ == "__main__":
    main()
