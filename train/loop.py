"""The one training loop, for every family of drafter.

It knows of a drafter only its `loss`: sums and counts, of which "loss" is minimised. Sums are divided by the tokens of
the whole step, over all ranks and micro-batches, so that neither changes the gradient.
"""

import contextlib
import math
import os
import signal
from pathlib import Path

import rich
import torch
from accelerate import Accelerator
from rich.markup import escape
from torch import Tensor
from torch.distributed.tensor import DTensor

from draftsmith.data.features.stored import FeatureSource
from draftsmith.data.progress import progress_bar
from draftsmith.data.samples.batches import MicroBatch
from draftsmith.models import Drafter
from draftsmith.models.batch import Batch
from draftsmith.models.losses.losses import LossSums
from draftsmith.models.target.target import pick_device
from draftsmith.train.config import OptimizerConfig, TrainConfig
from draftsmith.train.evaluation.evaluate import Evaluator, what_training_brought
from draftsmith.train.folder.checkpoint import (
    checkpoint_name,
    checkpoints,
    resume,
    rotate,
    save_checkpoint,
    seed_step,
)
from draftsmith.train.folder.run_folder import open_run
from draftsmith.train.folder.tracking import Tracker
from draftsmith.train.folder.vocabulary import vocabulary_content, write_vocabulary
from draftsmith.train.hardware.compilation import with_compiled_loss
from draftsmith.train.hardware.meter import Meter
from draftsmith.train.hardware.placement import gather_as_one, steps_in_backward
from draftsmith.train.inputs.features import feature_source
from draftsmith.train.inputs.prefetch import prefetched
from draftsmith.train.process.faults import NonFinite, in_one_line, is_finite
from draftsmith.train.process.profiling import profiled
from draftsmith.train.process.signals import Stopped, StopRequest
from draftsmith.train.process.stages import Stages, watched
from draftsmith.train.setup import Setup, set_up, show_data


def train(config: TrainConfig) -> Path:
    """Train, checkpoint, evaluate; go on where an earlier run of the same config stopped. Returns the run's folder.

    Raises `Stopped` where a signal asked for that: after a checkpoint, or at once before the first step.
    """
    stages, stop = Stages(pick_device(config.run.device)), StopRequest()
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # from the start, in which processes find each other, and features may be stored for hours
    with in_one_line(stages, rank, num_ranks), watched(stages, rank, num_ranks, config.run.stuck_after), stop:
        setup = set_up(config)
        run = open_run(config, setup.target, setup.accelerator)
        Run(config, setup, run, stages, stop).go()
    return run


class Run:
    """A run on one of its processes, from where its folder says that it is."""

    def __init__(self, config: TrainConfig, setup: Setup, run: Path, stages: Stages, stop: StopRequest) -> None:
        self.config, self.setup, self.folder, self.stages, self.stop = config, setup, run, stages, stop
        self.accelerator, self.drafter, self.plan = setup.accelerator, setup.drafter, setup.plan
        self.source = feature_source(config, setup.store, self.drafter, setup.target, self.accelerator, stages)
        on_main = self.accelerator.is_main_process
        vocabulary = vocabulary_content(self.drafter, self.plan, self.source, setup.target)
        if on_main:
            show_data(setup, vocabulary)
            if vocabulary:
                write_vocabulary(run, vocabulary)
        self.model, self.optimizer = self.accelerator.prepare(self.drafter, adamw(self.drafter, config.optimizer))
        gather_as_one(self.accelerator, self.drafter)
        self.first_step, self.earlier_seconds = resume(self.accelerator, self.drafter, self.optimizer, run)
        self.tracker = Tracker(config, run, self.first_step) if on_main else None
        self.evaluator: Evaluator | None = None
        if setup.prompts:
            self.evaluator = Evaluator(
                config, self.accelerator, setup.target, setup.prompts, run, self.tracker, stages, self.stop
            )

    def go(self) -> None:
        """All steps that are left."""
        config, accelerator, stages = self.config, self.accelerator, self.stages
        meter = Meter(config, accelerator, self.drafter, stages)
        # a step that DeepSpeed has taken cannot be skipped
        most_nonfinite = 1 if steps_in_backward(accelerator) else config.optimizer.max_nonfinite_steps
        nonfinite = NonFinite(self.folder, most_nonfinite, accelerator.is_main_process)
        compute = with_compiled_loss(gradients) if config.run.compile else gradients
        self.stop.in_steps = True
        reason = self.before_steps()
        steps = range(self.first_step, config.run.steps if reason is None else self.first_step)
        self.model.train()
        with (
            progress_bar(accelerator.is_main_process) as progress,
            profiled(self.folder, config.run.profile and accelerator.is_main_process) as profiler_step,
        ):
            task = progress.add_task(
                f"training {config.drafter.kind}", total=config.run.steps, completed=self.first_step, detail=""
            )
            stages.enter("data")
            for step, loaded in zip(steps, prefetched(self.load, steps), strict=True):
                done, last = step + 1, step + 1 == config.run.steps
                stages.step = done
                seed_step(config.run.seed, step, accelerator.process_index)
                rate = learning_rate(step, config.run.steps, config.optimizer)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.drafter.progress = step / config.run.steps
                batches = [(rows, batch.to(accelerator.device)) for rows, batch in loaded]
                if self.setup.on_policy and self.setup.on_policy.is_due(step):
                    batches = [(rows, self.setup.on_policy.rewrite(batch, step)) for rows, batch in batches]

                batch_sums = compute(accelerator, self.model, batches, self.source, stages)
                stages.enter("communication")
                norm = gradient_norm(accelerator, self.model, config.optimizer.max_gradient_norm)
                finite = is_finite(norm, [sums["loss"][0] for sums in batch_sums])
                finite_everywhere, stopped_by = agree(accelerator, finite, self.stop.received)
                stages.enter("optimizer")
                if finite_everywhere:
                    self.optimizer.step()
                    meter.add(batch_sums, sum(self.plan.num_tokens(rows) for rows, _ in batches))
                else:
                    meter.skip()
                self.optimizer.zero_grad()
                nonfinite.note(finite_everywhere, done, self.plan.indices(step))

                if done % config.run.log_every == 0 or last:
                    norm_value = float(norm) if finite_everywhere else None
                    values = {**meter.take(), "learning_rate": rate, "gradient_norm": norm_value}
                    if self.tracker:
                        self.tracker.log(done, values)
                    progress.update(task, detail="" if values["loss"] is None else f"loss {values['loss']:.3f}")
                progress.update(task, completed=done)
                profiler_step()
                if done % config.run.checkpoint_every == 0 or last or stopped_by:
                    reason = self.keep(done, evaluate=stopped_by is None)
                if stopped_by:
                    raise Stopped(stopped_by, checkpoint_name(done))
                if reason:
                    break
                stages.enter("data")
        if self.tracker:
            self.tracker.finish()
            if config.evaluation.untrained and self.evaluator:
                rich.print(escape(what_training_brought(self.folder)))

    def load(self, step: int) -> list[tuple[MicroBatch, Batch]]:
        """This rank's micro-batches of a step, in memory from which a GPU can copy them by itself."""
        groups = self.plan.micro_batches(step, self.accelerator.process_index, self.accelerator.num_processes)
        batches, on_gpu = [self.plan.collate(rows) for rows in groups], self.accelerator.device.type == "cuda"
        if self.setup.store:
            for rows, batch in zip(groups, batches, strict=True):
                self.setup.store.read_ahead(rows, batch, pin_memory=on_gpu)
        if on_gpu:
            batches = [batch.pin_memory() for batch in batches]
        return list(zip(groups, batches, strict=True))

    def before_steps(self) -> str | None:
        """Measure what an earlier run left unmeasured, or the untrained drafter; why to stop at once, if so."""
        if not checkpoints(self.folder) and self.config.evaluation.untrained and self.evaluator:
            return self.keep(0)
        if checkpoints(self.folder) and self.evaluator:
            return self.evaluator.newest(self.earlier_seconds)
        return None

    def keep(self, step: int, evaluate: bool = True) -> str | None:
        """Save a checkpoint and measure it, and let go of old ones; why training should stop, if it should."""
        self.stages.enter("checkpoint")
        seconds = self.earlier_seconds + self.stages.training_seconds()
        save_checkpoint(self.accelerator, self.drafter, self.optimizer, self.folder, step, seconds)
        reason = self.evaluator.newest(seconds) if self.evaluator and evaluate else None
        if self.accelerator.is_main_process:
            rotate(self.folder, self.config.run.keep_checkpoints)
        return reason


