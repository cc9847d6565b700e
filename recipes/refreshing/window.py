"""The prompts of the last days, by round: those to train on and those held out. Older ones are deleted."""

import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_prompts
from draftsmith.data.prompts.splits import Split, deduplicate, prompt_hash, write_prompts
from draftsmith.models.storage.files import whole_folder
from draftsmith.recipes.refreshing.folders import keep_only, numbered

TRAINING, HELD_OUT = "training.jsonl", "held_out.jsonl"


class Window:
    """The folder of prompts, with a folder for each round whose prompts are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, number: int, split: Split) -> None:
        """Keep the prompts of a round."""
        with whole_folder(self.folder / str(number)) as folder:
            write_prompts(folder / TRAINING, split.train)
            write_prompts(folder / HELD_OUT, split.held_out)

    def numbers(self) -> list[int]:
        """Return the rounds whose prompts are kept, the oldest first."""
        return numbered(self.folder)

    def domains(self, number: int) -> dict[str, int]:
        """Return the numbers of prompts of a round by domain."""
        return dict(Counter(prompt.domain for prompt in [*self.training(number), *self.held_out(number)]))

    def training(self, number: int) -> list[Prompt]:
        """Return the prompts of a round that may be trained on."""
        return read_prompts(self.folder / str(number) / TRAINING)

    def held_out(self, number: int) -> list[Prompt]:
        """Return the prompts of a round that are never trained on."""
        return read_prompts(self.folder / str(number) / HELD_OUT)

    def earlier_training(self, number: int, most: int) -> list[Prompt]:
        """Return prompts to train on of the rounds before one, drawn from all of them, without those of it."""
        earlier = [prompt for round in self.numbers() if round < number for prompt in self.training(round)]
        return drawn_beside(self.training(number), earlier, most)

    def earlier_held_out(self, number: int, most: int) -> list[Prompt]:
        """Return held-out prompts of the rounds before one, drawn from all of them, without those of it."""
        earlier = [prompt for round in self.numbers() if round < number for prompt in self.held_out(round)]
        return drawn_beside(self.held_out(number), earlier, most)

    def keep_only(self, numbers: Collection[int]) -> None:
        """Delete the prompts of all rounds but these."""
        keep_only(self.folder, numbers)


def drawn_beside(own: list[Prompt], others: list[Prompt], most: int) -> list[Prompt]:
    """Return at most so many of the other prompts, each once and none of one's own; the same ones each time."""
    known = set(map(prompt_hash, own))
    unique = [prompt for prompt in deduplicate(others) if prompt_hash(prompt) not in known]
    return unique if len(unique) <= most else random.Random(0).sample(unique, most)
