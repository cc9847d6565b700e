"""What single settings of EAGLE-3 change: acceptance after the same time of training, by seed.

    python benchmarks/choices.py FILE --samples DIR [--seconds 30 90] [--seeds 0 1 2] [--choices NAME ...]
    python benchmarks/choices.py FILE       # the tables of what FILE has, without training

Each choice changes one field of the quickstart's recipe as it was before its unroll grew. It takes as many steps as so
many CPU seconds allow on one thread, so a choice whose steps take longer has fewer of them. All choices were timed
before, in turns. What the target computes is not counted: it is the same for all. Then held-out texts of the target
tell what chains of 4 would have had accepted, as in learning.py. FILE keeps the rows, one a line, and FILE.times the
times: give the same command again to go on, or other seeds beside it. The differences from no change, which stand in
the tables, are of the same seeds; three of them or more give a 95 % interval by Student's t.
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
NO_CHANGE = "no change"
CHOICES: dict[str, dict[str, Any]] = {
    NO_CHANGE: {},
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
        layer_ids = new_drafter(self.target, NO_CHANGE, seed, plan).layer_ids
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
    config = replace(RECIPES[RECIPE]().drafter, **{"unroll_warmup": 0.0, **CHOICES[choice]})
    torch.manual_seed(seed)
    drafter = DRAFTERS[config.kind].from_target(config, target)
    drafter.fit_vocabulary(token_counts(plan, target.vocab_size))
    return drafter


def step_times(target: Target, samples: Samples, path: Path) -> dict[str, float]:
    """Return the CPU seconds of a step of each choice, the least of some turns, or those that the file has."""
    if not path.is_file():
        plan = plan_of(samples, 0)
        drafters = {choice: new_drafter(target, choice, 0, plan) for choice in CHOICES}
        steps = steps_with_features(target, plan, drafters[NO_CHANGE].layer_ids, WARM_UP + TIMED)
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


def rows_in(path: Path) -> list[Row]:
    """Return the rows that a file keeps."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def make_rows(study: Study, args: argparse.Namespace) -> None:
    """Add to the file what it lacks of the rows for each seed, time and choice."""
    done = {(row.choice, row.seed, row.seconds) for row in rows_in(args.file)}
    for seed in args.seeds:
        steps = study.steps_of(seed, max(args.seconds))
        for seconds in args.seconds:
            for choice in args.choices:
                if (choice, seed, seconds) not in done:
                    row = study.row(choice, seed, seconds, steps)
                    with args.file.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")


def cell(values: list[float], of_none: list[float]) -> str:
    """Return the mean of the seeds and its difference from no change, with the 95 % interval of three or more."""
    mean = f"{fmean(values):.2f}"
    differences = [value - other for value, other in zip(values, of_none, strict=True)]
    if not any(differences):
        return mean
    half = ""
    if len(differences) > 2:
        quantile = float(student_t.ppf(0.975, len(differences) - 1))
        half = f" ± {quantile * stdev(differences) / len(differences) ** 0.5:.2f}"
    return f"{mean} ({fmean(differences):+.2f}{half})"


def print_table(rows: list[Row], seconds: float) -> None:
    """Print the choices after one time, each beside no change of the same seeds."""
    print(f"\n| {seconds:g} seconds planned | seeds | CPU s | steps | T=0, beside no change | T=1, beside no change |")
    print("|---|---|---|---|---|---|")
    found = {(row.choice, row.seed): row for row in rows if row.seconds == seconds}
    for choice in CHOICES:
        seeds = sorted(seed for name, seed in found if name == choice and (NO_CHANGE, seed) in found)
        if seeds:
            own, unchanged = ([found[name, seed] for seed in seeds] for name in (choice, NO_CHANGE))
            greedy = cell([row.greedy for row in own], [row.greedy for row in unchanged])
            sampled = cell([row.sampled for row in own], [row.sampled for row in unchanged])
            cpu_seconds = fmean(row.cpu_seconds for row in own)
            print(f"| {choice} | {len(seeds)} | {cpu_seconds:.0f} | {own[0].steps} | {greedy} | {sampled} |")


def study_of(args: argparse.Namespace) -> Study:
    """Return what all choices share, with the times of their steps."""
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    prompts = encode_prompts(prompts_for(target, held_out=True)[: args.prompts], target)
    recordings = [record(target, prompts, Sampling(heat), MAX_NEW_TOKENS, DRAFT_LENGTH) for heat in MODES]
    samples = read_samples(args.samples)
    env = environment(target)
    print(f"{env.command}, {env.device}, one thread, commit {env.git_commit}")
    return Study(target, samples, recordings, step_times(target, samples, Path(f"{args.file}.times")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--samples", type=Path, help="prepared samples to train on")
    parser.add_argument("--seconds", nargs="+", type=float, default=[30.0, 90.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--prompts", type=int, default=157)
    args = parser.parse_args()
    args.choices = list(dict.fromkeys([NO_CHANGE, *args.choices]))  # which the others are compared with
    torch.set_num_threads(1)
    if args.samples:
        make_rows(study_of(args), args)
    rows = rows_in(args.file)
    for seconds in sorted({row.seconds for row in rows}):
        print_table(rows, seconds)


if __name__ == "__main__":
    main()
