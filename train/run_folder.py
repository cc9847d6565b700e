"""The folder of a run: its config, what it ran on, and the link to its best checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from draftsmith.data.samples import data_hash, read_prepared
from draftsmith.inference.evaluation import environment
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.identity import identity
from draftsmith.models.layouts import checkpoint_hash
from draftsmith.train.checkpoint import checkpoints
from draftsmith.train.config import TrainConfig, contents, dump


def check_run_folder(config: TrainConfig) -> Path:
    """The run's folder, made if need be; `UserError` where it cannot be written or belongs to another config."""
    run = Path(config.run.dir)
    require_writable(run)
    existing = run / "config.yaml"
    if existing.is_file() and yaml.safe_load(existing.read_text()) != contents(config):
        raise UserError(f"{run} holds a run with other settings: give another run.dir, or remove it to start anew")
    return run


def open_run(config: TrainConfig, target: Target, accelerator: Accelerator) -> Path:
    """Check the folder and write config.yaml and environment.json into it."""
    run = check_run_folder(config)
    if accelerator.is_main_process:
        (run / "checkpoints").mkdir(exist_ok=True)
        write_whole(run / "config.yaml", dump(config))
        samples = Path(config.data.samples)
        content = {**identity(target), **environment(target), "data_hash": data_hash(samples)}
        content["data_written_by"] = read_prepared(samples)["written_by"]
        if config.init_from is not None:
            content["init_from_hash"] = checkpoint_hash(config.init_from)
        write_whole(run / "environment.json", json.dumps(content, indent=2) + "\n")
    accelerator.wait_for_everyone()
    return run


def link_best(run: Path) -> Path | None:
    """Point `best` at the checkpoint with the highest measured speedup, by its first evaluated setting.

    A checkpoint whose output differed from plain decoding comes after all others.
    """
    measured = measured_checkpoints(run)
    if not measured:
        (run / "best").unlink(missing_ok=True)
        return None
    best = max(measured, key=lambda checkpoint: worth(first_result(checkpoint)))
    temporary = run / ".best"
    temporary.unlink(missing_ok=True)
    os.symlink(best.relative_to(run), temporary)
    temporary.replace(run / "best")
    return best


def measured_checkpoints(run: Path) -> list[Path]:
    """Those with an evaluation, oldest first."""
    return [checkpoint for checkpoint in checkpoints(run) if (checkpoint / "evaluation.json").is_file()]


def best_checkpoint(run: Path) -> Path:
    """The checkpoint that `best` points at, by its own path."""
    return run / (run / "best").readlink()


def worth(result: dict[str, Any]) -> tuple[bool, float]:
    """What checkpoints, of one run or of several, are compared by."""
    return result["lossless"]["divergences"] == 0, result["speedup"]


def results(checkpoint: Path) -> list[dict[str, Any]]:
    """The rows of a checkpoint's evaluation."""
    return json.loads((checkpoint / "evaluation.json").read_text())["results"]


def first_result(checkpoint: Path) -> dict[str, Any]:
    """The first of them."""
    return results(checkpoint)[0]


def write_whole(path: Path, text: str) -> None:
    """Write whole or not at all: a resumed run reads these files before it writes them anew."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    partial.replace(path)


def require_writable(folder: Path) -> None:
    """Make the folder, or raise `UserError` saying why it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have been quicker
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
