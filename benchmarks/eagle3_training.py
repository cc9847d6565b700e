"""EAGLE-3 training steps beside those of speculators 0.9.0: tokens per CPU second and peak memory, in one run.

    python benchmarks/eagle3_training.py --speculators PYTHON [--rounds N]     PYTHON: of an environment that has it
    python benchmarks/eagle3_training.py --table                               ours alone, by length and unroll

Forward, backward and fused AdamW step of a drafter on given target features, every slot trained, forward KL, fp32 or
with `--precision bf16` under autocast on both sides, on one thread, whose own CPU time is taken: other programs on the
machine disturb that least. Each side has a process of its own, and they take single steps in turns, so that both meet
the same moments of the machine: the median of the ratios of neighbouring steps is what compares. Of ours each other
step is one that is logged, which takes longer; as one in ten is in training, they are weighed 1 to 9. Peak memory is
what a step adds to the memory of a process in which model, state of the optimiser and data stand, and free memory was
given back. speculators runs its CPU path: SDPA attention and eager losses, for its fused ones need a GPU. It keeps the
drafter's head as it is, the target's rows, which EAGLE-3's authors train: both sides are measured either way. It
compares within the draft vocabulary alone; ours makes the target's whole distribution in logged steps, for what that
would accept. All tokens of the text are in the draft vocabulary, for ours leaves out chains that leave it, which would
be an advantage that depends on the text.

Our training tells malloc to keep freed memory, and torch to take large products by oneDNN where that is faster. Theirs
does neither, but is given both here, so that the code is what differs. `--as-they-are` leaves theirs without.
"""

import argparse
import copy
import ctypes
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NUM_LAYERS, LAYER_IDS = 6, [2, 3, 4]
WARM_UP = 3
ROUNDS_OF_TABLE = 3
Precision = Literal["fp32", "bf16"]  # of matrix products
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}  # as ours asks for
LOGGED_SHARE = 0.1  # of steps, by default (`run.log_every`)
COMPARED = [  # hidden, vocabulary, draft vocabulary, length, unrolled steps, whether the drafter's head is trained
    (256, 8192, 4096, 512, 3, 1),
    (256, 8192, 4096, 512, 3, 0),
    (256, 8192, 4096, 512, 7, 1),
    (256, 8192, 4096, 512, 7, 0),
]


def layer_config(hidden: int, vocab: int, num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def our_step(
    precision: Precision, hidden: int, vocab: int, draft_vocab: int, length: int, unroll: int, head: int
) -> Callable[[], None]:
    from draftsmith.models import Target
    from draftsmith.models.batch import Batch
    from draftsmith.models.devices import keep_freed_memory, training_precision
    from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
    from draftsmith.models.slots.attention import ATTENTION
    from draftsmith.models.target.target import Features

    keep_freed_memory()  # as training does
    config = layer_config(hidden, vocab, NUM_LAYERS)
    config._attn_implementation = ATTENTION
    drafter_config = Eagle3Config(layer_ids=LAYER_IDS, draft_vocab_size=draft_vocab, unroll_steps=unroll)
    target = LlamaForCausalLM(config).requires_grad_(False)
    drafter = Eagle3.from_target(drafter_config, Target(target, None, "random"))
    drafter.lm_head.requires_grad_(bool(head))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], fused=True)
    batch = Batch(torch.randint(0, draft_vocab, (1, length)), torch.arange(length)[None] > 0)
    features = Features(torch.randn(1, length, hidden), torch.randn(1, length, 3 * hidden))

    numbers = itertools.count()

    def step() -> None:
        drafter.tells_acceptance = next(numbers) % 2 == 1
        with training_precision(torch.device("cpu"), precision):
            total, count = drafter.loss(batch, features)["loss"]
            (total / count).backward()
            optimizer.step()
        optimizer.zero_grad()

    return step


