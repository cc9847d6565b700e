"""Passes of the embedded target on a CPU, with its weights in fp32 and in fp16.

    python benchmarks/half_weights.py

A pass reads some tokens behind a text of 64. Each figure is the median of `REPEATS` passes in milliseconds; both forms
take turns, ten passes at a time.
"""

import statistics
import time

import torch

from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target
from draftsmith.models.fused.fused_layers import FusedDecoder, fuse
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import chain_window
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

ROWS = (1, 2, 3, 5, 8, 16, 64)
REPEATS = 200
TEXT = 64  # tokens before those of a pass


def main() -> None:
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    frozen, plain = target.fused_decoder, fuse(target.model)
    assert frozen is not None
    assert plain is not None
    print(f"torch {torch.__version__}, commit {git_commit()}")
    print("threads  tokens  fp32    fp16")
    for num_threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(num_threads)
        for num_tokens in ROWS:
            times: dict[FusedDecoder, list[float]] = {plain: [], frozen: []}
            for _ in range(REPEATS // 10):
                for decoder, taken in times.items():
                    taken += ten_passes(decoder, num_tokens)
            in_fp32, in_fp16 = (1000 * statistics.median(taken) for taken in times.values())
            print(f"{num_threads:7}  {num_tokens:6}  {in_fp32:6.2f}  {in_fp16:6.2f}", flush=True)


def ten_passes(decoder: FusedDecoder, num_tokens: int) -> list[float]:
    """Return the seconds of ten passes over so many tokens behind a text."""
    cache, start = SlotCache(1, TEXT + num_tokens), torch.zeros(1, dtype=torch.int64)
    decoder.run(torch.ones(1, TEXT, dtype=torch.int64), chain_window(start, TEXT), cache)
    token_ids, seconds = torch.ones(1, num_tokens, dtype=torch.int64), []
    for _ in range(10):
        begin = time.perf_counter()
        decoder.run(token_ids, chain_window(start + TEXT, num_tokens), cache)
        seconds.append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    main()
