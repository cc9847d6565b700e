"""Whether it pays to end a chain by the drafter's confidence: rules tried on what it drafts at every place of texts.

Shapes: N places of an answer where a round can start, K depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.inference.decoding.schedule import Confident
from draftsmith.inference.planning.costs import GOAL, Costs
from draftsmith.inference.replay.forced_decoding import force_answers
from draftsmith.models import Drafter, Target
from draftsmith.models.sampling.trees import Chain

LEASTS = tuple(step / 20 for step in range(1, 20))  # that are tried


@dataclass(frozen=True)
class Drafts:
    """What was drafted at each place of an answer."""

    num_right: np.ndarray  # [N] int64 tokens in a row that are the text's
    confidence: np.ndarray  # [N, K] in the draft up to each depth

    def lengths(self, rule: Confident) -> np.ndarray:
        """Tokens that the rule drafts at each place, [N]."""
        return 1 + (self.confidence[:, : rule.longest - 1] >= rule.least).sum(1)

    def rounds(self, lengths: np.ndarray) -> list[tuple[int, int]]:
        """Drafted and accepted tokens of each round of decoding."""
        found, place = [], 0
        while place < len(lengths):
            found.append((int(lengths[place]), int(min(lengths[place], self.num_right[place]))))
            place += 1 + found[-1][1]
        return found


@dataclass(frozen=True)
class ConfidenceChoice:
    """The best rule, and what is predicted of it and of the best chains of one length, on the same rounds."""

    rule: Confident
    acceptance_length: float
    speedup: float
    chain_length: int
    chain_speedup: float

    @property
    def pays(self) -> bool:
        """Whether the gain is more than predictions err by."""
        return self.speedup > max(1.0, (1 + GOAL) * self.chain_speedup)


def draft_everywhere(
    drafter: Drafter, target: Target, texts: list[tuple[list[int], list[int]]], longest: int, batch_size: int = 8
) -> list[Drafts]:
    """Chains at every token of the answers; texts: prompts and what the target answered in greedy decoding."""
    found = []
    for followed in force_answers(target, drafter, Chain(longest), texts, batch_size):
        state = followed.engine.state
        state.confidence = torch.zeros(len(followed.texts), longest, device=target.device)
        drafted, confidence = [], []
        for _ in range(followed.num_rounds):
            followed.generation.step()
            drafted.append(followed.engine.drafted.cpu().numpy())
            confidence.append(state.confidence.cpu().numpy().copy())
        for row, (_, answer) in enumerate(followed.texts):
            places = len(answer) - 1
            own = np.array([of_round[row] for of_round in drafted[:places]]).reshape(places, longest)
            following = np.pad(answer, (0, longest), constant_values=-1)
            right = own == np.stack([following[1 + k :][:places] for k in range(longest)], 1)
            chances = np.array([of_round[row] for of_round in confidence[:places]], float).reshape(places, longest)
            found.append(Drafts(right.cumprod(1).sum(1), chances.cumprod(1)))
    return found


def choose_confidence(drafts: Sequence[Drafts], costs: Costs, batch: int, context: int) -> ConfidenceChoice:
    """The rule and the chain length of the highest predicted speedup at a batch size that stays full."""
    longest = drafts[0].confidence.shape[1]
    rules = [Confident(length, least) for length in range(2, longest + 1) for least in LEASTS]
    tried = [(*predict([(one, one.lengths(rule)) for one in drafts], costs, batch, context), rule) for rule in rules]
    speedup, acceptance_length, rule = max(tried, key=lambda found: found[0])
    chains = []
    for length in range(1, longest + 1):
        whole = [(one, np.full(len(one.num_right), length)) for one in drafts]
        chains.append((predict(whole, costs, batch, context)[0], length))
    chain_speedup, chain_length = max(chains)
    return ConfidenceChoice(rule, acceptance_length, speedup, chain_length, chain_speedup)


def predict(drafts: Sequence[tuple[Drafts, np.ndarray]], costs: Costs, batch: int, context: int) -> tuple[float, float]:
    """Speedup and tokens a round, where drafts have these lengths [N].

    The rows of a batch stop by themselves, and a round lasts as long as its longest draft: of `batch` rows whose
    lengths are drawn alike.
    """
    rounds = np.array([pair for one, lengths in drafts for pair in one.rounds(lengths)])
    acceptance_length = 1 + float(rounds[:, 1].mean())
    shares = np.bincount(rounds[:, 0]) / len(rounds)
    of_longest = np.diff(shares.cumsum() ** batch, prepend=0)
    milliseconds = sum(
        share * costs.round(length, batch, context) for length, share in enumerate(of_longest) if share > 0
    )
    return float(acceptance_length * costs.plain(batch, context) / milliseconds), acceptance_length
