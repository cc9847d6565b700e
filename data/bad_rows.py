"""Rows of a source that give nothing to train on: left out, counted, and listed in a file with their reasons."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from draftsmith.data.progress import warn
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import write_whole

BAD_ROWS = "bad_rows.jsonl"  # beside the samples


@dataclass(frozen=True)
class BadRow:
    """A row that was left out."""

    where: str  # file and line
    reason: str


@dataclass
class BadRows:
    """The rows of a source that are left out, at most `max_share` of all its rows."""

    max_share: float = 0.0
    num_rows: int = 0  # good and bad ones
    rows: list[BadRow] = field(default_factory=list)

    def add(self, where: str, error: UserError) -> None:
        """Leave a row out for a mistake in it. Raises that mistake where no row may be bad."""
        if not self.max_share:
            raise error
        self.rows.append(BadRow(where, str(error)))

    def check(self) -> None:
        """Raise `UserError` where more of the rows are bad than may be."""
        if len(self.rows) > self.max_share * self.num_rows:
            raise UserError(
                f"{len(self.rows)} of {self.num_rows} rows are bad, more than --max-bad-share {self.max_share:g}; the "
                f"first: {self.rows[0].reason}"
            )

    def write(self, folder: Path) -> None:
        """List the bad rows in the folder's bad_rows.jsonl, and say so; nothing is written where there are none."""
        if self.rows:
            write_whole(folder / BAD_ROWS, "".join(json.dumps(asdict(row)) + "\n" for row in self.rows))
            warn(f"{len(self.rows)} bad rows are left out; their reasons stand in {BAD_ROWS} beside the samples")
