"""EAGLE-3 training steps beside those of speculators 0.9.0: tokens per CPU second and peak memory, in one run.

    python benchmarks/eagle3_training.py --speculators PYTHON [--rounds N]     PYTHON: of an environment that has it
    python benchmarks/eagle3_training.py --table                               ours alone, by length and unroll

Forward, backward and AdamW step of a drafter on given target features, every slot trained, forward KL, fp32, on one
thread, whose own CPU time is taken: other programs on the machine disturb that least. Each side runs in a process of
its own, in turns; peak memory is what the process grew by since its model and
data stood. speculators runs its CPU path: SDPA attention and eager losses, for its fused ones need a GPU. It keeps the
drafter's head as it is, the target's rows, which EAGLE-3's authors train: both sides are measured either way. It
compares within the draft vocabulary alone; ours makes the target's whole distribution, for its acceptance.
"""

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NUM_LAYERS, LAYER_IDS = 6, [2, 3, 4]
STEPS_A_ROUND = 3
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


def our_step(hidden: int, vocab: int, draft_vocab: int, length: int, unroll: int, head: int) -> Callable[[], None]:
    from draftsmith.models import Target
    from draftsmith.models.batch import Batch
    from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
    from draftsmith.models.slots.attention import ATTENTION
    from draftsmith.models.target.target import Features

    config = layer_config(hidden, vocab, NUM_LAYERS)
    config._attn_implementation = ATTENTION
    drafter_config = Eagle3Config(layer_ids=LAYER_IDS, draft_vocab_size=draft_vocab, unroll_steps=unroll)
    drafter = Eagle3.from_target(drafter_config, Target(LlamaForCausalLM(config), None, "random"))
    drafter.lm_head.requires_grad_(bool(head))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad])
    batch = Batch(torch.randint(0, vocab, (1, length)), torch.arange(length)[None] > 0)
    features = Features(torch.randn(1, length, hidden), torch.randn(1, length, 3 * hidden))

    def step() -> None:
        total, count = drafter.loss(batch, features)["loss"]
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def their_step(
    hidden: int, vocab: int, draft_vocab: int, length: int, unroll: int, head: int, device: str = "cpu"
) -> Callable[[], None]:
    """Return a training step of speculators: on a GPU with flex attention and fused losses, under autocast to bf16."""
    on_gpu = device == "cuda"
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(layer_config(hidden, vocab, NUM_LAYERS)).save_pretrained(folder)
        d2t, t2d = build_vocab_mappings_from_distribution({i: vocab - i for i in range(vocab)}, draft_vocab, vocab)
        config = layer_config(hidden, vocab, 1)
        config.layer_types = ["full_attention"]
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
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], fused=on_gpu)
    inputs = {
        "hidden_states": torch.randn(1, length - 1, 3 * hidden, device=device),
        "input_ids": torch.randint(0, vocab, (1, length - 1), device=device),
        "document_ids": torch.zeros(1, length - 1, dtype=torch.int64, device=device),
        "verifier_last_hidden_states": torch.randn(1, length - 1, hidden, device=device),
    }
    losses = resolve_loss_config("kl_div", "fused" if on_gpu else "eager")

    def step() -> None:
        loss_mask = torch.ones(1, length - 1, dtype=torch.bool, device=device)  # it writes into it
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            _, loss, _ = drafter(
                **inputs, loss_mask=loss_mask, ttt_steps=unroll, ttt_step_loss_decay=0.8, loss_config=losses
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(side: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Return the median tokens per CPU second of some steps after a first one, and the peak memory that they add."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = {"ours": our_step, "theirs": their_step}[side](*shape)
    before = peak_mebibytes()
    step()
    seconds = []
    for _ in range(STEPS_A_ROUND):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return {"tokens_per_second": shape[3] / statistics.median(seconds), "mebibytes": peak_mebibytes() - before}


def in_a_process(python: str, side: str, shape: tuple[int, ...]) -> dict[str, float]:
    command = [python, __file__, "--measure", side, *map(str, shape)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def compare(python: str, rounds: int) -> None:
    print("hidden, vocabulary, draft vocabulary, length, unroll, head trained: ours and (theirs); ratio of each round")
    for shape in COMPARED:
        runs = [
            [in_a_process(*side, shape) for side in ((sys.executable, "ours"), (python, "theirs"))]
            for _ in range(rounds)
        ]
        ours, theirs = ([run[side] for run in runs] for side in (0, 1))
        speeds = [statistics.median(run["tokens_per_second"] for run in side) for side in (ours, theirs)]
        memory = [statistics.median(run["mebibytes"] for run in side) for side in (ours, theirs)]
        ratios = " ".join(f"{a['tokens_per_second'] / b['tokens_per_second']:.2f}" for a, b in runs)
        found = f"{speeds[0]:.0f} ({speeds[1]:.0f}) tokens/CPU s, {ratios}; {memory[0]:.0f} ({memory[1]:.0f}) MiB"
        print(" ".join(map(str, shape)), "-", found, flush=True)


def table() -> None:
    print("hidden 256, vocabulary 8192, draft vocabulary 4096: tokens/CPU s, MiB above model and data")
    for length, unroll in itertools.product((256, 512, 1024, 2048), (1, 3, 5, 7)):
        found = in_a_process(sys.executable, "ours", (256, 8192, 4096, length, unroll, 1))
        speed, memory = found["tokens_per_second"], found["mebibytes"]
        print(f"length {length:5} unroll {unroll}: {speed:7.0f} tokens/CPU s {memory:6.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)  # one side in this process
    arguments = parser.parse_args()
    if arguments.measure:
        side, *shape = arguments.measure
        print(json.dumps(measure(side, tuple(int(value) for value in shape))))
        return
    from draftsmith.inference.measuring.environment import git_commit

    machine = platform.processor() or platform.machine()
    print(f"{machine}, one thread, torch {torch.__version__}, commit {git_commit()}", flush=True)
    if arguments.speculators:
        compare(arguments.speculators, arguments.rounds)
    if arguments.table:
        table()


if __name__ == "__main__":
    main()
