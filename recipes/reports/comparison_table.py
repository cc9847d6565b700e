"""The report's first table, drafters side by side at one setting, and what speculation makes of each kind of text."""

from dataclasses import dataclass, replace
from itertools import takewhile

from draftsmith.inference.measuring.results import DomainResult, Interval, Result
from draftsmith.inference.planning.best_draft import rates_of_rounds
from draftsmith.inference.planning.costs import GOAL
from draftsmith.recipes.pages.tables import (
    Bar,
    Cell,
    Row,
    Section,
    Table,
    Tone,
    count,
    draft_text,
    interval_text,
    percent,
    ratio_text,
    setting_name,
    speedup_text,
    table_of,
    tone_of,
)
from draftsmith.recipes.report_data.contents import ReportData
from draftsmith.recipes.report_data.measured import DrafterResult, MeasuredDrafter, differing_conditions
from draftsmith.recipes.reports.lossless import certificate_text, lossless_text
from draftsmith.recipes.reports.what_if import chains, profile_of, speedups


def compared(data: ReportData) -> Section:
    _, leading = data.leader
    blocks = by_setting(data.all_drafters)
    (first,) = [setting for setting, block in blocks.items() if any(row is leading for _, row in block)]
    return Section(
        "drafters",
        "Drafters compared",
        "What counts is the speedup: green where its 95 % interval lies above 1, red where below. A round of plain "
        "decoding is one step.",
        [ranking_table(first, blocks[first])],
        folded=[comparison_table(setting, block) for setting, block in blocks.items()],
        notes=[
            f"Certificate of losslessness, {certificate_text(drafter.name, drafter.evaluation.certificate)}"
            for drafter in data.drafters
            if drafter.evaluation.certificate
        ],
    )


def by_setting(drafters: list[MeasuredDrafter]) -> dict[str, list[DrafterResult]]:
    """Return the results that may stand in one table, by their setting: trained drafters first, the fastest on top.

    What was measured under other conditions (device, threads, dtype, versions) is a setting of its own: times and
    ratios stand side by side only where they were measured alike.
    """
    blocks: dict[str, list[DrafterResult]] = {}
    for drafter, label in zip(drafters, differing_conditions(drafters), strict=True):
        for row in drafter.results:
            blocks.setdefault(setting_name(row.setting) + (label and f", on {label}"), []).append((drafter, row))
    for block in blocks.values():
        block.sort(key=lambda pair: (not pair[0].is_trained, -pair[1].speed.speedup))
    return blocks


def ranking_table(setting: str, block: list[DrafterResult]) -> Table:
    """Return what decides: the drafters by their speedup, the winner first, with bars, and their drafts if they differ.

    The results are of one setting, or of several that differ in their drafts alone and were measured in turns.
    """
    have_own_drafts = len({draft_text(row.setting) for _, row in block}) > 1
    drafting = sorted(block, key=lambda pair: (pair[1].is_sound, pair[1].speed.speedup), reverse=True)
    reach = max([1.0, *(max(ends_of(row)) for _, row in drafting)])
    rows: list[Row] = [
        {
            "drafter": Cell(drafter.name, drafter.note),
            **({"draft": draft_text(row.setting)} if have_own_drafts else {}),
            "speedup": Cell(speedup_text(row), interval_note(row), tone_of(row), bar_of(row, reach)),
            "tokens a round": f"{row.tokens_a_round:.2f}",
            "output": Cell("✓ the target's", lossless_text(row))
            if row.is_sound
            else Cell(lossless_text(row), tone="alarm"),
        }
        for drafter, row in drafting
    ]
    plain: Row = {
        "drafter": "plain decoding",
        **({"draft": "–"} if have_own_drafts else {}),
        "speedup": Cell("1.00×", bar=Bar(1 / reach, 1 / reach, 1 / reach, 1 / reach)),
    }
    slower = [place for place, (_, row) in enumerate(drafting) if not row.is_sound or row.speed.speedup < 1]
    rows.insert(slower[0] if slower else len(rows), plain | {"tokens a round": "1.00", "output": "reference"})
    return table_of(setting[0].upper() + setting[1:], rows, words=("drafter", "draft", "output"))


