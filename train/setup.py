"""Loading and checking all that a run needs, before anything is written."""

import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed

from draftsmith.data.console import say
from draftsmith.data.features.stored import StoredFeatures
from draftsmith.data.features.vocabulary import token_counts
from draftsmith.data.progress import notice, waiting
from draftsmith.data.prompts.checks import (
    check_capture,
    check_prepared,
    check_samples,
    notice_images,
    notice_padding,
    notice_seen_prompts,
    notice_without_checksum,
    shown_sample,
)
from draftsmith.data.samples.batches import GPU_WIDTH, BatchPlan
from draftsmith.data.samples.folder import read_chat, read_samples
from draftsmith.data.samples.samples import Samples, held_out_samples
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.models import CHANGED_TARGET, Drafter, Target
from draftsmith.models.devices import keep_freed_memory, training_precision
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Precision
from draftsmith.models.target.chat_template import set_chat
from draftsmith.train.config import DataConfig, TrainConfig
from draftsmith.train.evaluation.by_engine import check_swappable
from draftsmith.train.evaluation.evaluate import check_evaluation, evaluation_prompts
from draftsmith.train.hardware.layouts import IN_PIECES, check_deepspeed_precision, layout_of, make_accelerator
from draftsmith.train.hardware.placement import check_placement, place
from draftsmith.train.hardware.teams import Teams
from draftsmith.train.inputs.features import check_images, load_target, open_store
from draftsmith.train.inputs.on_policy import OnPolicy
from draftsmith.train.run_folder.vocabulary import DraftVocabulary, vocabulary_text
from draftsmith.train.starting_drafter import fit_starting_layers, fit_vocabulary_size, starting_drafter

ROW = 2048  # tokens of a row, where samples are shorter: packing has something to fill


@dataclass
class Setup:
    """Everything that a run needs, loaded and checked."""

    accelerator: Accelerator
    teams: Teams
    target: Target  # without its layers where features are stored
    drafter: Drafter
    plan: BatchPlan
    store: StoredFeatures | None
    prompts: PromptSet | None
    on_policy: OnPolicy | None
    precision: Precision | None  # None: by the device

    def training_precision(self) -> AbstractContextManager[None]:
        """Return the context of the drafter's loss, of its gradient and of the optimiser's step."""
        return training_precision(self.accelerator.device, self.precision)


def set_up(config: TrainConfig) -> Setup:
    """Load target and data, and build the drafter. Raises `UserError` for whatever does not fit together."""
    accelerator = make_accelerator(config)
    check_placement(config, accelerator)
    if config.data.on_policy_share:
        check_writes_alone(layout_of(accelerator))
    teams = Teams.of(config, accelerator)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    if config.run.compile:
        check_compiles(accelerator.device)
    bare_target = Target.without_weights(config.target)
    fit_vocabulary_size(config, bare_target.vocab_size)
    fit_starting_layers(config, bare_target)
    placement = place(config, accelerator, bare_target)
    if accelerator.is_main_process:
        say(placement.text())
    folder = Path(config.data.samples)
    samples = read_samples(folder, config.data.drop_cut)
    check_images(config, samples)
    if accelerator.is_main_process:
        notice_without_checksum(folder)
        notice_images(samples)
    with waiting(f"loading {config.target} ...", accelerator.is_main_process):
        target = load_target(config, accelerator.device)
    set_chat(target, read_chat(folder))  # prompts of the evaluation are rendered as those trained on
    check_prepared(folder, target)
    check_samples(samples, target, row_length(config.data, samples, target), str(folder))
    plan = plan_batches(config, samples, target, teams)
    prompts = evaluation_prompts(config.evaluation, target)
    set_seed(config.run.seed)
    counts = token_counts(plan, target.vocab_size)
    drafter = starting_drafter(config, target, counts).to(accelerator.device)
    drafter.compile_loss, drafter.team = config.run.compile, teams.own
    drafter.trained_length = max(drafter.trained_length or 0, max(plan.lengths[index] for index in plan.trained))
    if target.has_layers:
        check_capture(target, drafter.layer_ids, samples[0].token_ids)
    if config.evaluation.engine:
        check_swappable(drafter)
    elif prompts:
        check_evaluation(config.evaluation, drafter, target)
    check_deepspeed_precision(config.run.precision, accelerator)
    check_states_precision(config.run.precision, drafter, target)
    store = open_store(config, drafter, target, plan)
    share = config.data.on_policy_share
    on_policy = OnPolicy(drafter, config.data, config.run.steps, config.run.seed) if share else None
    return Setup(accelerator, teams, target, drafter, plan, store, prompts, on_policy, config.run.precision)


def check_writes_alone(layout: str) -> None:
    """Refuse data.on_policy_share where processes put the drafter's weights together: each decodes by itself."""
    if layout in IN_PIECES:
        raise UserError(
            f"data.on_policy_share: the drafter writes text by weights that are whole, and {layout} holds them in "
            "pieces: start with recipes/launch/ddp.yaml or zero2.yaml, or leave it out"
        )


