"""`draftsmith export`."""

from huggingface_hub import HfApi
from rich.console import Console

from draftsmith.models import Target
from draftsmith.models.errors import require_at_least
from draftsmith.recipes.configs.command_settings import ExportSettings
from draftsmith.recipes.serving.deliver import DeliverySettings, deliver


def run(settings: ExportSettings, console: Console) -> None:
    """Write a checkpoint as an engine loads it. Raises `UserError` for one that the engine would not serve."""
    require_at_least("--max-new-tokens", settings.max_new_tokens, 2)
    for name, values in (("--draft-length", settings.draft_length), ("--batch-size", settings.batch_size)):
        for value in values:
            require_at_least(name, value)
    delivery = DeliverySettings(
        settings.prompts,
        settings.num_prompts,
        list(settings.draft_length),
        list(settings.batch_size),
        settings.max_new_tokens,
        settings.repeats,
        settings.check,
        settings.push,
    )
    if settings.prompts:
        target = Target.from_pretrained(settings.target, settings.device)
    else:  # nothing is decoded
        target = Target.head_from_pretrained(settings.target, None, settings.device or "cpu")
    api = HfApi() if settings.push else None
    deliver(settings.checkpoint, settings.engine, target, settings.out, delivery, api, console)
