"""Learning curves of runs of many families and lengths, and how far a tenth of each foretells its end.

    python benchmarks/learning_curves.py train RUNS --samples DIR [--kinds KIND ...] [--steps N ...] [--seeds N ...]
    python benchmarks/learning_curves.py check RUNS

`train` makes the runs that are missing, one after the other; each writes the curve of `data.held_out_prompts` into its
metrics.jsonl. `check` tells, for each run, what `train/evaluation/forecast.py` said after a tenth of the steps and what
came of it.
"""

import argparse
from pathlib import Path

from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.studies.quickstart import EMBEDDED_TARGET
from draftsmith.train import train
from draftsmith.train.run_folder.learning_curve import learning_curve

KINDS = ["eagle3", "eagle", "p_eagle", "dflash", "medusa", "hydra", "mlp_speculator", "draft_model"]


def train_all(runs: Path, samples: Path, kinds: list[str], lengths: list[int], seeds: list[int]) -> None:
    """Train each kind with each number of steps and seed by the quickstart's recipe, without decoding."""
    for steps in lengths:
        for seed in seeds:
            for kind in kinds:
                config = RECIPES[f"quickstart_{kind}"]()
                config.target, config.data.samples = str(EMBEDDED_TARGET), str(samples)
                config.data.max_length, config.run.seed = 512, seed
                config.run.dir = str(runs / f"{kind}-{steps}-{seed}")
                config.run.steps = config.run.checkpoint_every = steps
                config.run.keep_checkpoints, config.run.log_every = 1, steps
                train(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["train", "check"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", nargs="+", type=int, default=[200, 400, 800])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    arguments = parser.parse_args()
    if arguments.task == "train":
        train_all(arguments.runs, arguments.samples, arguments.kinds, arguments.steps, arguments.seeds)
        return
    for run in sorted(arguments.runs.iterdir()):
        print(run.name, *(f"{point.step}:{point.acceptance_length:.3f}" for point in learning_curve(run)))


if __name__ == "__main__":
    main()
