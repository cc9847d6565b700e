"""What single settings of the quickstart's EAGLE-3 change: acceptance after the same time of training, by seed.

    python benchmarks/choices.py --samples DIR [--seconds 40 120] [--seeds 0 1 2] [--choices NAME ...] [--out FILE]

Each choice changes one field of the recipe. It takes as many steps as so many CPU seconds allow on one thread, so a
choice whose steps take longer has fewer of them. All choices were timed before, in turns. What the target computes is
not counted: it is the same for all. Then held-out texts of the target tell what chains of 4 would have had accepted, as
in learning.py. FILE keeps the rows, one a line, and FILE.times the times: give the same command again to go on, or
other seeds beside it. The differences from the recipe, which stand at the end, are of the same seeds, with 95 %
intervals by Student's t.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from learning import DRAFT_LENGTH, MAX_NEW_TOKENS, MODES, Step, acceptance_lengths, fit, steps_with_features
from scipy.stats import t as student_t

from draftsmith.data.features.vocabulary import token_counts
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import read_samples
from draftsmith.data.samples.samples import Samples
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.replay.replay import Recording, record
from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for

RECIPE = "quickstart_eagle3"
TURNS, WARM_UP, TIMED = 3, 2, 8  # turns in which choices are timed, and steps in each
CHOICES: dict[str, dict[str, Any]] = {
    "the recipe": {},
    "loss: cross-entropy": {"divergence": "cross_entropy"},
    "loss: cross-entropy and L1": {"divergence": "cross_entropy_and_l1"},
    "loss: LK hybrid": {"divergence": "lk_hybrid"},
    "loss: half KL, then LK hybrid": {"divergence": "lk_hybrid", "kl_share": 0.5},
    "loss: total variation": {"divergence": "total_variation"},
    "unroll: 1 step": {"unroll_steps": 1},
    "unroll: 2 steps": {"unroll_steps": 2},
    "unroll: 5 steps": {"unroll_steps": 5},
    "unroll: grows to 3 in two thirds": {"unroll_warmup": 2 / 3},
    "step decay 0.6": {"step_decay": 0.6},
    "step decay 1": {"step_decay": 1.0},
    "draft vocabulary: 512": {"draft_vocab_size": 512},
    "draft vocabulary: 1024": {"draft_vocab_size": 1024},
    "two layers": {"num_layers": 2},
    "MLP twice as wide": {"intermediate_size": 1376},
}


@dataclass(frozen=True)
class Row:
    """What a choice came to with a seed after so many CPU seconds of training."""

    choice: str
    seed: int
    seconds: float  # that were planned
    steps: int
    cpu_seconds: float  # that the steps took
    greedy: float  # acceptance length
    sampled: float  # the same at temperature 1


@dataclass(frozen=True)
class Study:
    """What all choices share."""

    target: Target
    samples: Samples
    recordings: list[Recording]  # of held-out texts, one a mode
    step_seconds: dict[str, float]  # CPU time of a step of each choice, the target's part left out

    def steps_of(self, seed: int, seconds: float) -> list[Step]:
        """Return as many steps of a seed as any choice takes in so many seconds."""
        plan, num_steps = plan_of(self.samples, seed), round(seconds / min(self.step_seconds.values()))
        layer_ids = new_drafter(self.target, "the recipe", seed, plan).layer_ids
        return steps_with_features(self.target, plan, layer_ids, num_steps)

    def row(self, choice: str, seed: int, seconds: float, steps: list[Step]) -> Row:
        """Train one choice on the first of these steps, and tell what it came to."""
        drafter = new_drafter(self.target, choice, seed, plan_of(self.samples, seed))
        num_steps = round(seconds / self.step_seconds[choice])
        begin = time.process_time()
        trained(drafter, steps[:num_steps])
        cpu_seconds = time.process_time() - begin
        lengths = acceptance_lengths(self.target, drafter, self.recordings)
        return Row(choice, seed, seconds, num_steps, cpu_seconds, *lengths)


def plan_of(samples: Samples, seed: int) -> BatchPlan:
    """Return the batches that a seed trains on."""
    return BatchPlan(samples, 8, 512, 8 * 512, seed=seed)


def new_drafter(target: Target, choice: str, seed: int, plan: BatchPlan) -> Drafter:
    """Return a drafter of a choice before its first step."""
    config = replace(RECIPES[RECIPE]().drafter, **CHOICES[choice])
    torch.manual_seed(seed)
    drafter = DRAFTERS[config.kind].from_target(config, target)
    drafter.fit_vocabulary(token_counts(plan, target.vocab_size))
    return drafter


def timed_steps(target: Target, samples: Samples, path: Path) -> dict[str, float]:
    """Return the CPU seconds of a step of each choice, the least of some turns, or those that the file has."""
    if not path.is_file():
        plan = plan_of(samples, 0)
        drafters = {choice: new_drafter(target, choice, 0, plan) for choice in CHOICES}
        steps = steps_with_features(target, plan, drafters["the recipe"].layer_ids, WARM_UP + TIMED)
        times: dict[str, list[float]] = {choice: [] for choice in CHOICES}
        for _ in range(TURNS):
            for choice, drafter in drafters.items():
                trained(drafter, steps[:WARM_UP])
                begin = time.process_time()
                trained(drafter, steps[WARM_UP:])
                times[choice].append((time.process_time() - begin) / TIMED)
        path.write_text(json.dumps({choice: min(found) for choice, found in times.items()}))
    found: dict[str, float] = json.loads(path.read_text())
    return found


def trained(drafter: Drafter, steps: list[Step]) -> None:
    """Train a drafter on these steps by the recipe's optimiser."""
    fit(drafter, steps, RECIPES[RECIPE]().optimizer)


