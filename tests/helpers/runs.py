"""Small training runs that several test files make."""

from pathlib import Path
from typing import Any

import torch
from drafters import SMALLER
from safetensors.torch import load_file

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.models import Target
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import TrainConfig
from draftsmith.train.config import resolve
from draftsmith.train.run_folder.checkpoint import checkpoints

# A draft vocabulary is larger than the tiny target's; what is drawn by chance differs from batch to batch.
CHANGES = {"draft_vocab_size": None, "noise": 0.0, "keep_ratio": 1.0, "anchor_share": 1.0}
OF_MACHINE = ("tokens_per_second", "time_share", "peak_memory", "model_flop")  # metrics that no two runs share


def base_of(target_dir: Path, target: Target, folder: Path) -> dict[str, Any]:
    """Overrides that runs share: target, samples of 48 prompts, a device."""
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"strike {'the iron ' * (i // 2 % 4)}{i}\n" for i in range(48)))
    prepare(target, str(prompts), folder / "samples", PrepareSettings(max_new_tokens=24))
    return {
        "target": str(target_dir),
        "data.samples": str(folder / "samples"),
        "data.batch_size": 16,
        "data.held_out_prompts": 0,
        "run.device": "cpu",
        "run.precision": "fp32",  # in processes that are launched, too, on a CPU that multiplies bf16 faster
        "run.log_every": 1,
        "optimizer.learning_rate": 3e-3,
        "optimizer.matrices": "adamw",
        "optimizer.matrices_rate_factor": 1.0,
    }


def write_held_out(folder: Path) -> Path:
    path = folder / "held_out.txt"
    path.write_text("heat the iron\nheats it again, and\nreturn [iron.hit()\n")
    return path


def arguments(base: dict[str, Any], folder: Path, **parts: dict[str, Any]) -> list[str]:
    """`key=value` arguments; `parts` by section, as in run={"steps": 3}."""
    changes = {f"{part}.{key}": value for part, values in parts.items() for key, value in values.items()}
    return [
        f"{key}={'null' if value is None else value}" for key, value in {**base, "run.dir": folder, **changes}.items()
    ]


def make_config(kind: str, base: dict[str, Any], folder: Path, **parts: dict[str, Any]) -> TrainConfig:
    recipe = RECIPES[kind]()
    for name in CHANGES.keys() & vars(recipe.drafter).keys():
        setattr(recipe.drafter, name, CHANGES[name])
    for name, value in SMALLER.get(kind, {}).items():
        setattr(recipe.drafter, name, value)
    return resolve(recipe, None, arguments(base, folder, **parts))


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoints(run)[-1] / "model.safetensors")


def of_the_run(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what hangs on the machine."""
    return {name: value for name, value in line.items() if not name.startswith(OF_MACHINE)}