def adamw(drafter: Drafter, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Over what is trained; one kernel for all that a step does to a tensor, on a GPU for all tensors."""
    trainable = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(trainable, betas=betas, weight_decay=config.weight_decay, fused=True)


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then a cosine from the peak to `final_share` of it. `step` counts from 0."""
    warmup = max(1, round(config.warmup_share * num_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    share = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * share


def gradients(
    accelerator: Accelerator,
    model: torch.nn.Module,
    batches: list[tuple[MicroBatch, Batch]],
    source: FeatureSource,
    stages: Stages,
) -> list[LossSums]:
    """Leave in the parameters the gradient of the step's mean loss per trained token; return each batch's sums."""
    stages.enter("communication")
    own_tokens = torch.stack([batch.loss_mask.sum() for _, batch in batches]).sum()
    num_tokens = accelerator.reduce(own_tokens, "sum").clamp(min=1)
    batch_sums = []
    for number, (rows, batch) in enumerate(batches, 1):
        stages.enter("target")
        features = source(rows, batch)
        stages.enter("drafter")
        last = number == len(batches)
        accelerator.gradient_state._set_sync_gradients(last)  # DeepSpeed steps where this is set
        synchronise = contextlib.nullcontext() if last else accelerator.no_sync(model)
        with synchronise, accelerator.autocast():
            sums = model(batch, features)
            # gradients are averaged over ranks: multiply by their number to divide by all tokens just once
            accelerator.backward(sums["loss"][0] / num_tokens * accelerator.num_processes)
        batch_sums.append({name: (total.detach(), count) for name, (total, count) in sums.items()})
    return batch_sums


def gradient_norm(accelerator: Accelerator, model: torch.nn.Module, most: float) -> Tensor:
    """Clip the gradient to the norm `most`; the norm that it had, on the device."""
    norm = accelerator.clip_grad_norm_(model.parameters(), most)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return torch.as_tensor(norm, device=accelerator.device)


def agree(accelerator: Accelerator, finite: Tensor, received: int | None) -> tuple[bool, int | None]:
    """What all ranks act on alike after a step: whether it was finite on each, and a signal that one of them got.

    Waits for the device, once a step.
    """
    signals = [received == signal.SIGTERM, received == signal.SIGINT]
    flags = torch.cat([(~finite).float()[None], torch.tensor(signals, dtype=torch.float32, device=finite.device)])
    nonfinite, terminated, interrupted = accelerator.reduce(flags, "sum").tolist()
    stopped_by = signal.SIGTERM if terminated else signal.SIGINT if interrupted else None
    return not nonfinite, stopped_by
