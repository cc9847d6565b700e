"""The folder of a run: its config, what it ran on, and the link to its best checkpoint."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate import Accelerator

from draftsmith.data.answers.changed_settings import changes_text, flatten, setting_changes
from draftsmith.data.progress import notice
from draftsmith.data.samples.folder import data_hash, read_prepared
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.judged import JudgedResult
from draftsmith.inference.measuring.results import Result, read_evaluation
from draftsmith.models import Target
from draftsmith.models.drafter_parts.layouts import checkpoint_hash
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import point_link, write_json, write_whole, writing
from draftsmith.models.storage.reading import read_json_object, read_yaml
from draftsmith.models.storage.typed_json import to_json
from draftsmith.models.target.identity import identity
from draftsmith.train.config import DataConfig, EvaluationConfig, RunConfig, TrainConfig, contents, dump
from draftsmith.train.process.faults import failing_together
from draftsmith.train.run_folder.checkpoint import checkpoint_step, checkpoints, remove, resumable, rotate
from draftsmith.train.run_folder.learning_curve import learning_curve
from draftsmith.train.run_folder.stored_run import StoredRun, read_config

# Settings that may change when a run goes on: where things lie, what is said and measured, how the work is divided. The
# weights stay the same up to rounding, and to what a drafter draws by chance.
CHANGEABLE = {
    *(f"run.{field.name}" for field in fields(RunConfig) if field.name not in ("steps", "seed")),
    *("data.tokens_per_micro_batch", "data.features_layers", "data.features_dir", "data.features_endpoint"),
    *("data.features_files", "data.features_kept_gb"),
    *(f"evaluation.{field.name}" for field in fields(EvaluationConfig)),
}
# Settings that name something whose content decides, however it is spelled, and its place in environment.json.
HASHES = {
    "target": "target_fingerprint",
    "data.samples": "data_hash",
    "init_from": "init_from_hash",
    "data.max_length": "row_length",  # where it is not set, data.tokens_per_micro_batch has a say in it
}


def open_run(config: TrainConfig, target: Target, row_length: int, accelerator: Accelerator) -> Path:
    """Make or check the run's folder, and write config.yaml and environment.json into it.

    Raises `UserError`, on every rank, where it holds checkpoints of another config.
    """
    run = Path(config.run.dir)
    with failing_together():
        if accelerator.is_main_process:
            environment = environment_of(config, target, row_length)
            check_same_run(run, config, environment)
            with writing(run):
                (run / "checkpoints").mkdir(parents=True, exist_ok=True)
            write_whole(run / "config.yaml", dump(config))
            write_json(run / "environment.json", environment)
    return run


def environment_of(config: TrainConfig, target: Target, row_length: int) -> dict[str, Any]:
    """Return the content of environment.json."""
    samples = Path(config.data.samples)
    content = {**identity(target), **to_json(environment(target)), "data_hash": data_hash(samples)}
    content["row_length"] = row_length
    content["data_written_by"] = read_prepared(samples)["written_by"]
    if config.init_from is not None:
        content["init_from_hash"] = checkpoint_hash(config.init_from)
    return content


def check_same_run(run: Path, config: TrainConfig, environment: dict[str, Any]) -> None:
    """Refuse a folder with checkpoints of a run that would give other weights; say what else has changed."""
    if not checkpoints(run):
        return
    stored_environment = read_json_object(run / "environment.json")
    stored = read_config(run / "config.yaml")
    changed = changed_settings(read_yaml(run / "config.yaml"), config)
    for key, hash in HASHES.items():
        before, now = (content.get(hash) for content in (stored_environment, environment))
        if before and now:
            changed.pop(key, None)
            if before != now:
                what = "the tokens of a row by" if hash == "row_length" else "the content of"
                changed[key] = f"{what} {key} {before} -> {now}"
    if "run.steps" in changed and is_extended(stored, config):
        del changed["run.steps"]
    if decisive := {key: text for key, text in changed.items() if key not in CHANGEABLE}:
        raise UserError(
            f"{run} holds a run with other settings ({changes_text(decisive)}): give the ones it has, or another "
            f"run.dir, where init_from={checkpoints(run)[-1]} trains on from it, or remove it to start anew"
        )
    if is_extended(stored, config):
        set_decayed_aside(run, stored.run.steps, config)
    changed.pop("run.dir", None)
    if changed:
        text = f"{run} goes on with {changes_text(changed)}"
        if any(key.startswith("evaluation.") for key in changed):
            text += "; `best` compares checkpoints as each was measured, those of the newest one's judge"
        notice(text)


def is_extended(stored: StoredRun, config: TrainConfig) -> bool:
    """Return whether this is the stored run with more steps, and a learning rate that lets them follow."""
    is_late = config.optimizer.decay == "late" == stored.optimizer.decay
    return is_late and config.run.steps > stored.run.steps


def set_decayed_aside(run: Path, num_steps: int, config: TrainConfig) -> None:
    """Rename the checkpoints that a run of so many steps made while its learning rate fell: a longer one has others.

    Raises `UserError` where no checkpoint from before keeps its training state.
    """
    first = config.optimizer.decay_start(num_steps)
    early = [checkpoint for checkpoint in resumable(run) if checkpoint_step(checkpoint) <= first]
    if not early:
        raise UserError(
            f"run.steps={config.run.steps}: no checkpoint of {run} up to step {first}, from which its learning rate "
            "fell, keeps its training state; give another run.dir"
        )
    for checkpoint in checkpoints(run):
        if checkpoint_step(checkpoint) > first:
            aside = checkpoint.with_name(f"decayed-{checkpoint.name}")
            remove(aside)  # of an earlier end, where the run was made longer before
            checkpoint.rename(aside)
    link_best(run)
    notice(
        f"{run} goes on to step {config.run.steps} from {early[-1].name}, before its learning rate fell; the "
        "checkpoints behind it are now named decayed-step-..."
    )


def changed_settings(stored: dict[str, Any], config: TrainConfig) -> dict[str, str]:
    """Return in words, by key, how a stored config differs; a key that draftsmith did not have then has its default.

    So the default of a new setting must be what was done before there was the setting.
    """
    drafter = type(config.drafter)(kind=config.drafter.kind)
    defaults = contents(TrainConfig(target="", drafter=drafter, data=DataConfig(samples="")))
    return setting_changes({**flatten(defaults), **flatten(stored)}, contents(config))


def link_best(run: Path) -> Path | None:
    """Point `best` at the best checkpoint, by its first evaluated setting."""
    best = best_measured(run)
    try:
        if best is None:
            (run / "best").unlink(missing_ok=True)
            return None
        point_link(run / "best", best.relative_to(run))
    except OSError as error:  # a file system without links, or a run that was copied without them
        notice(f"{run / 'best'} is no link to the best checkpoint, which is {best} ({error.strerror})")
    return best


def tidy(run: Path, keep: int | None, whole: str | None) -> None:
    """Point `best` at the best checkpoint, and thin out older ones, after a new one was written or measured."""
    rotate(run, keep, link_best(run), whole)


def best_measured(run: Path) -> Path | None:
    """Return the best checkpoint (`place_of_best`); None where none was measured.

    Those are compared that were measured as the newest one was. Where nothing was decoded, it is the one with the
    longest acceptance on held-out samples; of equal ones the later.
    """
    if rows := compared_rows(run):
        return list(rows)[place_of_best(list(rows.values()))]
    lengths = {point.step: point.acceptance_length for point in learning_curve(run)}
    followed = [checkpoint for checkpoint in checkpoints(run) if checkpoint_step(checkpoint) in lengths]
    return max(reversed(followed), key=lambda checkpoint: lengths[checkpoint_step(checkpoint)], default=None)


def measured_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints with an evaluation, oldest first."""
    return [checkpoint for checkpoint in checkpoints(run) if (checkpoint / "evaluation.json").is_file()]


