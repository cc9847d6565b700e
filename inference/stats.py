"""Counters of speculative decoding, with the names and definitions of vLLM's.

Counted before the cut at the length limit, which is no fault of the drafter's, but not beyond an end-of-text token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Stats:
    """Of one request, or summed over several. Rounds in which nothing was drafted are not drafts."""

    draft_length: int
    num_drafts: int = 0  # rounds with at least one drafted token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # bonus tokens not among them
    num_emitted_tokens: int = 0
    num_rounds: int = 0  # target passes after the prompt's
    acceptance_histogram: tuple[int, ...] = ()  # drafts by number of accepted tokens, draft_length + 1 bins

    def __add__(self, other: "Stats") -> "Stats":
        assert self.draft_length == other.draft_length
        histogram = tuple(a + b for a, b in zip(self.acceptance_histogram, other.acceptance_histogram, strict=True))
        return Stats(
            self.draft_length,
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            self.num_emitted_tokens + other.num_emitted_tokens,
            self.num_rounds + other.num_rounds,
            histogram,
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per draft, the bonus token counted: 1 + accepted / drafts. 1 where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def per_position_acceptance_rates(self) -> list[float]:
        """Share of drafts with more than i tokens accepted; unconditional, so it never rises."""
        return [n / self.num_drafts if self.num_drafts else 0.0 for n in self._at_least()[1:]]

    @property
    def conditional_acceptance_rates(self) -> list[float | None]:
        """Chance that draft i is accepted when all before it were; None where that never happened."""
        at_least = self._at_least()
        return [later / now if now else None for now, later in zip(at_least[:-1], at_least[1:], strict=True)]

    def _at_least(self) -> list[int]:
        """Drafts with at least j accepted tokens, j = 0..draft_length."""
        return [sum(self.acceptance_histogram[j:]) for j in range(self.draft_length + 1)]


class RoundCounters:
    """Collects per-round tensors on the device and counts once at the end, so that no round waits for the host."""

    def __init__(self, draft_length: int) -> None:
        self.draft_length = draft_length
        self._rounds: list[Tensor] = []  # each [3, B]: drafted, accepted, active

    def add(self, num_drafted: Tensor, num_accepted: Tensor, active: Tensor) -> None:
        """One round: drafted and accepted tokens and whether the row was still running, each [B]."""
        self._rounds.append(torch.stack([num_drafted, num_accepted, active.long()]))

    def per_request(self, num_emitted: list[int]) -> list[Stats]:
        if not self._rounds:
            empty = (0,) * (self.draft_length + 1)
            return [Stats(self.draft_length, num_emitted_tokens=n, acceptance_histogram=empty) for n in num_emitted]
        drafted, accepted, active = torch.stack(self._rounds, 1).cpu()  # each [rounds, B]
        requests = []
        for row, emitted in enumerate(num_emitted):
            is_draft = (active[:, row] > 0) & (drafted[:, row] > 0)
            row_accepted = accepted[is_draft, row]
            requests.append(
                Stats(
                    self.draft_length,
                    num_drafts=int(is_draft.sum()),
                    num_draft_tokens=int(drafted[is_draft, row].sum()),
                    num_accepted_tokens=int(row_accepted.sum()),
                    num_emitted_tokens=emitted,
                    num_rounds=int(active[:, row].sum()),
                    acceptance_histogram=tuple(torch.bincount(row_accepted, minlength=self.draft_length + 1).tolist()),
                )
            )
        return requests
