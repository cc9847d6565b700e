"""The inputs of an evaluation, from the settings of a command: sets of prompts, and settings to measure at."""

from collections.abc import Sequence
from pathlib import Path

from draftsmith.data.progress import waiting
from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference.decoding.schedule import read_schedule
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.models import Target
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.sampling.trees import DDTree, DynamicTree, StaticTree, Tree
from draftsmith.models.storage.reading import JsonObject, read_json
from draftsmith.models.target.chat_template import set_chat
from draftsmith.models.target.target import ChatSettings
from draftsmith.recipes.configs.command_settings import EvaluateSettings

DRAFT_LENGTH = 4  # of all commands, where neither a draft length, nor a tree, nor a schedule is asked for
DEFAULT_REPEATS, DEFAULT_MINUTES = 5, 4.0  # so many repeats of each setting, or as many as fit
MOST_REPEATS = 25  # where a time is given


def load_target(name: str, device: str | None, chat_template_kwargs: JsonObject | None = None) -> Target:
    """Return a target on its device, and say so while it is loaded.

    `chat_template_kwargs` are given to its chat template with every chat. Raises `UserError` for what it does not read.
    """
    with waiting(f"loading {name} ..."):
        target = Target.from_pretrained(name, device)
    set_chat(target, ChatSettings(chat_template_kwargs or {}))
    return target


def load_head(name: str, device: str = "cpu") -> Target:
    """Return a target without its layers, whose sizes, embedding and head are enough; say so while they are loaded."""
    with waiting(f"loading the head of {name} ..."):
        return Target.head_from_pretrained(name, None, device)


def read_prompt_sets(
    sources: Sequence[str], target: Target, num_prompts: int | None, max_new_tokens: int, with_images: bool = False
) -> list[PromptSet]:
    """Read and encode several sets of prompts, which hold images only where a server reads them (`with_images`).

    Raises `UserError` for bad prompts and for two sets of one name."""
    prompt_sets = [read_prompt_set(source, target, num_prompts, max_new_tokens, with_images) for source in sources]
    names = [prompts.name for prompts in prompt_sets]
    if len(set(names)) < len(names):
        raise UserError(f"--prompts: the sets {', '.join(names)} cannot be told apart by name: rename one of the files")
    return prompt_sets


def settings_grid(settings: EvaluateSettings) -> list[MeasureSettings]:
    """Return every temperature with every batch size and every draft.

    Raises `UserError` for a tree or a schedule that cannot be read.
    """
    lengths = settings.draft_length or ([] if settings.tree or settings.schedule else [DRAFT_LENGTH])
    schedules = [read_schedule(settings.schedule)] if settings.schedule else []
    most = DEFAULT_REPEATS if settings.minutes is None else MOST_REPEATS
    return [
        MeasureSettings(
            temperature,
            settings.top_p,
            batch_size,
            draft,
            settings.max_new_tokens,
            most if settings.repeats is None else settings.repeats,
            settings.seed,
            "synthetic" if settings.synthetic_acceptance else settings.verification_mode,
            settings.synthetic_acceptance,
        )
        for temperature in settings.temperature
        for batch_size in settings.batch_size
        for draft in [*lengths, *map(parse_tree, settings.tree), *schedules]
    ]


def parse_tree(text: str) -> Tree:
    """Return the tree of NODES,DEPTH,WIDTH (EAGLE-2) or NODES,DEPTH (DDTree).

    Or of a JSON file with a list of choices such as [[0], [1], [0, 0]].
    """
    if text.endswith(".json"):
        try:
            return StaticTree(tuple(map(tuple, read_json(Path(text)))))
        except (ValueError, TypeError) as error:
            raise UserError(f"--tree {text}: {first_line(error)}") from None
    try:
        sizes = [int(number) for number in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (2, 3):
        raise UserError(
            f"--tree {text}: give NODES,DEPTH,WIDTH, for drafters of independent depths NODES,DEPTH, or the path of a "
            ".json list of choices"
        )
    return DDTree(*sizes) if len(sizes) == 2 else DynamicTree(*sizes)
