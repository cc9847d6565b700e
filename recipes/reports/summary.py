"""The comparison of drafters: one table a setting, and what stands below it."""

import math
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.measuring.results import row_from_json
from draftsmith.inference.measuring.teacher_forcing import gap_warning
from draftsmith.inference.verification.acceptance_rules import LOSSY
from draftsmith.recipes.reports.contents import Contender, Result, is_sound, plain_step_ms, told_apart
from draftsmith.recipes.reports.tables import Cell, Row, Table, Tone, table_of

PLAIN = "none"  # the name of plain decoding among drafters


@dataclass
class SummaryRow:
    """One line of the comparison: a drafter at one setting."""

    setting: str
    drafter: str
    note: str  # which checkpoint, or beside which it was measured
    trained: bool
    result: Result  # its row of evaluation.json

    @property
    def sound(self) -> bool:
        """Its output is what the target alone would write, as far as was looked; else its speed does not count."""
        return is_sound(self.result)

    @property
    def tone(self) -> Tone:
        """Good or bad where the interval of the speedup leaves no doubt; other output is never good."""
        low, high = self.result["speedup_ci95"] or (0.0, math.inf)
        return "bad" if high < 1 else "good" if low > 1 and self.sound else ""

    @property
    def gap(self) -> str | None:
        """What to say where the decoder accepts other than training predicts."""
        if self.drafter == PLAIN or "teacher_forced_gap" not in self.result:
            return None
        return gap_warning(row_from_json(self.result))


# --- rows


def summary_rows(contenders: list[Contender]) -> list[SummaryRow]:
    """The contenders and plain decoding at each setting; a setting's trained drafters first, the fastest on top.

    What was measured under other conditions (device, threads, dtype, versions) is a setting of its own: times and
    ratios stand side by side only where they were measured alike.
    """
    labels = told_apart([one.environment for one in contenders])
    blocks: dict[str, list[SummaryRow]] = {}
    for one, label in zip(contenders, labels, strict=True):
        for result in one.results:
            setting = setting_name(result) + (label and f", on {label}")
            blocks.setdefault(setting, []).append(SummaryRow(setting, one.name, one.note, one.trained, result))
    rows = []
    for setting, block in blocks.items():
        block.sort(key=lambda row: (not row.trained, row.drafter == PLAIN, -row.result["speedup"]))
        note = "" if block[-1].trained else block[-1].note
        rows += block
        if all(row.drafter != PLAIN for row in block):
            rows.append(plain_row(setting, block[0], note))
    return rows


def setting_name(result: Result) -> str:
    """All that two results must share to stand side by side."""
    top_p = f", top-p {result['top_p']:g}" if result["top_p"] < 1 else ""
    return (
        f"temperature {result['temperature']:g}{top_p}, batch size {result['batch_size']}, "
        f"{draft_text(result)}, {result['num_prompts']} prompts of {result['prompt_set']}, "
        f"up to {result['max_new_tokens']} new tokens"
    )


def draft_text(result: Result) -> str:
    """What a round drafts: a chain of a length, a tree, or chains by a schedule."""
    if rule := (result.get("schedule") or {}).get("confident"):
        return f"draft length up to {rule['longest']}, by confidence {rule['least']:g}"
    if result.get("schedule"):
        return f"draft length up to {result['draft_length']}, by schedule"
    tree = f", tree of {count(result['tree_nodes'], 'node')}" if result["tree_nodes"] else ""
    return f"draft length {result['draft_length']}{tree}"


def is_choice(result: Result, chosen: dict[str, Any]) -> bool:
    """Whether a measured row is of what was chosen, an entry of choice.json's `predicted`."""
    same = ("batch_size", "draft_length", "tree_nodes", "schedule")
    return all(result.get(field) == chosen.get(field) for field in same)


