"""Plans the requests of a load test: their prompts, when they arrive, and how long their answers may get."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftsmith.models.errors import UserError

FAR = 1.5  # factor by which the length of a request may differ from the one that was drawn for it
FAR_SHARE = 0.1  # share of the requests whose lengths may differ more
NUM_DRAWN = 10_000  # lengths that a check draws


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths in tokens: half of them below the median, two thirds within a factor of exp(sigma) of it."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return lengths [count] int64 of at least 1."""
        return np.maximum(1, np.rint(self.median * np.exp(self.sigma * rng.standard_normal(count)))).astype(np.int64)


@dataclass(frozen=True)
class Load:
    """The load of a stage: arrivals a second, or requests at once."""

    mode: Literal["rate", "concurrency"]
    value: float


@dataclass(frozen=True)
class Sent:
    """A request of the plan."""

    prompt: int  # its place among the prompts
    max_new_tokens: int
    seconds: float  # time of its arrival since the start; not used with closed clients


def plan_requests(
    load: Load,
    prompts: list[list[int]],
    count: int,
    max_new_tokens: int,
    seed: int,
    prompt_lengths: Lengths | None = None,
    output_lengths: Lengths | None = None,
) -> list[Sent]:
    """Return the requests of one run, the same for the same seed.

    Prompts are drawn with replacement; with `prompt_lengths` each is the one whose length is nearest to a drawn length.
    Answers end at their end of text or at `max_new_tokens`, and with `output_lengths` at a drawn length, if that is
    less. The times between arrivals are exponential.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / load.value, count)
    picks = rng.integers(len(prompts), size=count)
    if prompt_lengths is not None:
        lengths = np.array([len(prompt) for prompt in prompts])
        order = rng.permutation(len(prompts))  # so that any of equally near prompts may be taken
        picks = order[nearest(lengths[order], prompt_lengths.draw(rng, count))]
    limits = np.full(count, max_new_tokens)
    if output_lengths is not None:
        limits = np.minimum(output_lengths.draw(rng, count), max_new_tokens)
    seconds = np.cumsum(gaps) - gaps[0]
    plan = zip(picks, limits, seconds, strict=True)
    return [Sent(int(prompt), int(limit), float(arrival)) for prompt, limit, arrival in plan]


def nearest(lengths: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the places, among `lengths`, of the first length that is nearest to each wanted one: [wanted] int64."""
    return np.abs(lengths - wanted[:, None]).argmin(1)


def check_prompt_lengths(asked: Lengths, prompts: list[list[int]]) -> None:
    """Raise `UserError` where a tenth of the requests would get a prompt of another length than was drawn."""
    own = np.unique([len(prompt) for prompt in prompts])
    wanted = asked.draw(np.random.default_rng(0), NUM_DRAWN)
    actual = own[nearest(own, wanted)]
    far = float((np.maximum(actual / wanted, wanted / actual) > FAR).mean())
    if far > FAR_SHARE:
        raise UserError(
            f"--prompt-lengths {asked.median:g} {asked.sigma:g}: {100 * far:.0f} % of the requests would get a prompt "
            f"more than {FAR:g} times shorter or longer than that, since yours have {own[0]} to {own[-1]} tokens: give "
            "other prompts, or lengths that these have"
        )


def check_output_lengths(asked: Lengths, max_new_tokens: int) -> None:
    """Raise `UserError` where the limit would cut a tenth of the answers far below the length drawn for them."""
    far = float((asked.draw(np.random.default_rng(0), NUM_DRAWN) > FAR * max_new_tokens).mean())
    if far > FAR_SHARE:
        raise UserError(
            f"--output-lengths {asked.median:g} {asked.sigma:g}: {100 * far:.0f} % of the answers would have to be "
            f"more than {FAR:g} times longer than --max-new-tokens {max_new_tokens}, which cuts them: raise it"
        )
