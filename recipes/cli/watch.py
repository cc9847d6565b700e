"""`draftsmith watch`."""

from rich.console import Console

from draftsmith.recipes.configs.server_settings import WatchSettings
from draftsmith.recipes.serving.watch import watch


def run(settings: WatchSettings, console: Console) -> None:
    """Print the acceptance of a running server again and again. Raises `UserError` where it cannot be read."""
    watch(settings.url, settings.against, settings.interval, settings.readings, console)
