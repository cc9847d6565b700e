"""The one training loop, for every family of drafter.

It knows of a drafter only its `loss`: sums and counts, of which "loss" is minimised. Sums are divided by the tokens of
the whole step, over all ranks and micro-batches, so that neither changes the gradient.
"""

from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import broadcast_object_list
from torch import Tensor

from draftsmith.data.console import say
from draftsmith.data.prefetch import prefetched
from draftsmith.data.processes import locked, rank_and_num_ranks
from draftsmith.data.progress import progress_bar
from draftsmith.data.samples.batches import MicroBatch
from draftsmith.models.batch import Batch
from draftsmith.models.devices import pick_device
from draftsmith.models.storage.files import write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.train.config import TrainConfig
from draftsmith.train.evaluation.budget import lengths_without_gain
from draftsmith.train.evaluation.evaluate import Evaluator, reason_to_stop, what_training_brought
from draftsmith.train.evaluation.forecast import FINISHED_RUNS, forecast, forecast_text, outcome_text
from draftsmith.train.evaluation.held_out import HeldOutSamples, is_on_curve
from draftsmith.train.hardware.layouts import gather_as_one, steps_in_backward
from draftsmith.train.hardware.meter import Meter
from draftsmith.train.inputs.features import feature_source
from draftsmith.train.optimizer import learning_rate, optimizer_of, set_learning_rate
from draftsmith.train.process.faults import NonFiniteSteps, in_one_line
from draftsmith.train.process.profiling import profiled
from draftsmith.train.process.signals import Stopped, StopRequest
from draftsmith.train.process.stages import Stages, watched
from draftsmith.train.run_folder.checkpoint import Progress, checkpoint_name, checkpoint_step, checkpoints, resume
from draftsmith.train.run_folder.checkpoint_writer import CheckpointWriter
from draftsmith.train.run_folder.learning_curve import learning_curve, log_forecast, log_point, newest_forecast
from draftsmith.train.run_folder.run_folder import open_run, tidy
from draftsmith.train.run_folder.tracking import Tracker
from draftsmith.train.run_folder.vocabulary import VOCABULARY, vocabulary_of
from draftsmith.train.setup import Setup, set_up, show_data
from draftsmith.train.step import (
    Agreement,
    accumulate_gradients,
    agree,
    all_finite,
    clip_gradient,
    seed_step,
)


def train(config: TrainConfig) -> Path:
    """Train, checkpoint and evaluate, from where an earlier run of the same config stopped. Return the run's folder.

    Raises `UserError` where another process writes that folder, and `Stopped` where a signal asked for that: after a
    checkpoint, or at once before the first step.
    """
    stages, stop = Stages(pick_device(config.run.device)), StopRequest()
    rank, num_ranks = rank_and_num_ranks()
    # from the start, in which processes find each other, and features may be stored for hours
    with (
        in_one_line(stages, rank, num_ranks),
        watched(stages, rank, num_ranks, config.run.stuck_after),
        stop,
        locked(Path(config.run.dir)),
    ):
        setup = set_up(config)
        folder = open_run(config, setup.target, setup.plan.row_length, setup.accelerator)
        training = TrainingRun(config, setup, folder, stages, stop)
        try:
            training.train()
        finally:
            try:
                training.source.stop()
            finally:
                training.writer.close()
    return folder


@dataclass
class StepOutcome:
    """The outcome of a step, alike on all ranks."""

    learning_rate: float
    gradient_norm: Tensor | None  # before clipping, a scalar; None where the step was skipped, for it was not finite
    agreed: Agreement


