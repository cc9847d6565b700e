"""One evaluation on several processes: each takes a share of the prompts, one of them also the time.

Acceptance is a count and may be pooled; a speed is that of one process, and is measured on one.
"""

from typing import Any, TypeVar

from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.measuring.measure import PromptSet, acceptance_fields

LEAST_TIMED = 8  # prompts, on the process that measures speed

T = TypeVar("T")
Row = dict[str, Any]  # of `results` in evaluation.json


def share_of(num_prompts: int, rank: int, num_ranks: int, batch_size: int = 1) -> list[int]:
    """The prompts of a rank, in the batches that a single process would make of them all.

    Rank 0, whose speed is reported, has so many that it means something, spread evenly over all of them: prompts may be
    sorted by their domain.
    """
    batches = [list(range(i, min(i + batch_size, num_prompts))) for i in range(0, num_prompts, batch_size)]
    num_timed = min(len(batches), max(-(-LEAST_TIMED // batch_size), -(-len(batches) // num_ranks)))
    timed = [i * len(batches) // num_timed for i in range(num_timed)]
    others = sorted(set(range(len(batches))) - set(timed))
    own = others[rank - 1 :: num_ranks - 1] if rank else timed
    return [index for number in own for index in batches[number]]


def subset(prompts: PromptSet, indices: list[int]) -> PromptSet:
    def taken(values: list[T]) -> list[T]:
        return [values[i] for i in indices] if values else []

    return PromptSet(prompts.name, taken(prompts.token_ids), taken(prompts.domains), taken(prompts.tokenise_seconds))


def pool(rows: list[Row], shares: list[list[int]]) -> Row:
    """One setting's row of all ranks, the first that of rank 0, each on its share of the prompts.

    Counters of acceptance and losslessness are those of all prompts, by domain, too; acceptance lengths of several
    ranks have no interval, since rows do not hold the counters of each prompt. All else, with the speedup and its
    interval, is rank 0's, on the `timed_prompts` of its share.
    """
    own = rows[0]
    pooled = {**own, "num_prompts": sum(row["num_prompts"] for row in rows), "timed_prompts": own["num_prompts"]}
    pooled |= acceptance_fields(sum(map(counters, rows[1:]), counters(own)))
    if len(rows) > 1:
        pooled["mean_acceptance_length_ci95"] = None
    checks = [row["lossless"] for row in rows]
    pooled["lossless"] = {
        name: sum(check[name] for check in checks) for name, value in checks[0].items() if isinstance(value, int)
    }
    pooled["lossless"]["first_differences"] = [
        {**difference, "request": share[difference["request"]]}
        for check, share in zip(checks, shares, strict=True)
        for difference in check["first_differences"]
    ]
    if domains := dict.fromkeys(name for row in rows for name in row.get("domains", {})):
        pooled["domains"] = {name: pool_domain([row.get("domains", {}).get(name) for row in rows]) for name in domains}
    return pooled


def pool_domain(of_ranks: list[Row | None]) -> Row:
    """One domain's acceptance on all ranks; None where a rank has no prompt of it. The speed is rank 0's, if it has."""
    own, found = of_ranks[0] or {}, [fields for fields in of_ranks if fields]
    names = ("num_prompts", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
    sums = {name: sum(fields[name] for fields in found) for name in names}
    return {
        **own,
        **sums,
        "timed_prompts": own.get("num_prompts", 0),
        "mean_acceptance_length": 1 + sums["num_accepted_tokens"] / sums["num_drafts"] if sums["num_drafts"] else 1.0,
        "draft_acceptance_rate": sums["num_accepted_tokens"] / max(1, sums["num_draft_tokens"]),
        "mean_acceptance_length_ci95": found[0]["mean_acceptance_length_ci95"] if len(found) == 1 else None,
    }


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
