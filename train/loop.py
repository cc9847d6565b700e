"""The one training loop, for every family of drafter.

It knows of a drafter only its `loss`: sums and counts, of which "loss" is minimised. Sums are divided by the tokens of
the whole step, over all ranks and micro-batches, so that neither changes the gradient.
"""

import contextlib
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import rich
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.markup import escape
from torch import Tensor

from draftsmith.data.batches import BatchPlan, Rows
from draftsmith.data.checks import (
    check_capture,
    check_prepared,
    check_samples,
    notice_padding,
    notice_seen_prompts,
    shown_sample,
)
from draftsmith.data.features import FeatureSource, StoredFeatures
from draftsmith.data.progress import progress_bar
from draftsmith.data.samples import Sample, read_samples
from draftsmith.data.vocabulary import token_counts
from draftsmith.inference.measure import PromptSet
from draftsmith.models import CHANGED_TARGET, Drafter, Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.losses import LossSums
from draftsmith.models.target import default_dtype, pick_device
from draftsmith.train.checkpoint import checkpoints, resume, save_checkpoint
from draftsmith.train.config import OptimizerConfig, TrainConfig
from draftsmith.train.evaluate import (
    check_evaluation,
    evaluate_checkpoint,
    evaluation_prompts,
    is_measured,
    log_evaluation,
    what_training_brought,
)
from draftsmith.train.features import feature_source, load_target, open_store, whole_target
from draftsmith.train.on_policy import OnPolicy
from draftsmith.train.run_folder import link_best, open_run
from draftsmith.train.start import starting_drafter
from draftsmith.train.tracking import Tracker
from draftsmith.train.vocabulary import vocabulary_text, write_vocabulary


@dataclass
class Setup:
    """Everything a run needs, checked and loaded before anything is written."""

    accelerator: Accelerator
    target: Target  # without its layers where features are stored
    drafter: Drafter
    plan: BatchPlan
    store: StoredFeatures | None
    prompts: PromptSet | None
    on_policy: OnPolicy | None


def set_up(config: TrainConfig) -> Setup:
    """Load target and data and build the drafter; raises `UserError` for whatever does not fit together."""
    device = pick_device(config.run.device)
    mixed_precision = "bf16" if default_dtype(device) == torch.bfloat16 else "no"
    accelerator = Accelerator(mixed_precision=mixed_precision, cpu=device.type == "cpu")
    folder = Path(config.data.samples)
    samples = read_samples(folder, config.data.drop_cut)
    target = load_target(config, accelerator.device)
    check_prepared(folder, target)
    check_samples(samples, target, min(config.data.max_length, target.context), str(folder))
    plan = plan_batches(config, samples, target, accelerator.num_processes)
    prompts = evaluation_prompts(config.evaluation, target)
    set_seed(config.run.seed)
    counts = token_counts(plan, target.vocab_size)
    drafter = starting_drafter(config, target, counts).to(accelerator.device)
    if target.has_layers:
        check_capture(target, drafter.layer_ids, samples[0].token_ids)
    if prompts:
        check_evaluation(config.evaluation, drafter, target)
    store = open_store(config, drafter, target, plan)
    share = config.data.on_policy_share
    on_policy = OnPolicy(drafter, config.data, config.run.steps, config.run.seed) if share else None
    return Setup(accelerator, target, drafter, plan, store, prompts, on_policy)


def plan_batches(config: TrainConfig, samples: list[Sample], target: Target, num_ranks: int) -> BatchPlan:
    """The plan of the config's batches; `UserError` where they cannot be made."""
    data = config.data
    if data.batch_size % num_ranks:
        raise UserError(f"data.batch_size={data.batch_size}: give a multiple of {num_ranks} processes")
    length = min(data.max_length, target.context)
    plan = BatchPlan(samples, data.batch_size, length, data.tokens_per_micro_batch, config.run.seed, data.packing)
    if len(plan.trained) < data.batch_size:
        raise UserError(
            f"data.batch_size={data.batch_size} exceeds the {len(plan.trained)} samples in {data.samples} that have "
            f"something to train on within data.max_length={length}"
        )
    return plan


