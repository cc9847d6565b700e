"""evaluation.md: what an evaluation found, as Markdown, the verdict first."""

from typing import Any

from draftsmith.recipes.report import (
    SummaryRow,
    baseline_cells,
    by_setting,
    caveats,
    cells,
    domain_cells,
    summary_rows,
    teacher_forced_cells,
)
from draftsmith.recipes.results import compared


def evaluation_page(contents: list[dict[str, Any]]) -> str:
    """The page of contents of evaluation.json files that one process measured."""
    rows = summary_rows([compared(content) for content in contents])
    environment = contents[0]["environment"]
    lines = [f"# {verdict(rows)}", "", *(f"- {line}" for line in caveats(rows)), ""]
    lines += [
        f"Target {contents[0]['target']}, on {environment['device']} ({environment['dtype']}, "
        f"{environment['num_threads']} CPU threads), commit {environment['git_commit']}:",
        "",
        f"    {environment['command']}",
        "",
    ]
    for setting, block in by_setting(rows).items():
        lines += [f"## {setting[0].upper()}{setting[1:]}", ""]
        lines += table([named(row) for row in block] + baseline_cells(block))
        lines += table([latency_cells(row) for row in block if not row.plain_beside])
        lines += table(domain_cells(block)) + table(teacher_forced_cells(block))
    return "\n".join(lines)


def verdict(rows: list[SummaryRow]) -> str:
    """The fastest drafter at the first setting, and how many settings it pays in."""
    drafting = [row for row in rows if row.drafter != "none" and not row.diverged and not row.lossy]
    first = [row for row in drafting if row.setting == rows[0].setting]
    if not first:
        return "No speedup to report: no drafter leaves the output of plain decoding as it is"
    best = max(first, key=lambda row: row.result["speedup"])
    same = [row for row in drafting if (row.drafter, row.note) == (best.drafter, best.note)]
    result, (low, high) = best.result, best.result["speedup_ci95"]
    return (
        f"{best.drafter}: {result['speedup']:.2f}× plain decoding [{low:.2f}, {high:.2f}] at temperature "
        f"{result['temperature']:g} and batch size {result['batch_size']}; faster beyond doubt in "
        f"{sum(row.verdict == 'faster' for row in same)} of {len(same)} settings, slower in "
        f"{sum(row.verdict == 'slower' for row in same)}"
    )


def named(row: SummaryRow) -> dict[str, str]:
    return {**cells(row), "drafter": f"{row.drafter}, {row.note}" if row.note else row.drafter}


def latency_cells(row: SummaryRow) -> dict[str, str]:
    """Times in ms of one drafter, or of plain decoding where that was measured as a drafter too."""
    result, parts = row.result, row.result["ttft_parts_ms"]
    share, prefilled = result["bandwidth_floor_share"], result["decode_speedup"]
    return {
        "drafter": row.drafter,
        "TTFT ms, p50 / p95 / p99": " / ".join(f"{value:.1f}" for value in result["ttft_ms"].values()),
        "tokenise / prefill / first round": " / ".join(
            "–" if value is None else f"{value:.2f}" for value in parts.values()
        ),
        "TPOT ms, p50 / p95 / p99": " / ".join(f"{value:.2f}" for value in result["tpot_ms"].values()),
        "speedup after the prompt": "–" if prefilled is None else f"{prefilled:.2f}×",
        "share of bandwidth": "–" if share is None else f"{100 * share:.0f} %",
        "repeats": str(result["repeats"]),
    }


def table(rows: list[dict[str, str]]) -> list[str]:
    """Lines of a Markdown table and an empty one; none without rows."""
    if not rows:
        return []
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return [*(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines), ""]
