"""The drafter on held-out samples, as training sees them: a number for every run, also where nothing can decode.

Features come from the source that training has: computed beside the drafter, in pieces on several devices, or stored.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from accelerate import Accelerator
from torch import nn

from draftsmith.data.features.stored import FeatureSource
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.train.hardware.layouts import back_to_pieces
from draftsmith.train.hardware.teams import Teams
from draftsmith.train.process.stages import Stages
from draftsmith.train.run_folder.learning_curve import CurvePoint

FIRST_POINT = 8  # steps


def is_on_curve(step: int, num_steps: int) -> bool:
    """Return whether the learning curve of a run of `num_steps` has a point after `step` steps.

    It has 4 an octave in the first tenth (8, 10, 11, 13, 16, ...), which the forecast is made of, one at the end of
    that, and 2 an octave after it (23, 32, 45, ...).
    """
    tenth = num_steps // 10
    if step < FIRST_POINT or step == tenth:
        return step >= FIRST_POINT
    an_octave = 4 if step < tenth else 2
    number = round(an_octave * math.log2(step / FIRST_POINT))
    return step == round(FIRST_POINT * 2 ** (number / an_octave))


class HeldOutSamples:
    """The samples of a plan that are not trained on, to measure the drafter on."""

    def __init__(
        self,
        accelerator: Accelerator,
        teams: Teams,
        model: nn.Module,
        plan: BatchPlan,
        source: FeatureSource,
        stages: Stages,
        precision: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`model` is the drafter as the accelerator has prepared it, `precision` returns the context of its loss."""
        self.accelerator, self.teams, self.model = accelerator, teams, model
        self.plan, self.source, self.stages, self.precision = plan, source, stages, precision
        self.micro_batches = plan.held_out_batches()

    @torch.no_grad()
    def measure(self, step: int) -> CurvePoint:
        """Return the point of the learning curve after so many steps. All processes call this together."""
        accelerator, teams = self.accelerator, self.teams
        self.model.eval()
        sums = torch.zeros(2, 2, dtype=torch.float64, device=accelerator.device)
        for first in range(0, len(self.micro_batches), teams.count):
            self.stages.enter("evaluation")
            number = first + teams.number
            # all processes pass through layers in pieces together: a team without a share reads the last one, uncounted
            micro_batch = self.micro_batches[min(number, len(self.micro_batches) - 1)]
            batch = self.plan.collate(micro_batch).to(accelerator.device)
            features = self.source(micro_batch, batch)
            with self.precision():
                found = self.model(batch, features)
            if number < len(self.micro_batches):
                pairs = (found["loss"], found["simulated_acceptance_length"])
                sums += torch.stack([torch.stack([value.double() for value in pair]) for pair in pairs])
        back_to_pieces(self.model)
        self.model.train()
        (loss, tokens), (emitted, rounds) = accelerator.reduce(sums, "sum").tolist()
        return CurvePoint(step, loss / max(1, tokens), emitted / max(1, rounds))
