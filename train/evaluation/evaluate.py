"""Evaluation after a checkpoint: the drafter beside plain decoding and the training-free baselines."""

import signal
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from draftsmith.data.console import say
from draftsmith.data.progress import progress_bar, warn
from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.judged import JudgedResult
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, check_settings, measure
from draftsmith.inference.measuring.results import (
    Evaluation,
    EvaluationCost,
    Result,
    read_evaluation,
    write_evaluation,
)
from draftsmith.inference.measuring.sample_texts import sample_texts
from draftsmith.inference.measuring.teacher_forcing import gap_warning
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.planning.costs_after_evaluation import costs_beside
from draftsmith.inference.planning.predictions import with_predictions
from draftsmith.models import CHANGED_TARGET, Drafter, Target, load_drafter
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.files import write_json, write_whole
from draftsmith.models.storage.reading import read_typed
from draftsmith.models.storage.typed_json import to_json
from draftsmith.train.config import EvaluationConfig, TrainConfig
from draftsmith.train.engine.judging import EngineJudge
from draftsmith.train.evaluation.budget import Amount, affordable, checkpoints_without_gain, seconds_left
from draftsmith.train.evaluation.by_engine import (
    drafting_beside,
    file_beside,
    first_judge_failure,
    judge_settings,
    judged_evaluations,
    loads_of,
    log_judged,
)
from draftsmith.train.evaluation.pooling import pool, share_of, spread, subset
from draftsmith.train.inputs.features import whole_target
from draftsmith.train.process.signals import Stopped, StopRequest
from draftsmith.train.process.stages import Stages
from draftsmith.train.run_folder.checkpoint import checkpoint_step, checkpoints
from draftsmith.train.run_folder.run_folder import (
    best_checkpoint,
    compared_rows,
    link_best,
    measured_checkpoints,
    place_of_best,
)
from draftsmith.train.run_folder.tracking import Tracker

ERROR = "evaluation.error.txt"


def evaluation_prompts(config: EvaluationConfig, target: Target) -> PromptSet | None:
    """Return the prompts to evaluate on, encoded. Raises `UserError` where one of them does not fit the target."""
    if config.prompts is None:
        return None
    by_engine = config.engine is not None
    return read_prompt_set(config.prompts, target, config.num_prompts, config.max_new_tokens, with_images=by_engine)


def evaluation_settings(config: EvaluationConfig, repeats: int) -> list[MeasureSettings]:
    """Return one setting for each temperature."""
    return [
        MeasureSettings(
            temperature=temperature,
            batch_size=config.batch_size,
            draft=config.draft_length,
            max_new_tokens=config.max_new_tokens,
            repeats=repeats,
        )
        for temperature in config.temperatures
    ]


def check_evaluation(config: EvaluationConfig, drafter: Drafter, target: Target) -> None:
    """Refuse, before training, settings that the first checkpoint could not be measured with."""
    drafters = {drafter.kind: drafter, **{name: load_drafter(name, target) for name in config.baselines}}
    for settings in evaluation_settings(config, config.repeats):
        check_settings(settings, drafters)


def is_measured(checkpoint: Path, config: EvaluationConfig) -> bool:
    """Return whether everything that an evaluation writes is there."""
    beside = config.baselines if config.engine is None else drafting_beside(config)
    return all((checkpoint / file).is_file() for file in ["evaluation.json", *map(file_beside, beside)])


@dataclass(frozen=True)
class ShareResult:
    """The part of a checkpoint's evaluation that one process measured."""

    evaluations: dict[str, Evaluation] = field(default_factory=dict)  # by file; empty without prompts for the process
    failure: str = ""  # what failed; empty where nothing did
    stopped: bool = False  # by a signal


@dataclass(frozen=True)
class Measured:
    """The results of all processes, and the places of the prompts that each of them measured."""

    of_ranks: list[ShareResult]
    shares: list[list[int]]

    @property
    def failures(self) -> str:
        """Texts of all failures; empty where nothing failed."""
        return "".join(of_rank.failure for of_rank in self.of_ranks)


