"""The part of a run's evaluation that an engine measures: its settings, its files, and what is said of it."""

import os
import shlex
from pathlib import Path

from draftsmith.data.console import say, shell_path
from draftsmith.data.http import named_urls
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.judged import JudgedResult
from draftsmith.inference.measuring.results import Evaluation, EvaluationCost
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.train.config import EvaluationConfig
from draftsmith.train.engine.answers import RequestSettings
from draftsmith.train.engine.judging import ENGINE, PLAIN, JudgeSettings
from draftsmith.train.engine.restarted import COMMAND, ENGINE_LOG
from draftsmith.train.run_folder.checkpoint import checkpoint_step
from draftsmith.train.run_folder.tracking import Tracker


def check_swappable(drafter: Drafter) -> None:
    """Refuse, before training, a drafter that a running engine cannot take, and that no command serves."""
    if COMMAND in os.environ:
        return
    if drafter.served_in_target or drafter.config.changes_target:
        raise UserError(
            f"evaluation.engine: {drafter.kind} is served in a target of its own, and a running engine keeps its "
            f"target: leave it out, or give in {COMMAND} what starts it with $DRAFTER"
        )


def judge_settings(config: EvaluationConfig, run: Path) -> JudgeSettings:
    """Return the settings of the engine that measures the checkpoints of the run in a folder."""
    assert config.engine
    return JudgeSettings(
        config.engine,
        "evaluation.engine",
        named_urls(config.engine_beside, "evaluation.engine_beside"),
        config.max_new_tokens,
        config.draft_length,
        command=os.environ.get(COMMAND),
        log=run / ENGINE_LOG,
    )


def drafting_beside(config: EvaluationConfig) -> list[str]:
    """Return the names of the servers beside the engine that have a drafter."""
    return [name for name in named_urls(config.engine_beside, "evaluation.engine_beside") if name != PLAIN]


def file_beside(name: str) -> str:
    """Return the name of the file with the evaluation of what was measured beside a checkpoint."""
    return f"evaluation.{name}.json"


def loads_of(config: EvaluationConfig, repeats: int) -> list[RequestSettings]:
    """Return the requests of one evaluation: one load for each temperature."""
    return [RequestSettings(Sampling(temperature), config.batch_size, repeats) for temperature in config.temperatures]


def judged_evaluations(
    rows: dict[str, list[JudgedResult]], checkpoint: Path, kind: str, target: Target
) -> dict[str, Evaluation]:
    """Return the evaluations of a checkpoint, whose rows stand under `ENGINE`, and of the servers beside, by file."""
    env = environment(target)
    return {
        "evaluation.json" if name == ENGINE else file_beside(name): Evaluation(
            target=target.name,
            drafter=str(checkpoint) if name == ENGINE else name,
            drafter_kind=kind if name == ENGINE else name,
            environment=env,
            results=[],
            judged=judged,
        )
        for name, judged in rows.items()
    }


def first_judge_failure(failures: str, checkpoint: Path, target: str) -> str:
    """Return what ends a run whose engine cannot measure the first checkpoint, with the way to start such an engine."""
    reason = failures.splitlines()[0].partition("UserError: ")[2] or failures.splitlines()[0]
    if COMMAND in os.environ:
        return f"{reason}. Mend what {COMMAND} starts, then give the same command again"
    served = checkpoint.parents[1] / "served"
    export = ["draftsmith", "export", shell_path(checkpoint), "--engine", "vllm", "--swappable"]
    export += ["--target", shell_path(target), "--out", shell_path(served)]
    serve = ["sh", shell_path(served / "serve_vllm_swappable.sh")]
    return (
        f"{reason}. An engine for this run is started by `{shlex.join(export)}`, then `{shlex.join(serve)}`; then give "
        "the same command again"
    )


def log_judged(checkpoint: Path, row: JudgedResult, cost: EvaluationCost, tracker: Tracker) -> None:
    """Tell the tracker and the console what an engine measured on a checkpoint."""
    acceptance, speed, interval = row.acceptance, row.speed, row.mean_acceptance_length_ci95
    metrics = {
        "acceptance_length": acceptance.mean_acceptance_length,
        "engine_tokens_per_second": speed.tokens_per_second,
        **({"speedup": speed.speedup} if speed.speedup else {}),
        "evaluation_seconds": cost.seconds,
    }
    by_position = {f"acceptance_at_{i}": rate for i, rate in enumerate(acceptance.per_position_acceptance_rates)}
    tracker.log(checkpoint_step(checkpoint), {**metrics, **by_position})
    say(
        f"{checkpoint.name}, by {row.setting.judge.text}: acceptance length {acceptance.mean_acceptance_length:.2f}"
        + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
        + f", {speed.tokens_per_second:.0f} tokens/s"
        + (f", speedup {speed.speedup:.2f}" if speed.speedup else "")
        + f", in {cost.seconds:.0f} s: {cost.num_prompts} prompts, {cost.repeats} times"
    )
