"""`draftsmith export` from end to end: write, measure what was written, say how to serve it, try it, push it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.recipes.evaluation.comparison import compare
from draftsmith.recipes.reports.printing import print_evaluations
from draftsmith.recipes.serving.engine_check import EngineReport, add_speed, check_engine, print_reports
from draftsmith.recipes.serving.engine_rules import speculative_config
from draftsmith.recipes.serving.export import WEIGHT_FILES, Exported, export_checkpoint, write_scripts
from draftsmith.recipes.serving.model_card import Findings, HubApi, push, schedule_of, served_row, write_card

DRAFT_LENGTH = 4  # where nothing is measured or asked for


@dataclass
class DeliverySettings:
    """What `draftsmith export` does beside writing the weights."""

    prompts: str | None = None  # to measure on, and for `check`
    num_prompts: int | None = None
    draft_lengths: list[int] = field(default_factory=list)  # to measure, or the one to serve with
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    max_new_tokens: int = 64
    repeats: int = 3
    check: str | None = None  # environment with vLLM, or address of a running one
    push: str | None = None  # name on the Hub


def deliver(
    checkpoint: str,
    engine: str,
    target: Target,
    out: Path,
    settings: DeliverySettings,
    api: HubApi | None,
    console: Console,
) -> Exported:
    """Export a checkpoint and do what the settings ask for. `api` is needed to push.

    Raises `UserError`: before anything is written for what cannot be done; at the end where `check` found that the
    engine and draftsmith disagree, in which case nothing is pushed.
    """
    if settings.check and not settings.prompts:
        raise UserError("--check needs --prompts to decode")
    if len(settings.draft_lengths) > 1 and not settings.prompts:
        raise UserError("several --draft-length need --prompts to choose between them")
    if settings.check and engine in WEIGHT_FILES:
        raise UserError(f"--check: no engine serves the layout of {engine}")
    prompts = None
    if settings.prompts:
        prompts = read_prompt_set(settings.prompts, target, settings.num_prompts, settings.max_new_tokens)
    exported = export_checkpoint(checkpoint, engine, target, out, settings.push)
    findings, schedule = Findings(), None
    draft_length = settings.draft_lengths[0] if settings.draft_lengths else DRAFT_LENGTH
    if prompts is not None:
        findings.evaluation = measure_exported(exported, target, prompts, settings)
        print_evaluations([findings.evaluation], console)
        draft_length = served_row(findings.evaluation["results"])["draft_length"]
        schedule = schedule_of(exported.kind, findings.evaluation["results"])
    commands = write_scripts(exported, settings.push or str(out), draft_length, schedule)
    console.print(f"wrote {out}", soft_wrap=True, highlight=False)
    for name, command in commands.items():
        console.print(f"{name}: {command}", soft_wrap=True, highlight=False)
    if settings.check and prompts is not None:
        findings.check = check_exported(
            exported, settings.check, target, prompts, draft_length, settings.max_new_tokens
        )
        print_reports([findings.check], console)
    write_card(exported, Path(checkpoint), commands, findings)
    if findings.check is not None and not findings.check.agrees:
        raise UserError(f"the engine and draftsmith disagree: see {out / 'engine_check.json'}")
    if settings.push and api is not None:
        push(out, settings.push, api)
        console.print(f"pushed to {settings.push}", highlight=False)
    return exported


def measure_exported(
    exported: Exported, target: Target, prompts: PromptSet, settings: DeliverySettings
) -> dict[str, Any]:
    """Acceptance and speed of the directory as it lies there; writes its evaluation.json."""
    longest = exported.max_draft_length or 5
    lengths = settings.draft_lengths or [length for length in (1, 2, 3, 4, 5) if length <= longest]
    grid = [
        MeasureSettings(batch_size=size, draft=length, max_new_tokens=settings.max_new_tokens, repeats=settings.repeats)
        for size in settings.batch_sizes
        for length in lengths
    ]
    return compare(target, [str(exported.directory)], [prompts], grid, exported.directory)[0]


def check_exported(
    exported: Exported, engine: str, target: Target, prompts: PromptSet, draft_length: int, max_new_tokens: int
) -> EngineReport:
    """Let an engine serve the directory, and an environment the bare target too; writes its engine_check.json."""
    draft_length = min(draft_length, exported.max_draft_length or draft_length)
    settings = speculative_config(exported.kind, str(exported.directory.resolve()), draft_length)
    drafter = load_drafter(exported.directory, target)
    report = check_engine(engine, settings, drafter, target, prompts.token_ids, max_new_tokens)
    if not engine.startswith("http"):
        report = add_speed(report, Path(engine), target, prompts.token_ids, max_new_tokens)
    (exported.directory / "engine_check.json").write_text(json.dumps(report.row(), indent=2) + "\n")
    return report
