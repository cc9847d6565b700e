"""Predicted times on GPUs that are not here, against numbers that were worked out by hand."""

from dataclasses import replace

import pytest

from draftsmith.inference.planning.gpu_roofline import (
    DrafterShape,
    Machine,
    RooflineCosts,
    TargetTimes,
    dollars_per_million,
    reply_seconds,
    touched,
)
from draftsmith.inference.planning.gpus import GPUS, gpu_named, gpu_of_device
from draftsmith.models.errors import UserError
from draftsmith.models.target.shape import CachedLayers, RoutedExperts, TargetShape

LLAMA_8B = TargetShape(6_979_588_096, 525_336_576, 525_336_576, [], "8B", 32, [CachedLayers(32, 2048, None)], 0)
EAGLE3 = DrafterShape("eagle3", "token", 424_689_664, 1, 2048, None)
H100 = TargetTimes(LLAMA_8B, Machine(GPUS["H100"]))


def test_llama_8b_on_an_h100() -> None:
    """15.01 GB of weights at 0.9 x 3.35 TB/s take 4.978 ms, 268 MB of cache 0.089, 32 layers 0.64, the step 1."""
    assert H100.plain(1, 2048) == pytest.approx(4.978 + 0.089 + 0.64 + 1, abs=1e-3)
    assert H100.plain(64, 2048) == pytest.approx(4.978 + 64 * 0.08904 + 1.64, abs=1e-3)
    # 2 operations a weight and token at 0.7 x 989 TFLOP/s take as long as 2 bytes at 3.015 TB/s from 229.6 tokens on.
    assert H100.free_tokens() == 229
    assert H100.verify(4, 100, 0) == pytest.approx(1000 * 2 * 500 * 7_504_924_672 / (0.7 * 989e12) + 0.64)
    assert H100.bound_from(2048) is None  # a text's cache takes longer to read than its token to multiply
    assert H100.bound_from(128) is not None
    assert H100.rows_that_fit(2048) == 208  # (72 - 16.06) GB / 268.4 MB
    assert TargetTimes(LLAMA_8B, Machine(GPUS["L4"], weights="bf16")).rows_that_fit(100_000) == 0


def test_where_a_step_begins_to_compute_longer_than_it_reads() -> None:
    """At that batch size and not at the one before."""
    bound = H100.bound_from(128)
    assert bound is not None
    for batch, computes in ((bound - 1, False), (bound, True)):
        assert (H100.computing_ms(batch) >= H100.reading_ms(batch, batch, 128)) == computes


def test_drafts_of_each_kind() -> None:
    """EAGLE-3's 0.85 GB take 0.2817 ms, its cache 0.0028, its layer 0.02 and its pass 0.4: 0.7045 ms a token."""
    costs = RooflineCosts(H100, EAGLE3)
    assert costs.draft(4, 1, 2048) == pytest.approx(4 * 0.7045, abs=1e-3)
    assert costs.break_even(4, 1, 2048) == pytest.approx((4 * 0.7045 + 6.7074) / 6.7074, abs=1e-4)
    assert costs.speedup(3.08, 4, 1, 2048) == pytest.approx(3.08 / 1.4201, abs=1e-3)
    assert costs.round(0, 8, 2048) == costs.plain(8, 2048)
    block = RooflineCosts(H100, replace(EAGLE3, passes="block"))
    assert block.draft(7, 1, 2048) == costs.draft(1, 1, 2048)  # one pass, while its tokens are read for nothing
    assert block.draft(7, 100, 0) > block.draft(2, 100, 0)
    heads = RooflineCosts(H100, replace(EAGLE3, passes="head", weights=4 * EAGLE3.weights, longest=4))
    assert heads.draft(3, 1, 2048) == pytest.approx(costs.draft(3, 1, 2048))
    assert RooflineCosts(H100, replace(EAGLE3, passes="none")).draft(5, 1, 2048) == 0.0
    assert costs.round(5, 1, 2048, nodes=1000) > costs.round(5, 1, 2048)  # of a tree all nodes are verified


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (4, 29), (8, 52), (16, 82), (64, 126)])
def test_a_batch_touches_more_experts(tokens: int, experts: int) -> None:
    """128 experts, of which each token takes 8: 128 (1 - (1 - 8/128)^T)."""
    assert round(touched(RoutedExperts(48, 128, 8, 1), tokens)) == experts