def ends_of(row: Result) -> tuple[float, float]:
    """Return the ends of the interval of a speedup; the speedup itself where there is none."""
    return row.speed.speedup_ci95 or (row.speed.speedup, row.speed.speedup)


def bar_of(row: Result, reach: float) -> Bar:
    low, high = ends_of(row)
    return Bar(row.speed.speedup / reach, max(0.0, low) / reach, high / reach, 1 / reach)


def comparison_table(setting: str, block: list[DrafterResult]) -> Table:
    """Return all drafters at one setting, plain decoding, and what transformers reached beside them."""
    rows = [comparison_cells(drafter, row) for drafter, row in block]
    last, row = block[-1]
    rows.append(plain_cells(row, "" if last.is_trained else last.note))
    rows += baseline_cells(block, list(rows[0]))
    return table_of(setting[0].upper() + setting[1:], rows, idle_note(block), words=("drafter", "identical outputs"))


def comparison_cells(drafter: MeasuredDrafter, row: Result) -> Row:
    phases = row.speed.milliseconds_per_round
    sound = Cell(lossless_text(row), row.setting.verification_mode, "" if row.is_sound else "alarm")
    return {
        "drafter": Cell(drafter.name, drafter.note),
        "acceptance length": Cell(
            f"{row.acceptance.mean_acceptance_length:.2f}", interval_text(row.mean_acceptance_length_ci95)
        ),
        "draft acceptance": percent(row.acceptance.draft_acceptance_rate),
        "speedup": Cell(speedup_text(row), interval_note(row), tone_of(row)),
        "tokens/s": f"{row.speed.tokens_per_second:.1f}",
        "plain tokens/s": f"{row.speed.baseline_tokens_per_second:.1f}",
        "ms a round": f"{phases.total:.2f}",
        "draft / verify / host": f"{phases.draft:.2f} / {phases.verify:.2f} / {phases.host:.2f}",
        "plain steps a round": f"{row.steps_a_round:.2f}",
        "identical outputs": sound,
    }


def plain_cells(row: Result, note: str) -> Row:
    """Return the cells of plain decoding as it was measured beside a drafter, whose result is given."""
    speed = f"{row.speed.baseline_tokens_per_second:.1f}"
    return {
        "drafter": Cell("none", ", ".join(filter(None, ("plain decoding", note)))),
        "acceptance length": "1.00",
        "draft acceptance": "–",
        "speedup": "1.00×",
        "tokens/s": speed,
        "plain tokens/s": speed,
        "ms a round": f"{row.plain_step_ms:.2f}",
        "draft / verify / host": "–",
        "plain steps a round": "1.00",
        "identical outputs": "reference",
    }


def baseline_cells(block: list[DrafterResult], headings: list[str]) -> list[Row]:
    """Return what transformers reached beside the drafters of one setting."""
    rows: dict[str, Row] = {}
    for drafter, row in block:
        for kind, baseline in (row.baselines or {}).items():
            name = f"transformers {kind}{f' with {drafter.name}' if kind == 'assisted' else ''}"
            cells: Row = dict.fromkeys(headings, "–")
            cells |= {
                "drafter": name,
                "speedup": ratio_text(baseline.speedup_over_plain, baseline.speedup_over_plain_ci95),
                "tokens/s": f"{baseline.tokens_per_second:.1f}",
                "plain tokens/s": f"{row.speed.baseline_tokens_per_second:.1f}",
                "identical outputs": "not compared"
                if baseline.identical is None
                else f"{baseline.identical}/{row.setting.num_prompts}",
            }
            rows.setdefault(name, cells)
    return list(rows.values())


