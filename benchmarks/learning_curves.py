"""Learning curves of short runs of many families, and how well a tenth of each foretells its end.

    python benchmarks/learning_curves.py train FOLDER
    python benchmarks/learning_curves.py check FOLDER [RUN ...]

`train` lets the embedded target write samples where there are none in FOLDER, as the quickstart does, and makes the
runs that are missing, one after the other, on features that are stored once. `check` prints what the runs of
`FINISHED` give for `FINISHED_RUNS` of train/evaluation/forecast.py, and for each run of `CHECKED`, none of which is
among these, the forecast after a tenth of its steps and what came of it; and so for the folders of other runs with the
embedded target, such as those of a quickstart.
"""

import argparse
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from draftsmith.data.answers.prepare import prepare
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.quickstart.budget import ANSWERS, new_drafter
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, traffic_for, write_jsonl
from draftsmith.train import train
from draftsmith.train.config import TrainConfig
from draftsmith.train.evaluation.forecast import FINISHED_RUNS, FinishedRun, accepted_share, forecast
from draftsmith.train.run_folder.learning_curve import CurvePoint, learning_curve
from draftsmith.train.run_folder.stored_run import read_config

NUM_PROMPTS = 1024
MAX_LENGTH = 160  # tokens, so that a run takes some two minutes
KINDS = ["eagle3", "eagle", "p_eagle", "dflash", "medusa", "hydra", "mlp_speculator"]


@dataclass
class CurveRun:
    """A run by the quickstart's recipe, of which only the learning curve is wanted."""

    kind: str
    steps: int
    batch_size: int  # samples
    decay: Literal["cosine", "late"] = "cosine"
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.kind}-{self.steps}x{self.batch_size}-{self.decay}-{self.seed}"


FINISHED = [
    *[CurveRun(kind, 200, 8) for kind in KINDS],
    CurveRun("medusa", 600, 2),
    CurveRun("eagle3", 600, 8),
]
CHECKED = [
    CurveRun("hydra", 200, 2),
    *[CurveRun(kind, 200, 2, seed=1) for kind in ("medusa", "hydra", "mlp_speculator", "eagle", "eagle3", "dflash")],
    *[CurveRun(kind, 300, 2, "late", 1) for kind in ("medusa", "hydra", "eagle")],
    *[CurveRun(kind, 300, 2, seed=1) for kind in ("mlp_speculator", "eagle3", "p_eagle")],
]


def prepare_samples(folder: Path, target: Target) -> None:
    """Let the target write the quickstart's training text."""
    write_jsonl(folder / "prompts.jsonl", traffic_for(target, held_out=False)[:NUM_PROMPTS])
    prepare(target, str(folder / "prompts.jsonl"), folder / "samples", ANSWERS)


def config_of(run: CurveRun, folder: Path, layers: list[int]) -> TrainConfig:
    """Return the config of a run that only follows its learning curve, on features stored for all runs."""
    config = RECIPES[f"quickstart_{run.kind}"]()
    config.target, config.data.samples = str(EMBEDDED_TARGET), str(folder / "samples")
    config.data.max_length, config.data.batch_size = MAX_LENGTH, run.batch_size
    config.data.held_out_prompts = 8 * run.batch_size
    config.data.features, config.data.features_layers = "stored", layers
    config.optimizer.decay = run.decay
    config.run.dir, config.run.seed = str(folder / run.name), run.seed
    config.run.steps = config.run.checkpoint_every = run.steps
    config.run.keep_checkpoints, config.run.log_every = 1, run.steps
    return config


def train_all(folder: Path) -> None:
    """Make all runs that are missing."""
    target = load_target(str(EMBEDDED_TARGET), "cpu")
    if not (folder / "samples").is_dir():
        prepare_samples(folder, target)
    drafters = [new_drafter(RECIPES[f"quickstart_{kind}"](), target) for kind in KINDS]
    layers = sorted({layer_id for drafter in drafters for layer_id in drafter.layer_ids})
    for run in [*FINISHED, *CHECKED]:
        train(config_of(run, folder, layers))


def finished_run(points: list[CurvePoint], depth: int, num_steps: int) -> FinishedRun:
    """Return what later forecasts need to know of a run."""
    tenth = accepted_share(num_steps // 10, points, depth)
    assert tenth
    steps, lengths = [point.step for point in points], [point.acceptance_length for point in points]
    fifth = float(np.interp(math.log(2 * (num_steps // 10)), np.log(steps), lengths))  # between the points beside it
    return FinishedRun(*(round(share, 4) for share in (tenth, (fifth - 1) / depth, (lengths[-1] - 1) / depth)))


def check(folder: Path, others: list[Path]) -> None:
    """Print the finished runs as the forecast wants them, and the forecast of each other run with its end."""
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, commit {git_commit()}")
    target = load_target(str(EMBEDDED_TARGET), "cpu")
    depths = {kind: new_drafter(RECIPES[f"quickstart_{kind}"](), target).simulated_depth for kind in KINDS}
    for run in FINISHED:
        points = learning_curve(folder / run.name)
        made = points and points[-1].step == run.steps
        print(
            f"{finished_run(points, depths[run.kind], run.steps)},  # {run.name}" if made else f"{run.name}: not made"
        )
    checked = [(folder / run.name, run.name, run.kind, run.steps) for run in CHECKED]
    for path in others:
        stored = read_config(path / "config.yaml")
        checked.append((path, f"{path.parent.name}/{path.name}", stored.drafter.kind, stored.run.steps))
    insides = [inside_forecast(path, name, depths[kind], steps) for path, name, kind, steps in checked]
    foretold = [inside for inside in insides if inside is not None]
    print(f"{sum(foretold)} of {len(foretold)} inside")


def inside_forecast(run: Path, name: str, depth: int, num_steps: int) -> bool | None:
    """Print the forecast of a run beside its end, and return whether this lies in it. None: there is no forecast."""
    points = learning_curve(run)
    made = points and points[-1].step == num_steps
    found = forecast(points, depth, num_steps, FINISHED_RUNS) if made else None
    if found is None:
        print(f"{name}: not made, or nothing foretold")
        return None
    reached = points[-1].acceptance_length
    inside = found.low <= reached <= found.high
    print(f"| {name} | {found.text} | {reached:.2f} | {'inside' if inside else 'outside'} |")
    return inside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["train", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    arguments = parser.parse_args()
    if arguments.task == "train":
        train_all(arguments.folder)
        return
    check(arguments.folder, arguments.runs)


if __name__ == "__main__":
    main()
