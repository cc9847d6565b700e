"""`draftsmith train`, also as `accelerate launch -m draftsmith.train`."""

import atexit

from accelerate import PartialState
from rich.console import Console

from draftsmith.recipes.configs.command_settings import TrainSettings
from draftsmith.train import train
from draftsmith.train.overfit import overfit
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.run_folder.run_folder import best_measured, measured_checkpoints


def run(settings: TrainSettings, console: Console) -> None:
    """Train by a recipe, and report on what was measured. Raises `UserError` for settings that do not go together."""
    config = settings.resolved()
    if settings.overfit is not None:
        overfit(config, settings.overfit)
        return
    folder = train(config)
    # Processes that end while a thread of their group still runs may be aborted, which fails the launch.
    atexit.register(PartialState().destroy_process_group)
    if not PartialState().is_main_process:
        return
    if measured_checkpoints(folder):
        from draftsmith.recipes.reports.report import build_report  # with matplotlib: a quarter of a start of training

        console.print(f"report: {build_report(folder)}")
    if best := best_measured(folder):
        console.print(f"best checkpoint: {folder / 'best'}, which is {best.name}")
    else:
        console.print(f"checkpoint: {checkpoints(folder)[-1]}")
