"""Finds out whether it pays to end chains by the drafter's confidence, by trying rules on drafts all over texts.

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
from draftsmith.models.drafter_parts.drafts import NO_TOKEN
from draftsmith.models.sampling.trees import Chain

LEASTS = tuple(step / 20 for step in range(1, 20))  # thresholds of confidence that are tried


@dataclass(frozen=True)
class Drafts:
    """The draft at each place of an answer."""

    num_right: np.ndarray  # [N] int64 tokens from the first one on that are the text's
    confidence: np.ndarray  # [N, K] confidence in the chain up to each depth

    def lengths(self, rule: Confident) -> np.ndarray:
        """Return how many tokens a rule drafts at each place, [N]."""
        return 1 + (self.confidence[:, : rule.longest - 1] >= rule.least).sum(1)

    def rounds(self, lengths: np.ndarray) -> list[tuple[int, int]]:
        """Return the drafted and the accepted tokens of each round of decoding, from the lengths of drafts [N]."""
        rounds, place = [], 0
        while place < len(lengths):
            num_accepted = int(min(lengths[place], self.num_right[place]))
            rounds.append((int(lengths[place]), num_accepted))
            place += 1 + num_accepted
        return rounds


@dataclass(frozen=True)
class ConfidenceChoice:
    """The best rule, its predicted speedup, and that of the best chains of one length, on the same rounds."""

    rule: Confident
    acceptance_length: float
    speedup: float
    chain_length: int
    chain_speedup: float

    @property
    def pays(self) -> bool:
        """Whether the gain is larger than the error of predictions."""
        return self.speedup > max(1.0, (1 + GOAL) * self.chain_speedup)


def draft_everywhere(
    drafter: Drafter, target: Target, texts: list[tuple[list[int], list[int]]], longest: int, batch_size: int = 8
) -> list[Drafts]:
    """Return the chains at every token of answers; `texts` are prompts and what the target answered greedily."""
    drafts = []
    for batch in force_answers(target, drafter, Chain(longest), texts, batch_size):
        state = batch.engine.state
        state.confidence = torch.zeros(len(batch.texts), longest, device=target.device)
        drafted, confidence = [], []  # of each round, [B, K]
        for _ in range(batch.num_rounds):
            batch.generation.step()
            tokens = batch.engine.drafted.cpu().numpy()  # a cascade of draft models may have cut them all
            drafted.append(np.pad(tokens, ((0, 0), (0, longest - tokens.shape[1])), constant_values=NO_TOKEN))
            confidence.append(state.confidence.cpu().numpy().copy())
        tokens, chances = np.stack(drafted, 1), np.stack(confidence, 1).astype(float)  # [B, N, K]
        for row, (_, answer) in enumerate(batch.texts):
            places = len(answer) - 1
            following = np.pad(answer, (0, longest), constant_values=-1)
            is_right = tokens[row, :places] == np.stack([following[1 + k :][:places] for k in range(longest)], 1)
            drafts.append(Drafts(is_right.cumprod(1).sum(1), chances[row, :places].cumprod(1)))
    return drafts


def choose_confidence(drafts: Sequence[Drafts], costs: Costs, batch: int, context: int) -> ConfidenceChoice:
    """Return the rule and the chain length of the highest predicted speedup at a batch size that stays full."""
    longest = drafts[0].confidence.shape[1]
    rules = [Confident(length, least) for length in range(2, longest + 1) for least in LEASTS]
    predictions = [
        (*predict([(answer, answer.lengths(rule)) for answer in drafts], costs, batch, context), rule) for rule in rules
    ]
    speedup, acceptance_length, rule = max(predictions, key=lambda prediction: prediction[0])
    chains = []
    for length in range(1, longest + 1):
        whole = [(answer, np.full(len(answer.num_right), length)) for answer in drafts]
        chains.append((predict(whole, costs, batch, context)[0], length))
    chain_speedup, chain_length = max(chains)
    return ConfidenceChoice(rule, acceptance_length, speedup, chain_length, chain_speedup)


def predict(drafts: Sequence[tuple[Drafts, np.ndarray]], costs: Costs, batch: int, context: int) -> tuple[float, float]:
    """Return the speedup and the tokens a round, where the drafts of each answer have these lengths [N].

    Each row of a batch stops by itself, and a round lasts as long as the longest draft of `batch` rows whose lengths
    have the same distribution.
    """
    rounds = np.array([pair for answer, lengths in drafts for pair in answer.rounds(lengths)])
    acceptance_length = 1 + float(rounds[:, 1].mean())
    shares = np.bincount(rounds[:, 0]) / len(rounds)
    shares_of_longest = np.diff(shares.cumsum() ** batch, prepend=0)
    milliseconds = sum(
        share * costs.round(length, batch, context) for length, share in enumerate(shares_of_longest) if share > 0
    )
    return float(acceptance_length * costs.plain(batch, context) / milliseconds), acceptance_length
