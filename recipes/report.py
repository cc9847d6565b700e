"""report.html of a run or of a folder of runs, and what its tables say."""

import base64
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template

from draftsmith.inference.teacher_forcing import gap_warning
from draftsmith.inference.verify import LOSSY
from draftsmith.recipes.figures import draw_figures
from draftsmith.recipes.results import (
    Contender,
    Result,
    Run,
    checkpoint_names,
    read_contenders,
    read_runs,
    same_conditions,
    told_apart,
)
from draftsmith.train.run_folder import require_writable

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
    def plain_beside(self) -> bool:
        """Plain decoding as a reference, of which only some figures are known."""
        return self.result["milliseconds_per_round"] is None

    @property
    def diverged(self) -> bool:
        return self.result["lossless"]["divergences"] > 0

    @property
    def lossy(self) -> bool:
        """Measured in a mode that does not keep the target's law."""
        return self.result["verification_mode"] in LOSSY

    @property
    def verdict(self) -> str:
        """`faster` or `slower` than plain decoding where the interval leaves no doubt; other output is never faster."""
        low, high = self.result["speedup_ci95"]
        return "slower" if high < 1 else "faster" if low > 1 and not self.diverged and not self.lossy else ""

    @property
    def gap(self) -> str | None:
        """What to say where the decoder accepts other than training predicts."""
        return None if self.drafter == PLAIN else gap_warning(self.result)


def build_report(folder: Path) -> Path:
    """Write figures/*.png and report.html into the folder of a run, or of several runs.

    Raises `UserError` where the folder holds nothing that was evaluated.
    """
    runs = read_runs(folder)
    require_writable(folder)
    contenders = read_contenders(folder, runs)
    rows = summary_rows(contenders)
    alike, elsewhere = measured_alike(runs, contenders)
    figures = draw_figures(*alike, folder / "figures")
    samples = folder / "samples.json"
    content = {
        "folder": folder.resolve().name,
        "runs": runs,
        "headline": headline(rows, runs[0].target, contenders[0].environment),
        "caveats": caveats(rows) + elsewhere,
        "divergences": divergences(runs),
        "first_differences": first_differences(contenders),
        "certificates": [certificate_text(one.name, one.certificate) for one in contenders if one.certificate],
        "blocks": by_setting(rows),
        "headings": list(cells(rows[0])),
        "cells": cells,
        "baseline_cells": baseline_cells,
        "domain_cells": domain_cells,
        "teacher_forced_cells": teacher_forced_cells,
        "figures": [(inline_image(path), caption) for path, caption in figures],
        "samples": json.loads(samples.read_text()) if samples.is_file() else [],
        "sample_source": sample_source,
        "to_yaml": lambda content: yaml.safe_dump(content, sort_keys=False),
    }
    path = folder / "report.html"
    path.write_text(page_template().render(content), encoding="utf-8")
    return path


# --- the comparison


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
        f"draft length {result['draft_length']}, {result['num_prompts']} prompts of {result['prompt_set']}, "
        f"up to {result['max_new_tokens']} new tokens"
    )


