"""The numbers of a logged step: mean losses over all ranks, speed, memory, and the share of time of each stage."""

import resource
from collections import defaultdict
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.models import Drafter
from draftsmith.models.losses.chain_loss import LossSums
from draftsmith.models.target.shape import target_weights
from draftsmith.train.config import TrainConfig
from draftsmith.train.hardware.estimates import operations_per_token, peak_of
from draftsmith.train.hardware.placement import target_devices
from draftsmith.train.process.stages import STAGES, Stages

OUTSIDE_STEPS = ("checkpoint", "evaluation")  # speed is that of the steps


class Meter:
    """Sums and counts since the last logged step."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, drafter: Drafter, stages: Stages) -> None:
        self._accelerator, self._stages = accelerator, stages
        self._pairs: dict[str, list[Tensor]] = defaultdict(list)
        self._tokens_read, self._skipped = 0.0, 0
        self._devices = target_devices(config, accelerator.device)
        self._peak = peak_of(accelerator.device)  # operations a second
        self._operations = 0.0  # a token
        if self._peak:
            weights = target_weights(drafter.target.config, config.target)
            self._operations = operations_per_token(config, weights, drafter)

    def add(self, batch_sums: list[LossSums], tokens_read: float) -> None:
        """Add a step: its sums, and the number of tokens that this rank read; of a text that a team took, its share."""
        self._tokens_read += tokens_read
        for sums in batch_sums:
            for name, pair in sums.items():
                self._pairs[name].append(torch.stack([value.double() for value in pair]))

    def skip(self) -> None:
        """Count a step that was skipped, since it was not finite."""
        self._skipped += 1

    def flush(self) -> dict[str, Any]:
        """Return means over everything added on all ranks, tokens a second, and more; then begin anew.

        `tokens_per_second` counts tokens that are trained on; `model_flop_utilisation` all that are read, by the
        operations of estimates.py, of the devices' bf16 peak, None where that is unknown. `time_share_STAGE` is that
        stage's share of the whole time, mean over ranks; `peak_memory_gb` the highest of a rank: on a GPU of what torch
        holds there, else of the process.
        """
        reduce = self._accelerator.reduce
        reduced = {name: reduce(torch.stack(pairs).sum(0), "sum").tolist() for name, pairs in self._pairs.items()}
        device = self._accelerator.device
        memory = torch.tensor([self._peak_memory()], dtype=torch.float64, device=device)
        of_rank = [*self._stages.flush().values(), self._tokens_read]
        *seconds, tokens_read = reduce(torch.tensor(of_rank, dtype=torch.float64, device=device), "mean").tolist()
        stages = dict(zip(STAGES, seconds, strict=True))
        in_steps = sum(spent for name, spent in stages.items() if name not in OUTSIDE_STEPS)
        speed = reduced["loss"][1] / in_steps if reduced else 0.0
        values: dict[str, Any] = {name: total / max(1, count) for name, (total, count) in reduced.items()}
        values |= {"loss": None} if not reduced else {}
        values["tokens_per_second"] = speed
        values["tokens_per_second_per_device"] = speed / self._accelerator.num_processes / len(self._devices)
        values["model_flop_utilisation"] = (
            self._operations * tokens_read / in_steps / self._peak / len(self._devices) if self._peak else None
        )
        values["peak_memory_gb"] = float(self._accelerator.gather(memory).max())
        values |= {f"time_share_{name}": spent / sum(seconds) for name, spent in stages.items()}
        values["skipped_steps"] = self._skipped
        self._pairs.clear()
        self._tokens_read, self._skipped = 0.0, 0
        return values

    def _peak_memory(self) -> float:
        if self._accelerator.device.type == "cuda":
            return max(map(torch.cuda.max_memory_allocated, self._devices)) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