def idle_note(block: list[DrafterResult]) -> str:
    """Return which numbers count the rounds in which a drafter had nothing to draft, where there are such rounds."""
    parts = [
        f"{drafter.name} drafted in {100 * counts.num_drafts / counts.num_rounds:.0f} % of its rounds"
        for drafter, row in block
        for counts in [row.acceptance]
        if 0 < counts.num_drafts < counts.num_rounds
    ]
    if not parts:
        return ""
    return (
        f"{', '.join(parts)}. Acceptance length and draft acceptance count the rounds with a draft only; speedup, "
        "milliseconds and plain steps count all."
    )


def interval_note(row: Result) -> str:
    """Return what to know of the interval of a speedup, where it is not over several batches."""
    if row.speed.speedup_ci95 is None:
        return "too few batches or repeats for an interval"
    timed_prompts = row.setting.num_prompts if row.timed_prompts is None else row.timed_prompts
    return "over the repeats of one batch" if timed_prompts <= row.setting.batch_size else ""


def domain_table(block: list[DrafterResult]) -> Table:
    """Return each drafter's acceptance length and speedup by domain; no rows where prompts have none."""
    rows: list[Row] = [
        {
            "drafter": drafter.name,
            **{
                f"{name or 'no domain'} ({count(domain.num_prompts, 'prompt')})": domain_text(domain)
                for name, domain in row.domains.items()
            },
        }
        for drafter, row in block
        if row.domains is not None
    ]
    return table_of("By domain of the prompts: acceptance length, speedup", rows)


def span_table(block: list[DrafterResult]) -> Table:
    """Return each drafter's acceptance length in thinking, answers, tool calls and code; no rows for one kind alone."""
    rows: list[Row] = [
        {
            "drafter": drafter.name,
            **{
                name.replace("_", " "): Cell(domain_text(part), count(part.num_emitted_tokens, "token"))
                for name, part in row.spans.items()
            },
        }
        for drafter, row in block
        if row.spans is not None
    ]
    return table_of("By kind of span: acceptance length", rows)


def domain_text(domain: DomainResult) -> str:
    """Return acceptance length and speedup, which is there at batch size 1 only, where a batch is of one domain."""
    length = f"{domain.mean_acceptance_length:.2f} {interval_text(domain.mean_acceptance_length_ci95)}".rstrip()
    return length if domain.speedup is None else f"{length}, {ratio_text(domain.speedup, domain.speedup_ci95)}"


# --- where speculation pays


def traffic(data: ReportData) -> Section:
    """Show where the leading drafter pays, by domain of the prompts and by kind of span; the others are folded."""
    kinds = kinds_of_traffic(data)
    says = {"pays": "Speculation pays in", "does not pay": "It does not pay in", TOO_FEW: "Too little was measured of"}
    by_verdict = {verdict: [kind.name for kind in kinds if kind.verdict == verdict] for verdict in says}
    note = " ".join(f"{says[verdict]} {', '.join(names)}." for verdict, names in by_verdict.items() if names)
    return Section(
        "domains",
        "Traffic by kind",
        "The same drafter on each domain of the prompts, and in each kind of span. What falls behind wants training "
        "text of its own; where speculation does not pay, plain decoding is faster.",
        [traffic_table(data, kinds)],
        folded=[domain_table(data.at_leading_setting()), span_table(data.at_leading_setting())],
        notes=[note] if note else [],
    )


TOO_FEW = "too little to tell"
TONES: dict[str, Tone] = {"pays": "good", "does not pay": "bad"}  # by verdict


@dataclass(frozen=True)
class KindOfTraffic:
    """A domain of prompts or a kind of span, and what the leading drafter makes of it."""

    name: str
    part: DomainResult
    tokens_a_round: float  # rounds without a draft counted
    tokens_ci95: Interval
    speedup: float
    speedup_ci95: Interval
    measured: bool  # the speedup; else it is that of the tokens a round, at the mean cost of a round

    @property
    def verdict(self) -> str:
        if self.speedup_ci95 is None or self.speedup_ci95[0] <= 1 <= self.speedup_ci95[1]:
            return TOO_FEW
        return "pays" if self.speedup_ci95[0] > 1 else "does not pay"


