"""Every kernel compiles for sm_90 (H100, H200), GPU or no GPU: what Triton's interpreter does not check.

Each does for sm_89 (L4, RTX 40) in one shape, too, and attention, which needs most shared memory there, in every width.
That is `pytest -m long`. By default each kernel compiles once, with the options and the widths that need most, and for
sm_89 those that need most shared memory.

Kernels are compiled as they are launched: an entry of `launches` is a call on tensors of the meta device, of which only
dtype and shape exist, and every launch ends after compilation. So the call waits for no result either: it could not.
What the compiler made is read: spills, the width of loads, barriers (helpers/ptx.py).
`python tests/models/test_compiled_kernels.py` prints what each kernel takes. To have more kernels compiled, add a call.
"""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SHARED_MEMORY = {89: 99 * 1024, 90: 227 * 1024}  # bytes that one program may have, by sm
MOST_PROGRAMS = 65535  # on the second and third axis of a grid
WIDEST = 512  # attention heads, of Gemma-4's global layers
ROWS = {  # what kernels read in long rows; "" is an address that was loaded itself
    **dict.fromkeys(("_sample_columns", "_typical", "_draw"), ["p.0"]),
    **dict.fromkeys(("_read_in_chunks", "accept_chain", "draw_next", "sum_blocks", "accept_block"), ["p.0", "q.0"]),
    **dict.fromkeys(("try_children", "descend"), ["p.0", "q.0"]),
    **dict.fromkeys(("_find_winners", "_read_rows"), ["logits"]),
    "_compare": ["logits", "teachers"],
    "product_kernel": ["weight"],
    "_cut_chunk": ["logits"],
    **dict.fromkeys(("_read_groups", "_find_edge"), ["rows.0"]),
    "enter_kernel": ["embedding"],
    "close_kernel": ["features.0", "layers.0"],
    "attend_kernel": ["query", "key", "value"],
    "write_kernel": ["key", "value"],
    "move_kernel": [""],
    "silu_kernel": ["gate_up"],
    **dict.fromkeys(("gate_experts_kernel", "add_experts_kernel"), ["row", "rows"]),
    "norm_kernel": ["x", "weight"],
    "rotate_kernel": ["qkv", "weight"],
}
ALL = pytest.param("all", marks=pytest.mark.long)
COLUMNS = ("sm", "launch", "kernel", "grid", "warps", "registers", "stack", "shared")


