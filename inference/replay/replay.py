"""Counterfactual replay: texts that the target once wrote say what any drafter, draft and verification mode would do.

Lossless verification leaves the law of the text as it is, so x, recorded by plain decoding at some temperature, is
as good a text as decoding with any drafter gives. Let a round start with i tokens of the answer written, and its
draft have followed x up to depth j. Given that the next token is x_{i+j}, the draft had it with chance a[i, j]:

    greedy, one_hot   1 where the drafter's likeliest token is x_{i+j}, else 0
    probabilistic     min(p, q) / p = min(1, q / p) at x_{i+j}

with p the target's law and q the drafter's, both after the same temperature and cut, q on x itself as the drafted
prefix: the teacher-forced chain of training. (A token comes about as drafted and accepted with chance
q min(1, p / q) = min(p, q), as one drawn from what a rejection leaves with the rest of p; Leviathan et al., arXiv
2211.17192, appendix A.1.) What comes after a token hangs on the token alone, not on how it came about, so the a[i, j]
are independent given x. Likewise a static tree whose ranks are deterministic accepts x as far as the path of its ranks
lies in the tree. A round that starts at i and accepts j drafts makes the next one start at i + j + 1: the starts are
a Markov chain along the text, whose expected counters are summed exactly. In greedy and one_hot all chances are 0 or 1
and the counters are those of the decoder on this very text.

Not to be replayed, for their draft or their test hangs on tokens that x does not hold: dynamic trees, block
verification, drawing without replacement; lossy modes, which write other texts; and drafters that have no
teacher-forced form. One recording has one temperature.

Shapes: N places of an answer where a round can start, K depths.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.decoder import SpeculativeDecoder, resolve_settings
from draftsmith.inference.replay.token_scores import UNRANKED, DrafterScores, TargetScores, score_drafter, score_target
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.drafting.base import NO_TOKEN
from draftsmith.models.errors import UserError
from draftsmith.models.layers import shift_left
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, DynamicTree, Shape, StaticTree
from draftsmith.models.target.target import Features
from draftsmith.models.training_free.ngram import Ngram

REPLAYED_MODES: tuple[VerificationMode, ...] = ("greedy", "one_hot", "probabilistic")
LOWEST = -1e4  # log of a chance of 0, which rounding may give a token of the text at the edge of top-p


@dataclass(frozen=True)
class Recording:
    """Answers of the target, some tokens longer than the limit where they do not end before: a draft looks ahead."""

    prompts: list[list[int]]
    answers: list[list[int]]
    max_new_tokens: int  # the limit of decoding
    sampling: Sampling = Sampling()
    seed: int = 0

    def limit(self, index: int) -> int:
        """Tokens of an answer that decoding emits."""
        return min(len(self.answers[index]), self.max_new_tokens)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Recording":
        content = json.loads(path.read_text())
        return cls(**{**content, "sampling": Sampling(**content["sampling"])})


def record(
    target: Target,
    prompts: list[list[int]],
    sampling: Sampling,
    max_new_tokens: int,
    longest: int,
    seed: int = 0,
    batch_size: int = 16,
) -> Recording:
    """Decode prompts plainly, for drafts of up to `longest` tokens. Noise as in `generate`, a prompt's place its id."""
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    plain.check_prompts(prompts, max_new_tokens)
    settings = resolve_settings(plain.drafter, sampling, max_new_tokens + longest, seed=seed)
    answers = plain.decode(prompts, settings, batch_size=batch_size).token_ids
    return Recording(prompts, answers, max_new_tokens, sampling, seed)


@dataclass
class AcceptanceTrace:
    """How one drafter fares along one answer; place i is a round's start with i + 1 tokens written. fp64 in arrays."""

    accept: dict[str, np.ndarray]  # verification mode -> [N, K] chance that depth k is accepted when all before it were
    rank: np.ndarray  # [N, K] int64 of the text's token among the drafter's, or UNRANKED
    confidence: np.ndarray  # [N, K] the drafter's probability of its likeliest token; 1 where it has none
    choice: np.ndarray  # [N, K] int64 that token, in the draft vocabulary
    best: np.ndarray  # [N, K] the target's probability of its own likeliest token there
    entropy: np.ndarray  # [N, K] of the target there, nats
    following: np.ndarray  # [N, K] int64 the text's token; -1 beyond its end
    num_drafted: np.ndarray  # [N] int64 tokens drafted, where K are asked for
    limit: int  # tokens of the answer that decoding emits