def rows_of(study: Study, args: argparse.Namespace) -> list[Row]:
    """Return a row for each seed, time and choice, of which those in the file are there already."""
    lines = args.out.read_text().splitlines() if args.out.is_file() else []
    rows = [Row(**json.loads(line)) for line in lines]
    done = {(row.choice, row.seed, row.seconds) for row in rows}
    for seed in args.seeds:
        steps = study.steps_of(seed, max(args.seconds))
        for seconds in args.seconds:
            for choice in args.choices:
                if (choice, seed, seconds) not in done:
                    rows.append(study.row(choice, seed, seconds, steps))
                    with args.out.open("a") as file:
                        file.write(json.dumps(asdict(rows[-1])) + "\n")
    return rows


def cell(values: list[float], of_recipe: list[float]) -> str:
    """Return the mean of the seeds, and its difference from the recipe's with the 95 % interval."""
    mean = f"{fmean(values):.2f}"
    differences = [value - other for value, other in zip(values, of_recipe, strict=True)]
    if len(differences) < 2 or not any(differences):
        return mean
    half = float(student_t.ppf(0.975, len(differences) - 1)) * stdev(differences) / len(differences) ** 0.5
    return f"{mean}, {fmean(differences):+.2f} ± {half:.2f}"


def print_table(rows: list[Row], seconds: float, choices: list[str]) -> None:
    """Print the choices after one time, by the order of the seeds."""
    print(
        f"\n| {seconds:g} seconds planned | CPU s | steps | T=0, and beside the recipe | T=1, and beside the recipe |"
    )
    print("|---|---|---|---|---|")
    by_choice = {
        choice: sorted(
            (row for row in rows if (row.choice, row.seconds) == (choice, seconds)), key=lambda row: row.seed
        )
        for choice in choices
    }
    recipe = by_choice["the recipe"]
    for choice, own in by_choice.items():
        cpu_seconds = fmean(row.cpu_seconds for row in own)
        greedy = cell([row.greedy for row in own], [row.greedy for row in recipe])
        sampled = cell([row.sampled for row in own], [row.sampled for row in recipe])
        print(f"| {choice} | {cpu_seconds:.0f} | {own[0].steps} | {greedy} | {sampled} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--seconds", nargs="+", type=float, default=[40.0, 120.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--prompts", type=int, default=157)
    parser.add_argument("--out", type=Path, default=Path("choices.jsonl"))
    args = parser.parse_args()
    args.choices = list(dict.fromkeys(["the recipe", *args.choices]))  # which the others are compared with
    torch.set_num_threads(1)
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    prompts = encode_prompts(prompts_for(target, held_out=True)[: args.prompts], target)
    recordings = [record(target, prompts, Sampling(heat), MAX_NEW_TOKENS, DRAFT_LENGTH) for heat in MODES]
    samples = read_samples(args.samples)
    times = timed_steps(target, samples, args.out.with_name(f"{args.out.name}.times"))
    rows = rows_of(Study(target, samples, recordings, times), args)
    env = environment(target)
    print(f"{env.command}, {env.device}, one thread, commit {env.git_commit}")
    for seconds in args.seconds:
        print_table(rows, seconds, args.choices)


if __name__ == "__main__":
    main()
