"""CUDA graphs without a GPU: what is recorded, that replays give what fresh rounds give, and that all is freed.

The graphs are those of `helpers/replayed_graphs.py`, which run again what a call ran, on the memory of its capture.
"""

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from drafters import admit, build
from replayed_graphs import StaleAddress, record_on_cpu
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.batch_engine import BatchEngine
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.decoding.graphs import CALLS_TO_RECORD, RecordedCalls, can_be_recorded
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import DRAFTERS, Drafter, Target, kernels, load_drafter
from draftsmith.models.kernels import counters
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, DynamicTree, StaticTree

CPU = torch.device("cpu")
ROTARY = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
LONG = {**ROTARY, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
PROMPTS = ["The smith heats the iron", "iron iron iron iron", "x", "def strike(iron):"]
STATIC_TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
TREE = DynamicTree(num_nodes=6, depth=3, width=2)


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {}, True),
        ("gemma3_text", {}, True),
        ("mixtral", {}, True),
        ("jetmoe", {"kv_channels": 8}, False),  # the experts' counts go to the host
        ("llama", {"rope_parameters": {**ROTARY, "rope_type": "dynamic"}}, False),
        ("phi3", {"rope_parameters": LONG}, False),
    ],
)
def test_models_that_wait_for_the_device_cannot_be_recorded(
    model_type: str, changes: dict[str, Any], expected: bool
) -> None:
    fields = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
    config = CONFIG_MAPPING[model_type](**{**fields, **heads, "max_position_embeddings": 64, **changes})
    assert can_be_recorded(AutoModelForCausalLM.from_config(config)) == expected


# --- recorded calls


class Adder:
    """Adds a step to a total, as a round changes the state of an engine."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.num_calls = 0

    def add(self, step: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.total += step
        return self.total * 2


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch)


def test_what_is_recorded_runs_again_without_its_function(on_cpu: None) -> None:
    calls, adder, step = RecordedCalls(CPU, records=True), Adder(), torch.ones(())
    outputs = [float(calls("add", adder.add, step)) for _ in range(6)]
    assert outputs == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert adder.num_calls == CALLS_TO_RECORD
    step.fill_(10)
    assert float(calls("add", adder.add, step)) == 32


def test_a_replay_that_reads_freed_memory_is_found(on_cpu: None) -> None:
    """The stand-in's own negative control: a step that nobody keeps, at the address of its capture."""
    calls, adder = RecordedCalls(CPU, records=True), Adder()
    for _ in range(CALLS_TO_RECORD):
        calls("add", lambda: adder.add(adder.total * 0 + 1))
    outside = [torch.ones(())]
    for _ in range(CALLS_TO_RECORD):
        calls("stale", lambda: adder.add(outside[0]))
    outside.clear()
    calls("add", adder.add)
    with pytest.raises(StaleAddress):
        calls("stale", adder.add)


def test_recorded_kernels_count_with_counters_of_their_own(on_cpu: None) -> None:
    """Two decoders may replay at once; what runs unrecorded shares the counters of its stream."""
    used: tuple[list[torch.Tensor], ...] = ([], [])  # by the calls of each
    for seen in used:
        calls = RecordedCalls(CPU, records=True)
        for kind in ("draft", "verify") * CALLS_TO_RECORD:
            calls(kind, lambda seen=seen: seen.append(counters(CPU)))
    for seen in used:
        *eager, draft, verify = seen
        assert {tensor.data_ptr() for tensor in eager} == {counters(CPU).data_ptr()}
        assert draft is verify
    addresses = {seen[-1].data_ptr() for seen in used} | {counters(CPU).data_ptr()}
    assert len(addresses) == 3


def test_streams_count_with_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a graph that nobody gave counters fails at its capture, not at replays beside others."""
    gpu, stream = torch.device("cuda", 0), SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(kernels, "_counters_of", functools.cache(lambda device, stream: torch.zeros(1)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first = counters(gpu)
    assert counters(gpu) is first
    stream.cuda_stream = 2
    assert counters(gpu) is not first
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(AssertionError, match="counters of its own"):
        counters(gpu)


@pytest.mark.parametrize("off", ["records", "switch"])
def test_what_is_not_recorded_is_called_each_time(off: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if off == "switch":
        monkeypatch.setenv("DRAFTSMITH_GRAPHS", "off")
    calls, adder = RecordedCalls(CPU, records=off == "switch"), Adder()
    for _ in range(5):
        calls("add", adder.add, torch.ones(()))
    assert adder.num_calls == adder.total == 5


def test_a_capture_that_fails_leaves_nothing_recorded(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning; what was recorded before goes, too, and the stream is the one of before."""
    streams: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "before")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    calls, adder, step = RecordedCalls(CPU, records=True), Adder(), torch.ones(())
    for _ in range(CALLS_TO_RECORD):
        calls("add", adder.add, step)
    monkeypatch.setattr(torch.cuda, "graph", Mock(side_effect=RuntimeError("operation not permitted\nwhen capturing")))
    other = Adder()
    with warnings.catch_warnings(record=True) as told:
        for _ in range(5):
            calls("other", other.add, step)
            calls("add", adder.add, step)
    assert ["CUDA graphs failed (operation not permitted); DRAFTSMITH_GRAPHS=off" in str(w.message) for w in told] == [
        True
    ]
    assert streams == ["before"]
    assert other.num_calls == other.total == 5
    assert adder.total == 8  # by replays until the capture failed
    assert adder.num_calls == CALLS_TO_RECORD + 3


# --- recorded rounds

