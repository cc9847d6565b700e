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
        """Return the prompts of a round that were not trained on so far."""
        return read_prompts(self.folder / str(number) / HELD_OUT)

    def earlier_training(self, number: int, most: int) -> list[Prompt]:
        """Return prompts to train on of the rounds before one, drawn from all of them, without those of it."""
        own = set(map(prompt_hash, self.training(number)))
        earlier = deduplicate([prompt for round in self.before(number) for prompt in self.training(round)])
        others = [prompt for prompt in earlier if prompt_hash(prompt) not in own]
        return others if len(others) <= most else random.Random(0).sample(others, most)

    def earlier_held_out(self, number: int, num_openings: int) -> Split:
        """Return the held-out prompts of the rounds before one: those that stay so, and those to train on from now on.

        Those that begin in one of `num_openings` ways stay: the first by hash, of the ways in which no prompt to train
        on begins. Prompts that begin like held-out ones of the round itself are in neither part.
        """
        earlier = deduplicate([prompt for round in self.before(number) for prompt in self.held_out(round)])
        trained = {opening_hash(prompt) for round in [*self.before(number), number] for prompt in self.training(round)}
        own = set(map(opening_hash, self.held_out(number)))
        hashes = set(map(opening_hash, earlier)) - own
        staying = set(sorted(hashes - trained)[:num_openings])
        return Split(
            train=[prompt for prompt in earlier if opening_hash(prompt) in hashes - staying],
            held_out=[prompt for prompt in earlier if opening_hash(prompt) in staying],
        )

    def train_on(self, prompts: list[Prompt]) -> None:
        """Move those of the prompts that were held out, each within its round, to those that may be trained on."""
        hashes = set(map(prompt_hash, prompts))
        for number in self.numbers():
            held_out = self.held_out(number)
            moved = [prompt for prompt in held_out if prompt_hash(prompt) in hashes]
            if moved:  # a process that is killed between the two files leaves them in both, and they are moved again
                write_prompts(self.folder / str(number) / TRAINING, deduplicate([*self.training(number), *moved]))
                staying = [prompt for prompt in held_out if prompt_hash(prompt) not in hashes]
                write_prompts(self.folder / str(number) / HELD_OUT, staying)

    def before(self, number: int) -> list[int]:
        """Return the rounds before one whose prompts are kept."""
        return [round for round in self.numbers() if round < number]

    def keep_only(self, numbers: Collection[int]) -> None:
        """Delete the prompts of all rounds but these."""
        keep_only(self.folder, numbers)
