"""One evaluation on several processes: each takes a share of the prompts, one of them also the time.

Acceptance is a count and may be pooled; a speed is that of one process, and is measured on one.
"""

from typing import Any, TypeVar

from draftsmith.inference.measure import PromptSet, acceptance_fields
from draftsmith.inference.stats import Stats

LEAST_TIMED = 8  # prompts, on the process that measures speed

T = TypeVar("T")
Row = dict[str, Any]  # of `results` in evaluation.json


def share_of(num_prompts: int, rank: int, num_ranks: int) -> list[int]:
    """The prompts of a rank. Rank 0, whose speed is reported, has the first, and so many that it means something."""
    timed = min(num_prompts, max(LEAST_TIMED, -(-num_prompts // num_ranks)))
    if rank == 0:
        return list(range(timed))
    return list(range(timed, num_prompts))[rank - 1 :: num_ranks - 1]


def subset(prompts: PromptSet, indices: list[int]) -> PromptSet:
    def taken(values: list[T]) -> list[T]:
        return [values[i] for i in indices] if values else []

    return PromptSet(prompts.name, taken(prompts.token_ids), taken(prompts.domains), taken(prompts.tokenise_seconds))


def pool(rows: list[Row], shares: list[list[int]]) -> Row:
    """One setting's row of all ranks, the first that of rank 0, each on its share of the prompts.

    Counters of acceptance and losslessness are those of all prompts. All else, with the speedup and its interval, is
    rank 0's, on the first `timed_prompts` of them.
    """
    own = rows[0]
    pooled = {**own, "num_prompts": sum(row["num_prompts"] for row in rows), "timed_prompts": own["num_prompts"]}
    pooled |= acceptance_fields(sum(map(counters, rows[1:]), counters(own)))
    checks = [row["lossless"] for row in rows]
    pooled["lossless"] = {
        name: sum(check[name] for check in checks) for name, value in checks[0].items() if isinstance(value, int)
    }
    pooled["lossless"]["first_differences"] = [
        {**difference, "request": share[difference["request"]]}
        for check, share in zip(checks, shares, strict=True)
        for difference in check["first_differences"]
    ]
    return pooled


def counters(row: Row) -> Stats:
    """The counters that a row's acceptance is computed from."""
    return Stats(
        row["draft_length"],
        row["num_drafts"],
        row["num_draft_tokens"],
        row["num_accepted_tokens"],
        row["num_emitted_tokens"],
        row["num_rounds"],
        acceptance_histogram=row["acceptance_histogram"],
    )
