"""Suffix decoding against a slow twin on plain lists, and what it remembers of finished texts."""

import random
from collections import Counter

import pytest
import torch
from drafters import first_round
from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, measure
from draftsmith.models import Target
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Noise, Sampling
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.target.target import Features
from draftsmith.models.training_free.suffix import Suffix, SuffixConfig

DRAFT_LENGTH = 5


def suffix_with(**changes: object) -> Suffix:
    return Suffix(SuffixConfig(**{"longest": 4, "history": 200, "tokens_per_match": 1.0, **changes}))


def state_of(texts: list[list[int]]) -> DecodingState:
    """Rows with these texts; behind them stands what looks like text."""
    token_ids = torch.tensor([[*text, *[1] * (40 - len(text))] for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    nothing = Features(torch.zeros(len(texts), 1, 1), None)
    noise = Noise(0, torch.arange(len(texts)))
    newest = token_ids.gather(1, lengths[:, None] - 1)
    return DecodingState(
        token_ids, lengths, nothing, lengths[:, None] - 2, newest, lengths * 0, Sampling(), noise, False
    )


def slow_draft(config: SuffixConfig, history: list[list[int]], text: list[int]) -> tuple[list[int], int]:
    """The draft and the length of its match, from a dictionary of all that followed each suffix, oldest first."""
    followed: dict[tuple[int, ...], list[list[int]]] = {}
    for document in [*history, text]:
        for end in range(1, len(document)):
            for length in range(1, min(config.longest, end) + 1):
                followed.setdefault(tuple(document[end - length : end]), []).append(document[end:])
    lengths = [n for n in range(1, min(config.longest, len(text)) + 1) if tuple(text[-n:]) in followed]
    matched = max(lengths, default=0)
    if matched < config.shortest:
        return [], 0
    copies = followed[tuple(text[-matched:])][-config.copies :]
    draft: list[int] = []
    while len(draft) < min(DRAFT_LENGTH, int(config.tokens_per_match * matched)):
        going = [copy for copy in copies if copy[: len(draft)] == draft and len(copy) > len(draft)]
        votes = Counter(copy[len(draft)] for copy in going)
        if not votes or max(votes.values()) < config.least_share * len(copies):
            break
        draft.append(next(copy[len(draft)] for copy in going[::-1] if votes[copy[len(draft)]] == max(votes.values())))
    return draft, matched


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shortest": 2},
        {"tokens_per_match": 2.5},
        {"least_share": 0.6},
        {"copies": 3},
        {"longest": 1},
        {"history": 0},
    ],
    ids=str,
)
def test_drafts_are_those_of_a_dictionary(changes: dict[str, float]) -> None:
    """Texts over three letters repeat themselves at all lengths, with ties and with copies that end."""
    suffix, rng = suffix_with(**changes), random.Random(1)
    texts = [[rng.randrange(1, 4) for _ in range(rng.randrange(1, 30))] for _ in range(60)]
    history = [[rng.randrange(1, 4) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
    for text in history:
        suffix.remember(text)
    kept = history if suffix.config.history else []
    tokens, matched = suffix.look_up(state_of(texts), DRAFT_LENGTH)
    for row, text in enumerate(texts):
        draft, length = slow_draft(suffix.config, kept, text)
        assert tokens[row].tolist() == draft + [NO_TOKEN] * (DRAFT_LENGTH - len(draft))
        assert matched[row] == length


def test_the_history_is_bounded_and_forgotten() -> None:
    suffix = suffix_with(history=8)
    place = suffix.history.data_ptr()

    def drafts() -> list[list[int]]:
        tokens = suffix.look_up(state_of([[9, 5, 6], [5, 2, 3]]), 2)[0]
        return [[token for token in row if token != NO_TOKEN] for row in tokens.tolist()]

    assert drafts() == [[], []]
    suffix.remember([5, 6, 7, 8])
    assert drafts() == [[7, 8], []]
    suffix.remember([2, 3, 4])  # nine with their ends: the 5 is gone
    assert drafts() == [[7], [4]]
    suffix.remember([6])  # and the 7
    assert drafts() == [[], [4]]
    suffix.remember([1] * 20)
    assert drafts() == [[], []]
    assert suffix.history.data_ptr() == place  # recorded rounds read it there
    suffix.remember([2, 3, 4])
    suffix.forget()
    assert drafts() == [[], []]


def test_looking_up_does_not_wait_for_the_device(tiny_target: Target) -> None:
    """And the shapes are fixed where the history is taken whole, as on a GPU."""
    suffix = suffix_with()
    state = first_round(suffix, tiny_target, torch.randint(1, 9, (3, 12)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, matched = suffix.look_up(state, DRAFT_LENGTH)
    assert tokens.shape == (3, DRAFT_LENGTH)
    assert matched.shape == (3,)


def test_the_unused_part_of_the_history_changes_nothing() -> None:
    suffix = suffix_with()
    suffix.remember([1, 2, 3, 4])
    state = state_of([[2, 3], [1, 2], [4, 1]])
    expected = suffix.look_up(state, DRAFT_LENGTH)
    suffix.num_kept = len(suffix.history)  # whole, as on a GPU
    for found, wanted in zip(suffix.look_up(state, DRAFT_LENGTH), expected, strict=True):
        assert torch.equal(found, wanted)


def test_an_answer_given_before_is_drafted_whole(tiny_target: Target) -> None:
    """The same prompt again: after the first round each draft is right, until `forget`."""
    suffix = Suffix(SuffixConfig(tokens_per_match=4.0))
    decoder = SpeculativeDecoder(tiny_target, suffix)

    def decode() -> float:
        return decoder.generate(["The smith heats"], max_new_tokens=30, stop_at_eos=False).stats.total.num_rounds

    first, second = decode(), decode()
    assert second <= 7 < first  # 29 tokens, five a round, and a round to begin with
    suffix.forget()
    assert decode() == first


def test_repeats_do_not_flatter(tiny_target: Target) -> None:
    """Acceptance and rounds of three repeats, which all decode the same prompts, are those of one."""
    prompts = PromptSet("some", [tiny_target.encode(text) for text in ("a b a b", "def f(", "The smith")])
    suffix = Suffix(SuffixConfig())
    decode, rounds = SpeculativeDecoder.decode, []

    def counted(self: SpeculativeDecoder, *args: object) -> object:
        output = decode(self, *args)
        if self.drafter is suffix:
            rounds.append(output.stats.total)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeDecoder, "decode", counted)
        settings = MeasureSettings(batch_size=1, max_new_tokens=20, repeats=3)
        measure(tiny_target, {"suffix": suffix}, prompts, settings)
    assert rounds[1:4] == rounds[4:7] == rounds[7:10]  # the first is the warm-up
    assert sum(one.num_rounds for one in rounds[1:4]) < 3 * 19


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UserError, match="drafter.longest"):
        SuffixConfig(longest=0)


def test_a_draft_ends_where_no_row_has_more() -> None:
    suffix = suffix_with()
    draft = suffix.propose(state_of([[1, 2, 3], [5, 6, 7, 5, 6, 7]]), Chain(4))
    assert draft.tokens.tolist() == [[NO_TOKEN] * 3, [5, 6, 7]]