CUT_ON_CPU = ("ngram", "suffix")  # their drafts are cut there to what was found
MODES: list[tuple[VerificationMode, Any]] = [
    ("greedy", 3),
    ("greedy", STATIC_TREE),
    ("greedy", TREE),
    ("greedy", Schedule(((1, 3), (2, 0)))),
    ("probabilistic", 3),
    ("block", 3),
    ("without_replacement", STATIC_TREE),
]


@pytest.fixture(scope="module")
def shallow_target(make_target_dir: Callable[..., Path]) -> Target:
    return Target.from_pretrained(make_target_dir(num_hidden_layers=3), "cpu", torch.float32)


def drafter_of(kind: str, target: Target) -> Drafter:
    return load_drafter(kind, target) if kind in ("none", "lookahead") else build(kind, target)


def texts_of(engine: BatchEngine, prompts: list[list[int]]) -> list[list[int]]:
    generation = Generation(engine, prompts, lag=1)
    while generation.running():
        generation.step()
    return [request.token_ids for request in generation.requests]


@pytest.mark.parametrize(
    ("kind", "modes"),
    [
        *((kind, MODES[:1]) for kind in DRAFTERS if kind not in CUT_ON_CPU),
        ("eagle3", MODES[1:]),
        ("none", [("one_hot", 3)]),
    ],
)
def test_recorded_rounds_give_the_texts_of_fresh_ones(
    kind: str, modes: list[tuple[VerificationMode, Any]], shallow_target: Target, on_cpu: None
) -> None:
    """Three requests through two rows, with the host a round late, and a second call with another seed and limit."""
    drafter, prompts = drafter_of(kind, shallow_target), [shallow_target.encode(prompt) for prompt in PROMPTS[:3]]
    for mode, draft in modes:
        sampling = Sampling() if mode == "greedy" else Sampling(0.8, 0.9, 20)
        settings = resolve_settings(drafter, sampling, 10, draft, mode)
        texts: dict[bool, list[list[int]]] = {}
        for records in (False, True):
            engine = BatchEngine(shallow_target, drafter, settings, 2, 64)
            engine.fixed_shapes, engine.recorded = True, RecordedCalls(CPU, records)
            texts[records] = texts_of(engine, prompts)
            assert engine.follow(replace(settings, seed=7, max_new_tokens=6), 2, 64)
            texts[records] += texts_of(engine, prompts)
            assert bool(engine.recorded.num_recorded) == records
        assert texts[True] == texts[False], (mode, draft)


def test_a_recorded_verification_takes_no_draft_made_anew(shallow_target: Target, on_cpu: None) -> None:
    """It would read the draft of its capture; so the engine records both halves of a round, or none."""
    drafter = drafter_of("eagle3", shallow_target)
    settings = resolve_settings(drafter, Sampling(), 10, 1)
    engine = BatchEngine(shallow_target, drafter, settings, 1, 64)
    engine.fixed_shapes, engine.recorded = True, RecordedCalls(CPU, True)
    admit(engine, [0], [shallow_target.encode(PROMPTS[0])])
    for _ in range(CALLS_TO_RECORD - 1):
        engine.verify(engine._propose(Chain(1), 0))
    recorded = engine._propose(Chain(1), 0)
    engine.verify(recorded)
    engine.verify(recorded)
    with pytest.raises(AssertionError, match="reads what it recorded"):
        engine.verify(engine._propose(Chain(1), 0))


def test_an_engine_serves_other_seeds_and_limits(tiny_target: Target) -> None:
    """So that its graphs do, too. Texts are those of an engine of their own."""
    decoder = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    engines = set()
    for seed, new in ((0, 8), (1, 8), (2, 5), (0, 8)):
        texts = decoder.generate(PROMPTS, new, 1.0, seed=seed).texts
        engines.add(decoder._engine)
        fresh = SpeculativeDecoder(tiny_target, decoder.drafter)
        assert fresh.generate(PROMPTS, new, 1.0, seed=seed).texts == texts
    assert len(engines) == 1


# --- memory


@pytest.mark.parametrize("kind", DRAFTERS)
def test_state_is_freed_with_its_last_reference(kind: str, shallow_target: Target, on_cpu: None) -> None:
    """Engine, cache and graphs are in no cycle, in which GPU memory would wait for the garbage collector."""
    decoder = SpeculativeDecoder(shallow_target, drafter_of(kind, shallow_target))
    gc.disable()
    try:
        engine = decoder.engine_for(resolve_settings(decoder.drafter, Sampling(), 12, 3), 2, 32)
        if kind not in CUT_ON_CPU:
            engine.fixed_shapes, engine.recorded = True, RecordedCalls(CPU, True)
        texts_of(engine, [[1, 2, 3], [4, 5]])
        held = [engine, engine.cache, engine.state, engine.state.cache, engine.recorded, decoder]
        dead = [weakref.ref(thing) for thing in held if thing is not None]
        del engine, decoder, held
        assert [ref() for ref in dead] == [None] * len(dead)
    finally:
        gc.enable()


def test_all_engines_of_a_model_share_its_merged_weights(tiny_target: Target) -> None:
    """A new state copied those of a draft model anew each time."""
    drafter = build("draft_model", tiny_target)
    caches = [drafter.new_cache(1, 16, Chain(3)) for _ in range(2)]
    merged = [
        [weight.data_ptr() for layer in cache.fused_decoder.layers for weight in (layer.qkv, layer.mlp.gate_up)]
        for cache in caches
    ]
    assert merged[0] == merged[1]
    own = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    assert {cache.fused_decoder.layers[0].mlp.out.untyped_storage().data_ptr() for cache in caches} <= own