class TrainingRun:
    """A training run on one of its processes, from where its folder says that it is."""

    def __init__(self, config: TrainConfig, setup: Setup, folder: Path, stages: Stages, stop: StopRequest) -> None:
        self.config, self.setup, self.folder, self.stages, self.stop = config, setup, folder, stages, stop
        self.accelerator, self.drafter, self.plan = setup.accelerator, setup.drafter, setup.plan
        self.teams = setup.teams
        self.source = feature_source(config, setup.store, self.plan, self.drafter, self.accelerator, stages)
        on_main = self.accelerator.is_main_process
        vocabulary = vocabulary_of(self.drafter, self.plan, self.source, setup.target)
        if on_main:
            if not checkpoints(folder):  # a run that goes on has shown it
                show_data(setup, vocabulary)
            if vocabulary:
                write_json(folder / VOCABULARY, to_json(vocabulary))
        self.writer = CheckpointWriter(self.accelerator, self.drafter, folder, self.tidy)
        self.model, self.optimizer = self.accelerator.prepare(
            self.drafter, optimizer_of(self.drafter, config.optimizer)
        )
        gather_as_one(self.accelerator, self.drafter)
        self.first_step, self.earlier_seconds = resume(self.accelerator, self.drafter, self.optimizer, folder)
        self.tracker = Tracker(config, folder, self.first_step) if on_main else None
        self.meter = Meter(config, self.accelerator, self.drafter, stages)
        # a step that DeepSpeed has taken cannot be skipped
        max_nonfinite = 1 if steps_in_backward(self.accelerator) else config.optimizer.max_nonfinite_steps
        self.nonfinite_steps = NonFiniteSteps(folder, max_nonfinite, on_main)
        self.held_out = HeldOutSamples(
            self.accelerator, self.teams, self.model, self.plan, self.source, stages, setup.training_precision
        )
        self.evaluator: Evaluator | None = None
        if setup.prompts:
            self.evaluator = Evaluator(
                config, self.accelerator, setup.target, setup.prompts, folder, self.tracker, stages, stop
            )

    def train(self) -> None:
        """Take all steps that are left, and save and measure checkpoints between them."""
        run, on_main = self.config.run, self.accelerator.is_main_process
        self.stop.in_steps = True
        reason_to_stop = self.measure_before_steps()
        steps = range(self.first_step, run.steps if reason_to_stop is None else self.first_step)
        self.model.train()
        with (
            progress_bar(on_main) as progress,
            profiled(self.folder, run.profile and on_main) as profiler_step,
        ):
            name = f"training {self.drafter.kind}"
            task = progress.add_task(name, total=run.steps, completed=self.first_step, detail="")
            self.stages.enter("data")
            all_batches = prefetched(self.load, steps, self.source.steps_ahead)
            for step, batches in zip(steps, all_batches, strict=True):
                done = step + 1
                outcome = self.take_step(step, batches)
                if self.logs_at(done):
                    progress.update(task, detail=self.log(done, outcome))
                progress.update(task, completed=done)
                profiler_step()
                if outcome.agreed.checkpoint_failed:
                    self.writer.wait()  # which raises its error
                if self.held_out.micro_batches and (is_on_curve(done, run.steps) or self.saves_at(done)):
                    self.follow_curve(done)
                if self.saves_at(done) or outcome.agreed.stopped_by:
                    reason_to_stop = self.save_and_measure(done, outcome.agreed.stopped_by)
                if reason_to_stop:
                    progress.update(task, total=done)
                    break
                self.stages.enter("data")
        self.stages.enter("checkpoint")
        self.writer.wait()
        if self.tracker:
            self.tracker.finish()
            if self.measures_untrained and self.evaluator:
                say(what_training_brought(self.folder))

    def tidy(self) -> None:
        """Point `best` at the best checkpoint, and thin out older ones."""
        run, optimizer = self.config.run, self.config.optimizer
        whole = checkpoint_name(optimizer.decay_start(run.steps)) if optimizer.decay == "late" else None
        tidy(self.folder, run.keep_checkpoints, whole)

    def saves_at(self, step: int) -> bool:
        """Return whether a checkpoint is due after so many steps.

        One is due where the late decay begins, too: from there the run can be made longer.
        """
        run, optimizer = self.config.run, self.config.optimizer
        falls = optimizer.decay == "late" and step == optimizer.decay_start(run.steps)
        return step % run.checkpoint_every == 0 or step == run.steps or falls

    def logs_at(self, step: int) -> bool:
        """Return whether a line is logged after so many steps."""
        return step % self.config.run.log_every == 0 or step == self.config.run.steps

    def load(self, step: int) -> list[tuple[MicroBatch, Batch]]:
        """Return this team's micro-batches of a step, in memory from which a GPU can copy them by itself."""
        micro_batches = self.plan.micro_batches(step, self.teams.number, self.teams.count)
        batches, on_gpu = list(map(self.plan.collate, micro_batches)), self.accelerator.device.type == "cuda"
        for micro_batch, batch in zip(micro_batches, batches, strict=True):
            self.source.read_ahead(micro_batch, batch, pin_memory=on_gpu)
        if on_gpu:
            batches = [batch.pin_memory() for batch in batches]
        return list(zip(micro_batches, batches, strict=True))

    def take_step(self, step: int, batches: list[tuple[MicroBatch, Batch]]) -> StepOutcome:
        """Take a step, counted from 0, on this rank's micro-batches; all ranks skip it where it is not finite on one.

        Raises `UserError` at the last of too many skipped steps in a row.
        """
        config, accelerator, stages = self.config, self.accelerator, self.stages
        stages.step = step + 1
        seed_step(config.run.seed, step, self.teams.number)
        rate = learning_rate(step, config.run.steps, config.optimizer)
        set_learning_rate(self.optimizer, rate)
        self.drafter.progress = step / config.run.steps
        self.drafter.tells_acceptance = self.logs_at(step + 1)
        if self.setup.on_policy and self.setup.on_policy.is_due(step):
            batches = [(micro_batch, self.setup.on_policy.rewrite(batch, step)) for micro_batch, batch in batches]
        batches = [(micro_batch, batch.to(accelerator.device)) for micro_batch, batch in batches]

        tokens = config.data.batch_size if self.plan.in_tokens else None
        batch_sums = accumulate_gradients(self.setup, self.model, batches, self.source, stages, tokens)
        stages.enter("communication")
        norm = clip_gradient(accelerator, self.model, config.optimizer.max_gradient_norm)
        finite = all_finite(norm, [sums["loss"][0] for sums in batch_sums])
        agreed = agree(accelerator, finite, self.stop.received, self.writer.failed)
        stages.enter("optimizer")
        if agreed.finite:
            with self.setup.training_precision():
                self.optimizer.step()
            tokens_read = sum(self.plan.num_tokens(micro_batch) for micro_batch, _ in batches)
            self.meter.add(batch_sums, tokens_read / self.teams.own.size)
        else:
            self.meter.skip()
        self.optimizer.zero_grad()
        # which samples they were is looked up for a skipped step alone: the next ones may be of another epoch already
        self.nonfinite_steps.note(agreed.finite, step + 1, [] if agreed.finite else self.plan.indices(step))
        return StepOutcome(rate, norm if agreed.finite else None, agreed)

    def log(self, step: int, outcome: StepOutcome) -> str:
        """Log the means since the last logged step; return the loss in words, for the progress bar."""
        norm = None if outcome.gradient_norm is None else float(outcome.gradient_norm)
        values = {**self.meter.flush(), "learning_rate": outcome.learning_rate, "gradient_norm": norm}
        if self.tracker:
            self.tracker.log(step, values)
        return "" if values["loss"] is None else f"loss {values['loss']:.3f}"

    def follow_curve(self, step: int) -> None:
        """Measure the drafter on the held-out samples; log what it reached, and after a tenth what that foretells."""
        point, num_steps = self.held_out.measure(step), self.config.run.steps
        if self.tracker is None:
            return
        log_point(point, self.tracker)
        if step == num_steps // 10 and self.config.init_from is None:  # else it starts where another run ended
            curve = learning_curve(self.folder)
            if found := forecast(curve, self.drafter.simulated_depth, num_steps, FINISHED_RUNS):
                log_forecast(found, self.tracker)
                say(forecast_text(found))
        elif step == num_steps and (found := newest_forecast(self.folder)) and found.num_steps == num_steps:
            say(outcome_text(found, point.acceptance_length))

    def judge_by_curve(self, step: int) -> str | None:
        """Return why training should stop by what it brought on held-out samples, if it should.

        All processes call this together, with the same answer.
        """
        reason = None
        if self.tracker and self.held_out.micro_batches:
            saved = [point for point in learning_curve(self.folder) if self.saves_at(point.step)]
            lengths = [point.acceptance_length for point in saved]
            patience = self.config.evaluation.patience
            reason = reason_to_stop(lengths_without_gain(lengths), patience, step, self.tracker)
        return broadcast_object_list([reason])[0]

    def measure_before_steps(self) -> str | None:
        """Measure the untrained drafter, or what an earlier run left unmeasured; return why to stop at once, if so."""
        if not (saved := checkpoints(self.folder)):
            return self.save_and_measure(0) if self.evaluator and self.measures_untrained else None
        if self.evaluator:
            return self.evaluator.newest(self.earlier_seconds)
        return self.judge_by_curve(checkpoint_step(saved[-1]))

    @property
    def measures_untrained(self) -> bool:
        """Whether the drafter is measured before its first step; by an engine always, which shows that it can be."""
        return self.config.evaluation.untrained or self.config.evaluation.engine is not None

    def save_and_measure(self, step: int, stopped_by: int | None = None) -> str | None:
        """Save a checkpoint, measure it, and thin out old ones; return why training should stop early, if it should.

        Raises `Stopped`, without measuring, where a signal asked for the checkpoint.
        """
        self.stages.enter("checkpoint")
        seconds = self.earlier_seconds + self.stages.training_seconds()
        progress = Progress(step, seconds)
        if stopped_by is None and self.evaluator is None:
            self.writer.save_beside(self.optimizer, progress)
            return self.judge_by_curve(step)
        self.writer.save(self.optimizer, progress)
        reason_to_stop = self.evaluator.newest(seconds) if self.evaluator and stopped_by is None else None
        if self.accelerator.is_main_process:
            self.tidy()
        if stopped_by is not None:
            raise Stopped(stopped_by, checkpoint_name(step))
        return reason_to_stop
