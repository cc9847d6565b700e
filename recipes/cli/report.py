"""`draftsmith report`."""

from rich.console import Console

from draftsmith.recipes.configs.command_settings import ReportSettings
from draftsmith.recipes.reports.report import build_report


def run(settings: ReportSettings, console: Console) -> None:
    """Rebuild the report of a folder. Raises `UserError` where it holds nothing that was evaluated."""
    console.print(f"report: {build_report(settings.run)}")