def kinds_of_traffic(data: ReportData) -> list[KindOfTraffic]:
    """Return the kinds that the leading result tells apart: domains, then kinds of spans."""
    _, row = data.leader
    if not row.acceptance.num_drafts:
        return []
    domains = [(name or "no domain", part) for name, part in (row.domains or {}).items()]
    spans = [(f"{name.replace('_', ' ')} (span)", part) for name, part in (row.spans or {}).items()]
    return [kind_of_traffic(name, part, row) for name, part in domains + spans]


def kind_of_traffic(name: str, part: DomainResult, row: Result) -> KindOfTraffic:
    """Return a kind with its measured speedup, else with the one that its tokens a round give in that result.

    Where an older file does not tell its rounds, each is taken to have had a draft.
    """
    drafted = part.num_drafts / part.num_rounds if part.num_rounds else 1.0  # share of its rounds
    interval = part.mean_acceptance_length_ci95
    tokens = 1 + (part.mean_acceptance_length - 1) * drafted
    ends = None if interval is None else (1 + (interval[0] - 1) * drafted, 1 + (interval[1] - 1) * drafted)
    if part.speedup is not None:
        return KindOfTraffic(name, part, tokens, ends, part.speedup, part.speedup_ci95, True)
    steps = row.steps_a_round
    predicted = None if ends is None else (ends[0] / steps, ends[1] / steps)
    return KindOfTraffic(name, part, tokens, ends, tokens / steps, predicted, False)


def traffic_table(data: ReportData, kinds: list[KindOfTraffic]) -> Table:
    drafter, _ = data.leader
    rows: list[Row] = [
        {
            "kind": Cell(kind.name, f"{count(kind.part.num_prompts, 'text')}, {kind.part.num_emitted_tokens} tokens"),
            "tokens a round": Cell(f"{kind.tokens_a_round:.2f}", interval_text(kind.tokens_ci95)),
            "speedup": Cell(
                ratio_text(kind.speedup, kind.speedup_ci95), "measured" if kind.measured else "by its tokens a round"
            ),
            "best draft length": best_lengths_text(data, kind),
            "verdict": Cell(kind.verdict, tone=TONES.get(kind.verdict, "")),
        }
        for kind in kinds
    ]
    note = (
        "Intervals: 95 %, over texts. The best draft length is predicted from the acceptance of the kind and the costs "
        f"of the panel, for the batch sizes that were measured; off where less than {100 * GOAL:.0f} % is gained."
    )
    return table_of(f"What {drafter.name} makes of each kind", rows, note, words=("kind", "verdict"))


def best_lengths_text(data: ReportData, kind: KindOfTraffic) -> str:
    """Return the best draft length by batch size, such as "4, off from batch 16"; a dash where it cannot be told."""
    drafter, _ = data.leader
    counters = kind.part.counters
    known = list(takewhile(lambda rate: rate is not None, counters.conditional_acceptance_rates))
    if kind.verdict == TOO_FEW or not known or not chains(data, drafter):
        return "–"
    rates = [rate or 0.0 for rate in rates_of_rounds(known, counters.num_drafts, counters.num_rounds)]
    profile = replace(profile_of(data, drafter), rates=rates)
    parts: list[tuple[int, int]] = []  # batch size from which on, and draft length
    for costs in profile.costs:
        predicted = speedups(profile, costs)[: len(rates)]
        best = 0 if max(predicted) <= 1 + GOAL else predicted.index(max(predicted)) + 1
        if costs.batch_size <= profile.known_batch and (not parts or parts[-1][1] != best):
            parts.append((costs.batch_size, best))
    first, *later = [str(length or "off") for _, length in parts]
    return ", ".join([first, *(f"{text} from batch {size}" for text, (size, _) in zip(later, parts[1:], strict=True))])