def test_mixtures_windows_and_states() -> None:
    """By hand, in bytes: a layer's experts by the tokens of the pass, a window at most, states read and written."""
    shape = TargetShape(
        100, 10, 0, [RoutedExperts(2, 4, 2, 50)], "mixture", 2, [CachedLayers(1, 8, 16), CachedLayers(1, 8, None)], 1000
    )
    times = TargetTimes(shape, Machine(GPUS["H100"]))
    assert times.weight_bytes(1) == 2 * (100 + 10 + 2 * 2 * 50)
    assert times.weight_bytes(1000) == pytest.approx(2 * (100 + 10 + 2 * 4 * 50))
    assert times.kept_bytes(10) == 2 * (8 * 10 + 8 * 10) + 1000
    assert times.kept_bytes(100) == 2 * (8 * 16 + 8 * 100) + 1000
    assert times.moved_bytes(100) == times.kept_bytes(100) + 1000
    assert times.computing_ms(3) == pytest.approx(1000 * 2 * 3 * (110 + 2 * 2 * 50) / (0.7 * 989e12))


def test_types_of_weights_and_several_gpus() -> None:
    """Layers shrink and the head does not; fp8 is multiplied as such where the GPU can; exchanges take time."""
    in_fp8 = TargetTimes(LLAMA_8B, Machine(GPUS["H100"], weights="fp8"))
    assert in_fp8.weight_bytes(1) == LLAMA_8B.layer_weights + 2 * LLAMA_8B.head_weights
    assert in_fp8.stored_bytes() == LLAMA_8B.layer_weights + 4 * LLAMA_8B.head_weights
    assert Machine(GPUS["H100"], weights="fp8").flops == pytest.approx(0.7 * 1979e12)
    assert Machine(GPUS["A100-80GB"], weights="fp8").flops == pytest.approx(0.7 * 312e12)
    assert Machine(GPUS["H100"], weights="int4").flops == pytest.approx(0.7 * 989e12)
    two = TargetTimes(LLAMA_8B, Machine(GPUS["H100"], 2))
    assert two.plain(1, 2048) == pytest.approx((4.978 + 0.089) / 2 + 32 * (0.02 + 2 * 0.01) + 1, abs=1e-3)
    assert two.rows_that_fit(2048) == int((144e9 - two.stored_bytes()) // two.kept_bytes(2048))


def test_price_and_time_of_a_reply() -> None:
    """At 2.5 dollars an hour and 100 tokens a second a million tokens take 10,000 s, which is 6.94 dollars."""
    assert dollars_per_million(2.5, 1, 1, 10.0) == pytest.approx(6.944, abs=1e-3)
    assert dollars_per_million(2.5, 2, 4, 10.0) == pytest.approx(6.944 / 2, abs=1e-3)
    assert reply_seconds(300, 10.0) == 3.0


def test_names_of_gpus() -> None:
    assert gpu_named("rtx 4090") is GPUS["RTX-4090"]
    with pytest.raises(UserError, match=r"--gpu H101: .* give one of B200, H200, H100"):
        gpu_named("H101")
    assert gpu_of_device("NVIDIA H100 80GB HBM3") is GPUS["H100"]
    assert gpu_of_device("NVIDIA H100 PCIe") is GPUS["H100-PCIe"]
    assert gpu_of_device("NVIDIA A100-SXM4-80GB") is GPUS["A100-80GB"]
    assert gpu_of_device("NVIDIA GeForce RTX 3090") is GPUS["RTX-3090"]
    assert gpu_of_device("Quadro K620") is None
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert gpu.source.startswith("https://")
        assert 30 < gpu.bf16 / gpu.bandwidth < 1000  # operations a byte: a slip in a unit would show