def best_checkpoint(run: Path) -> Path:
    """Return the checkpoint that `best` points at, by its own path. Raises `UserError` where none was measured."""
    best = best_measured(run)
    if best is None:
        raise UserError(f"no checkpoint of {run} was measured: see evaluation.error.txt in its checkpoints")
    return best


def compared_rows(run: Path) -> dict[Path, Result | JudgedResult]:
    """Return the first row of each checkpoint that was measured as the newest one was, oldest first.

    Rows of draftsmith's own decoder are never compared with those of an engine, nor those of one engine with another's.
    """
    first = {path: read_evaluation(path / "evaluation.json").first for path in measured_checkpoints(run)}
    newest = next(reversed(first.values()), None)
    if isinstance(newest, JudgedResult):
        return {path: row for path, row in first.items() if row.setting == newest.setting}
    return {path: row for path, row in first.items() if isinstance(row, Result)}


def place_of_best(rows: Sequence[Result | JudgedResult]) -> int:
    """Return the place of the best of a run's checkpoints, given the first row of each, oldest first.

    A round of each costs the same, as all have one architecture. They rank by tokens a round over that cost, pooled
    over the rows of one setting, since single times are too noisy. Rows that an engine judged are of one setting, so
    their cost plays no part. Those with divergences come last. Training seldom makes a drafter worse, and a few prompts
    tell little: a later checkpoint is the better one where the first in rank is not shown to be ahead of it.
    """

    def cost(row: Result) -> float:
        alike = [other for other in rows if isinstance(other, Result)]
        return fmean(
            other.steps_a_round for other in alike if other.setting.differs_only_in(row.setting, "num_prompts")
        )

    def key(place: int) -> tuple[bool, float, int]:
        row = rows[place]
        value = row.tokens_a_round / cost(row) if isinstance(row, Result) else row.acceptance.mean_acceptance_length
        return row.is_sound, value, place

    first = max(range(len(rows)), key=key)
    return max(place for place in range(first, len(rows)) if place == first or not is_ahead(rows[first], rows[place]))


def is_ahead(row: Result | JudgedResult, later: Result | JudgedResult) -> bool:
    """Return whether a row is ahead of a later one that ranks behind it, and not by chance where that can be told."""
    if not isinstance(row, Result) or not isinstance(later, Result):
        return True
    if row.setting != later.setting or row.is_sound != later.is_sound:
        return True
    # several processes share the prompts, of which a row holds the requests of one
    holds_all = all(len(each.requests or []) == each.setting.num_prompts for each in (row, later))
    return not holds_all or row.is_shown_to_emit_more(later)
