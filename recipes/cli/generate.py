"""`draftsmith generate`: text as it is decoded, drafted and accepted tokens in green."""

import itertools

from rich.console import Console

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.decoder import check_sampling
from draftsmith.inference.decoding.schedule import read_schedule
from draftsmith.models import load_drafter
from draftsmith.models.errors import printable
from draftsmith.models.target.chat_template import has_template
from draftsmith.recipes.configs.command_settings import GenerateSettings
from draftsmith.recipes.evaluation.inputs import DRAFT_LENGTH, load_target

DIM, GREEN, RESET = "\x1b[2m", "\x1b[32m", "\x1b[0m"


def run(settings: GenerateSettings, console: Console) -> None:
    """Stream the answer to a prompt. Raises `UserError` before anything is printed."""
    sampling = check_sampling(settings.temperature, settings.top_p, 0)
    length = DRAFT_LENGTH if settings.draft_length is None else settings.draft_length
    draft = read_schedule(settings.schedule) if settings.schedule else length
    target = load_target(settings.target, settings.device, settings.chat_template_kwargs)
    decoder = SpeculativeDecoder(target, load_drafter(settings.drafter, target))
    rounds = decoder.stream(
        settings.prompt, settings.max_new_tokens, sampling, draft, settings.seed, chat=not settings.raw
    )
    first = next(rounds)  # a mistake in the settings shows before anything is printed
    in_chat = has_template(target.tokenizer) and not settings.raw
    write(settings.prompt + "\n\n" * in_chat, DIM, console)
    for round in itertools.chain([first], rounds):
        for piece in round.pieces:
            write(piece.text, GREEN if piece.drafted else "", console)
    console.file.write("\n")


def write(text: str, style: str, console: Console) -> None:
    """Write text as it is, but printable: rich would change tabs. It is styled on a terminal only."""
    text, styled = printable(text), style and console.is_terminal and not console.no_color
    console.file.write(f"{style}{text}{RESET}" if styled else text)
    console.file.flush()
