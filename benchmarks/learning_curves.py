"""Learning curves of runs of many families and lengths, and how far a tenth of each foretells its end.

    python benchmarks/learning_curves.py train RUNS [--kinds ...] [--steps ...] [--seeds ...] [--decays ...]
    python benchmarks/learning_curves.py check RUNS

`train` lets the embedded target write samples where RUNS/samples is missing, as the quickstart does, and makes the runs
that are missing, one after the other. Each writes the curve of `data.held_out_prompts` into its metrics.jsonl. `check`
tells, for each run, what `train/evaluation/forecast.py` says after a tenth of the steps and what came of it.
"""

import argparse
from pathlib import Path

from draftsmith.data.answers.prepare import prepare
from draftsmith.models import Target
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.studies.quickstart import EMBEDDED_TARGET, prompts_for, write_jsonl
from draftsmith.recipes.studies.quickstart_budget import ANSWERS, new_drafter
from draftsmith.train import train
from draftsmith.train.config import TrainConfig
from draftsmith.train.run_folder.learning_curve import learning_curve

NUM_PROMPTS = 2048  # so that 64 of them can be held out
MAX_LENGTH = 80  # tokens, so that a run takes a minute
KINDS = ["eagle3", "eagle", "p_eagle", "dflash", "dspark", "medusa", "hydra", "mlp_speculator", "draft_model"]


def prepare_samples(runs: Path, target: Target) -> None:
    """Let the target write the quickstart's training text."""
    write_jsonl(runs / "prompts.jsonl", prompts_for(target, held_out=False)[:NUM_PROMPTS])
    prepare(target, str(runs / "prompts.jsonl"), runs / "samples", ANSWERS)


def config_of(kind: str, steps: int, seed: int, decay: str, runs: Path, layers: list[int]) -> TrainConfig:
    """Return the quickstart's recipe for a run that only follows its learning curve, on features stored for all."""
    config = RECIPES[f"quickstart_{kind}"]()
    config.target, config.data.samples = str(EMBEDDED_TARGET), str(runs / "samples")
    config.data.max_length, config.run.seed = MAX_LENGTH, seed
    config.optimizer.decay = "late" if decay == "late" else "cosine"
    if not config.drafter.starts_from_layers:
        config.data.features, config.data.features_layers = "stored", layers
    config.run.dir = str(runs / "runs" / f"{kind}-{steps}-{decay}-{seed}")
    config.run.steps = config.run.checkpoint_every = steps
    config.run.keep_checkpoints, config.run.log_every = 1, steps
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["train", "check"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", nargs="+", type=int, default=[200, 400, 800])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--decays", nargs="+", choices=["cosine", "late"], default=["cosine"])
    arguments = parser.parse_args()
    if arguments.task == "train":
        target = load_target(str(EMBEDDED_TARGET), "cpu")
        if not (arguments.runs / "samples").is_dir():
            prepare_samples(arguments.runs, target)
        layers = sorted({layer_id for kind in KINDS for layer_id in new_drafter(kind, target).layer_ids})
        for steps in arguments.steps:
            for seed in arguments.seeds:
                for decay in arguments.decays:
                    for kind in arguments.kinds:
                        train(config_of(kind, steps, seed, decay, arguments.runs, layers))
        return
    for run in sorted((arguments.runs / "runs").iterdir()):
        print(run.name, *(f"{point.step}:{point.acceptance_length:.3f}" for point in learning_curve(run)))


if __name__ == "__main__":
    main()