def plain_row(setting: str, beside: SummaryRow, note: str) -> SummaryRow:
    """Plain decoding as it was measured beside a drafter."""
    result = {
        **beside.result,
        "mean_acceptance_length": 1.0,
        "mean_acceptance_length_ci95": None,
        "draft_acceptance_rate": None,
        "tokens_per_second": beside.result["baseline_tokens_per_second"],
        "speedup": 1.0,
        "speedup_ci95": [1.0, 1.0],
        "milliseconds_per_round": None,
        "step_cost_ratio": 1.0,
        "verification_mode": "greedy",
        "baselines": {},
        "diagnosis": [],
        "lossless": {
            **{"checked": 0, "identical": 0, "near_tie_divergences": 0, "divergences": 0},
            "first_differences": [],
        },
    }
    return SummaryRow(setting, PLAIN, f"plain decoding{note and ', ' + note}", False, result)


def by_setting(rows: list[SummaryRow]) -> dict[str, list[SummaryRow]]:
    blocks: dict[str, list[SummaryRow]] = {}
    for row in rows:
        blocks.setdefault(row.setting, []).append(row)
    return blocks


# --- tables


def comparison_table(setting: str, block: list[SummaryRow]) -> Table:
    """All drafters at one setting, and what transformers reached beside them."""
    rows = [*map(comparison_cells, block), *baseline_cells(block)]
    return table_of(setting[0].upper() + setting[1:], rows, idle_note(block), words=("drafter", "identical outputs"))


def idle_note(block: list[SummaryRow]) -> str:
    """Of drafters that had nothing to draft in some rounds: which of their numbers count those rounds."""
    parts = [
        f"{row.drafter} drafted in {100 * result['num_drafts'] / result['num_rounds']:.0f} % of its rounds"
        for row in block
        for result in [row.result]
        if row.drafter != PLAIN and 0 < result["num_drafts"] < result.get("num_rounds", 0)
    ]
    if not parts:
        return ""
    return (
        f"{', '.join(parts)}. Acceptance length and draft acceptance count the rounds with a draft only; speedup and "
        "milliseconds count all, so the step cost ratio sets one against the other and says less there."
    )


def comparison_cells(row: SummaryRow) -> Row:
    result, plain = row.result, row.drafter == PLAIN
    rate = result["draft_acceptance_rate"]
    phases = result["milliseconds_per_round"]
    alarm: Tone = "" if row.sound else "alarm"
    return {
        "drafter": Cell(row.drafter, row.note),
        "acceptance length": Cell(
            f"{result['mean_acceptance_length']:.2f}", interval_text(result.get("mean_acceptance_length_ci95"))
        ),
        "draft acceptance": "–" if rate is None else f"{100 * rate:.1f} %",
        "speedup": "1.00×" if plain else Cell(speedup_text(result), interval_note(result), row.tone),
        "tokens/s": f"{result['tokens_per_second']:.1f}",
        "plain tokens/s": f"{result['baseline_tokens_per_second']:.1f}",
        "ms a round": f"{plain_step_ms(result) if plain else sum(phases.values()):.2f}",
        "draft / verify / host": "–" if plain else " / ".join(f"{phase:.2f}" for phase in phases.values()),
        "step cost ratio": f"{result['step_cost_ratio']:.2f}",
        "identical outputs": "reference" if plain else Cell(lossless_text(result), result["verification_mode"], alarm),
    }


def baseline_cells(block: list[SummaryRow]) -> list[Row]:
    """What transformers reached beside one setting's drafters, by the column headings of `comparison_cells`."""
    found: dict[str, dict[str, Any]] = {}
    for row in block:
        for name, fields in row.result.get("baselines", {}).items():
            found.setdefault(f"{name} with {row.drafter}" if name == "assisted" else name, fields)
    headings, checked = list(comparison_cells(block[0])), block[0].result["num_prompts"]
    return [
        {
            **dict.fromkeys(headings, "–"),
            "drafter": f"transformers {name}",
            "speedup": ratio_text(fields["speedup_over_plain"], fields["speedup_over_plain_ci95"]),
            "tokens/s": f"{fields['tokens_per_second']:.1f}",
            "plain tokens/s": f"{block[0].result['baseline_tokens_per_second']:.1f}",
            "identical outputs": "not compared" if fields["identical"] is None else f"{fields['identical']}/{checked}",
        }
        for name, fields in found.items()
    ]