def replay(
    target: Target, recording: Recording, drafters: dict[str, Drafter], longest: int
) -> dict[str, list[AcceptanceTrace]]:
    """The traces of each drafter, one a text, for drafts of up to `longest` tokens; one pass of the target a text.

    Drafters are in evaluation mode. Raises `UserError` for one that cannot be replayed.
    """
    for drafter in drafters.values():
        check_replayed(drafter)
    layer_ids = tuple(sorted({layer_id for drafter in drafters.values() for layer_id in drafter.layer_ids}))
    traces: dict[str, list[AcceptanceTrace]] = {name: [] for name in drafters}
    for index in range(len(recording.prompts)):
        batch = text_batch(recording, index, target.device)
        features = target.features(batch, layer_ids)
        rated = score_target(target, features.last_hidden, batch, recording.sampling)
        for name, drafter in drafters.items():
            if isinstance(drafter, Ngram):
                found = lookup_trace(drafter, recording, index, rated, longest)
            else:
                own = select_layers(features, layer_ids, drafter.layer_ids)
                scores = score_drafter(drafter, batch, own, longest, recording.sampling)
                found = acceptance_trace(recording, index, rated, scores)
            traces[name].append(found)
    return traces


def text_batch(recording: Recording, index: int, device: torch.device) -> Batch:
    """Prompt and answer as one row."""
    prompt = recording.prompts[index]
    token_ids = torch.tensor([prompt + recording.answers[index]], device=device)
    return Batch(token_ids, torch.arange(token_ids.shape[1], device=device)[None] >= len(prompt))


def select_layers(features: Features, layer_ids: tuple[int, ...], wanted: tuple[int, ...]) -> Features:
    """Only the wanted ones of the layers that features have."""
    if not wanted:
        return Features(features.last_hidden, None)
    assert features.layers is not None
    layers = features.layers.unflatten(-1, (len(layer_ids), -1))
    return Features(features.last_hidden, layers[..., [layer_ids.index(i) for i in wanted], :].flatten(-2))


def acceptance_trace(recording: Recording, index: int, rated: TargetScores, scores: DrafterScores) -> AcceptanceTrace:
    """From the scores [.., 1, T] of one text."""
    depths, first = range(len(scores.rank)), len(recording.prompts[index]) - 1
    last = first + len(recording.answers[index])

    def at_starts(values: torch.Tensor) -> np.ndarray:
        """[K, 1, T] -> [N, K]"""
        return values[:, 0, first:last].T.cpu().numpy()

    def of_target(values: torch.Tensor) -> np.ndarray:
        """[1, T] of places t + 1 + k -> [N, K]"""
        return at_starts(torch.stack([shift_left(values, 1 + k) for k in depths])).astype(np.float64)

    rank = at_starts(scores.rank)
    log_q, log_p = at_starts(scores.log_q).astype(np.float64), np.maximum(of_target(rated.log_p), LOWEST)
    likeliest = (rank == 0).astype(np.float64)
    following = np.pad(recording.answers[index], (0, len(depths)), constant_values=-1)
    return AcceptanceTrace(
        accept={
            "greedy": likeliest,
            "one_hot": likeliest,
            "probabilistic": np.exp(np.minimum(0, log_q - log_p)),
        },
        rank=rank,
        confidence=at_starts(scores.confidence).astype(np.float64),
        choice=at_starts(scores.choice),
        best=of_target(rated.best),
        entropy=of_target(rated.entropy),
        following=np.stack([following[1 + k :][: last - first] for k in depths], 1),
        num_drafted=np.full(last - first, len(depths)),
        limit=recording.limit(index),
    )


