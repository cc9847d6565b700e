"""How long `draftsmith evaluate` takes with 3 drafters, 2 temperatures, 3 batch sizes and 40 prompts: goal 5 minutes.

    python benchmarks/evaluate.py DRAFTER DRAFTER DRAFTER [--num-prompts N]

The target is the quickstart's, the prompts are held-out functions of the standard library, all else is the default of
`evaluate`. The time is what a user waits for the whole command, with the start of Python and the loading of the target.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.inference.measuring.results import Result, read_evaluation
from draftsmith.models import Target
from draftsmith.recipes.pages.tables import speedup_text
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, write_jsonl

GOAL = 5  # minutes
GRID = ["--temperature", "0", "1", "--batch-size", "1", "4", "8"]
LONGEST = 128  # tokens of a prompt


def write_prompts(path: Path, count: int) -> None:
    target = Target.without_weights(str(EMBEDDED_TARGET))
    prompts = [function_prompt(function) for function in stdlib_functions(held_out=True)]
    short = [prompt for prompt in prompts if len(target.encode(prompt)) <= LONGEST]
    write_jsonl(path, [Prompt(text=prompt) for prompt in random.Random(0).sample(short, count)])


def line(row: Result) -> str:
    setting, length = row.setting, f"{row.acceptance.mean_acceptance_length:.2f}"
    return f"{setting.temperature:g} | {setting.batch_size} | {length} | {speedup_text(row)} | {row.speed.repeats}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER")
    parser.add_argument("--num-prompts", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "held_out.jsonl", Path(folder) / "out"
        write_prompts(prompts, args.num_prompts)
        words = ["--target", str(EMBEDDED_TARGET), "--prompts", str(prompts), *GRID, "--device", "cpu"]
        words += [word for drafter in args.drafters for word in ("--drafter", drafter)]
        start = time.perf_counter()
        command = [sys.executable, "-m", "draftsmith.inference", *words, "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        minutes = (time.perf_counter() - start) / 60
        evaluations = [read_evaluation(path) for path in sorted(out.rglob("evaluation.json"))]
    env = evaluations[0].environment
    print(f"{env.device}, threads: {env.num_threads}, torch {env.versions['torch']}, commit {env.git_commit}")
    print(f"draftsmith evaluate {' '.join(GRID)}: {len(args.drafters)} drafters, {args.num_prompts} prompts")
    kept = "kept" if minutes < GOAL else "MISSED"
    measuring = (evaluations[0].seconds or 0) / 60
    print(f"{minutes:.2f} minutes, of which {measuring:.2f} measuring; goal of {GOAL}: {kept}\n")
    print("| drafter | temperature | batch | acceptance length | speedup | repeats |\n|---|---|---|---|---|---|")
    for evaluation in evaluations:
        for row in evaluation.results:
            print(f"| {evaluation.drafter_kind} | {line(row)} |")


if __name__ == "__main__":
    main()
