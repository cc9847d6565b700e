"""`draftsmith export`."""

from rich.console import Console

from draftsmith.recipes.configs.command_settings import ExportSettings
from draftsmith.recipes.evaluation.inputs import load_head, load_target
from draftsmith.recipes.serving.export_command import export


def run(settings: ExportSettings, console: Console) -> None:
    """Write a checkpoint as an engine loads it. Raises `UserError` for one that the engine would not serve."""
    if settings.prompts:
        target = load_target(settings.target, settings.device, settings.chat_template_kwargs)
    else:  # nothing is decoded
        target = load_head(settings.target, settings.device or "cpu")
    export(settings, target, console)
