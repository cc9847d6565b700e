"""`draftsmith watch`."""

from rich.console import Console

from draftsmith.models.errors import require_at_least
from draftsmith.recipes.configs.command_settings import WatchSettings
from draftsmith.recipes.serving.watch import watch


def run(settings: WatchSettings, console: Console) -> None:
    """Print the acceptance of a running server again and again. Raises `UserError` where it cannot be read."""
    require_at_least("--interval", settings.interval, 0.1)
    watch(settings.url, settings.against, settings.interval, settings.readings, console)
