"""Counterfactual replay: texts that the target once wrote show what any drafter, draft and verification mode would do.

Lossless verification leaves the distribution of the text as it is. So a text x that was recorded by plain decoding at
some temperature is as good as one that decoding with any drafter gives. Let a round start with i tokens of the answer
written, and let its draft have followed x up to depth j. Given that the next token is x_{i+j}, the draft had that token
with probability a[i, j]:

    greedy, one_hot   1 where the drafter's likeliest token is x_{i+j}, else 0
    probabilistic     min(p, q) / p = min(1, q / p) at x_{i+j}

Here p is the target's distribution and q the drafter's, both after the same temperature and cut, and q reads x itself
as the drafted prefix: the teacher-forced chain of training. (A token is drafted and accepted with probability q min(1,
p / q) = min(p, q), and it is drawn from the residual of a rejection with the rest of p; Leviathan et al., arXiv
2211.17192, appendix A.1.) What follows a token depends on the token alone, not on how it came about, so the a[i, j] are
independent given x. Likewise a static tree whose ranks are deterministic accepts x as far as the path of its ranks lies
in the tree. A round that starts at i and accepts j drafts makes the next one start at i + j + 1: the starts are a
Markov chain along the text, whose expected counters are summed exactly. In greedy and one_hot all probabilities are 0
or 1, and the counters are those of the decoder on this very text.

Some settings cannot be replayed, since their draft or their test depends on tokens that x does not hold: dynamic trees,
block verification, and drawing without replacement. Lossy modes cannot be replayed either, since they write other
texts, nor can drafters that predict nothing from a text alone. A recording has one temperature.

Shapes: N places of an answer where a round can start, K depths, T tokens of a text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.decoder import SpeculativeDecoder, resolve_settings
from draftsmith.inference.replay.token_scores import UNRANKED, DrafterScores, TargetScores, score_drafter, score_target
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.drafter_parts.drafts import NO_TOKEN
from draftsmith.models.errors import UserError
from draftsmith.models.layers import shift_left
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, DDTree, DynamicTree, Shape, StaticTree
from draftsmith.models.target.target import Features

REPLAYED_MODES: tuple[VerificationMode, ...] = ("greedy", "one_hot", "probabilistic")
LOWEST = -1e4  # log of probability 0, which rounding may give a token of the text at the edge of top-p


@runtime_checkable
class Lookup(Protocol):
    """A drafter that looks up its drafts in the text before them, and reads nothing else."""

    def continuation(self, token_ids: Tensor, lengths: Tensor, draft_length: int) -> tuple[Tensor, Tensor]:
        """Return drafts [B, K], NO_TOKEN where there is none, behind the first `lengths` [B] tokens of texts [B, M]."""


@dataclass(frozen=True)
class Recording:
    """Answers of the target; those that do not end go beyond the limit by as many tokens as a draft looks ahead."""

    prompts: list[list[int]]
    answers: list[list[int]]
    max_new_tokens: int  # the limit of decoding
    sampling: Sampling = Sampling()
    seed: int = 0

    def limit(self, index: int) -> int:
        """Return how many tokens of an answer decoding emits."""
        return min(len(self.answers[index]), self.max_new_tokens)

    def batch(self, index: int, device: torch.device) -> Batch:
        """Return a prompt and its answer as a batch of one row."""
        prompt = self.prompts[index]
        token_ids = torch.tensor([prompt + self.answers[index]], device=device)
        return Batch(token_ids, torch.arange(token_ids.shape[1], device=device)[None] >= len(prompt))


def record(
    target: Target,
    prompts: list[list[int]],
    sampling: Sampling,
    max_new_tokens: int,
    longest: int,
    seed: int = 0,
    batch_size: int = 16,
) -> Recording:
    """Decode prompts plainly, for drafts of up to `longest` tokens, with the noise that `generate` has by default.

    Answers end where the target's context does.
    """
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    prompts = plain.token_ids(prompts, max_new_tokens)
    settings = resolve_settings(plain.drafter, sampling, max_new_tokens + longest, seed=seed)
    answers = plain.decode(prompts, settings, batch_size=batch_size).token_ids
    answers = [answer[: target.context - len(prompt)] for prompt, answer in zip(prompts, answers, strict=True)]
    return Recording(prompts, answers, max_new_tokens, sampling, seed)


@dataclass
class AcceptanceTrace:
    """The chances of one drafter along one answer. A round at place i starts with i + 1 tokens written."""

    accept: dict[str, np.ndarray]  # by verification mode [N, K] fp64: chance that depth k is accepted, if those before
    rank: np.ndarray  # [N, K] int64 of the text's token among the drafter's, or UNRANKED
    confidence: np.ndarray  # [N, K] fp64 the drafter's probability of its likeliest token; 1 where it has none
    choice: np.ndarray  # [N, K] int64 that token, in the draft vocabulary
    best: np.ndarray  # [N, K] fp64 the target's probability of its own likeliest token there
    following: np.ndarray  # [N, K] int64 the text's token; -1 beyond its end
    num_drafted: np.ndarray  # [N] int64 tokens that are drafted where K are asked for
    limit: int  # tokens of the answer that decoding emits


def replay(
    target: Target, recording: Recording, drafters: dict[str, Drafter], longest: int
) -> dict[str, list[AcceptanceTrace]]:
    """Return the traces of each drafter, one for each text, for drafts of up to `longest` tokens.

    The target reads each text once. Drafters are in evaluation mode. Raises `UserError` for one that cannot be
    replayed.
    """
    for drafter in drafters.values():
        check_replayed(drafter)
    layer_ids = tuple(sorted({layer_id for drafter in drafters.values() for layer_id in drafter.layer_ids}))
    traces: dict[str, list[AcceptanceTrace]] = {name: [] for name in drafters}
    for index, (batch, features, target_scores) in enumerate(read_texts(target, recording, layer_ids)):
        for name, drafter in drafters.items():
            if isinstance(drafter, Lookup):
                scores = score_lookup(drafter, recording, index, longest)
            else:
                own_features = select_layers(features, layer_ids, drafter.layer_ids)
                scores = score_drafter(drafter, batch, own_features, longest, recording.sampling)
            traces[name].append(acceptance_trace(recording, index, target_scores, scores))
    return traces


def read_texts(
    target: Target, recording: Recording, layer_ids: tuple[int, ...]
) -> Iterator[tuple[Batch, Features, TargetScores]]:
    """Yield each recorded text as a batch of one row, with the features of some layers and the target's scores."""
    for index in range(len(recording.prompts)):
        batch = recording.batch(index, target.device)
        features = target.features(batch, layer_ids)
        yield batch, features, score_target(target, features.last_hidden, batch, recording.sampling)