def meta(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ON_SM_89 = tuple(f"attention {name}" for name in ("bfloat16 8 128", "bfloat16 64 256", "bfloat16 8 512", "float32 512"))
ON_SM_89 += tuple(f"attention latents {dtype} tree" for dtype in (torch.bfloat16, torch.float32))
ON_SM_89 += ("greedy chain bfloat16", "one_hot tree", "typical tree", "block chain")
ON_SM_89 += ("probabilistic chain", "without_replacement tree", "uniforms", "write torch.bfloat16", "move 4")
ON_SM_89 += ("product torch.bfloat16 (4096, 6144, 'write', 5)", "product torch.float32 (4096, 28672, 'gate', 1)")
ON_SM_89 += (
    "enter tree",
    "round tree",
    "draw cut",
    "forward_kl bfloat16",
    "silu torch.bfloat16 1",
    "experts torch.bfloat16",
    "norm torch.bfloat16 1",
    "enter with features torch.bfloat16",
    "rotate torch.bfloat16 1",
    "delta rule of channels 64",
    "convolution bfloat16",
)
BY_DEFAULT = (  # a launch of each kernel at least, of each rule and of each ending of a product
    "attention bfloat16 64 128",  # the most registers
    "attention everything tree",
    "greedy chain bfloat16",
    "one_hot tree",
    "typical tree",
    "block long chain",
    "probabilistic odd vocabulary",
    "without_replacement tree",
    "draw cut",
    "uniforms",
    "write torch.bfloat16",
    "move 4",
    "product torch.bfloat16 (4096, 6144, 'write', 5)",
    "product torch.bfloat16 (14336, 4096, 'add', 8)",
    "product torch.float32 (4096, 28672, 'gate', 1)",
    "enter tree",
    "enter with features torch.bfloat16",
    "round tree",
    "forward_kl bfloat16",
    "jensen_shannon float32 odd",
    "silu torch.bfloat16 131072",
    "experts torch.bfloat16",
    "norm torch.bfloat16 1",
    "rotate torch.bfloat16 1",
    "delta rule of channels 64",
    "mamba-2 64",
    "convolution bfloat16",
)
BY_DEFAULT_ON_SM_89 = ("attention latents torch.bfloat16 tree", "draw cut")


def launches() -> dict[str, Callable[[], object]]:
    """By a name with the shape bucket and, where there are several, the dtype."""
    return verification() | attention() | cache() | states() | losses() | steps() | products() | rounds()


def attention() -> dict[str, Callable[[], object]]:
    """Every dtype and width in the tiles that 4, 32 and 64 query rows give; chains and trees, with and without all."""
    from draftsmith.models.slots import attention_kernel

    def call(length: int, width: int, dtype: torch.dtype, num_words: int, everything: bool, splits: int) -> object:
        query, cached = meta(2, 32, length, width, dtype=dtype), meta(2, 8, 4096, width, dtype=dtype)
        mask = meta(2, 1, length, 3 + num_words, dtype=torch.int32)
        extras = (1024, 30.0, meta(32, dtype=dtype)) if everything else ()
        return attention_kernel.attend(query, cached, cached, mask, 0.1, *extras, splits=splits)

    calls: dict[str, tuple[Any, ...]] = {}
    for length in (1, 8, 64):
        for width in (64, 128, 256):
            calls[f"bfloat16 {length} {width}"] = length, width, torch.bfloat16, 2, False, 8
            if width > 64 or length == 64:  # the others need less than those in bf16
                calls[f"float16 {length} {width}"] = length, width, torch.float16, 0, True, 8
        calls[f"bfloat16 {length} {WIDEST}"] = length, WIDEST, torch.bfloat16, 2, False, 8
    for width in (64, 128, 256, WIDEST):  # all lengths take the same tile
        calls[f"float32 {width}"] = 8, width, torch.float32, 2, True, 8
    calls["odd width"] = 8, 80, torch.bfloat16, 2, False, 8
    calls["one token"] = 1, 128, torch.bfloat16, 0, False, 8
    calls["one word"] = 32, 128, torch.bfloat16, 1, False, 8  # a draft and its root in one word of the mask
    calls["everything tree"] = 8, 128, torch.bfloat16, 2, True, 8
    calls["prompt"] = 512, 128, torch.bfloat16, 0, False, 1
    return {f"attention {name}": lambda args=args: call(*args) for name, args in calls.items()} | latent_attention()


def latent_attention() -> dict[str, Callable[[], object]]:
    """Return calls with keys and values of DeepSeek-V3's widths: latents for all heads, and expanded for each."""
    from draftsmith.models.slots import attention_kernel

    def latents(dtype: torch.dtype, length: int, mask: Tensor) -> object:
        query, key = meta(2, 128, length, 576, dtype=dtype), meta(2, 1, 4096, 576, dtype=dtype)
        return attention_kernel.attend(query, key, key[..., :512], mask, 0.1, splits=8)

    def expanded(dtype: torch.dtype, mask: Tensor) -> object:
        query, key = meta(2, 128, 512, 192, dtype=dtype), meta(2, 128, 4096, 192, dtype=dtype)
        return attention_kernel.attend(query, key, meta(2, 128, 4096, 128, dtype=dtype), mask, 0.1)

    chosen = meta(2, 1, 5, 4096, dtype=torch.bool), meta(2, 1, 512, 4096, dtype=torch.bool)
    calls: dict[str, Callable[[], object]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        chain, tree = (meta(2, 1, 5, 3 + num_words, dtype=torch.int32) for num_words in (0, 2))
        prompt = meta(2, 1, 512, 3, dtype=torch.int32)
        calls[f"latents {dtype} chain"] = lambda dtype=dtype, mask=chain: latents(dtype, 5, mask)
        calls[f"latents {dtype} tree"] = lambda dtype=dtype, mask=tree: latents(dtype, 5, mask)
        calls[f"latents {dtype} chosen"] = lambda dtype=dtype: latents(dtype, 5, chosen[0])
        calls[f"expanded {dtype}"] = lambda dtype=dtype, mask=prompt: expanded(dtype, mask)
    calls["expanded chosen"] = lambda: expanded(torch.bfloat16, chosen[1])
    return {f"attention {name}": call for name, call in calls.items()}


def steps() -> dict[str, Callable[[], object]]:
    """Return calls of a fused layer's steps but products, for chunks of 512 tokens in 256 rows, and for one token."""
    from draftsmith.models.fused import expert_kernels
    from draftsmith.models.fused import layer_kernels as llama_kernels
    from draftsmith.models.fused.layer_steps import Beside
    from draftsmith.models.layers import DecodingNorm
    from draftsmith.models.slots.cache import SlotCache
    from draftsmith.models.slots.window import Window

    many, queries, kv_heads, half = 256 * 512, 32, 8, 64

    def rotate(dtype: torch.dtype, normed: bool, num_tokens: int) -> None:
        qkv = meta(num_tokens, (queries + 2 * kv_heads) * 2 * half, dtype=dtype)
        heads = qkv[:, : (queries + kv_heads) * 2 * half].view(num_tokens, -1, 2, half)
        stored, angles = qkv[:, queries * 2 * half :], meta(num_tokens, 1, 2, half, dtype=torch.float32)
        norm = DecodingNorm(meta(queries + kv_heads, 2 * half, dtype=dtype), 1e-6) if normed else None
        flat = meta(8192, 4 * kv_heads * half, dtype=dtype)
        llama_kernels.rotate_and_store(
            heads, stored, angles[:, :, :1].contiguous(), angles, norm, meta(num_tokens, dtype=torch.int64), flat
        )

    def silu(dtype: torch.dtype, num_tokens: int) -> None:
        llama_kernels.silu_mul(meta(num_tokens, 2 * 14336, dtype=dtype), meta(num_tokens, 14336, dtype=dtype))

    def norm(dtype: torch.dtype, num_tokens: int) -> None:
        x = meta(num_tokens, 4096, dtype=dtype)
        llama_kernels.rms_norm(x, DecodingNorm(meta(4096, dtype=dtype), 1e-6), x)

    def experts(dtype: torch.dtype, num_tokens: int) -> None:
        x, inner = meta(num_tokens, 2048, dtype=dtype), 768
        gate_up, down = meta(128, 2 * inner, 2048, dtype=dtype), meta(128, 2048, inner, dtype=dtype)
        expert_kernels.add_experts(
            x, x, gate_up, down, meta(num_tokens, 8, dtype=torch.int64), meta(num_tokens, 8, dtype=dtype)
        )

    def enter(dtype: torch.dtype, batch: int, num_words: int, normed: bool = False) -> None:
        slots, prefix = meta(batch, 5, dtype=torch.int64), meta(batch, dtype=torch.int64)
        ancestors = meta(batch, 5, num_words, dtype=torch.int32) if num_words else None
        slot_cache = SlotCache(batch, 4096)
        slot_cache.angles = meta(4096, 2, half, dtype=torch.float32)
        window = Window(slots, slots, prefix, ancestors)
        norm = DecodingNorm(meta(2, 4096, dtype=dtype), 1e-6)
        beside = Beside(meta(batch * 5, 4096, dtype=dtype), norm) if normed else None
        llama_kernels.enter(slots, meta(128256, 4096, dtype=dtype), window, slot_cache, {None}, beside)

    calls: dict[str, Callable[[], object]] = {}
    calls["enter"] = lambda: enter(torch.bfloat16, 1, 0)
    calls["enter tree"] = lambda: enter(torch.float32, 8, 2)
    for dtype in (torch.float32, torch.bfloat16):
        calls[f"experts {dtype}"] = lambda dtype=dtype: experts(dtype, 5)
    for args in itertools.product((torch.float32, torch.bfloat16), (many, 1)):
        calls["silu {} {}".format(*args)] = lambda args=args: silu(*args)
        calls["norm {} {}".format(*args)] = lambda args=args: norm(*args)
        calls["rotate {} {}".format(*args)] = lambda dtype=args[0], count=args[1]: rotate(dtype, True, count)
    calls |= {
        f"enter with features {dtype}": lambda dtype=dtype: enter(dtype, 1, 0, True)
        for dtype in (torch.float32, torch.bfloat16)
    }
    for count in (many, 1):
        calls[f"rotate without norm {count}"] = lambda count=count: rotate(torch.bfloat16, False, count)
    return calls


def products() -> dict[str, Callable[[], object]]:
    """Return calls of the products of a layer, with the splits that they have on 132 multiprocessors."""
    from draftsmith.models.fused import product_kernel
    from draftsmith.models.layers import DecodingNorm

    def call(dtype: torch.dtype, width: int, outputs: int, ending: Any, splits: int) -> None:
        x, weight = meta(5, width, dtype=dtype), meta(outputs, width, dtype=dtype).t()
        out = meta(5, outputs // 2 if ending == "gate" else outputs, dtype=dtype)
        norm = None if ending == "add" else DecodingNorm(meta(width, dtype=dtype), 1e-6)
        bias = meta(outputs, dtype=dtype) if ending == "write" else None
        product_kernel.product(x, weight, out, norm, bias, ending, splits)

    llama = [(4096, 6144, "write", 5), (4096, 4096, "add", 8), (4096, 28672, "gate", 1), (14336, 4096, "add", 8)]
    qwen = [(4096, 24576, "gate", 1), (12288, 4096, "add", 8)]  # Qwen3-8B, whose attention is Llama's
    embedded = [(128, 256, "write", 1), (128, 128, "add", 1), (128, 704, "gate", 1), (352, 128, "add", 1)]
    halves = itertools.product((torch.bfloat16, torch.float16), llama + qwen + embedded)
    calls = [*halves, *((torch.float32, shape) for shape in llama), (torch.bfloat16, (100, 90, "write", 2))]
    return {f"product {dtype} {shape}": lambda dtype=dtype, shape=shape: call(dtype, *shape) for dtype, shape in calls}


def cache() -> dict[str, Callable[[], object]]:
    from draftsmith.models.slots import cache_kernels

    def write(length: int, width: int, dtype: torch.dtype) -> None:
        new, slots = meta(2, 8, length, width, dtype=dtype), meta(2 * length, dtype=torch.int64)
        cache_kernels.write_slots(new, new, slots, meta(8192, 16 * width, dtype=dtype))

    def move(depth: int) -> None:
        (table,) = cache_kernels.move_tables([meta(2, 4096, 2, 8, 128, dtype=torch.bfloat16)] * 32)
        indices = meta(2, 1 + depth, dtype=torch.int64)
        cache_kernels.move_slots(table, indices[:, 0].contiguous(), indices[:, 1:].contiguous())

    writes = {f"write {dtype}": dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    moves = {f"move {depth}": depth for depth in (1, 4, 16)}
    return {name: lambda dtype=dtype: write(5, 80, dtype) for name, dtype in writes.items()} | {
        name: lambda depth=depth: move(depth) for name, depth in moves.items()
    }


def states() -> dict[str, Callable[[], object]]:
    """Return calls of rules and convolutions of Qwen3.5, Kimi-Linear, Nemotron-H, Falcon-H1 and LFM2, by draft."""
    from draftsmith.models.slots import state_kernels
    from draftsmith.models.slots.state_buffers import Buffer, RunningStates, WindowRead
    from draftsmith.models.slots.window import chain_window

    def read(length: int) -> WindowRead:
        states = RunningStates(2, 64)
        return WindowRead(states, slice(2), chain_window(meta(2, dtype=torch.int64), length))

    def delta(length: int, decays: int) -> None:
        sizes = [(32, 128), (32, 128), (32, decays), (32,)]
        new, waiting = ([meta(2, n, *size, dtype=torch.float32) for size in sizes] for n in (length, 64))
        buffer = Buffer(meta(2, 32, 128, 128, dtype=torch.float32), waiting)
        state_kernels.delta_rule(read(length), buffer, meta(2, length, 32, 128, dtype=torch.float32), new)

    def mamba2(length: int, width: int) -> None:
        sizes = [(64, 64), (64, width), (64,)]
        new, waiting = ([meta(2, n, *size, dtype=torch.float32) for size in sizes] for n in (length, 64))
        buffer = Buffer(meta(2, 64, 64, width, dtype=torch.float32), waiting)
        state_kernels.mamba2_rule(read(length), buffer, meta(2, length, 64, width, dtype=torch.float32), new)

    def convolve(dtype: torch.dtype, channels: int, num_taps: int, with_bias: bool) -> None:
        buffer = Buffer(meta(2, num_taps - 1, channels, dtype=dtype), [meta(2, 64, channels, dtype=dtype)])
        bias = meta(channels, dtype=dtype) if with_bias else None
        weight = meta(channels, num_taps, dtype=dtype)
        state_kernels.read_convolution(read(5), buffer, meta(2, 5, channels, dtype=dtype), weight, bias)

    calls: dict[str, Callable[[], object]] = {}
    for length in (1, 20, 64):
        calls[f"delta rule {length}"] = lambda length=length: delta(length, 1)
        calls[f"delta rule of channels {length}"] = lambda length=length: delta(length, 128)
        calls[f"mamba-2 {length}"] = lambda length=length: mamba2(length, 128)
    calls["mamba-2 wide 64"] = lambda: mamba2(64, 256)
    calls["convolution bfloat16"] = lambda: convolve(torch.bfloat16, 8192, 4, True)
    calls["convolution float32"] = lambda: convolve(torch.float32, 2048, 3, False)
    return calls


def rounds() -> dict[str, Callable[[], object]]:
    """Return calls of both ends of a round: of plain decoding, of a chain, and of a tree."""
    from draftsmith.inference.decoding import round_kernels
    from draftsmith.inference.decoding.round_steps import Ends
    from draftsmith.inference.verification.acceptance_rules import Verified
    from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
    from draftsmith.models.sampling.sampling import Noise, Sampling
    from draftsmith.models.target.target import Features

    def state_of(batch: int, depth: int, num_layers: int) -> DecodingState:
        ids, hidden = meta(batch, dtype=torch.int64), meta(batch, depth + 1, 4096, dtype=torch.bfloat16)
        layers = meta(batch, depth + 1, num_layers * 4096, dtype=torch.bfloat16) if num_layers else None
        positions, token_ids = meta(batch, depth + 1, dtype=torch.int64), meta(batch, 4096, dtype=torch.int64)
        features = Features(hidden, layers)
        return DecodingState(token_ids, ids, features, positions, positions, ids, Sampling(), Noise(0, ids), False)

    def both(batch: int, nodes: int, depth: int, num_layers: int) -> None:
        tokens, ids = meta(batch, nodes, dtype=torch.int64), meta(batch, dtype=torch.int64)
        draft = Draft(tokens, None if nodes == depth else tokens, depth)
        state = state_of(batch, depth, num_layers)
        verified = Verified(ids, meta(batch, depth, dtype=torch.int64), ids)
        ends = Ends(ids, meta(3, dtype=torch.int64), meta(batch, dtype=torch.bool))
        round_kernels.open_round(state.token_ids, ids, draft)
        read = state_of(batch, nodes, num_layers).features
        round_kernels.close_round(state, ends, draft, verified, read)

    sizes = {"plain": (1, 0, 0, 0), "chain": (1, 4, 4, 3), "tree": (8, 63, 6, 3)}
    return {f"round {name}": lambda size=size: both(*size) for name, size in sizes.items()}


def losses() -> dict[str, Callable[[], object]]:
    from draftsmith.models.losses.divergence_kernels import FusedTeacher
    from draftsmith.models.losses.divergences import DIVERGENCES

    def compare(divergence: Any, dtype: torch.dtype, vocabulary: int) -> None:
        ids = meta(vocabulary, dtype=torch.int64) if vocabulary != 128256 else None
        teacher = FusedTeacher.from_logits(meta(256, 128256, dtype=dtype), ids)
        weights = meta(256, dtype=torch.float32)
        teacher.compare(meta(256, vocabulary, dtype=dtype), weights, divergence, True)

    calls = {f"{name} bfloat16": (name, torch.bfloat16, 32000) for name in DIVERGENCES}
    calls |= {f"{name} float32 odd": (name, torch.float32, 50257) for name in DIVERGENCES}
    calls["forward_kl bfloat16 whole"] = "forward_kl", torch.bfloat16, 128256
    return {name: lambda args=args: compare(*args) for name, args in calls.items()}


def verification() -> dict[str, Callable[[], object]]:
    from draftsmith.inference.verification import acceptance_kernels
    from draftsmith.models.sampling import cut_kernels, sampling_kernels
    from draftsmith.models.sampling.sampling import Noise, Sampling, Stream

    def call(
        rule: str, batch: int, nodes: int, depth: int, vocabulary: int, dtype: torch.dtype = torch.float32
    ) -> object:
        logits = meta(batch, nodes + 1, vocabulary, dtype=dtype)
        draft_logits = meta(batch, nodes, vocabulary, dtype=torch.float32)
        tokens = meta(batch, nodes, dtype=torch.int64)
        parents = None if nodes == depth else tokens
        accept, draws = meta(batch, nodes), meta(batch, depth + 1)
        match rule:
            case "greedy" | "typical":
                return getattr(acceptance_kernels, rule)(logits, tokens, parents, depth)
            case "one_hot":
                return acceptance_kernels.one_hot(logits, tokens, parents, depth, draws)
            case "without_replacement":
                return acceptance_kernels.without_replacement(
                    logits, draft_logits, tokens, parents, depth, accept, draws
                )
            case _:
                return getattr(acceptance_kernels, rule)(logits, draft_logits, tokens, accept, draws)

    calls: dict[str, tuple[Any, ...]] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        calls[f"greedy chain {str(dtype).removeprefix('torch.')}"] = "greedy", 1, 4, 4, 128256, dtype
    for rule in ("one_hot", "typical", "probabilistic", "block", "without_replacement"):
        calls[f"{rule} chain"] = rule, 1, 4, 4, 128256
    for rule in ("greedy", "one_hot", "typical", "without_replacement"):
        calls[f"{rule} tree"] = rule, 8, 63, 6, 151936
    for rule in ("greedy", "one_hot", "typical"):
        calls[f"{rule} no drafts"] = rule, 4, 0, 0, 128256
        dtype = torch.bfloat16 if rule == "greedy" else torch.float32  # the others read what `cut` returns
        calls[f"{rule} no drafts, one row"] = rule, 1, 0, 0, 128256, dtype
    calls["block long chain"] = "block", 8, 15, 15, 151936
    calls["probabilistic odd vocabulary"] = "probabilistic", 8, 4, 4, 50257
    noise = meta(8, dtype=torch.int64), meta(8, 1, dtype=torch.int64), Stream.DRAFT, meta(5, dtype=torch.int64)

    def draw(batch: int, vocabulary: int, dtype: torch.dtype, sampling: Sampling) -> None:
        ids = meta(batch, dtype=torch.int64)
        logits = meta(batch, vocabulary, dtype=dtype)
        cut_kernels.draw(logits, sampling, Noise(0, ids), ids, Stream.DRAFT, 3, meta(batch, 4, dtype=torch.int64)[:, 3])

    draws = {
        "draw": (1, 128256, torch.bfloat16, Sampling(0.8)),
        "draw cut": (1, 128256, torch.bfloat16, Sampling(0.8, 0.9, 20)),
        "draw top-p": (8, 32000, torch.float32, Sampling(0.8, 0.9)),
        "draw top-k": (8, 151936, torch.float16, Sampling(0.8, 1.0, 20)),
    }
    return (
        {name: lambda args=args: call(*args) for name, args in calls.items()}
        | {name: lambda args=args: draw(*args) for name, args in draws.items()}
        | {"uniforms": lambda: sampling_kernels.uniforms(*noise)}
    )


def compiled(everything: bool) -> Iterator[dict[str, Any]]:
    """Yield what each launch of each call takes, by COLUMNS, and how it reads memory; first of the controls."""
    from faulty_kernel import add_blocks
    from ptx import Ptx
    from stand_in_gpu import Gpu
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    results: list[tuple[Any, tuple[int, ...]]] = []
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        results.append((launch(kernel, *args, grid=grid, warmup=True, **kwargs), grid))

    def control(fault: str, block: int) -> None:
        floats, counter = meta(4 * block, dtype=torch.float32), meta(1, dtype=torch.int32)
        add_blocks[(4,)](floats, floats, counter, floats, 61, fault, block, num_warps=1)

    JITFunction.run = compile_only
    controls = {f"control {fault}": lambda fault=fault: control(fault, 128) for fault in ("", "reads back")}
    controls["control spill"] = lambda: control("", 8192)
    every = launches()
    on_sm_90, on_sm_89 = (tuple(every), ON_SM_89) if everything else (BY_DEFAULT, BY_DEFAULT_ON_SM_89)
    for sm, names in ((90, tuple(controls)), (90, on_sm_90), (89, on_sm_89)):
        driver.set_active(Gpu(sm))
        for name in names:
            results.clear()
            (controls | every)[name]()
            for kernel, grid in results:
                usage, data, ptx = resource_usage(kernel.asm["cubin"]), kernel.metadata, kernel.asm["ptx"]
                row = sm, name, data.name, list(grid), data.num_warps, usage["REG"], usage["STACK"], data.shared
                names = parameter_names(kernel.src.signature)
                yield dict(zip(COLUMNS, row, strict=True)) | {
                    "memory": memory_order(ptx),
                    "loads": {names[number]: widths for number, widths in Ptx(ptx).load_widths().items()},
                    "unfenced": [f"{what} {names[number]}" for what, number in sorted(Ptx(ptx).unfenced())],
                    "unfenced without barriers": sorted(
                        {what for what, _ in Ptx(ptx.replace("bar.sync", "//")).unfenced()}
                    ),
                }


def parameter_names(signature: dict[str, Any]) -> dict[int, str]:
    """Return the names of a kernel's parameters as PTX numbers them; of a tuple `p`, p.0 and so on; -1 is none."""
    leaves: list[tuple[str, Any]] = []
    for name, kind in signature.items():
        leaves += [(f"{name}.{i}", part) for i, part in enumerate(kind)] if isinstance(kind, tuple) else [(name, kind)]
    return {-1: "", **dict(enumerate(name for name, kind in leaves if kind != "constexpr"))}


def memory_order(ptx: str) -> str:
    """Return the order of what the program does: L loads from global memory, S stores there, B waits at a barrier."""
    letters = {"ld.global": "L", "st.global": "S", "bar.sync": "B"}
    steps = re.findall("|".join(map(re.escape, letters)), ptx)
    return "".join(letters[step] for step, _ in itertools.groupby(steps))


@functools.cache
def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG: registers a thread; STACK: bytes a thread that did not fit into them; ..."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.check_output([cuobjdump, "--dump-resource-usage", file.name], text=True)
    return {key: int(value) for key, value in (word.split(":") for word in output.splitlines()[-1].split())}


@pytest.fixture(scope="module", params=["chosen", ALL])
def kernels(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """From a process of its own: here, kernels may be defined for the interpreter."""
    pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, request.param]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def real(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kernel for kernel in kernels if not kernel["launch"].startswith("control")]


def test_every_kernel_is_compiled(kernels: list[dict[str, Any]]) -> None:
    assert_complete(kernels, 90)


@pytest.mark.parametrize("kernels", [ALL], indirect=True)
def test_every_kernel_is_compiled_for_a_smaller_gpu(kernels: list[dict[str, Any]]) -> None:
    assert_complete(kernels, 89)


def assert_complete(kernels: list[dict[str, Any]], sm: int) -> None:
    from kernel_names import launched_kernels  # not there yet where this file is a script

    assert {kernel["kernel"] for kernel in real(kernels) if kernel["sm"] == sm} == launched_kernels()


def test_registers_hold_everything(kernels: list[dict[str, Any]]) -> None:
    """But on sm_89 one value of `_find_edge`, which is stored once, before all loops, and loaded once behind them."""
    spilled = {(kernel["sm"], kernel["launch"]): kernel["stack"] for kernel in kernels if kernel["stack"]}
    assert (90, "control spill") in spilled
    assert spilled.pop((89, "draw cut"), 0) <= 8
    assert list(spilled) == [(90, "control spill")]


def test_rows_are_loaded_16_bytes_at_a_time(kernels: list[dict[str, Any]]) -> None:
    """Rows of an odd length are not: they do not begin at a multiple of 16 bytes."""
    narrow = {
        (kernel["launch"], kernel["kernel"], name): kernel["loads"][name]
        for kernel in kernels
        for name in ROWS.get(kernel["kernel"], [])
        if max(kernel["loads"].get(name, [16])) < 16
    }
    odd = {place for place in narrow if any(word in place[0] for word in ("odd", "(100, 90"))}
    assert not {place: narrow[place] for place in narrow.keys() - odd}
    assert {kernel for _, kernel, _ in odd} > {"_compare", "_read_in_chunks"}


def test_barriers_stand_between_threads(kernels: list[dict[str, Any]]) -> None:
    """`_compare` stores a block of gradients over logits that it reads no more, as watched memory shows."""
    for kernel in real(kernels):
        assert kernel["unfenced"] == (["load logits"] if kernel["kernel"] == "_compare" else []), kernel["launch"]
    controls = {kernel["launch"]: kernel for kernel in kernels}
    assert controls["control "]["unfenced"] == []
    assert controls["control reads back"]["unfenced"] == ["load total"]
    assert controls["control "]["unfenced without barriers"] == ["arrive", "load", "publish"]


def test_shared_memory_suffices(kernels: list[dict[str, Any]]) -> None:
    assert {kernel["sm"] for kernel in kernels} == set(SHARED_MEMORY)
    assert not [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY[kernel["sm"]]]


def test_grids_can_be_launched(kernels: list[dict[str, Any]]) -> None:
    """Only the first axis takes more than 65,535 programs."""
    assert max(kernel["grid"][0] for kernel in kernels) > MOST_PROGRAMS
    assert not [kernel for kernel in kernels if max(kernel["grid"][1:], default=1) > MOST_PROGRAMS]


def test_a_move_reads_everything_before_it_writes(kernels: list[dict[str, Any]]) -> None:
    """A thread's source is another's destination; the interpreter, which has one thread, cannot show that race."""
    moves = {kernel["launch"]: kernel["memory"] for kernel in kernels if kernel["kernel"] == "move_kernel"}
    assert set(moves.values()) == {"LBS"}


def test_a_rule_takes_four_launches_at_most(kernels: list[dict[str, Any]]) -> None:
    counts = Counter(kernel["launch"] for kernel in kernels if kernel["sm"] == 90)
    assert not {launch: count for launch, count in counts.items() if launch in verification() and count > 4}


if __name__ == "__main__":
    sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "tests/helpers")]
    for row in compiled(everything=sys.argv[1:] != ["chosen"]):
        if sys.argv[1:]:
            print(json.dumps(row), flush=True)
        else:
            line = "sm_{sm} {launch:30} {kernel:18} {grid!s:15} {warps:3} {registers:4} {stack:4} {shared:6}"
            print(line.format(**row))