def their_step(
    target: LlamaConfig,
    draft_vocab: int,
    length: int,
    unroll: int,
    head: int,
    device: str = "cpu",
    precision: Precision = "bf16",
) -> Callable[[], None]:
    """Return a training step of speculators: on a GPU compiled, with flex attention."""
    on_gpu, hidden, vocab = device == "cuda", target.hidden_size, target.vocab_size
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    with tempfile.TemporaryDirectory() as folder:
        config = copy.deepcopy(target)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        with torch.device(device):
            LlamaForCausalLM(config).save_pretrained(folder)
        target.save_pretrained(folder)  # of the whole target, of which its ends alone are read
        d2t, t2d = build_vocab_mappings_from_distribution({i: vocab - i for i in range(vocab)}, draft_vocab, vocab)
        drafter = Eagle3DraftModel.from_training_args(
            config,
            t2d=t2d,
            d2t=d2t,
            draft_vocab_size=draft_vocab,
            norm_before_residual=False,
            norm_before_fc=False,
            norm_output=False,
            ttt_steps=unroll,
            verifier_name_or_path=folder,
            target_layer_ids=LAYER_IDS,
            draft_attn_impl="simple_flex_attention" if on_gpu else "sdpa",
        ).to(device, torch.float32)
    drafter.lm_head.requires_grad_(bool(head))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], fused=True)
    given = torch.bfloat16 if on_gpu else torch.float32
    inputs = {
        "hidden_states": torch.randn(1, length - 1, 3 * hidden, device=device, dtype=given),
        "input_ids": torch.randint(0, draft_vocab, (1, length - 1), device=device),
        "document_ids": torch.zeros(1, length - 1, dtype=torch.int64, device=device),
        "verifier_last_hidden_states": torch.randn(1, length - 1, hidden, device=device, dtype=given),
    }
    losses = resolve_loss_config("kl_div", "eager")  # compiled with the rest on a GPU: torch 2.11 cannot the fused one

    def step() -> None:
        loss_mask = torch.ones(1, length - 1, dtype=torch.bool, device=device)  # it writes into it
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            _, loss, _ = drafter(
                **inputs, loss_mask=loss_mask, ttt_steps=unroll, ttt_step_loss_decay=0.8, loss_config=losses
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def mebibytes(name: str) -> float:
    """Return a size that the kernel tells of this process, such as VmRSS, or its peak, VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


def memory_of(step: Callable[[], None]) -> float:
    """Return the MiB that a step adds at its peak to what stands before it."""
    ctypes.CDLL(None).malloc_trim(0)  # gives back what earlier steps, and a verifier that was loaded, have freed
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = mebibytes("VmRSS")
    step()
    return mebibytes("VmHWM") - before


def serve_steps(side: str, shape: tuple[int, ...], precision: Precision, large_products: bool) -> None:
    """Print the MiB that a step adds, then for each line that is read take a step and print its CPU seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if side == "ours":
        step = our_step(precision, *shape)
    else:
        hidden, vocab, draft_vocab, length, unroll, head = shape
        config = layer_config(hidden, vocab, NUM_LAYERS)
        step = their_step(config, draft_vocab, length, unroll, head, precision=precision)
        if large_products:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]  # it rounds nothing here
    for _ in range(WARM_UP):
        step()
    print("memory", memory_of(step), flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        step()
        print("seconds", time.process_time() - start, flush=True)


class Side:
    """A process that takes steps when it is told to; `is_given_settings`: those that our training makes by itself."""

    def __init__(
        self, python: str, side: str, shape: tuple[int, ...], precision: Precision, is_given_settings: bool
    ) -> None:
        from draftsmith.models.devices import mkl_misses_avx512

        command = [python, __file__, "--precision", precision, "--serve", side, *map(str, shape)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if is_given_settings:
            environment.update(KEEPS_MEMORY)
            command += ["--large-products"] * mkl_misses_avx512()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.mebibytes = self.told("memory")

    def told(self, name: str) -> float:
        assert self.process.stdout is not None
        return float(next(line for line in self.process.stdout if line.startswith(f"{name} ")).split()[1])

    def step(self) -> float:
        """Return the CPU seconds of one step."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.told("seconds")


@contextmanager
def side_of(
    python: str, side: str, shape: tuple[int, ...], precision: Precision, is_given_settings: bool = False
) -> Iterator[Side]:
    worker = Side(python, side, shape, precision, is_given_settings)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


def mean_of_ours(usual: float, logged: float) -> float:
    """Return the mean seconds of our steps in training, from those of a usual one and of one that is logged."""
    return (1 - LOGGED_SHARE) * usual + LOGGED_SHARE * logged


def compare(python: str, rounds: int, precision: Precision, as_they_are: bool) -> None:
    print("hidden, vocabulary, draft vocabulary, length, unroll, head trained:")
    print("ratio of neighbouring steps, its quartiles; tokens per CPU second, ours and (theirs); MiB of a step")
    for shape in COMPARED:
        with (
            side_of(sys.executable, "ours", shape, precision) as ours,
            side_of(python, "theirs", shape, precision, not as_they_are) as theirs,
        ):
            pairs = []
            for _ in range(rounds):
                (usual, other), (logged, another) = [(ours.step(), theirs.step()) for _ in range(2)]
                pairs.append((mean_of_ours(usual, logged), (other + another) / 2))
            memory = f"{ours.mebibytes:.0f} ({theirs.mebibytes:.0f}) MiB"
        low, middle, high = statistics.quantiles([other / own for own, other in pairs], n=4)
        own, other = (shape[3] / statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        found = f"{middle:.2f} ({low:.2f} to {high:.2f}); {own:.0f} ({other:.0f}) tokens/CPU s; {memory}"
        print(" ".join(map(str, shape)), "-", found, flush=True)


def table(precision: Precision) -> None:
    print("hidden 256, vocabulary 8192, draft vocabulary 4096: tokens/CPU s, MiB of a step")
    for length, unroll in itertools.product((256, 512, 1024, 2048), (1, 3, 5, 7)):
        with side_of(sys.executable, "ours", (256, 8192, 4096, length, unroll, 1), precision) as ours:
            speed = length / statistics.median(mean_of_ours(ours.step(), ours.step()) for _ in range(ROUNDS_OF_TABLE))
        found = f"{speed:7.0f} tokens/CPU s {ours.mebibytes:6.0f} MiB"
        print(f"length {length:5} unroll {unroll}: {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=8, help="of two steps of each side")
    parser.add_argument("--as-they-are", action="store_true", help="theirs without the settings that ours makes")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of matrix products, both sides")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)  # one side in this process
    parser.add_argument("--large-products", action="store_true", help=argparse.SUPPRESS)  # of theirs in this process
    arguments = parser.parse_args()
    if arguments.serve:
        side, *shape = arguments.serve
        serve_steps(side, tuple(map(int, shape)), arguments.precision, arguments.large_products)
        return
    from draftsmith.inference.measuring.environment import git_commit

    machine = platform.processor() or platform.machine()
    print(f"{machine}, one thread, {arguments.precision}, torch {torch.__version__}, commit {git_commit()}", flush=True)
    if arguments.speculators:
        compare(arguments.speculators, arguments.rounds, arguments.precision, arguments.as_they_are)
    if arguments.table:
        table(arguments.precision)


if __name__ == "__main__":
    main()
