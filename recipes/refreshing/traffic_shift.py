"""Whether the traffic moved since the last training: two permutation tests with a set rate of false alarms together.

Both ask whether the new prompts could be a random part of the new and the old ones together. So their false alarms are
as rare as asked for, however few prompts there are, as long as prompts come independently of each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftsmith.data.progress import notice
from draftsmith.inference.decoding.counters import Stats
from draftsmith.recipes.watching.history import History
from draftsmith.recipes.watching.watch import POOLED, Pool, change_text

DRAWS = 9999
LEAST_SHIFT = 0.05  # of shares of domains, below which training would change nothing, however sure the shift is
NUM_TESTS = 2

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Survival:
    """The acceptance of a champion before and after its target changed, on the same prompts."""

    before: float  # acceptance length on the target that it was trained for
    after: float

    @property
    def share(self) -> float:
        """Share of the tokens that drafting brought which the new target leaves."""
        return (self.after - 1) / (self.before - 1) if self.before > 1 else 1.0


@dataclass(frozen=True)
class Look:
    """The findings on the new traffic, and the decision whether to train."""

    acceptance: float  # acceptance length of the champion on the newest held-out prompts
    domains_p_value: float | None = None  # None: there is nothing to compare with
    shift: float = 0.0  # half the sum of the changes of all domains' shares
    acceptance_p_value: float | None = None
    survival: Survival | None = None  # where the target is new
    trains: bool = True
    reason: str = ""  # in words


def domains_p_value(new: dict[str, int], old: dict[str, int]) -> float:
    """Return how likely numbers of prompts by domain differ as much, if new and old prompts are drawn alike."""
    names = sorted(new.keys() | old.keys())
    counts = np.array([[of.get(name, 0) for name in names] for of in (new, old)])
    totals, num_new = counts.sum(0), int(counts[0].sum())
    expected = totals * num_new / totals.sum()
    drawn = np.random.default_rng(0).multivariate_hypergeometric(totals, num_new, size=DRAWS)
    return p_value(chi_square(counts[0], expected), chi_square(drawn, expected))


def chi_square(counts: NDArray[np.int64], expected: Floats) -> Floats:
    """Return the distance of counts [..., domains] from what is expected of them, [...]."""
    return np.asarray(((counts - expected) ** 2 / expected).sum(-1))


def shift_of(new: dict[str, int], old: dict[str, int]) -> float:
    """Return half the sum of the changes of all domains' shares: 1 where no domain is in both."""
    shares = [{name: number / sum(of.values()) for name, number in of.items()} for of in (new, old)]
    return sum(abs(shares[0].get(name, 0.0) - shares[1].get(name, 0.0)) for name in new.keys() | old.keys()) / 2


def acceptance_p_value(new: Sequence[Stats], old: Sequence[Stats]) -> float:
    """Return how likely the new prompts are accepted so much less than the old ones, if they are drawn alike."""
    both = [*new, *old]
    accepted = np.array([stats.num_accepted_tokens for stats in both], dtype=float)
    drafts = np.array([stats.num_drafts for stats in both], dtype=float)
    orders = np.random.default_rng(0).permuted(np.tile(np.arange(len(both)), (DRAWS, 1)), axis=1)[:, : len(new)]
    own = np.arange(len(new))[None]
    fall, falls = (fall_of(accepted, drafts, picks) for picks in (own, orders))
    return p_value(fall[0], falls)


def fall_of(accepted: Floats, drafts: Floats, picks: NDArray[np.int64]) -> Floats:
    """Return how far the acceptance of picked prompts [draws, prompts] lies below that of the others, [draws]."""
    inside, in_drafts = accepted[picks].sum(1), drafts[picks].sum(1)
    outside, out_drafts = accepted.sum() - inside, drafts.sum() - in_drafts
    return np.asarray(outside / np.maximum(out_drafts, 1) - inside / np.maximum(in_drafts, 1))


def p_value(observed: Floats, drawn: Floats) -> float:
    """Return the share of values at least as large as the observed one, itself among them."""
    return float((1 + (drawn >= observed - 1e-9).sum()) / (len(drawn) + 1))


def why_moved(look: Look, false_alarms: float) -> str | None:
    """Return in words what moved; None where nothing did. Each test has its part of the false alarms."""
    level, reasons = false_alarms / NUM_TESTS, []
    if look.domains_p_value is not None and look.domains_p_value <= level and look.shift >= LEAST_SHIFT:
        reasons.append(f"the shares of domains moved by {look.shift:.0%} (p = {look.domains_p_value:.2g})")
    if look.acceptance_p_value is not None and look.acceptance_p_value <= level:
        reasons.append(f"the champion accepts less than on the traffic before (p = {look.acceptance_p_value:.2g})")
    return "; ".join(reasons) or None


def fall_in_history(path: Path, since: float) -> str | None:
    """Return the fall of acceptance that `draftsmith watch` would have found since a time, in words; None for none."""
    if not path.is_file():
        notice(f"--history {path}: there is no such file, so falls that `watch` finds do not count")
        return None
    history = History(path)
    for server in history.servers():
        pools, fall = [Pool(size) for size in POOLED], None
        for reading in history.of(server):
            changes = list(filter(None, [pool.add(reading) for pool in pools]))
            fall = changes[0] if changes and reading.time > since else fall
        if fall:
            return f"{server}: {change_text(fall)}"
    return None
