"""Which drafters kept the SLA where they were measured at the end, and which of them is best."""

from collections.abc import Callable
from dataclasses import replace

from draftsmith.inference.measuring.results import Evaluation, Percentiles, Result
from draftsmith.inference.traffic.stages import LEAST_FOR_P95, Sla


def kept(row: Result, sla: Sla) -> bool | None:
    """Return whether a drafter kept the SLA at one setting; None where too few requests tell, True of no SLA."""
    return sla.kept_at(row.speed.ttft_ms, row.speed.tpot_ms, row.setting.num_prompts)


def within_sla(evaluations: list[Evaluation], sla: Sla) -> list[Evaluation]:
    """Return what was measured at the settings that are not shown to break the SLA."""
    return with_rows(evaluations, lambda row: kept(row, sla) is not False)


def at_batch_size(evaluations: list[Evaluation], batch_size: int) -> list[Evaluation]:
    """Return what was measured at one batch size."""
    return with_rows(evaluations, lambda row: row.setting.batch_size == batch_size)


def chains_alone(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Return what was measured with chains of one length, which every engine that serves a drafter can draft."""
    return with_rows(evaluations, lambda row: row.setting.is_chain)


def with_rows(evaluations: list[Evaluation], is_wanted: Callable[[Result], bool]) -> list[Evaluation]:
    """Return the evaluations that have wanted rows, with these alone."""
    found = []
    for evaluation in evaluations:
        rows = [row for row in evaluation.results if is_wanted(row)]
        found += [replace(evaluation, results=rows)] if rows else []
    return found


def fastest_first(evaluations: list[Evaluation]) -> list[Evaluation]:
    return sorted(evaluations, key=lambda evaluation: evaluation.best.rank_key, reverse=True)


def sla_lines(evaluations: list[Evaluation], sla: Sla) -> list[str]:
    """Return for each drafter and for plain decoding whether it kept the SLA; nothing where there is none."""
    if sla == Sla():
        return []
    rows = {evaluation.drafter: evaluation.best for evaluation in within_sla(evaluations, sla)}
    rows = {evaluation.drafter: rows.get(evaluation.drafter, evaluation.best) for evaluation in evaluations}
    lines = [
        f"{name} at draft length {row.setting.draft_length} {verb(kept(row, sla), row)}: {latencies(row, sla)}"
        for name, row in rows.items()
    ]
    if sla.tpot_ms is not None:  # plain decoding's time to the first token is not measured apart
        row = next(iter(rows.values()))
        latency = row.speed.baseline_tpot_ms
        is_kept = Sla(tpot_ms=sla.tpot_ms).kept_at(latency, latency, row.setting.num_prompts)
        lines.append(f"plain decoding {verb(is_kept, row)}: {p95(latency)} a token, of {sla.tpot_ms:g}")
    return lines


def verb(is_kept: bool | None, row: Result) -> str:
    if is_kept is None:
        return f"has too few requests to judge the SLA ({row.setting.num_prompts}, {LEAST_FOR_P95} needed)"
    return "keeps the SLA" if is_kept else "breaks the SLA"


def latencies(row: Result, sla: Sla) -> str:
    """Return the latencies that are limited, at the 95th percentile."""
    limited = ((row.speed.ttft_ms, "to the first token", sla.ttft_ms), (row.speed.tpot_ms, "a token", sla.tpot_ms))
    return ", ".join(f"{p95(latency)} {what}, of {limit:g}" for latency, what, limit in limited if limit is not None)


def p95(latency: Percentiles) -> str:
    return f"{latency.p95:.3g} ms"
