"""`draftsmith export` from end to end: write, measure what was written, say how to serve it, try it, push it."""

from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi
from rich.console import Console

from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.measuring.results import Evaluation
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.files import real_path, write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.models.training_free.ngram import Ngram
from draftsmith.recipes.configs.command_settings import ExportSettings
from draftsmith.recipes.engine_rules.loader_rules import TRAINING_FREE
from draftsmith.recipes.evaluation.comparison import evaluate_side_by_side, write_evaluations
from draftsmith.recipes.evaluation.inputs import DRAFT_LENGTH
from draftsmith.recipes.reports.terminal import print_evaluations
from draftsmith.recipes.serving.engine_check import EngineReport, add_speed, check_engine, print_reports
from draftsmith.recipes.serving.export import WEIGHT_FILES, Exported, export_folder, served_names, write_drafter
from draftsmith.recipes.serving.model_card import schedule_of, served_result, write_card
from draftsmith.recipes.serving.serve_commands import (
    at_most_drafted,
    check_swaps,
    speculative_config,
    write_scripts,
    write_swappable,
)


def export(
    settings: ExportSettings,
    target: Target,
    console: Console,
    measured: Evaluation | None = None,
    schedule: Schedule | None = None,
) -> Exported:
    """Export a checkpoint and do what the settings ask for.

    `measured` is an evaluation of the checkpoint, which is exported with it in place of one on the prompts, and
    `schedule` then has the draft lengths by load. The folder appears when it is whole. Raises `UserError`: without a
    folder for what cannot be done; with it where `check` found that the engine and draftsmith disagree, in which case
    nothing is pushed, and where pushing fails.
    """
    if settings.check and not settings.prompts:
        raise UserError("--check needs --prompts to decode")
    if len(settings.draft_length) > 1 and not settings.prompts:
        raise UserError("several --draft-length need --prompts to choose between them")
    if settings.check and settings.engine in WEIGHT_FILES:
        raise UserError(f"--check: no engine serves the layout of {settings.engine}")
    prompts = None
    if settings.prompts:
        prompts = read_prompt_set(settings.prompts, target, settings.num_prompts, settings.max_new_tokens)
    if settings.swappable and settings.engine != "vllm":
        raise UserError("--swappable: only a vLLM takes other weights while it runs: give --engine vllm")
    out, evaluation, report = settings.out, None, None
    with export_folder(settings.checkpoint, target, out) as folder:
        names = served_names(out, settings.push)
        exported = write_drafter(settings.checkpoint, settings.engine, target, names, folder)
        if settings.swappable:
            check_swaps(exported)
        usual = exported.max_draft_length if exported.whole_blocks else None
        draft_length = settings.draft_length[0] if settings.draft_length else usual or DRAFT_LENGTH
        if measured:
            evaluation = replace(measured, drafter=str(out))
            write_evaluations([evaluation], {}, None, folder)
        elif prompts:
            evaluation = measure_exported(exported, target, prompts, settings, console)
            schedule = schedule_of(exported.kind, evaluation)
        if evaluation:
            draft_length = served_result(evaluation).setting.draft_length
        commands = write_scripts(exported, settings.push or out, draft_length, schedule)
        if settings.swappable:
            commands["vllm, swappable"] = write_swappable(exported, out, draft_length)
        if settings.check and prompts:
            report = check_exported(exported, settings.check, target, prompts, draft_length, settings.max_new_tokens)
            print_reports([report], console)
        write_card(exported, Path(settings.checkpoint), commands, evaluation, report)
    console.print(f"wrote {out}")
    for name, command in commands.items():
        console.print(f"{name}: {command}")
    if report and not report.agrees:
        raise UserError(f"the engine and draftsmith disagree: see {out / 'engine_check.json'}")
    if settings.push:
        push(out, settings.push)
        console.print(f"pushed to {settings.push}")
    return replace(exported, directory=out)


def measure_exported(
    exported: Exported, target: Target, prompts: PromptSet, settings: ExportSettings, console: Console
) -> Evaluation:
    """Measure acceptance and speed of the directory as it lies there; print them and write its evaluation.json."""
    longest = exported.max_draft_length or 5
    usual = [longest] if exported.whole_blocks else list(range(1, min(longest, 5) + 1))
    lengths = settings.draft_length or usual
    grid = [
        MeasureSettings(
            settings.temperature,
            batch_size=size,
            draft=length,
            max_new_tokens=settings.max_new_tokens,
            repeats=settings.repeats,
        )
        for size in settings.batch_size
        for length in lengths
    ]
    served, drafter = as_served(exported, target)
    (measured,) = evaluate_side_by_side(served, [drafter], [prompts], grid, exported.directory)
    evaluation = replace(measured, drafter=str(settings.out))  # the name that the folder will have
    write_evaluations([evaluation], {}, None, exported.directory)
    print_evaluations([evaluation], console)
    return evaluation


def as_served(exported: Exported, target: Target) -> tuple[Target, str]:
    """Return the target that is served with an exported drafter, and what `load_drafter` calls the drafter there."""
    if exported.kind in TRAINING_FREE:
        return target, exported.kind
    if not exported.in_target:
        return target, str(exported.directory)
    served = Target.from_pretrained(exported.directory, target.device, target.dtype)
    served.chat = target.chat
    return served, exported.kind


def check_exported(
    exported: Exported, engine: str, target: Target, prompts: PromptSet, draft_length: int, max_new_tokens: int
) -> EngineReport:
    """Let an engine serve the directory, and an environment the bare target too; write its engine_check.json."""
    draft_length = at_most_drafted(exported, draft_length)
    speculative = speculative_config(exported.kind, str(real_path(exported.directory)), draft_length)
    target, name = as_served(exported, target)
    drafter = load_drafter(name, target)
    if isinstance(drafter, Ngram):
        drafter = Ngram(replace(drafter.config, occurrence="earliest"))  # the copy that vLLM continues
    is_timed = not engine.startswith("http")
    report = check_engine(engine, speculative, drafter, target, prompts.token_ids, max_new_tokens, is_timed)
    if is_timed:
        report = add_speed(report, Path(engine), target, prompts.token_ids, max_new_tokens)
    write_json(exported.directory / "engine_check.json", to_json(report))
    return report


def push(directory: Path, name: str) -> None:
    """Upload an exported directory as the model `name` on the Hub. Raises `UserError` where the Hub refuses."""
    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(directory), commit_message="A drafter, exported by draftsmith")
    except (OSError, ValueError) as error:  # HfHubHTTPError is an OSError
        raise UserError(
            f"--push {name}: {first_line(error)}; {directory} is whole: mend that, and upload it with "
            f"`hf upload {name} {directory}`"
        ) from None