@dataclass
class Evaluator:
    """Measures a run's checkpoints on all its processes, within a share of the time.

    An evaluation that fails is reported once and written down; training goes on, on all processes alike.
    """

    config: TrainConfig
    accelerator: Accelerator
    target: Target
    prompts: PromptSet
    run: Path
    tracker: Tracker | None  # on the main process
    stages: Stages
    stop: StopRequest
    _judge: EngineJudge | None = None  # on the main process, from the first evaluation by an engine on

    def newest(self, training_seconds: float) -> str | None:
        """Measure the newest checkpoint where that is due and not done; return why training should stop, if it should.

        This is called on every process, with the same answer. Raises `Stopped` where a signal came meanwhile.
        """
        checkpoint, run = checkpoints(self.run)[-1], self.config.run
        if checkpoint_step(checkpoint) % run.checkpoint_every and checkpoint_step(checkpoint) != run.steps:
            return None  # saved on a signal, or where the late decay begins
        self.stages.enter("evaluation")
        if not is_measured(checkpoint, self.config.evaluation):
            self._measure(checkpoint, training_seconds)
        reason = None
        if self.tracker and (checkpoint / "evaluation.json").is_file():
            log_evaluation(checkpoint, self.tracker)
            link_best(self.run)
            without_gain = checkpoints_without_gain(list(compared_rows(self.run).values()))
            reason = reason_to_stop(
                without_gain, self.config.evaluation.patience, checkpoint_step(checkpoint), self.tracker
            )
            if (reason or checkpoint_step(checkpoint) == run.steps) and self.config.evaluation.engine is None:
                self._measure_costs(training_seconds)
        return broadcast_object_list([reason])[0]

    def _measure(self, checkpoint: Path, training_seconds: float) -> None:
        """Measure a checkpoint on all processes, and write its files, or what failed, on the main one.

        A run's first evaluation is of the least amount, which shows how long one takes; it is then done anew with as
        much as its share of the time allows, where that is more.
        """
        start, config, num_prompts = time.perf_counter(), self.config.evaluation, len(self.prompts.token_ids)
        earlier = evaluation_costs(self.run)
        amount = self._agreed(affordable(config, num_prompts, earlier, training_seconds))
        measured = self._measure_amount(checkpoint, amount)
        if measured.failures and not earlier and self.config.evaluation.engine:
            raise UserError(first_judge_failure(measured.failures, checkpoint, self.config.target))
        if not earlier and not measured.failures:
            first = cost_since(start, training_seconds, amount, config)
            more = self._agreed(affordable(config, num_prompts, [first], training_seconds))
            if more != amount:
                amount, measured = more, self._measure_amount(checkpoint, more)
        if self.tracker:
            self._write(checkpoint, measured, cost_since(start, training_seconds, amount, config))

    def _agreed(self, amount: Amount) -> Amount:
        """Return the amount of the main process, since clocks differ."""
        return broadcast_object_list([amount])[0]

    def _measure_amount(self, checkpoint: Path, amount: Amount) -> Measured:
        """Measure so much on all processes. Raises `Stopped` where a signal came meanwhile."""
        num_ranks, size = self.accelerator.num_processes, self.config.evaluation.batch_size
        places = spread(amount.num_prompts, len(self.prompts.token_ids))
        shares = [[places[i] for i in share_of(len(places), rank, num_ranks, size)] for rank in range(num_ranks)]
        if self.config.evaluation.engine:  # which one process asks for all
            shares = [places, *([] for _ in range(1, num_ranks))]
        of_ranks = gather_object([self._measure_share(checkpoint, shares[self.accelerator.process_index], amount)])
        if any(of_rank.stopped for of_rank in of_ranks):
            raise Stopped(self.stop.received or signal.SIGTERM, checkpoint.name)
        return Measured(of_ranks, shares)

    def _write(self, checkpoint: Path, measured: Measured, cost: EvaluationCost) -> None:
        """Write the files of an evaluation, or what failed."""
        assert self.tracker
        failures = measured.failures
        if not failures:
            evaluations = [of_rank.evaluations for of_rank in measured.of_ranks if of_rank.evaluations]
            try:
                write_pooled(checkpoint, evaluations, measured.shares, cost)
            except Exception as error:
                failures = failure_text(0, error)
        if failures:
            write_whole(checkpoint / ERROR, failures)
            self.tracker.log(checkpoint_step(checkpoint), {"evaluation_failed": 1, "evaluation_seconds": cost.seconds})
            warn(
                f"the evaluation of {checkpoint.name} failed after {cost.seconds:.0f} s, training goes on; "
                f"{failures.splitlines()[0]} (all of it in {checkpoint / ERROR})"
            )

    def _measure_share(self, checkpoint: Path, share: list[int], amount: Amount) -> ShareResult:
        """Measure this process's share of the prompts; what fails is in the result."""
        rank = self.accelerator.process_index
        try:
            if not share:
                return ShareResult()
            repeats = amount.repeats if rank == 0 else 1
            prompts = subset(self.prompts, share)
            if self.config.evaluation.engine:
                return ShareResult(self._judged_evaluations(checkpoint, prompts, repeats))
            return ShareResult(self._own_evaluations(checkpoint, prompts, repeats))
        except Stopped:
            return ShareResult(stopped=True)
        except Exception as error:  # whatever it is, it is no reason to end a training of days
            return ShareResult(failure=failure_text(rank, error))
        finally:
            if self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()

    def _own_evaluations(self, checkpoint: Path, prompts: PromptSet, repeats: int) -> dict[str, Evaluation]:
        """Return what this process measures, by the name of its file: of the checkpoint, and of baselines."""
        config, target = self.config.evaluation, self._target_of(checkpoint)
        drafters = {name: load_drafter(name, target) for name in [*config.baselines, str(checkpoint)]}
        num_batches = -(-len(prompts.token_ids) // config.batch_size) * repeats * len(config.temperatures)
        deadline = time.perf_counter() + self.config.run.timeout / 2

        def on_batch() -> None:
            progress.advance(task)
            self._check_going_on(checkpoint, deadline)

        rows: dict[str, list[Result]] = {name: [] for name in drafters}
        with progress_bar(self.accelerator.is_main_process) as progress, cpu_threads(config.num_threads):
            task = progress.add_task(f"evaluating {checkpoint.name}", total=num_batches, detail="")
            for settings in evaluation_settings(config, repeats):
                for name, row in measure(target, drafters, prompts, settings, on_batch).items():
                    rows[name].append(row)
            env = environment(target)
            if self.accelerator.is_main_process:
                grid = evaluation_settings(config, repeats)
                texts = sample_texts(target, drafters[str(checkpoint)], str(checkpoint), prompts, grid)
                write_json(checkpoint / "samples.json", to_json(texts), indent=1)
        return {
            "evaluation.json" if name == str(checkpoint) else file_beside(name): Evaluation(
                target=target.name, drafter=name, drafter_kind=drafter.kind, environment=env, results=rows[name]
            )
            for name, drafter in drafters.items()
        }

    def _judged_evaluations(self, checkpoint: Path, prompts: PromptSet, repeats: int) -> dict[str, Evaluation]:
        """Return what an engine measures, by the name of its file: of the checkpoint, and of the servers beside it."""
        if self._judge is None:
            self._judge = EngineJudge(judge_settings(self.config.evaluation, self.run), self.target)
        deadline = time.perf_counter() + self.config.run.timeout / 2

        def go_on() -> None:
            self._check_going_on(checkpoint, deadline)

        with self._judge.drafting_with(checkpoint, go_on):
            rows = self._judge.measure(prompts, loads_of(self.config.evaluation, repeats), go_on)
        return judged_evaluations(rows, checkpoint, self.config.drafter.kind, self.target)

    def _check_going_on(self, checkpoint: Path, deadline: float) -> None:
        """Raise `Stopped` where a signal came meanwhile, and `UserError` where other processes would wait too long."""
        self._raise_if_stopped(checkpoint)
        if self.accelerator.num_processes > 1 and time.perf_counter() > deadline:
            raise UserError(
                f"evaluation takes more than half of run.timeout={self.config.run.timeout:g} s, after which the "
                "other processes would give up: raise it, or take fewer evaluation.num_prompts"
            )

    def _raise_if_stopped(self, checkpoint: Path) -> None:
        """Tell that the evaluation goes on, and raise `Stopped` where a signal came meanwhile."""
        self.stages.enter("evaluation")
        if self.stop.received is not None:
            raise Stopped(self.stop.received, checkpoint.name)

    def _target_of(self, checkpoint: Path) -> Target:
        target = whole_target(self.config, self.target)
        if (checkpoint / CHANGED_TARGET).is_dir():  # trained along: measured as it is now, with all drafters
            target = Target.from_pretrained(checkpoint / CHANGED_TARGET, target.device, target.dtype)
        return target

    def _measure_costs(self, training_seconds: float) -> None:
        """Write the run's costs.json, of its best checkpoint, where the time that is left for evaluations is enough.

        All its checkpoints draft with one architecture, so costs are measured once, and what they predict is added to
        the evaluations of all. A signal that comes meanwhile ends it: the run is over anyway.
        """
        config, path, best = self.config.evaluation, self.run / "costs.json", best_checkpoint(self.run)
        rows = read_evaluation(best / "evaluation.json").results
        seconds = seconds_left(config, evaluation_costs(self.run), training_seconds)
        try:
            target, costs = self._target_of(best), read_typed(Costs, path) if path.is_file() else None
            with cpu_threads(config.num_threads):
                drafter = load_drafter(str(best), target)
                costs = costs or costs_beside(
                    target, drafter, str(best), rows, self.prompts, seconds, lambda share: self._raise_if_stopped(best)
                )
            if costs:
                for checkpoint in measured_checkpoints(self.run):
                    evaluated = checkpoint / "evaluation.json"
                    write_evaluation(evaluated, with_predictions(read_evaluation(evaluated), costs))
                write_json(path, to_json(costs))
        except Stopped:
            pass
        except Exception as error:
            warn(f"the costs of a round were not measured: {type(error).__name__}: {first_line(error)}")


def reason_to_stop(without_gain: int, patience: int | None, step: int, tracker: Tracker) -> str | None:
    """Return why training should stop after so many checkpoints without gain, and tell; None where it should go on."""
    if patience is None or without_gain < patience:
        return None
    reason = f"no longer acceptance in the last {patience} checkpoints (evaluation.patience)"
    tracker.log(step, {"stopped_early": reason})
    say(f"training stops at step {step}: {reason}")
    return reason


def failure_text(rank: int, error: Exception) -> str:
    """Return what evaluation.error.txt says of a failure: one line, then where it happened."""
    return f"process {rank}: {type(error).__name__}: {first_line(error)}\n\n{traceback.format_exc()}\n"


def cost_since(start: float, training_seconds: float, amount: Amount, config: EvaluationConfig) -> EvaluationCost:
    """Return the cost of an evaluation that began at `start`, a time of `time.perf_counter`."""
    seconds = time.perf_counter() - start
    return EvaluationCost(seconds, training_seconds, amount.num_prompts, amount.repeats, config.time_share)


def write_pooled(
    checkpoint: Path, of_ranks: list[dict[str, Evaluation]], shares: list[list[int]], cost: EvaluationCost
) -> None:
    """Write the files of an evaluation from what each rank with a share of the prompts measured for them."""
    shares = [share for share in shares if share]
    for file, own in of_ranks[0].items():
        by_setting = zip(*(evaluations[file].results for evaluations in of_ranks), strict=True)
        pooled = [pool(list(rows), shares) for rows in by_setting]
        write_evaluation(checkpoint / file, replace(own, results=pooled, cost=cost))
    (checkpoint / ERROR).unlink(missing_ok=True)


def evaluation_costs(run: Path) -> list[EvaluationCost]:
    """Return the costs of the evaluations so far, oldest first."""
    evaluations = [read_evaluation(checkpoint / "evaluation.json") for checkpoint in measured_checkpoints(run)]
    return [evaluation.cost for evaluation in evaluations if evaluation.cost]


def log_evaluation(checkpoint: Path, tracker: Tracker) -> None:
    """Tell the tracker and the console what the checkpoint's first setting gave."""
    evaluation = read_evaluation(checkpoint / "evaluation.json")
    first, cost = evaluation.first, evaluation.cost
    assert cost
    if isinstance(first, JudgedResult):
        log_judged(checkpoint, first, cost, tracker)
        return
    acceptance, speed, interval = first.acceptance, first.speed, first.speed.speedup_ci95
    metrics = {
        "acceptance_length": acceptance.mean_acceptance_length,
        "speedup": speed.speedup,
        **({"speedup_low": interval[0], "speedup_high": interval[1]} if interval else {}),
        "step_cost_ratio": speed.step_cost_ratio,
        "divergences": first.lossless.divergences,
        "evaluation_seconds": cost.seconds,
    }
    by_position = {f"acceptance_at_{i}": rate for i, rate in enumerate(acceptance.per_position_acceptance_rates)}
    tracker.log(checkpoint_step(checkpoint), {**metrics, **by_position})
    say(
        f"{checkpoint.name}: acceptance length {acceptance.mean_acceptance_length:.2f}, speedup {speed.speedup:.2f} "
        + (f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "(too little for an interval)")
        + f", in {cost.seconds:.0f} s: {cost.num_prompts} prompts, {cost.repeats} times"
    )
    if first.lossless.divergences:
        say("speculative output differs from plain decoding: see evaluation.json, and report this", "bold red")
    for row in evaluation.results:
        if warning := gap_warning(row):
            say(warning, "bold red")


def what_training_brought(run: Path) -> str:
    """Return a line on the best trained checkpoint beside the drafter before its first step.

    Both were measured on the same prompts, unless `evaluation.time_share` left some of them out.
    """
    rows = compared_rows(run)
    if not rows or checkpoint_step(next(iter(rows))):
        return "what training brought is not known: the drafter was not measured alike before its first step"
    untrained, *trained = rows.values()
    if not trained:
        return "what training brought is not known: its evaluations failed"
    best = trained[place_of_best(trained)]
    before, after = untrained.acceptance.mean_acceptance_length, best.acceptance.mean_acceptance_length
    change = f"acceptance length {before:.2f} -> {after:.2f}"
    if untrained.speed.speedup and best.speed.speedup:
        change += f", speedup {untrained.speed.speedup:.2f} -> {best.speed.speedup:.2f}"
    return f"training brought nothing: {change}" if after <= before else f"what training brought: {change}"