def lookup_trace(
    drafter: Ngram, recording: Recording, index: int, rated: TargetScores, longest: int
) -> AcceptanceTrace:
    """Of a drafter that looks its drafts up in the text written so far: asked at every place at once."""
    prompt, answer = recording.prompts[index], recording.answers[index]
    lengths = torch.arange(len(prompt) + 1, len(prompt) + len(answer) + 1)
    text = torch.tensor(prompt + answer + [NO_TOKEN - 1] * longest)
    drafted = drafter.continuation(text.expand(len(lengths), -1), lengths, longest)[0]  # [N, K]
    right = drafted == text.unfold(0, longest, 1)[lengths]
    scores = DrafterScores(*(torch.zeros(longest, 1, len(prompt) + len(answer)) for _ in range(4)))
    scores.log_q[:] = float("-inf")
    scores.rank = torch.full_like(scores.rank, UNRANKED, dtype=torch.int64)
    scores.rank[:, 0, len(prompt) - 1 : -1] = torch.where(right, 0, UNRANKED).T
    found = acceptance_trace(recording, index, rated, scores)
    found.confidence[:] = 1
    found.choice, found.num_drafted = drafted.numpy(), (drafted != NO_TOKEN).sum(1).numpy()
    return found


def check_replayed(drafter: Drafter) -> None:
    """Refuse a drafter whose drafts a recorded text does not tell."""
    if type(drafter).depths is Drafter.depths and not isinstance(drafter, Ngram):
        raise UserError(f"{drafter.kind} cannot be replayed from a text alone: measure it with draftsmith evaluate")


def check_replayed_as(shape: Shape, mode: VerificationMode) -> Chain | StaticTree:
    """The shape; refuse one, or a mode, of which a recorded text does not tell."""
    if isinstance(shape, DynamicTree):
        raise UserError(
            "a dynamic tree cannot be replayed, its shape hangs on tokens that the text does not hold: measure it "
            "with draftsmith evaluate, or give a static tree"
        )
    if mode not in REPLAYED_MODES or (mode == "probabilistic" and not isinstance(shape, Chain)):
        raise UserError(
            f"verification_mode {mode} of such drafts cannot be replayed from a text: give one_hot or greedy, or "
            "measure it with draftsmith evaluate"
        )
    return shape


# --- counters


def survival(trace: AcceptanceTrace, shape: Chain | StaticTree, mode: VerificationMode) -> np.ndarray:
    """Chance that a round from each place accepts at least 1, 2, ... tokens, [N, depth]."""
    if isinstance(shape, Chain):
        return trace.accept[mode][:, : shape.depth].cumprod(1)
    paths, nodes = trace.rank[:, : shape.depth].tolist(), set(shape.choices)
    return np.array([[float(tuple(path[: j + 1]) in nodes) for j in range(shape.depth)] for path in paths])


def starts(alive: np.ndarray, limit: int) -> np.ndarray:
    """Chance that a round starts at each place, [N], from how far rounds get, [N, K]. Decoding ends at the limit."""
    places, depth = alive.shape
    exactly = -np.diff(alive, axis=1, prepend=1, append=0)  # [N, K + 1] chance of so many accepted tokens
    chance = np.zeros(places + depth + 1)
    chance[0] = 1
    for place in range(limit - 1):
        chance[place + 1 : place + depth + 2] += chance[place] * exactly[place]
    return np.where(np.arange(places) < limit - 1, chance[:places], 0)


def expected_stats(trace: AcceptanceTrace, shape: Chain | StaticTree, mode: VerificationMode) -> Stats:
    """The decoder's counters on this text, in expectation over what a drafter draws and over the coins of accepting."""
    alive = survival(trace, shape, mode)
    chance = starts(alive, trace.limit)
    if isinstance(shape, Chain):
        drafted = np.minimum(trace.num_drafted, shape.depth)
    else:
        drafted = np.full(len(alive), shape.num_nodes)
    of_drafts = chance * (drafted > 0)
    histogram = of_drafts @ -np.diff(alive, axis=1, prepend=1, append=0)
    return Stats(
        shape.depth,
        num_drafts=float(of_drafts.sum()),
        num_draft_tokens=float(of_drafts @ drafted),
        num_accepted_tokens=float(of_drafts @ alive.sum(1)),
        num_emitted_tokens=trace.limit,
        num_rounds=float(chance.sum()),
        acceptance_histogram=histogram.tolist(),
    )