def select_layers(features: Features, layer_ids: tuple[int, ...], wanted: tuple[int, ...]) -> Features:
    """Return features that have only the wanted layers of those that they have."""
    if not wanted:
        return Features(features.last_hidden, None)
    assert features.layers is not None
    layers = features.layers.unflatten(-1, (len(layer_ids), -1))
    return Features(features.last_hidden, layers[..., [layer_ids.index(i) for i in wanted], :].flatten(-2))


def score_lookup(drafter: Lookup, recording: Recording, index: int, longest: int) -> DrafterScores:
    """Return the scores of a drafter that is asked for a draft at all places of an answer at once."""
    prompt, answer = recording.prompts[index], recording.answers[index]
    places = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
    lengths = torch.arange(len(prompt) + 1, len(prompt) + len(answer) + 1)
    text = torch.tensor(prompt + answer + [NO_TOKEN - 1] * longest)
    drafted = drafter.continuation(text.expand(len(lengths), -1), lengths, longest)[0]  # [N, K]
    is_right = drafted == text.unfold(0, longest, 1)[lengths]
    scores = DrafterScores.blank(longest, torch.tensor([prompt + answer]))
    scores.rank[:, 0, places] = torch.where(is_right, 0, UNRANKED).T
    scores.choice[:, 0, places] = drafted.T
    scores.num_drafted[0, places] = (drafted != NO_TOKEN).sum(1)
    scores.confidence.fill_(1)
    return scores


