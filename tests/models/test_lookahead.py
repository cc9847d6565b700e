"""Lookahead decoding against the paper's algorithm on plain lists, with a toy function for a target."""

import pytest
import torch

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, measure
from draftsmith.models import Target, load_drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Noise, Sampling
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.models.target.target import Features
from draftsmith.models.training_free.lookahead import Lookahead, LookaheadCache, LookaheadConfig

PLACES, CANDIDATES, POOL = 3, 2, 24
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5]


def likeliest(text: list[int]) -> int:
    """What the toy target says next: a function of the last two tokens that comes back to itself."""
    return (3 * text[-1] + text[-2] + 1) % 7


class SlowLookahead:
    """Algorithm 2 of arXiv 2402.02057: window, pool and verification of one text."""

    def __init__(self, prompt: list[int], length: int) -> None:
        self.text = list(prompt)
        first = len(prompt) - PLACES - length
        self.window = [[prompt[max(0, first + place + i)] for i in range(length)] for place in range(PLACES)]
        self.pool: list[list[int] | None] = []

    def candidates(self) -> list[list[int]]:
        found = [ngram[1:] for ngram in self.pool if ngram and ngram[0] == self.text[-1]]
        return found[::-1][:CANDIDATES]

    def round(self) -> None:
        trunk = [guesses[0] for guesses in self.window]
        ngrams = [
            [*guesses, likeliest([*self.text, *trunk[: place + 1], *guesses[1:]])]
            for place, guesses in enumerate(self.window)
        ]
        paths = self.candidates()
        for place, guesses in enumerate(self.window):
            paths.append([*trunk[: place + 1], *guesses[1:]])
        told = list(self.text)
        while len(told) < len(self.text) + 99:
            told.append(likeliest(told))
        told = told[len(self.text) :]
        # a walk goes down the first path that begins right: candidates, then the trunk
        first = next((path[0] for path in paths if path[0] == told[0]), None)
        in_candidates = any(path[0] == first for path in paths[:-PLACES])
        walked = [path for path in paths[:-PLACES] if path[0] == first] if in_candidates else paths[-PLACES:]
        self.text += told[: 1 + max(self.agreed(path, told) for path in walked)]
        for ngram in ngrams:
            self.pool = [None if old == ngram else old for old in self.pool]
            self.pool = [*self.pool, ngram][-POOL:]
        self.window = [ngram[1:] for ngram in ngrams]

    @staticmethod
    def agreed(path: list[int], told: list[int]) -> int:
        return next((i for i, token in enumerate(path) if token != told[i]), len(path))


def paths_of(draft: Draft, row: int) -> list[list[int]]:
    """Tokens from the root to each node."""
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


@pytest.mark.parametrize("length", [1, 2, 4])
def test_window_and_pool_are_those_of_the_paper(length: int) -> None:
    """Round by round: guesses and candidates of two rows with different prompts, one of which starts anew."""
    drafter = Lookahead(LookaheadConfig(window=PLACES, candidates=CANDIDATES, pool=POOL), torch.device("cpu"))
    shape = drafter.own_shape(length)
    assert shape.num_nodes == (PLACES + CANDIDATES) * length
    cache: LookaheadCache = drafter.new_cache(2, 200, shape)
    twins = [SlowLookahead(PROMPT, length), SlowLookahead(PROMPT[::-1], length)]
    predictions = torch.full((2, shape.num_nodes + 1), NO_TOKEN)
    num_rounds = 0
    for number in range(30):
        if number == 12:
            twins[1] = SlowLookahead([2, 2, 5], length)
            predictions[1] = NO_TOKEN
        texts = [twin.text for twin in twins]
        lengths = torch.tensor([len(text) for text in texts])
        token_ids = torch.tensor([text + [0] * (200 - len(text)) for text in texts])
        nothing, newest = Features(torch.zeros(2, 1, 1), None), token_ids.gather(1, lengths[:, None] - 1)
        noise = Noise(0, torch.arange(2))
        state = DecodingState(
            token_ids, lengths, nothing, lengths[:, None], newest, lengths * 0, Sampling(), noise, False, cache,
            predictions=predictions,
        )  # fmt: skip
        draft = drafter.propose(state, shape)
        for row, twin in enumerate(twins):
            assert cache.guesses[row].tolist() == twin.window
            paths = paths_of(draft, row)
            leaves = [paths[node] for node in cache.candidate_nodes.flatten().tolist()]
            for candidate in twin.candidates():
                assert all(candidate[: i + 1] in leaves for i in range(length))
                assert leaves.count(candidate) == 1  # those that begin alike share nodes
            trunk = [guesses[0] for guesses in twin.window]
            for place, guesses in enumerate(twin.window):
                assert paths[cache.window_nodes[place, -1]] == [*trunk[: place + 1], *guesses[1:]]
            predictions[row] = torch.tensor([likeliest(twin.text + path) for path in [[], *paths]])
            num_rounds += len(twin.candidates()) > 0
            twin.round()
    assert num_rounds > 20  # candidates there were


def test_a_text_that_repeats_itself_takes_fewer_rounds(tiny_target: Target) -> None:
    """And the one that starts it anew in a row meets no n-grams of the text before."""
    decoder = SpeculativeDecoder(tiny_target, load_drafter("lookahead", tiny_target))
    settings = {"max_new_tokens": 60, "stop_at_eos": False}
    first = decoder.generate(["A draft is cheap, a draft is cheap, a"], **settings)
    assert first.stats.total.num_rounds < 55  # of 59
    again = decoder.generate(["A draft is cheap, a draft is cheap, a"], **settings)
    assert again.stats.requests == first.stats.requests


def test_the_tree_is_told_in_evaluations(tiny_target: Target) -> None:
    prompts = PromptSet("some", [tiny_target.encode("a b a b")])
    settings = MeasureSettings(draft=3, max_new_tokens=8, repeats=1)
    row = measure(tiny_target, {"l": load_drafter("lookahead", tiny_target)}, prompts, settings)["l"]
    assert (row.setting.draft_length, row.setting.tree_nodes) == (7 + 2, (7 + 7) * 3)
    assert len(row.acceptance.acceptance_histogram) == 7 + 2 + 1
    assert row.lossless.identical == 1


def test_wrong_settings_are_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="drafter.pool"):
        LookaheadConfig(pool=5)
    decoder = SpeculativeDecoder(tiny_target, load_drafter("lookahead", tiny_target))
    with pytest.raises(UserError, match="tree"):
        decoder.generate(["x"], tree=StaticTree(((0,),)))
