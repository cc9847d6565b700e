"""The prompts of the last days, by round: those to train on and those held out. Older ones are deleted."""

import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_prompts
from draftsmith.data.prompts.splits import Split, deduplicate, opening_hash, prompt_hash, write_prompts
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
        """Return the prompts of a round that its training leaves out."""
        return read_prompts(self.folder / str(number) / HELD_OUT)

    def earlier_training(self, number: int, most: int) -> list[Prompt]:
        """Return prompts to train on of the rounds before one, drawn from all of them.

        They are none of its own, and none begins like one that it holds out.
        """
        own, judging = set(map(prompt_hash, self.training(number))), set(map(opening_hash, self.held_out(number)))
        earlier = deduplicate([prompt for round in self.before(number) for prompt in self.training(round)])
        others = [prompt for prompt in earlier if prompt_hash(prompt) not in own]
        return drawn([prompt for prompt in others if opening_hash(prompt) not in judging], most)

    def earlier_held_out(self, number: int, most: int) -> list[Prompt]:
        """Return held-out prompts of the rounds before one, drawn from all of them, to judge on the old traffic.

        None of them begins like a prompt to train on, of any of these rounds, or like a held-out one of the round.
        """
        known = [prompt for round in [*self.before(number), number] for prompt in self.training(round)]
        openings = set(map(opening_hash, [*known, *self.held_out(number)]))
        earlier = deduplicate([prompt for round in self.before(number) for prompt in self.held_out(round)])
        return drawn([prompt for prompt in earlier if opening_hash(prompt) not in openings], most)

    def before(self, number: int) -> list[int]:
        """Return the rounds before one whose prompts are kept."""
        return [round for round in self.numbers() if round < number]

    def keep_only(self, numbers: Collection[int]) -> None:
        """Delete the prompts of all rounds but these."""
        keep_only(self.folder, numbers)


def drawn(prompts: list[Prompt], most: int) -> list[Prompt]:
    """Return at most so many of the prompts, drawn at random, the same ones each time."""
    return prompts if len(prompts) <= most else random.Random(0).sample(prompts, most)
