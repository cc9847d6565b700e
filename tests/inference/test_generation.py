"""The decoder as a whole: whatever drafts, the text is the target's."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from drafters import admit, untrained
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding import batch_engine
from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.decoding.decoder import Output, resolve_settings
from draftsmith.inference.decoding.generation import Admission, Generation
from draftsmith.inference.decoding.schedule import Adaptive, Confident, Schedule
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft, chain
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import DynamicTree, Shape, StaticTree, node_depths
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import chain_window
from draftsmith.models.training_free.no_drafter import NoDrafter, NoneConfig

PROMPTS = ["The smith heats the iron", "def strike(iron):", "A draft is cheap, a draft is cheap, a", "x"]
TREE = DynamicTree(num_nodes=12, depth=4, width=3)
STATIC_TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
KINDS = [kind for kind in DRAFTERS if kind != "none"]
CUT_ON_CPU = ("ngram", "suffix")  # their drafts are cut there to what was found


@functools.lru_cache
def drafter_of(kind: str, target: Target) -> Drafter:
    return untrained(kind, target)


CONTEXT = 128  # of the tiny target


class Oracle(NoDrafter):
    """Drafts what the target would say for the first `num_right` tokens, then something else."""

    kind = "oracle"
    max_draft_length = None

    def __init__(self, answers: list[list[int]], prompt_lengths: list[int], num_right: int) -> None:
        super().__init__(NoneConfig())
        self.answers, self.prompt_lengths, self.num_right = answers, prompt_lengths, num_right

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        rows = []
        lengths = state.lengths.tolist()  # of the rows up to the last that is not free
        for answer, prompt_length, length in zip(self.answers, self.prompt_lengths, lengths, strict=False):
            told = length - prompt_length
            right = (answer + [0] * shape.depth)[told : told + shape.depth]
            rows.append([token if i < self.num_right else (token + 1) % 300 for i, token in enumerate(right)])
        return chain(torch.tensor(rows))


class RandomTree(Oracle):
    """A random tree in which a random path is right: other nodes draft wrong tokens, some of them twice."""

    kind = "tree"
    can_branch = True

    def new_cache(self, *_: object) -> None:
        """It grows its trees without looking at a target."""

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        right = super().propose(state, shape).tokens
        num_nodes = shape.num_nodes
        generator = torch.Generator().manual_seed(int(state.lengths.sum()))
        tokens = torch.randint(300, (len(right), num_nodes), generator=generator)
        parents = (torch.rand(len(right), num_nodes, generator=generator) * (torch.arange(num_nodes) + 1)).long() - 1
        paths = torch.rand(len(right), num_nodes, generator=generator).topk(shape.depth).indices.sort().values
        parents.scatter_(1, paths, torch.cat([paths.new_full((len(paths), 1), -1), paths[:, :-1]], 1))
        parents = torch.where(node_depths(parents, num_nodes)[:, 1:] > shape.depth, -1, parents)
        tokens.scatter_(1, paths, right)
        return Draft(tokens, parents, shape.depth)


def plain(target: Target) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, load_drafter("none", target))


@functools.lru_cache
def plain_output(target: Target, num_prompts: int = len(PROMPTS), **settings: Any) -> Output:
    """What every drafter is compared with; decoded once."""
    return plain(target).generate(PROMPTS[:num_prompts], max_new_tokens=24, **settings)


def test_plain_greedy_decoding_is_transformers(tiny_target: Target) -> None:
    """A ragged batch on the slot cache against one prompt at a time through stock attention and `generate`."""
    stock = AutoModelForCausalLM.from_pretrained(tiny_target.name, attn_implementation="eager", dtype=torch.float32)
    found = plain(tiny_target).generate(PROMPTS, max_new_tokens=24).token_ids
    for prompt, answer in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([tiny_target.encode(prompt)])
        expected = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert answer == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("draft_length", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_plain_decoding(kind: str, draft_length: int, tiny_target: Target) -> None:
    decoder = SpeculativeDecoder(tiny_target, drafter_of(kind, tiny_target))
    for prompts in (PROMPTS, PROMPTS[:1]):
        expected = plain_output(tiny_target, len(prompts))
        found = decoder.generate(prompts, max_new_tokens=24, draft_length=draft_length)
        assert found.token_ids == expected.token_ids
        assert found.texts == expected.texts


@pytest.mark.parametrize("kind", KINDS)
def test_one_hot_sampling_is_plain_sampling_for_a_seed(kind: str, tiny_target: Target) -> None:
    """Coins are keyed by position, so sample-then-match gives the very tokens of plain sampling."""
    settings = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 5}
    expected = plain_output(tiny_target, **settings)
    decoder = SpeculativeDecoder(tiny_target, drafter_of(kind, tiny_target))
    found = decoder.generate(PROMPTS, max_new_tokens=24, verification_mode="one_hot", **settings)
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize("num_right", [0, 1, 3, 4])
def test_counters_of_a_drafter_that_is_right_so_often(num_right: int, tiny_target: Target) -> None:
    """Each round accepts exactly `num_right` of four; 1 + 20 tokens take 20 / (num_right + 1) rounds."""
    answers = plain(tiny_target).generate(PROMPTS, max_new_tokens=40, stop_at_eos=False).token_ids
    lengths = [len(tiny_target.encode(prompt)) for prompt in PROMPTS]
    decoder = SpeculativeDecoder(tiny_target, Oracle(answers, lengths, num_right))
    output = decoder.generate(PROMPTS, max_new_tokens=21, draft_length=4, stop_at_eos=False)
    assert output.token_ids == [answer[:21] for answer in answers]
    rounds = 20 // (num_right + 1)
    for stats in output.stats.requests:
        assert stats.num_drafts == stats.num_rounds == rounds
        assert stats.num_accepted_tokens == rounds * num_right
        assert stats.num_emitted_tokens == 21
        assert stats.acceptance_histogram[num_right] == rounds
    assert output.stats.total.mean_acceptance_length == num_right + 1
    assert output.stats.total.per_position_acceptance_rates == [1.0] * num_right + [0.0] * (4 - num_right)


@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_trees_leave_the_output_as_it_is(num_right: int, tiny_target: Target) -> None:
    """Greedy and sampled, and the cache after each round holds what a fresh reading of the text would."""
    lengths = [len(tiny_target.encode(prompt)) for prompt in PROMPTS]
    for settings in ({}, {"temperature": 0.8, "verification_mode": "one_hot"}):
        mode = settings.pop("verification_mode", None)
        answers = plain(tiny_target).generate(PROMPTS, max_new_tokens=40, stop_at_eos=False, **settings).token_ids
        drafter = RandomTree(answers, lengths, num_right)
        output = SpeculativeDecoder(tiny_target, drafter).generate(
            PROMPTS, max_new_tokens=21, tree=TREE, stop_at_eos=False, verification_mode=mode, **settings
        )
        assert output.token_ids == [answer[:21] for answer in answers]
        assert output.stats.total.num_accepted_tokens >= num_right * output.stats.total.num_drafts


def test_the_cache_after_a_tree_is_that_of_a_fresh_reading(tiny_target: Target) -> None:
    prompts = [tiny_target.encode(prompt) for prompt in PROMPTS]
    answers = plain(tiny_target).generate(PROMPTS, max_new_tokens=40, stop_at_eos=False).token_ids
    drafter = RandomTree(answers, [len(prompt) for prompt in prompts], num_right=3)
    settings = GenerationSettings(max_new_tokens=20, shape=TREE, stop_at_eos=False)
    engine = BatchEngine(tiny_target, drafter, settings, num_rows=4, num_slots=CONTEXT)
    generation = Generation(engine, prompts)
    while generation.running():
        generation.step()
        fresh = SlotCache(4, CONTEXT)
        length = int(engine.state.lengths.max())
        tiny_target.run(engine.state.token_ids[:, :length], chain_window(torch.zeros(4).long(), length), fresh)
        for row, num_read in enumerate((engine.state.lengths - 1).tolist()):
            for layer in range(tiny_target.num_layers):
                caches = engine.cache.keys_and_values(layer), fresh.keys_and_values(layer)
                for found, expected in zip(*caches, strict=True):
                    found, expected = found[row, :, :num_read], expected[row, :, :num_read]
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class Queue(NamedTuple):
    prompts: list[list[int]]
    eos: int
    answers: list[list[int]]  # of each prompt by itself


@pytest.fixture(scope="module")
def queue(tiny_target: Target) -> Queue:
    prompts = [tiny_target.encode(prompt * (1 + i % 3)) for i, prompt in enumerate(PROMPTS * 3)]
    eos = plain(tiny_target).generate([prompts[4]], max_new_tokens=12, stop_at_eos=False).token_ids[0][5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "eos_token_ids", [eos])
        answers = [plain(tiny_target).generate([prompt], max_new_tokens=12).token_ids[0] for prompt in prompts]
    assert {len(answer) for answer in answers} > {12}  # some end early
    return Queue(prompts, eos, answers)


@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize(("lag", "chunk"), [(0, None), (1, None), (1, 3)])
def test_a_queue_through_few_rows_gives_what_each_prompt_gives(
    kind: str, lag: int, chunk: int | None, queue: Queue, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows change hands at any time, the host may be a round late, and others decode between the chunks of a prompt:
    nothing of it shows.
    """
    monkeypatch.setattr(batch_engine, "PREFILL_CHUNK", 7)
    monkeypatch.setattr(Target, "eos_token_ids", [queue.eos])
    drafter = drafter_of(kind, tiny_target)
    shape = drafter.own_shape(0 if kind == "none" else 3)
    engine = BatchEngine(tiny_target, drafter, GenerationSettings(max_new_tokens=12, shape=shape), 3, CONTEXT)
    generation = Generation(engine, queue.prompts, lag=lag, admission=Admission(chunk))
    told: list[list[int]] = [[] for _ in queue.prompts]
    while generation.running():
        for emission in generation.step():
            told[emission.request] += emission.token_ids
    assert told == queue.answers
    for request, answer in zip(generation.requests, queue.answers, strict=True):
        assert request.token_ids == answer
        assert request.admitted <= request.first_token <= request.finished
        assert request.stats.num_emitted_tokens == len(answer)
        assert request.stats.num_accepted_tokens + request.stats.num_rounds + 1 >= len(answer)


