"""Speed, memory and the split of the time of whole training steps, by length of rows, unroll and rows a micro-batch.

    python benchmarks/training.py [--target T --samples DIR] [--recipe eagle3] [--lengths 128 512] [--unrolls 1 4]
                                  [--rows 1 4] [--steps N] [--num-threads N] [key=value ...]

Runs the training loop, from data to optimiser, in a process of its own for each setting; without --target on the one
that draftsmith ships, on text that it writes first. Rows are packed to their length. Figures are medians over the steps
after the first two; the peak of memory is the process's on a CPU, what torch held on a GPU.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
import torch
from ranks import exit_codes, fork

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train import train
from draftsmith.train.config import resolve
from draftsmith.train.run_folder.tracking import read_metrics

WARM_UP = 2  # steps
PARTS = ("data", "target", "drafter", "communication", "optimizer")


def write_samples(
    folder: Path, target: str | Path = EMBEDDED_TARGET, num_prompts: int = 128, max_new_tokens: int = 48
) -> None:
    """Let a target answer small prompts; the samples are in the folder of that name."""
    (folder / "prompts.txt").write_text("".join(f"def strike_{i}(iron, times={i}):\n" for i in range(num_prompts)))
    settings = PrepareSettings(max_new_tokens=max_new_tokens)
    prepare(Target.from_pretrained(target), str(folder / "prompts.txt"), folder / "samples", settings)


def run(args: argparse.Namespace, folder: Path, length: int, unroll: int, rows: int) -> None:
    """Train at one setting; its metrics are left in the folder."""
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    changes = {
        "target": args.target,
        "data.samples": args.samples,
        "data.packing": "true",
        "data.max_length": length,
        "data.tokens_per_micro_batch": length * rows,
        "data.batch_size": args.batch_size,
        "drafter.unroll_steps": unroll,
        "run.dir": folder,
        "run.steps": args.steps + WARM_UP,
        "run.checkpoint_every": args.steps + WARM_UP,
        "run.log_every": 1,
    }
    overrides = [*(f"{key}={value}" for key, value in changes.items()), *args.overrides]
    train(resolve(RECIPES[args.recipe](), None, overrides))


def row_of(folder: Path) -> str:
    lines = read_metrics(folder)[WARM_UP:]
    median = {name: statistics.median(line[name] for line in lines) for name in ("tokens_per_second", "peak_memory_gb")}
    shares = [statistics.median(line[f"time_share_{part}"] for line in lines) for part in PARTS]
    use = lines[-1]["model_flop_utilisation"]
    text = " | ".join(f"{share:.0%}" for share in shares)
    return (
        f"{median['tokens_per_second']:.0f} | {median['peak_memory_gb']:.2f} | {text} | {f'{use:.0%}' if use else '-'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default=str(EMBEDDED_TARGET))
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--recipe", default="quickstart_eagle3")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--unrolls", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batch-size", type=int, default=32, help="samples a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as drafter.recompute=true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        if args.samples is None:
            args.samples = folder / "samples"
            assert exit_codes([fork(lambda: write_samples(folder), log)]) == [0], log.read_text()
        settings = ", ".join([args.recipe, *args.overrides, f"target {Path(args.target).name}"])
        print(f"{settings}, commit {git_commit()}, torch {torch.__version__}\n")
        print("| tokens a row | unroll | rows | trained tokens/s | peak GB |", " | ".join(PARTS), "| of peak FLOPs |")
        print("|---" * (6 + len(PARTS)) + "|")
        for length, unroll, rows in itertools.product(args.lengths, args.unrolls, args.rows):
            out = folder / f"{length}-{unroll}-{rows}"
            if exit_codes([fork(lambda: run(args, out, length, unroll, rows), log)]) != [0]:  # noqa: B023
                print(log.read_text()[-3000:], file=sys.stderr)
                sys.exit(1)
            print(f"| {length} | {unroll} | {rows} | {row_of(out)} |", flush=True)


if __name__ == "__main__":
    main()