def check_states_precision(precision: Precision | None, drafter: Drafter, target: Target) -> None:
    """Refuse run.precision=fp32 for a drafter that reads a target's states in half precision, as they are on GPUs."""
    if precision == "fp32" and target.dtype != torch.float32 and not drafter.prefills_from_tokens:
        raise UserError(
            f"run.precision=fp32: hidden states of {target.name} are in {target.dtype} here, which fp32 weights cannot "
            "multiply: leave it out"
        )


def check_compiles(device: torch.device) -> None:
    """Refuse run.compile where it would change nothing, and where there is nothing to compile with."""
    if device.type != "cpu":
        raise UserError("run.compile is for CPUs: on a GPU the loss is one kernel already; leave it out")
    if not (shutil.which("g++") or shutil.which("clang++")):
        raise UserError("run.compile needs a C++ compiler: install g++, or leave it out")


def row_length(data: DataConfig, samples: Samples, target: Target) -> int:
    """Return the most tokens of a row. Where none are asked for it holds any sample, as far as a micro-batch does."""
    needed = max(ROW, int(samples.lengths.max()))
    return min(data.max_length or min(needed, data.tokens_per_micro_batch), target.context)


def plan_batches(config: TrainConfig, samples: Samples, target: Target, teams: Teams) -> BatchPlan:
    """Return the plan of the run's batches. Raises `UserError` where they cannot be made."""
    data, num_teams = config.data, teams.count
    in_tokens = data.batch_unit == "tokens"
    if not in_tokens and data.batch_size % num_teams:
        near = max(1, data.batch_size // num_teams) * num_teams
        raise UserError(f"data.batch_size={data.batch_size}: {teams} share it; give data.batch_size={near}")
    if data.packing and data.features == "online" and target.carries_states:
        raise UserError(
            f"data.packing: layers of {target.name} carry a running state along a row, from one sample into the next: "
            "leave it out"
        )
    length = row_length(data, samples, target)
    multiple = GPU_WIDTH if target.device.type == "cuda" else 1

    def planned() -> BatchPlan:
        return BatchPlan(
            samples,
            data.batch_size,
            length,
            data.tokens_per_micro_batch,
            config.run.seed,
            data.packing,
            multiple,
            in_tokens,
            num_teams,
            held_out_samples(samples, data.held_out_prompts),
        )

    plan = planned()
    if in_tokens:
        check_tokens_per_step(plan, data, teams)
    elif len(plan.trained) < data.batch_size:
        fit_batch_size(config, len(plan.trained), length, teams)
        plan = planned()
    return plan


def check_tokens_per_step(plan: BatchPlan, data: DataConfig, teams: Teams) -> None:
    """Refuse steps of more tokens than there are or than no sample has, and fewer samples than teams of processes."""
    trained = [plan.num_trained[index] for index in plan.trained]
    least, most = max(trained), sum(trained)
    if not least <= data.batch_size <= most:
        raise UserError(
            f"data.batch_size={data.batch_size} tokens: the longest sample in {data.samples} trains on {least}, all "
            f"of them on {most}; give a number between them"
        )
    if not plan.steps_per_epoch:
        raise UserError(f"{teams} share the samples in {data.samples}: prepare more than that")


def fit_batch_size(config: TrainConfig, num_samples: int, length: int, teams: Teams) -> None:
    """Make batches of less samples than the recipe's where there are not as many, so that an epoch has a few steps.

    Raises `UserError` where the user asked for the size, and where there is not a sample for each team of processes.
    """
    data = config.data
    fitting = teams.count << max(0, (num_samples // (3 * teams.count)).bit_length() - 1)
    few = f"{num_samples} samples in {data.samples} that have something to train on within {length} tokens"
    if fitting > num_samples:
        raise UserError(f"{teams} share the {few}: prepare more")
    if "data.batch_size" in config.explicit_keys:
        raise UserError(f"data.batch_size={data.batch_size} exceeds the {few}: give data.batch_size={fitting}")
    if PartialState().is_main_process:
        notice(f"there are {num_samples} samples, and the recipe's batches hold {data.batch_size}: they hold {fitting}")
    data.batch_size = fitting


def show_data(setup: Setup, vocabulary: DraftVocabulary | None) -> None:
    """Show the user a sample with what is trained on, and what is odd about the data."""
    plan = setup.plan
    if cut := plan.describe_cut():
        say(cut)
    if vocabulary:
        say(vocabulary_text(vocabulary))
    notice_padding(plan.samples, setup.target)
    if setup.prompts:
        notice_seen_prompts(setup.prompts.token_ids, plan.samples)
    say(shown_sample(plan.samples[plan.trained[0]], setup.target))
    if setup.drafter.config.changes_target:
        say(f"this changes the target: each checkpoint holds its own, in {CHANGED_TARGET}/, to serve with", "bold")