def acceptance_trace(
    recording: Recording, index: int, target_scores: TargetScores, scores: DrafterScores
) -> AcceptanceTrace:
    """Return the trace of one text from its scores [.., 1, T]."""
    depths, first = range(len(scores.rank)), len(recording.prompts[index]) - 1
    num_places = len(recording.answers[index])

    def at_places(values: Tensor) -> np.ndarray:
        """Return values [.., 1, T] at the places of the answer, [N, ..]."""
        return values[..., 0, first : first + num_places].cpu().numpy().T

    def after_places(values: Tensor) -> np.ndarray:
        """Return values [1, T] of the tokens that follow each place, fp64 [N, K]."""
        return at_places(torch.stack([shift_left(values, 1 + k) for k in depths])).astype(np.float64)

    rank = at_places(scores.rank)
    log_q, log_p = at_places(scores.log_q).astype(np.float64), np.maximum(after_places(target_scores.log_p), LOWEST)
    is_likeliest = (rank == 0).astype(np.float64)
    following = np.pad(recording.answers[index], (0, len(depths)), constant_values=-1)
    return AcceptanceTrace(
        accept={
            "greedy": is_likeliest,
            "one_hot": is_likeliest,
            "probabilistic": np.exp(np.minimum(0, log_q - log_p)),
        },
        rank=rank,
        confidence=at_places(scores.confidence).astype(np.float64),
        choice=at_places(scores.choice),
        best=after_places(target_scores.best),
        following=np.stack([following[1 + k :][:num_places] for k in depths], 1),
        num_drafted=at_places(scores.num_drafted),
        limit=recording.limit(index),
    )


def check_replayed(drafter: Drafter) -> None:
    """Raise `UserError` for a drafter whose drafts do not follow from a recorded text."""
    if type(drafter).depths is Drafter.depths and not isinstance(drafter, Lookup):
        raise UserError(f"{drafter.kind} cannot be replayed from a text alone: measure it with draftsmith evaluate")


def check_replayed_as(shape: Shape, mode: VerificationMode) -> Chain | StaticTree:
    """Return the shape. Raises `UserError` where its drafts or their acceptance do not follow from a recorded text."""
    if isinstance(shape, DynamicTree | DDTree):
        raise UserError(
            "a tree that grows anew each round cannot be replayed, since its shape depends on tokens that the text "
            "does not hold: measure it with draftsmith evaluate, or give a static tree"
        )
    if mode not in REPLAYED_MODES or (mode == "probabilistic" and not isinstance(shape, Chain)):
        raise UserError(
            f"verification_mode {mode} of such drafts cannot be replayed from a text: give one_hot or greedy, or "
            "measure it with draftsmith evaluate"
        )
    return shape


# --- counters


def survival(trace: AcceptanceTrace, shape: Chain | StaticTree, mode: VerificationMode) -> np.ndarray:
    """Return the chance that a round from each place accepts at least 1, 2, ... tokens, [N, depth]."""
    if isinstance(shape, Chain):
        return trace.accept[mode][:, : shape.depth].cumprod(1)
    paths, nodes = trace.rank[:, : shape.depth].tolist(), set(shape.choices)
    return np.array([[float(tuple(path[: j + 1]) in nodes) for j in range(shape.depth)] for path in paths])


def starts(alive: np.ndarray, limit: int) -> np.ndarray:
    """Return the chance that a round starts at each place, [N], from the `survival` of its tokens, [N, K].

    Decoding ends at the limit.
    """
    places, depth = alive.shape
    exactly = -np.diff(alive, axis=1, prepend=1, append=0)  # [N, K + 1] chance of 0, 1, ... accepted tokens
    chance = np.zeros(places + depth + 1)
    chance[0] = 1
    for place in range(limit - 1):
        chance[place + 1 : place + depth + 2] += chance[place] * exactly[place]
    return np.where(np.arange(places) < limit - 1, chance[:places], 0)


def chance_offered(trace: AcceptanceTrace, draft_length: int, mode: VerificationMode) -> np.ndarray:
    """Return the chance, [N, K], that a round starts at a place and that all tokens before a depth are accepted."""
    alive = survival(trace, Chain(draft_length), mode)
    before = np.concatenate([np.ones((len(alive), 1)), alive[:, :-1]], 1)
    return starts(alive, trace.limit)[:, None] * before


def expected_stats(trace: AcceptanceTrace, shape: Chain | StaticTree, mode: VerificationMode) -> Stats:
    """Return the decoder's counters on this text, in expectation over drafts and the coins of their acceptance."""
    alive = survival(trace, shape, mode)
    chance = starts(alive, trace.limit)
    if isinstance(shape, Chain):
        drafted = np.minimum(trace.num_drafted, shape.depth)
    else:
        drafted = np.full(len(alive), shape.num_nodes)
    has_draft = chance * (drafted > 0)
    histogram = has_draft @ -np.diff(alive, axis=1, prepend=1, append=0)
    return Stats(
        shape.depth,
        num_drafts=float(has_draft.sum()),
        num_draft_tokens=float(has_draft @ drafted),
        num_accepted_tokens=float(has_draft @ alive.sum(1)),
        num_emitted_tokens=trace.limit,
        num_rounds=float(chance.sum()),
        acceptance_histogram=histogram.tolist(),
    )
