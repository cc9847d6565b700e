"""The requests of a load test: which prompts, when they arrive, and how long their answers may get."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftsmith.models.errors import UserError

FAR = 1.5  # a prompt or an answer so many times longer or shorter than drawn is of another length
FAR_SHARE = 0.1  # of the requests, from which on they are not what was asked for
NUM_DRAWN = 10_000  # lengths that a check draws


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths in tokens: half of them below the median, two thirds within a factor of exp(sigma) of it."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """[count] int64, at least 1"""
        return np.maximum(1, np.rint(self.median * np.exp(self.sigma * rng.standard_normal(count)))).astype(np.int64)


@dataclass(frozen=True)
class Load:
    """One stage: arrivals a second, or requests at once."""

    mode: Literal["rate", "concurrency"]
    value: float


@dataclass(frozen=True)
class Sent:
    """A request of the plan."""

    prompt: int  # which of the prompts
    max_new_tokens: int
    seconds: float  # of its arrival, since the start; meaningless among closed clients


def plan_requests(
    load: Load,
    prompts: list[list[int]],
    count: int,
    max_new_tokens: int,
    seed: int,
    prompt_lengths: Lengths | None = None,
    output_lengths: Lengths | None = None,
) -> list[Sent]:
    """Requests of one run, the same for the same seed.

    Prompts are drawn from the user's with replacement; with `prompt_lengths` each is the one whose length comes nearest
    to one drawn from there. Answers end at their end of text or at `max_new_tokens`, and at a length drawn from
    `output_lengths` where that comes first. Between two arrivals passes an exponential time.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / load.value, count)
    picks = rng.integers(len(prompts), size=count)
    if prompt_lengths is not None:
        own = np.array([len(prompt) for prompt in prompts])
        ties = rng.permutation(len(prompts))  # of equally near prompts any
        picks = ties[nearest(own[ties], prompt_lengths.draw(rng, count))]
    limits = np.full(count, max_new_tokens)
    if output_lengths is not None:
        limits = np.minimum(output_lengths.draw(rng, count), max_new_tokens)
    seconds = np.cumsum(gaps) - gaps[0]
    return [Sent(int(p), int(n), float(s)) for p, n, s in zip(picks, limits, seconds, strict=True)]


def nearest(lengths: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Of each wanted length the place, among `lengths`, of the first that comes nearest to it: [wanted] int64"""
    return np.abs(lengths - wanted[:, None]).argmin(1)


def check_prompt_lengths(asked: Lengths, prompts: list[list[int]]) -> None:
    """`UserError` where a tenth of the requests would get a prompt of another length than that drawn for it."""
    own = np.unique([len(prompt) for prompt in prompts])
    wanted = asked.draw(np.random.default_rng(0), NUM_DRAWN)
    found = own[nearest(own, wanted)]
    far = float((np.maximum(found / wanted, wanted / found) > FAR).mean())
    if far > FAR_SHARE:
        raise UserError(
            f"--prompt-lengths {asked.median:g} {asked.sigma:g}: {100 * far:.0f} % of the requests would get a prompt "
            f"more than {FAR:g} times shorter or longer than that, since yours have {own[0]} to {own[-1]} tokens: give "
            "other prompts, or lengths that these have"
        )


def check_output_lengths(asked: Lengths, max_new_tokens: int) -> None:
    """`UserError` where the limit would cut a tenth of the answers far below the length drawn for them."""
    far = float((asked.draw(np.random.default_rng(0), NUM_DRAWN) > FAR * max_new_tokens).mean())
    if far > FAR_SHARE:
        raise UserError(
            f"--output-lengths {asked.median:g} {asked.sigma:g}: {100 * far:.0f} % of the answers would have to be "
            f"more than {FAR:g} times longer than --max-new-tokens {max_new_tokens}, which cuts them: raise it"
        )
