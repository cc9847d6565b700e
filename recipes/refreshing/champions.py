"""The drafters that were promoted, and the link that says which of them serves.

The link is replaced in one step, so that there is a champion at any moment. Champions are numbered by their rounds; the
last ones are kept for a rollback. Those above the one that serves were rolled back from.
"""

import re
from pathlib import Path

from draftsmith.models import Drafter, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import point_link, writing
from draftsmith.recipes.refreshing.folders import copy_checkpoint, keep_only, numbered

LINK, FOLDER = "champion", "champions"
ROLLED_BACK = "rolled_back"  # an empty file in the folder of a champion that served and shall not again
KEPT = 3


class Champions:
    """The champions of a refresh in its folder."""

    def __init__(self, folder: Path) -> None:
        self.link, self.folder = folder / LINK, folder / FOLDER

    def path(self, number: int) -> Path:
        """Return the folder of a champion."""
        return self.folder / str(number)

    def numbers(self) -> list[int]:
        """Return the champions that are kept, the oldest first."""
        return numbered(self.folder)

    @property
    def serving(self) -> int | None:
        """The champion that serves; None before the first. Raises `UserError` for a link that we did not make."""
        if not self.link.is_symlink():
            return None
        serving = self.link.readlink()
        if serving.parent != Path(FOLDER) or not re.fullmatch("[0-9]{1,9}", serving.name) or not self.link.is_dir():
            raise UserError(f"{self.link} leads to {serving}, no champion: let it lead to {FOLDER}/N for one")
        return int(serving.name)

    def begin(self, drafter: Drafter) -> None:
        """Let the drafter that serves by now be the first champion."""
        if not self.path(0).is_dir():
            save_drafter(drafter, self.path(0))
        self._serve(0)

    def promote(self, number: int, checkpoint: Path, before: int) -> bool:
        """Let a checkpoint serve in place of an earlier champion. Done again after a kill, it comes to the same end.

        Return False, and change nothing, where champions were rolled back meanwhile, as the copy of a large checkpoint
        leaves time for.
        """
        if self.was_rolled_back(number):
            return False
        copy_checkpoint(checkpoint, self.path(number))
        if self.serving not in (before, number):
            return False
        # Those between the two were rolled back from.
        kept = [champion for champion in self.numbers() if not before < champion < number]
        keep_only(self.folder, kept)
        self._serve(number)
        keep_only(self.folder, kept[-KEPT:])
        return True

    def roll_back(self) -> int:
        """Let the champion before the one that serves serve again, and return its number. Raises `UserError`."""
        serving = self.serving
        earlier = [champion for champion in self.numbers() if serving is not None and champion < serving]
        if serving is None or not earlier:
            raise UserError(f"{self.folder} holds no champion from before the one that serves: nothing is changed")
        self._serve(earlier[-1])
        (self.path(serving) / ROLLED_BACK).touch()
        return earlier[-1]

    def was_rolled_back(self, number: int) -> bool:
        """Return whether a champion served and was rolled back from."""
        return (self.path(number) / ROLLED_BACK).is_file()

    def _serve(self, number: int) -> None:
        with writing(self.link):
            point_link(self.link, Path(FOLDER) / str(number))