class WithTheHost(TorchDispatchMode):
    """Keeps what passes between host and device: values read there, tensors made here, sizes that hang on values."""

    KINDS = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "isin",
        "lift_fresh",
        "repeat_interleave.Tensor",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [str(op) for kind in self.KINDS if kind in str(op)]
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CUT_ON_CPU])
def test_a_round_can_be_recorded(kind: str, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph holds nothing that passes between host and device: draft, verification, commit, in every mode."""
    drafter = drafter_of(kind, tiny_target)
    monkeypatch.setattr(torch.Tensor, "tolist", None)  # seen by no dispatch mode
    recorded = 0
    for mode, draft in itertools.product(get_args(VerificationMode), (3, STATIC_TREE, TREE)):
        sampling = Sampling() if mode in ("greedy", "synthetic") else Sampling(0.8, 0.9, 20)
        try:
            rates = (0.5, 0.3) if mode == "synthetic" else ()
            settings = resolve_settings(drafter, sampling, 12, draft, mode, synthetic_rates=rates)
        except UserError:  # it drafts no trees, or has no probabilities
            continue
        engine = BatchEngine(tiny_target, drafter, settings, 2, CONTEXT)
        engine.fixed_shapes = True  # as on a GPU: a CPU looks at lengths to compute less
        admit(engine, [0, 1], [[5, 6, 7], [8, 9]])
        with WithTheHost() as seen:
            for _ in range(2):
                record = engine.verify(engine.draft())
        assert not seen.found, (mode, draft)
        assert record.shape == (2, 4 + settings.shape.depth + 1)
        recorded += 1
    assert recorded >= 4
    with WithTheHost() as seen:
        record[0, 0].item()
        torch.tensor([1.0])
    assert len(seen.found) == 2


def test_sampled_answers_do_not_depend_on_the_batch(tiny_target: Target) -> None:
    """One request at a time and all through three rows: a request's noise is its own."""
    decoder = plain(tiny_target)
    settings = {"max_new_tokens": 12, "temperature": 0.9, "seed": 3}
    expected = [decoder.generate([p], request_ids=[i], **settings).token_ids[0] for i, p in enumerate(PROMPTS)]
    assert decoder.generate(PROMPTS, batch_size=3, **settings).token_ids == expected


def test_nothing_comes_after_the_end_of_text(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EOS that is accepted in the middle of a draft ends the text, and drafts behind it do not count."""
    decoder = plain(tiny_target)
    answers = decoder.generate(PROMPTS[:1], max_new_tokens=20, stop_at_eos=False).token_ids
    end = answers[0][6]
    first = answers[0].index(end)
    monkeypatch.setattr(Target, "eos_token_ids", [end])
    oracle = Oracle(answers, [len(tiny_target.encode(PROMPTS[0]))], num_right=4)
    output = SpeculativeDecoder(tiny_target, oracle).generate(PROMPTS[:1], max_new_tokens=20, draft_length=4)
    assert output.token_ids[0] == answers[0][: first + 1]
    assert output.stats.total.num_accepted_tokens <= first
    assert output.stats.total.num_emitted_tokens == first + 1


def test_a_round_is_cut_at_the_limit(tiny_target: Target) -> None:
    answers = plain(tiny_target).generate(PROMPTS, max_new_tokens=20, stop_at_eos=False).token_ids
    oracle = Oracle(answers, [len(tiny_target.encode(prompt)) for prompt in PROMPTS], num_right=4)
    for limit in (1, 2, 5, 8):
        output = SpeculativeDecoder(tiny_target, oracle).generate(
            PROMPTS, max_new_tokens=limit, draft_length=4, stop_at_eos=False
        )
        assert output.token_ids == [answer[:limit] for answer in answers]


class RandomDrafts(NoDrafter):
    """Draws drafts from a fixed distribution that has nothing to do with the target."""

    kind = "random"
    can_sample = True
    max_draft_length = None

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        logits = torch.linspace(-2, 2, 300).expand(len(state.lengths), -1)
        tokens = torch.empty(len(logits), shape.depth, dtype=torch.int64)
        drawn_from = [state.choose(logits, depth, tokens[:, depth]) for depth in range(shape.depth)]
        return chain(tokens, torch.stack(drawn_from, 1))


def test_sampled_text_has_the_distribution_of_the_target(tiny_target: Target) -> None:
    """Second and third token of 4000 requests against plain sampling: chi-square over the likely tokens.

    Both samples are random: the statistic sum (a - b)^2 / (a + b) has as many degrees of freedom as bins less one.
    5 standard deviations above its mean have a chance below 1e-5. Seeds are fixed.
    """
    prompts = [tiny_target.encode(PROMPTS[0])] * 4000
    settings = {"max_new_tokens": 3, "temperature": 0.7, "stop_at_eos": False}
    expected = plain(tiny_target).generate(prompts, seed=1, **settings).token_ids
    decoder = SpeculativeDecoder(tiny_target, RandomDrafts(NoneConfig()))
    output = decoder.generate(prompts, seed=2, draft_length=2, verification_mode="probabilistic", **settings)
    assert output.stats.total.num_accepted_tokens > 0
    for position in (1, 2):
        counts = [torch.bincount(torch.tensor(ids)[:, position], minlength=300) for ids in (expected, output.token_ids)]
        likely = sum(counts) >= 20
        rest = [count[~likely].sum()[None] for count in counts]
        a, b = (torch.cat([count[likely], r]).double() for count, r in zip(counts, rest, strict=True))
        statistic = ((a - b) ** 2 / (a + b).clamp(min=1)).sum()
        degrees = len(a) - 1
        assert statistic < degrees + 5 * (2 * degrees) ** 0.5


def test_stream_gives_the_text_of_generate(tiny_target: Target) -> None:
    decoder = SpeculativeDecoder(tiny_target, drafter_of("ngram", tiny_target))
    rounds = list(decoder.stream(PROMPTS[2], 40, Sampling(), draft=4, seed=0))
    whole = decoder.generate([PROMPTS[2]], max_new_tokens=40)
    assert "".join(piece.text for round in rounds for piece in round.pieces) == whole.texts[0]
    assert sum(round.num_tokens for round in rounds) == len(whole.token_ids[0])


def test_settings_that_cannot_be_followed_are_refused(tiny_target: Target) -> None:
    ngram = SpeculativeDecoder(tiny_target, drafter_of("ngram", tiny_target))
    medusa = SpeculativeDecoder(tiny_target, drafter_of("medusa", tiny_target))
    bad = [
        (ngram, {"prompts": []}),
        (ngram, {"prompts": [[]]}),
        (ngram, {"max_new_tokens": 1000}),
        *((ngram, {"temperature": value}) for value in (-1.0, 1e-38, float("nan"), float("inf"))),
        (ngram, {"top_p": 0.5}),
        (ngram, {"verification_mode": "one_hot"}),
        (ngram, {"temperature": 1.0, "verification_mode": "probabilistic"}),
        (ngram, {"temperature": 1.0, "verification_mode": "greedy"}),
        (ngram, {"draft_length": 0}),
        (medusa, {"draft_length": 5}),
        (medusa, {"tree": StaticTree(tuple((i,) for i in range(301)))}),
        (medusa, {"tree": DynamicTree(num_nodes=400, depth=3, width=301)}),
    ]
    for decoder, settings in bad:
        with pytest.raises(UserError):
            decoder.generate(**{"prompts": PROMPTS, **settings})


WRONG_PROMPTS = ("Hello there", [1, 2, 3], (prompt for prompt in PROMPTS), {"prompt": "x"}, None, 7, torch.ones(2, 2))
WRONG_PROMPT = (None, 3.5, b"x", {"a": 1}, iter([1]), torch.ones(()))
WHOLE = ("max_new_tokens", "draft_length", "top_k", "seed", "batch_size")
NO_WHOLE_NUMBERS = (2.5, 4.0, "4", True, 2**64, 10**5000, math.nan, [4], torch.tensor(4))
NO_NUMBERS = (math.nan, math.inf, -math.inf, "1", True, 10**400, [1.0], 1j)
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes."


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        *(({"prompts": prompts}, "prompts: give a list of prompts") for prompts in WRONG_PROMPTS),
        ({"prompts": []}, "no prompts"),
        ({"prompts": [[1, 2], [3, 300]]}, "prompt 2 has token ids from 3 to 300: the target knows 0 to 299"),
        ({"prompts": [[-1]]}, "prompt 1 has token ids from -1 to -1"),
        ({"prompts": ["x", []]}, "prompt 2 is empty"),
        ({"prompts": [np.zeros(0, dtype=int)]}, "prompt 1 is empty"),
        ({"prompts": [["a", "b"]]}, "prompt 1: 'a': give a whole number"),
        ({"prompts": [[1, 2.0]]}, "prompt 1: 2.0: give a whole number"),
        ({"prompts": [torch.ones(2, 2)]}, r"prompt 1: \[1.0, 1.0\]: give a whole number"),
        *(({"prompts": ["x", prompt]}, "prompt 2 .*: give a list of whole numbers") for prompt in WRONG_PROMPT),
        ({"prompts": ["\ud83d"]}, "prompt 1 holds a half of a character"),
        ({"prompts": ["x" * 200]}, "prompt 1 has 201 tokens, which with 8 new ones exceeds"),
        ({"request_ids": [0]}, "request_ids: 1 for 4 prompts"),
        ({"request_ids": 7}, "request_ids 7: give a list of whole numbers"),
        ({"request_ids": ["a"] * 4}, "request_ids: 'a': give a whole number"),
        ({"batch_size": -1}, "batch_size -1: give at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens 0: give at least 1"),
        *(({name: value}, f"{name} .*: give a whole number") for name in WHOLE for value in NO_WHOLE_NUMBERS),
        ({"draft_length": 128}, "draft_length: 128 tokens in a row do not fit into the target's context of 128"),
        ({"draft_length": 2**62}, "draft_length: .* do not fit into the target's context"),
        *(({"temperature": value}, "temperature .*: give a finite number") for value in NO_NUMBERS),
        ({"temperature": 1e-40}, "temperature 1e-40: give 0 .greedy., or 1e-05 or more"),
        *(({"temperature": 1, "top_p": value}, "top_p .*: give a finite number") for value in NO_NUMBERS),
        ({"temperature": 1, "top_p": 1.5}, "top_p 1.5: give more than 0 and at most 1"),
        ({"temperature": 1, "top_k": -1}, "top_k -1: give 0 .off. or more"),
        ({"stop_at_eos": "no"}, "stop_at_eos 'no': give True or False"),
        ({"verification_mode": ["greedy"]}, "verification_mode .*: give one of"),
        ({"verification_mode": np.array([1, 2])}, "verification_mode .*: give one of"),
        ({"tree": [[0]]}, r"tree \[\[0\]\]: give a StaticTree"),
        ({"schedule": 4, "tree": STATIC_TREE}, "schedule: it sets the length of chains"),
        ({"schedule": "fast"}, "schedule 'fast': give a Schedule"),
    ],
)
def test_a_wrong_argument_is_named(settings: dict[str, Any], reason: str, tiny_target: Target) -> None:
    decoder = SpeculativeDecoder(tiny_target, drafter_of("ngram", tiny_target))
    with pytest.raises(UserError, match=reason) as raised:
        decoder.generate(**{"prompts": PROMPTS, "max_new_tokens": 8, **settings})
    assert "\n" not in str(raised.value)


def test_token_ids_may_be_arrays(tiny_target: Target) -> None:
    ids = tiny_target.encode(PROMPTS[0])
    prompts = [ids, tuple(ids), np.array(ids, dtype=np.int32), torch.tensor(ids)]
    settings = {"max_new_tokens": np.int64(4), "seed": np.int32(3), "request_ids": torch.zeros(4).long()}
    texts = plain(tiny_target).generate(prompts, temperature=np.float32(1), **settings).texts
    assert len(set(texts)) == 1
    assert texts == plain(tiny_target).generate([PROMPTS[0]] * 4, 4, 1.0, seed=3, request_ids=[0] * 4).texts


@pytest.mark.parametrize(
    "make",
    [
        lambda: StaticTree((("a",),)),
        lambda: StaticTree(((-1,),)),
        lambda: StaticTree(7),
        lambda: DynamicTree(4.5, 2, 2),
        lambda: DynamicTree(True, 2, 2),
        lambda: DynamicTree(10**5000, 2, 2),
        lambda: Schedule(((1, "four"),)),
        lambda: Schedule(((0, 4),)),
        lambda: Schedule("abc"),
        lambda: Schedule(None),
        lambda: Adaptive((0, 2.5)),
        lambda: Adaptive((0, 2), costs=((1, (1.0, math.nan)),)),
        lambda: Adaptive((0, 2), decay=math.nan),
        lambda: Confident(4.5, 0.5),
        lambda: Confident(4, math.nan),
    ],
)
def test_a_shape_or_schedule_of_no_such_numbers_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UserError, match="tree|schedule"):
        make()


def test_where_memory_runs_out_the_message_says_what_helps(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In making the engine and in a round; afterwards the decoder works as before."""
    decoder = plain(tiny_target)
    expected = decoder.generate(PROMPTS, 8).texts
    for owner, name in ((batch_engine.SlotCache, "__init__"), (BatchEngine, "verify")):
        for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(NO_MEMORY), MemoryError()):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, Mock(side_effect=error))
                with pytest.raises(UserError, match="out of memory: lower the batch size"):
                    decoder.generate(PROMPTS[:3], 9)
            assert decoder.generate(PROMPTS, 8).texts == expected
