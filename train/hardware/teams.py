"""Teams of processes, each of which takes texts together, as run.processes_per_text says."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from accelerate import Accelerator

from draftsmith.models import DRAFTERS
from draftsmith.models.errors import UserError
from draftsmith.models.text_team import Team
from draftsmith.train.config import TrainConfig
from draftsmith.train.hardware.layouts import layout_of


@dataclass(frozen=True)
class Teams:
    """The teams that all processes of a run form. The members of one read the same batches."""

    number: int  # of this process's team
    count: int
    own: Team

    def __str__(self) -> str:
        return f"{self.count} processes" if self.own.size == 1 else f"{self.count} teams of {self.own.size} processes"

    @classmethod
    def of(cls, config: TrainConfig, accelerator: Accelerator) -> "Teams":
        """Form the teams out of neighbouring processes. All processes call this together.

        Raises `UserError` where the processes, or the drafter, cannot form them.
        """
        size, rank, num_ranks = config.run.processes_per_text, accelerator.process_index, accelerator.num_processes
        if size == 1:
            return cls(rank, num_ranks, Team())
        check_teams(config, num_ranks, layout_of(accelerator))
        group, _ = torch.distributed.new_subgroups(size, timeout=timedelta(seconds=config.run.timeout))
        return cls(rank // size, num_ranks // size, Team(size, rank % size, group))


def check_teams(config: TrainConfig, num_ranks: int, layout: str) -> None:
    """Refuse teams for a drafter that divides no text, and those that the processes of a machine cannot form.

    They are refused under ZeRO-3, too: there each process fetches weights when it needs them, in an order of its own,
    and could wait in a fetch for one that waits for its team.
    """
    size, kind = config.run.processes_per_text, config.drafter.kind
    setting = f"run.processes_per_text={size}"
    if not DRAFTERS[kind].divides_texts:
        able = " and ".join(name for name, drafter in DRAFTERS.items() if drafter.divides_texts)
        raise UserError(f"{setting}: only drafters of the kinds {able} divide a text, not {kind}: leave it out")
    if layout == "ZeRO-3":
        raise UserError(
            f"{setting}: under ZeRO-3 processes could wait for each other forever; start with recipes/launch/fsdp2.yaml"
        )
    of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if of_machine % size:
        raise UserError(
            f"{setting} makes no teams of the {of_machine} processes of this machine: start a multiple of {size} on "
            "each machine, or give a number that divides them"
        )
