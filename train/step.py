"""The parts of one training step: gradient over all micro-batches and ranks, clipping, agreement."""

import contextlib
import signal
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor

from draftsmith.data.features.stored import FeatureSource
from draftsmith.data.samples.batches import MicroBatch
from draftsmith.models.batch import Batch
from draftsmith.models.losses.chain_loss import LossSums
from draftsmith.train.process.stages import Stages
from draftsmith.train.setup import Setup


def seed_step(seed: int, step: int, team: int) -> None:
    """Seed all random numbers of a step in a team, so that they depend on nothing that came before."""
    torch.manual_seed((seed * 1_000_003 + step) * 4099 + team)


def accumulate_gradients(
    setup: Setup,
    model: torch.nn.Module,
    batches: list[tuple[MicroBatch, Batch]],
    source: FeatureSource,
    stages: Stages,
    tokens_of_step: int | None = None,
) -> list[LossSums]:
    """Leave in the parameters the gradient of the step's loss per trained token; return each batch's sums.

    The loss is divided by the tokens of the step, or by `tokens_of_step`, about as many, where each token is to weigh
    the same in whichever step it stands.
    """
    stages.enter("communication")
    accelerator, team = setup.accelerator, setup.teams.own
    own_tokens = torch.stack([batch.loss_mask.sum() for _, batch in batches]).sum()
    # all members of a team count the tokens that they train on together
    num_tokens = tokens_of_step or (accelerator.reduce(own_tokens, "sum") // team.size).clamp(min=1)
    batch_sums = []
    for number, (micro_batch, batch) in enumerate(batches, 1):
        stages.enter("target")
        features = source(micro_batch, batch)
        stages.enter("drafter")
        last = number == len(batches)
        accelerator.gradient_state._set_sync_gradients(last)  # DeepSpeed steps where this is set
        synchronise = contextlib.nullcontext() if last else accelerator.no_sync(model)
        with synchronise, setup.training_precision():
            sums = model(batch, features)
            # gradients are averaged over ranks: multiply by their number to divide by all tokens just once
            accelerator.backward(sums["loss"][0] / num_tokens * accelerator.num_processes)
        batch_sums.append({name: (total.detach(), count) for name, (total, count) in sums.items()})
    return batch_sums


def clip_gradient(accelerator: Accelerator, model: torch.nn.Module, max_norm: float) -> Tensor:
    """Clip the gradient to `max_norm`; return the norm that it had before, a scalar on the device."""
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return torch.as_tensor(norm, device=accelerator.device)


def all_finite(norm: Tensor, losses: list[Tensor]) -> Tensor:
    """Return whether the gradient's norm and all losses are finite, a bool on the device."""
    return torch.stack([norm.float(), *losses]).isfinite().all()


@dataclass(frozen=True)
class Agreement:
    """The state of a step and of its processes, alike on all of them."""

    finite: bool  # on each of them
    stopped_by: int | None  # a signal that any of them received
    checkpoint_failed: bool  # one that the main process wrote beside training


def agree(accelerator: Accelerator, finite: Tensor, received_signal: int | None, checkpoint_failed: bool) -> Agreement:
    """Return what the processes agree on after a step. Waits for the device, once a step."""
    of_host = [received_signal == signal.SIGTERM, received_signal == signal.SIGINT, checkpoint_failed]
    flags = torch.cat([(~finite).float()[None], torch.tensor(of_host, dtype=torch.float32, device=finite.device)])
    nonfinite, terminated, interrupted, failed = accelerator.reduce(flags, "sum").tolist()
    stopped_by = signal.SIGTERM if terminated else signal.SIGINT if interrupted else None
    return Agreement(not nonfinite, stopped_by, bool(failed))
