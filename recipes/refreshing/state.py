"""state.json: all that a refresh found and decided so far. Each stage of a round writes it when it is done.

Which champion serves does not stand here but in the link that the server follows (champions.py).
"""

from dataclasses import dataclass, replace
from pathlib import Path

from draftsmith.models.storage.sealed_json import read_sealed, write_sealed
from draftsmith.models.storage.typed_json import optional
from draftsmith.recipes.refreshing.champions import LINK
from draftsmith.recipes.refreshing.judgement import Judgement
from draftsmith.recipes.refreshing.traffic import Taken, TrafficCounts
from draftsmith.recipes.refreshing.traffic_shift import Look
from draftsmith.recipes.refreshing.training import RoundPlan

STATE = "state.json"
MOST_ROUNDS = 100  # that are remembered


@dataclass(frozen=True)
class Round:
    """A round: new prompts, the decision whether to train on them, and what came of it."""

    number: int
    time: float  # Unix time at which its prompts were taken
    target: str
    fingerprint: str | None  # of the target
    champion: int  # that served when it began
    prompts: int | None  # number of the round whose prompts are its newest ones; None: they were refused
    traffic: TrafficCounts
    look: Look | None = None
    plan: RoundPlan | None = None
    judgement: Judgement | None = None
    outcome: str | None = None  # in words; None: it is not over
    acceptance: float | None = None  # of the champion that serves after it, on its newest held-out prompts
    promoted: bool = False

    @property
    def serves(self) -> int:
        """The champion that serves after it."""
        return self.number if self.promoted else self.champion


@dataclass(frozen=True)
class RefreshState:
    """The content of state.json."""

    taken: dict[str, Taken]  # by source of traffic
    rounds: list[Round]  # the newest of them, oldest first
    target: str | None = optional()  # of the last call

    @property
    def open(self) -> Round | None:
        """The round that is not over, if any: always the newest."""
        return self.rounds[-1] if self.rounds and self.rounds[-1].outcome is None else None

    @property
    def last_trained(self) -> Round | None:
        """The last round that is over and was trained on, if any."""
        return next((round for round in reversed(self.rounds) if round.judgement and round.outcome), None)

    @property
    def next_number(self) -> int:
        """The number of the round that comes next."""
        return self.rounds[-1].number + 1 if self.rounds else 1

    def with_round(self, current: Round) -> "RefreshState":
        """Return the state with a new round, or with one in place of what was known of it."""
        earlier = [round for round in self.rounds if round.number != current.number]
        return replace(self, rounds=[*earlier, current][-MOST_ROUNDS:])


def read_state(folder: Path) -> RefreshState:
    """Return the state of a refresh; an empty one where there is none. Raises `UserError` for a damaged file."""
    path = folder / STATE
    mend = f"restore it, or begin anew with --drafter {folder / LINK} and another --out"
    return read_sealed(RefreshState, path, mend) if path.exists() else RefreshState({}, [])


def write_state(folder: Path, state: RefreshState) -> None:
    """Write the state whole or not at all."""
    write_sealed(folder / STATE, state)
