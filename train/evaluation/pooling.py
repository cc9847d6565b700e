"""An evaluation on several processes: each takes a share of the prompts, one of them also the time.

Acceptance is a count and may be pooled; a speed is that of one process, and is measured on one.
"""

from dataclasses import replace
from typing import TypeVar

from draftsmith.inference.decoding.counters import total_of
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.measuring.results import DomainResult, LosslessCheck, Result

LEAST_TIMED = 8  # prompts, on the process that measures speed

T = TypeVar("T")


def spread(count: int, total: int) -> list[int]:
    """Return so many of all places, spread evenly: prompts may be sorted by their domain."""
    return [place * total // count for place in range(count)]


def share_of(num_prompts: int, rank: int, num_ranks: int, batch_size: int = 1) -> list[int]:
    """Return the places of a rank's prompts, in the batches that a single process would make of them all.

    Rank 0, whose speed is reported, has so many that it means something, spread evenly over all of them.
    """
    batches = [list(range(i, min(i + batch_size, num_prompts))) for i in range(0, num_prompts, batch_size)]
    num_timed = min(len(batches), max(-(-LEAST_TIMED // batch_size), -(-len(batches) // num_ranks)))
    timed = spread(num_timed, len(batches))
    others = sorted(set(range(len(batches))) - set(timed))
    own = others[rank - 1 :: num_ranks - 1] if rank else timed
    return [index for number in own for index in batches[number]]


def subset(prompts: PromptSet, indices: list[int]) -> PromptSet:
    """Return the prompts at these places."""

    def taken(values: list[T]) -> list[T]:
        return [values[i] for i in indices] if values else []

    return PromptSet(
        prompts.name,
        taken(prompts.token_ids),
        taken(prompts.domains),
        taken(prompts.tokenise_seconds),
        taken(prompts.images),
    )


def pool(rows: list[Result], shares: list[list[int]]) -> Result:
    """Return one row from those of all ranks at one setting, that of rank 0 first, each on its share of the prompts.

    Counters of acceptance and losslessness are those of all prompts, by domain, too; acceptance lengths of several
    ranks have no interval, since rows do not hold the counters of each prompt. All else, with the speedup and its
    interval, is rank 0's, on the `timed_prompts` of its share.
    """
    own = rows[0]
    checks = [of_whole_set(row.lossless, share) for row, share in zip(rows, shares, strict=True)]
    return replace(
        own,
        setting=replace(own.setting, num_prompts=sum(row.setting.num_prompts for row in rows)),
        timed_prompts=own.setting.num_prompts,
        acceptance=total_of([row.acceptance for row in rows]),
        mean_acceptance_length_ci95=own.mean_acceptance_length_ci95 if len(rows) == 1 else None,
        lossless=sum(checks, LosslessCheck()),
        domains=pool_parts([row.domains or {} for row in rows]),
        spans=pool_parts([row.spans or {} for row in rows]),
    )


def pool_parts(of_ranks: list[dict[str, DomainResult]]) -> dict[str, DomainResult] | None:
    """Return acceptance by domain or kind of span on all ranks; None where no rank has any."""
    names = dict.fromkeys(name for parts in of_ranks for name in parts)
    return {name: pool_domain([parts.get(name) for parts in of_ranks]) for name in names} or None


def of_whole_set(check: LosslessCheck, share: list[int]) -> LosslessCheck:
    """Return the check of a share of the prompts with the places of requests among all prompts."""
    differences = [replace(difference, request=share[difference.request]) for difference in check.first_differences]
    return replace(check, first_differences=differences)


def pool_domain(rows: list[DomainResult | None]) -> DomainResult:
    """Return one domain's acceptance on all ranks, None for one without such prompts. The speed is rank 0's, if any."""
    own, measured = rows[0], [row for row in rows if row]
    total = total_of([row.counters for row in measured])
    interval = measured[0].mean_acceptance_length_ci95 if len(measured) == 1 else None
    pooled = DomainResult.of(sum(row.num_prompts for row in measured), total, interval)
    if own is None:
        return replace(pooled, timed_prompts=0)
    return replace(pooled, speedup=own.speedup, speedup_ci95=own.speedup_ci95, timed_prompts=own.num_prompts)