def domain_table(block: list[SummaryRow]) -> Table | None:
    """Each drafter's acceptance length and speedup by domain, where prompts have one."""
    rows = [
        {"drafter": row.drafter}
        | {
            f"{name or 'no domain'} ({count(fields['num_prompts'], 'prompt')})": domain_text(fields)
            for name, fields in row.result["domains"].items()
        }
        for row in block
        if row.drafter != PLAIN and "domains" in row.result
    ]
    return table_of("By domain of the prompts: acceptance length, speedup", rows) if rows else None


def domain_text(fields: dict[str, Any]) -> str:
    """Speed by domain is there at batch size 1 only, where a batch is of one domain."""
    length = f"{fields['mean_acceptance_length']:.2f} {interval_text(fields.get('mean_acceptance_length_ci95'))}"
    return ", ".join([length.rstrip(), *([speedup_text(fields)] if "speedup" in fields else [])])


# --- words


def speedup_text(result: Result) -> str:
    return ratio_text(result["speedup"], result["speedup_ci95"])


def ratio_text(ratio: float, interval: list[float] | None) -> str:
    return f"{ratio:.2f}× {interval_text(interval)}".rstrip()


def interval_text(interval: list[float] | None) -> str:
    """Nothing where too little was measured for one."""
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""


def interval_note(result: Result) -> str:
    """What to know of the interval of a speedup, where it is not over several batches."""
    if result["speedup_ci95"] is None:
        return "too few batches or repeats for an interval"
    one_batch = result.get("timed_prompts", result["num_prompts"]) <= result["batch_size"]
    return "over the repeats of one batch" if one_batch else ""


def lossless_text(result: Result) -> str:
    """How many outputs equal those of plain decoding; a lossy mode is named."""
    if result["verification_mode"] in LOSSY:
        return f"LOSSY ({result['verification_mode']})"
    return check_text(result["lossless"])


def check_text(check: dict[str, Any]) -> str:
    """The counts of one comparison with plain decoding."""
    if not check["checked"]:
        return "not compared"
    text = f"{check['identical']}/{check['checked']}"
    if check["near_tie_divergences"]:
        text += f", {count(check['near_tie_divergences'], 'near tie')}"
    if check["divergences"]:
        text += f", {check['divergences']} DIVERGED"
    return text


def certificate_text(drafter: str, certificate: dict[str, Any] | None) -> str:
    """What a certificate says, in a line."""
    if certificate is None:
        return f"{drafter}: nothing to certify, it drafts nothing"
    sampled = ", ".join(
        f"{mode}{' (lossy, the control)' if mode in LOSSY else ''} p = {test['p_value']:.2g}"
        for mode, test in certificate["sampled"].items()
    )
    verdict = "output is the target's" if certificate["passed"] else "OUTPUT IS NOT THE TARGET'S"
    control = "" if certificate["control_found"] else "; too few tokens to find lossy output"
    checks = certificate["greedy"].items()
    greedy = "; ".join(f"{size.replace('_', ' ')}: {check_text(check)}" for size, check in checks)
    return f"{drafter}: {verdict} (greedy {greedy}; sampled {sampled}{control})"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def diagnosis_lines(row: dict[str, Any]) -> list[str]:
    """What a row's diagnosis says, a cause a line; none where acceptance is not low."""
    if "diagnosis" not in row:
        return []
    if not row["diagnosis"]:
        return ["acceptance is low, and nothing wrong was found: train longer, or on more text like these prompts"]
    return [f"{one['cause']}: {one['evidence']}. To mend it, {one['mend']}" for one in row["diagnosis"]]
