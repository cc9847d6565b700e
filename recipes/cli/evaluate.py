"""`draftsmith evaluate`, also as `accelerate launch -m draftsmith.inference`."""

from pathlib import Path

from rich.console import Console

from draftsmith.data.processes import device_of_process
from draftsmith.inference.measuring.certify import CertifySettings
from draftsmith.inference.measuring.results import Evaluation
from draftsmith.recipes.configs.command_settings import EvaluateSettings
from draftsmith.recipes.evaluation.comparison import EvaluationOptions, evaluate_side_by_side
from draftsmith.recipes.evaluation.inputs import DEFAULT_MINUTES, load_target, read_prompt_sets, settings_grid
from draftsmith.recipes.reports.lossless import certificate_text
from draftsmith.recipes.reports.report import build_report
from draftsmith.recipes.reports.terminal import print_evaluations
from draftsmith.recipes.studies.evaluate_by_engine import evaluate_by_engine


def run(settings: EvaluateSettings, console: Console) -> None:
    """Measure drafters beside plain decoding, at every setting and on every set of prompts.

    Several processes share the prompts, and the first one writes and prints. Raises `UserError` for what cannot be
    measured.
    """
    if settings.engine:
        print_evaluations(evaluate_by_engine(settings), console)
        tell_reports(settings.out, console)
        return
    grid = settings_grid(settings)
    device = settings.device or device_of_process()
    target = load_target(settings.target, device, settings.chat_template_kwargs)
    prompt_sets = read_prompt_sets(settings.prompts, target, settings.num_prompts, settings.max_new_tokens)
    minutes = settings.minutes or (DEFAULT_MINUTES if settings.repeats is None else None)
    num_certified = min(CertifySettings.max_new_tokens, settings.max_new_tokens)  # for which prompts leave room
    certificate = CertifySettings(num_certified) if settings.certify else None
    options = EvaluationOptions(
        settings.num_threads, certificate, settings.baseline, minutes, sample_texts=True, costs=True
    )
    evaluations = evaluate_side_by_side(target, list(settings.drafter), prompt_sets, grid, settings.out, options)
    if not evaluations:  # of several processes this is not the first
        return
    print_evaluations(evaluations, console)
    console.print(f"{repeats_text(evaluations, minutes)}; all took {(evaluations[0].seconds or 0.0) / 60:.1f} minutes")
    tell_reports(settings.out, console)
    for evaluation in evaluations if settings.certify else []:
        console.print(certificate_text(evaluation.drafter, evaluation.certificate))


def tell_reports(out: Path, console: Console) -> None:
    """Build the report of an evaluation, and that of the run or the runs that it lies in; say where they are."""
    console.print(f"evaluation: {out / 'evaluation.md'}")
    console.print(f"report: {build_report(out)}")
    folders = out.absolute().parents
    if run := next((folder for folder in folders if (folder / "report.json").is_file()), None):
        console.print(f"report: {build_report(run)}")  # it shows this evaluation, too


def repeats_text(evaluations: list[Evaluation], minutes: float | None) -> str:
    """Return how often everything was decoded, and what chose that."""
    repeats = sorted({result.speed.repeats for evaluation in evaluations for result in evaluation.results})
    text = f"{repeats[0]} repeats of each setting"
    if len(repeats) > 1:
        text = f"{repeats[0]} to {repeats[-1]} repeats by setting"
    return text if minutes is None else f"{text}, as many as fit into {minutes:g} minutes"