def show_data(setup: Setup, run: Path, source: FeatureSource) -> None:
    """Tell the user what is trained on: a sample with its mask, and what is odd about the data."""
    plan = setup.plan
    if plan.cut():
        rich.print(escape(plan.cut()))
    if vocabulary := write_vocabulary(run, setup.drafter, plan, source, setup.target):
        rich.print(escape(vocabulary_text(vocabulary)))
    notice_padding(setup.target)
    if setup.prompts:
        notice_seen_prompts(setup.prompts.token_ids, plan.samples)
    rich.print(shown_sample(plan.samples[plan.trained[0]], setup.target))
    if setup.drafter.changes_target():
        rich.print(
            f"[bold]this changes the target[/]: each checkpoint holds its own, in {CHANGED_TARGET}/, to serve with"
        )


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then a cosine from the peak to `final_share` of it. `step` counts from 0."""
    warmup = max(1, round(config.warmup_share * num_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    share = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * share


def train(config: TrainConfig) -> Path:
    """Train, checkpoint, evaluate; go on where an earlier run of the same config stopped. Returns the run's folder."""
    setup = set_up(config)
    accelerator, target = setup.accelerator, setup.target
    run = open_run(config, target, accelerator)
    source = feature_source(config, setup.store, setup.drafter, target, accelerator)
    if accelerator.is_main_process:
        show_data(setup, run, source)
    trainable = [parameter for parameter in setup.drafter.parameters() if parameter.requires_grad]
    betas = (config.optimizer.beta1, config.optimizer.beta2)
    optimizer = torch.optim.AdamW(trainable, betas=betas, weight_decay=config.optimizer.weight_decay)
    model, optimizer = accelerator.prepare(setup.drafter, optimizer)
    first_step = resume(accelerator, run)
    tracker = Tracker(config, run, first_step) if accelerator.is_main_process else None

    def evaluate() -> None:
        if tracker and setup.prompts:
            newest = checkpoints(run)[-1]
            if not is_measured(newest, config.evaluation):
                evaluate_checkpoint(newest, whole_target(config, target), setup.prompts, config.evaluation)
            log_evaluation(newest, tracker)
            link_best(run)
        accelerator.wait_for_everyone()

    if config.evaluation.untrained and setup.prompts and not checkpoints(run):
        save_checkpoint(accelerator, setup.drafter, run, 0)
    if checkpoints(run):
        evaluate()  # a kill between a checkpoint and the end of its evaluation leaves this to do, too
    totals = Totals()
    model.train()
    with progress_bar(accelerator.is_main_process) as progress:
        task = progress.add_task(
            f"training {config.drafter.kind}", total=config.run.steps, completed=first_step, detail=""
        )
        for step in range(first_step, config.run.steps):
            rate = learning_rate(step, config.run.steps, config.optimizer)
            setup.drafter.progress = step / config.run.steps
            micro_batches = setup.plan.micro_batches(step, accelerator.process_index, accelerator.num_processes)
            for group in optimizer.param_groups:
                group["lr"] = rate
            batches = [setup.plan.collate(rows).to(accelerator.device) for rows in micro_batches]
            if setup.on_policy and setup.on_policy.is_due(step):
                batches = [setup.on_policy.rewrite(batch, step) for batch in batches]
            with_rows = list(zip(micro_batches, batches, strict=True))
            batch_sums = gradients(accelerator, model, with_rows, source)
            norm = accelerator.clip_grad_norm_(model.parameters(), config.optimizer.max_gradient_norm)
            optimizer.step()
            optimizer.zero_grad()

            done, last = step + 1, step + 1 == config.run.steps
            totals.add(batch_sums)
            if done % config.run.log_every == 0 or last:
                values = {**totals.means(accelerator), "learning_rate": rate, "gradient_norm": float(norm)}
                if tracker:
                    tracker.log(done, values)
                progress.update(task, detail=f"loss {values['loss']:.3f}")
            progress.update(task, completed=done)
            if done % config.run.checkpoint_every == 0 or last:
                save_checkpoint(accelerator, setup.drafter, run, done)
                evaluate()
    if tracker:
        tracker.finish()
        if config.evaluation.untrained and setup.prompts:
            rich.print(escape(what_training_brought(run)))
    return run


def gradients(
    accelerator: Accelerator, model: torch.nn.Module, batches: list[tuple[Rows, Batch]], source: FeatureSource
) -> list[LossSums]:
    """Leave in the parameters the gradient of the step's mean loss per trained token; return each batch's sums."""
    own_tokens = torch.stack([batch.loss_mask.sum() for _, batch in batches]).sum()
    num_tokens = accelerator.reduce(own_tokens, "sum").clamp(min=1)
    batch_sums = []
    for number, (rows, batch) in enumerate(batches, 1):
        features = source(rows, batch)
        synchronise = contextlib.nullcontext() if number == len(batches) else accelerator.no_sync(model)
        with synchronise, accelerator.autocast():
            sums = model(batch, features)
            # gradients are averaged over ranks: multiply by their number to divide by all tokens just once
            accelerator.backward(sums["loss"][0] / num_tokens * accelerator.num_processes)
        batch_sums.append({name: (total.detach(), count) for name, (total, count) in sums.items()})
    return batch_sums


class Totals:
    """Sums and counts since the last logged step."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[Tensor]] = defaultdict(list)
        self._since = time.perf_counter()

    def add(self, batch_sums: list[LossSums]) -> None:
        for sums in batch_sums:
            for name, pair in sums.items():
                self._pairs[name].append(torch.stack([value.double() for value in pair]))

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Means over everything added on all ranks, and trained tokens per second; begins anew."""
        reduced = {
            name: accelerator.reduce(torch.stack(pairs).sum(0), "sum").tolist() for name, pairs in self._pairs.items()
        }
        now = time.perf_counter()
        means = {name: total / max(1, count) for name, (total, count) in reduced.items()}
        means["tokens_per_second"] = reduced["loss"][1] / (now - self._since)
        self._pairs.clear()
        self._since = now
        return means