def plain_row(setting: str, beside: SummaryRow, note: str) -> SummaryRow:
    """Plain decoding as it was measured beside a drafter."""
    result = {
        **beside.result,
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": None,
        "tokens_per_second": beside.result["baseline_tokens_per_second"],
        "speedup": 1.0,
        "speedup_ci95": [1.0, 1.0],
        "milliseconds_per_round": None,
        "step_cost_ratio": 1.0,
        "verification_mode": "greedy",
        "baselines": {},
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


def cells(row: SummaryRow) -> dict[str, str]:
    """The row as text, by column heading."""
    result, plain = row.result, row.drafter == PLAIN
    rate = result["draft_acceptance_rate"]
    phases = result["milliseconds_per_round"]
    return {
        "drafter": row.drafter,
        "acceptance length": f"{result['mean_acceptance_length']:.2f}",
        "draft acceptance": "–" if rate is None else f"{100 * rate:.1f} %",
        "speedup": "1.00×" if plain else ratio_text(result["speedup"], result["speedup_ci95"]),
        "tokens/s": f"{result['tokens_per_second']:.1f}",
        "plain tokens/s": f"{result['baseline_tokens_per_second']:.1f}",
        "ms a round": f"{result['baseline_tpot_ms']['p50'] if plain else sum(phases.values()):.2f}",
        "draft / verify / host": "–" if plain else " / ".join(f"{phase:.2f}" for phase in phases.values()),
        "step cost ratio": f"{result['step_cost_ratio']:.2f}",
        "identical outputs": "reference" if plain else lossless_text(result),
    }


def domain_cells(block: list[SummaryRow]) -> list[dict[str, str]]:
    """Each drafter's acceptance length and speedup by domain, as text by column heading."""
    return [
        {"drafter": row.drafter}
        | {
            f"{name or 'no domain'} ({count(fields['num_prompts'], 'prompt')})": domain_text(fields)
            for name, fields in row.result["domains"].items()
        }
        for row in block
        if row.drafter != PLAIN and "domains" in row.result
    ]


def baseline_cells(block: list[SummaryRow]) -> list[dict[str, str]]:
    """What transformers reached beside one setting's drafters, as text by the column headings of `cells`."""
    found: dict[str, dict[str, Any]] = {}
    for row in block:
        for name, fields in row.result.get("baselines", {}).items():
            found.setdefault(f"{name} with {row.drafter}" if name == "assisted" else name, fields)
    headings, checked = list(cells(block[0])), block[0].result["num_prompts"]
    return [
        dict.fromkeys(headings, "–")
        | {
            "drafter": f"transformers {name}",
            "speedup": ratio_text(fields["speedup_over_plain"], fields["speedup_over_plain_ci95"]),
            "tokens/s": f"{fields['tokens_per_second']:.1f}",
            "plain tokens/s": f"{block[0].result['baseline_tokens_per_second']:.1f}",
            "identical outputs": "not compared" if fields["identical"] is None else f"{fields['identical']}/{checked}",
        }
        for name, fields in found.items()
    ]


def ratio_text(ratio: float, interval: list[float]) -> str:
    return f"{ratio:.2f}× [{interval[0]:.2f}, {interval[1]:.2f}]"


def domain_text(fields: dict[str, Any]) -> str:
    """Speed by domain is there at batch size 1 only, where a batch is of one domain."""
    speedup = f", {fields['speedup']:.2f}×" if "speedup" in fields else ""
    return f"{fields['mean_acceptance_length']:.2f}{speedup}"


def teacher_forced_cells(block: list[SummaryRow]) -> list[dict[str, str]]:
    """Of each trained drafter what the decoder accepts and what training predicts, as text by column heading."""
    return [
        {
            "drafter": row.drafter,
            "acceptance length": " / ".join(f"{one['mean_acceptance_length']:.2f}" for one in counted),
            **{
                f"token {i + 1}": " / ".join("–" if rate is None else f"{100 * rate:.1f} %" for rate in rates)
                for i, rates in enumerate(zip(*(one["conditional_acceptance_rates"] for one in counted), strict=True))
            },
            "difference": gap_text(row.result["teacher_forced_gap"]),
        }
        for row in block
        if row.drafter != PLAIN and "teacher_forced" in row.result
        for counted in [(row.result, row.result["teacher_forced"])]
    ]


def gap_text(gap: dict[str, Any]) -> str:
    low, high = gap["ci95"]
    return f"{gap['difference']:+.2f} [{low:+.2f}, {high:+.2f}]{' GAP' if gap['flagged'] else ''}"


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


# --- the page


def measured_alike(runs: list[Run], contenders: list[Contender]) -> tuple[tuple[list[Run], list[Contender]], list[str]]:
    """The runs and contenders that figures may put beside the first, and what to say of the others."""
    alike = [same_conditions(contenders[0].environment, one.environment) for one in contenders]
    kept = [one for one, same in zip(contenders, alike, strict=True) if same]
    elsewhere = [
        f"{one.name} was measured elsewhere ({one.environment['device']}, {one.environment['dtype']}, "
        f"{one.environment['num_threads']} CPU threads): it has tables of its own, and no place in the figures."
        for one, same in zip(contenders, alike, strict=True)
        if not same
    ]
    return ([run for run in runs if same_conditions(contenders[0].environment, run.best.environment)], kept), elsewhere


def headline(rows: list[SummaryRow], target: str, environment: dict[str, Any]) -> str:
    """What the best drafter reaches at the first setting, for what target and on what machine."""
    trained = [row for row in rows if row.trained and row.setting == rows[0].setting]
    best = next((row for row in trained if not row.diverged and not row.lossy), None)
    if best is None:
        return "No drafter leaves the output of plain decoding as it is: there is no speedup to report."
    low, high = best.result["speedup_ci95"]
    return (
        f"{best.drafter}{best.note and f' ({best.note})'} decodes {best.result['speedup']:.2f}× as fast as plain "
        "decoding "
        f"(95 % interval {low:.2f} to {high:.2f}) with an acceptance length of "
        f"{best.result['mean_acceptance_length']:.2f} at draft length {best.result['draft_length']}, "
        f"temperature {best.result['temperature']:g} and batch size {best.result['batch_size']}, for the target "
        f"{Path(target).name} on {environment['device']} "
        f"({environment['dtype']}, {environment['num_threads']} CPU threads)."
    )


def caveats(rows: list[SummaryRow]) -> list[str]:
    """What a reader of the headline alone would miss."""
    found = []
    if not any(row.trained and row.verdict == "faster" for row in rows):
        found.append(
            "No trained drafter is measurably faster than plain decoding here: no 95 % interval lies above 1.0."
        )
    for setting, block in by_setting(rows).items():
        fastest = max(
            (row for row in block if not row.diverged and not row.lossy), key=lambda row: row.result["speedup"]
        )
        if not fastest.trained:
            name = "plain decoding" if fastest.drafter == PLAIN else f"{fastest.drafter}, which needs no training"
            found.append(f"At {setting}, no trained drafter beats {name} ({fastest.result['speedup']:.2f}×).")
        found += [f"{row.drafter} at {setting}: {row.gap}." for row in block if row.gap]
    return found


def divergences(runs: list[Run]) -> list[str]:
    """Every measurement, of any checkpoint or baseline, whose output was not that of plain decoding."""
    measured = [
        (f"{name} beside {run.name}, step {checkpoint.step}" if name else f"{run.name}, step {checkpoint.step}", result)
        for run in runs
        for checkpoint in run.checkpoints
        for name, results in {"": checkpoint.results, **checkpoint.baselines}.items()
        for result in results
    ]
    return [
        f"{name}, {setting_name(result)}: {lossless_text(result)}"
        for name, result in measured
        if result["lossless"]["divergences"]
    ]


def first_differences(contenders: list[Contender]) -> list[dict[str, str]]:
    """Of every output in the comparison that differs from plain decoding: where, and what the target holds there."""
    return [
        {
            "drafter": one.name,
            "setting": setting_name(result),
            "prompt": str(found["request"] + 1),
            "token": str(found["position"] + 1),
            "plain → speculative": " → ".join(
                "end" if found[which] is None else str(found[which]) for which in ("plain_token", "speculative_token")
            ),
            "top-2 gap": f"{found['top_two_gap']:.2g}",
            "top-2 gap in fp32": f"{found['top_two_gap_fp32']:.2g}",
            "near tie up to": f"{found['near_tie_gap']:.2g}",
            "verdict": "near tie" if found["near_tie"] else "DIVERGED",
        }
        for one in contenders
        for result in one.results
        for found in result["lossless"]["first_differences"]
    ]


def inline_image(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def sample_source(sample: dict[str, Any]) -> str:
    """Short name of what drafted a sample: run and step, where it was a checkpoint of a run."""
    return ", ".join(filter(None, checkpoint_names(Path(sample["drafter"]))))


def page_template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = resources.files("draftsmith.recipes").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(text)
