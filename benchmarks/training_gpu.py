"""Where the time of an EAGLE-3 training step goes on a GPU, its speed and its memory; beside speculators, if installed.

    python benchmarks/training_gpu.py [--layers 32] [--length 2048] [--rows 4] [--unroll 7] [--steps 10] [--vary]
    python benchmarks/training_gpu.py --profile       # each kernel's time in one step, too
    python benchmarks/training_gpu.py --tiny          # a small target on a CPU, to see that the script runs

The target has Llama-3.1-8B's shape and random weights in bf16, the drafter the published shape (draft vocabulary
32000) and fp32 weights under autocast to bf16. Each step reads another text of random tokens, on half of which it is
trained. The parts of a step are data (the copies to the device), features (the target's pass), forward, loss (both
heads and all gradients at the logits), backward and optimizer. `--vary`: texts of lengths between half and the whole,
as they come and padded to a multiple of 128, which tells what new shapes cost.

speculators' step is on given features, so it is compared with ours without the target's pass, in the same process and
in turns. Both train their heads.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from eagle3_training import their_step
from kernel_times import print_kernels
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.samples.batches import GPU_WIDTH, rounded_up
from draftsmith.inference.decoding.clock import PhaseClock
from draftsmith.inference.measuring.environment import environment
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.target.target import Features
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS

WARM_UP = 3  # steps
PARTS = ("data", "features", "forward", "loss", "backward", "optimizer")


def make_target(args: argparse.Namespace) -> Target:
    """Return a target with random weights in bf16."""
    config = PUBLIC_TARGETS["llama_3_1_8b"].config
    assert isinstance(config, LlamaConfig)
    config.num_hidden_layers, config._attn_implementation = args.layers, ATTENTION
    if args.tiny:
        config.update({"vocab_size": 512, "eos_token_id": 0, "hidden_size": 64, "intermediate_size": 128})
        config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16})
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return Target(model.eval().requires_grad_(False), None, "random", fuse_layers=False, decodes=False)


def texts(args: argparse.Namespace, rows: int, lengths: list[int]) -> Iterator[Batch]:
    """Yield batches of random tokens in pinned memory, each of the next length; the second half of each is trained.

    All tokens are in the draft vocabulary, as nearly all of a real text are: a chain that leaves it is not trained.
    """
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        token_ids = torch.randint(args.draft_vocab, (rows, length), generator=generator)
        batch = Batch(token_ids, torch.arange(length).expand(rows, -1) >= length // 2)
        yield batch.pin_memory() if args.device == "cuda" else batch


class Training:
    """Our training step, whose parts a clock measures."""

    def __init__(self, target: Target, draft_vocab: int, unroll: int) -> None:
        config = Eagle3Config(draft_vocab_size=draft_vocab, unroll_steps=unroll)
        self.target, self.drafter = target, Eagle3.from_target(config, target).to(target.device).train()
        trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, fused=True)
        self.clock = PhaseClock(target.device)

    def step(self, batch: Batch, features: Features | None = None) -> None:
        """Take a step, on given features or on those that the target computes."""
        self.clock.mark(None)
        batch = batch.to(self.target.device)
        self.clock.mark("data")
        features = features or self.target.features(batch, self.drafter.layer_ids)
        self.clock.mark("features")
        with torch.autocast(self.target.device.type, torch.bfloat16):
            chain_loss = self.drafter.new_chain_loss(batch)
            depths = list(self.drafter.depths(chain_loss, batch, features, self.drafter.training_depth))
            self.clock.mark("forward")
            self.drafter.add_divergences(chain_loss, depths, features)
            total, count = chain_loss.sums()["loss"]
            self.clock.mark("loss")
            (total / count).backward()
        self.clock.mark("backward")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.mark("optimizer")


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    """Return the time of a step on an idle device until it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_parts(training: Training, batches: Iterator[Batch]) -> None:
    """Print the parts of steps that follow each other without a wait, their speed and the peak of memory."""
    on_gpu, num_tokens, num_steps = training.target.device.type == "cuda", 0, 0
    for batch in batches:
        if num_steps == WARM_UP:
            training.clock, num_tokens = PhaseClock(training.target.device), 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
        training.step(batch)
        num_steps, num_tokens = num_steps + 1, num_tokens + batch.token_ids.numel()
    parts = training.clock.milliseconds()
    whole, measured = sum(parts.values()), num_steps - WARM_UP
    shares = ", ".join(f"{part} {parts[part] / measured:.1f} ({parts[part] / whole:.0%})" for part in PARTS)
    print(f"step {whole / measured:.1f} ms: {shares}")
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else "not measured on a CPU"
    print(f"{1000 * num_tokens / whole:.0f} tokens a second, peak memory {memory}", flush=True)


def compare_with_speculators(training: Training, args: argparse.Namespace) -> None:
    """Print tokens a second of both, on given features and rows of one text, step about."""
    target = training.target
    assert isinstance(target.text_config, LlamaConfig)
    theirs = their_step(target.text_config, args.draft_vocab, args.length, args.unroll, 1, args.device)
    (batch,) = texts(args, 1, [args.length])
    features = target.features(batch.to(target.device), training.drafter.layer_ids)
    batch.loss_mask[:, 1:] = True  # as theirs, every token is trained
    sides = {"ours": lambda: training.step(batch, features), "speculators": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(WARM_UP + args.steps):
        for name, step in sides.items():
            seconds[name].append(seconds_of(step, target.device))
    speeds = {name: args.length / statistics.median(found[WARM_UP:]) for name, found in seconds.items()}
    print(", ".join(f"{name} {speed:.0f} tokens a second" for name, speed in speeds.items()), end="")
    print(f" on given features: {speeds['ours'] / speeds['speculators']:.2f} times theirs (goal 1.5)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 32, "length": 2048, "rows": 4, "unroll": 7, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--vary", action="store_true", help="lengths that differ, as they are and padded")
    parser.add_argument("--profile", action="store_true", help="each kernel's time in one step")
    parser.add_argument("--tiny", action="store_true", help="a small target on a CPU")
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        args.layers, args.length, args.rows, args.steps, args.draft_vocab = 6, 64, 2, 2, 128
    target = make_target(args)
    env = environment(target)
    print(f"{env.device}, torch {env.versions['torch']}, triton {env.versions['triton']}, {env.git_commit}")
    print(f"{args.layers} layers, {args.rows} rows of {args.length} tokens, {args.unroll} unrolled steps")
    training, count = Training(target, args.draft_vocab, args.unroll), WARM_UP + args.steps
    measure_parts(training, texts(args, args.rows, [args.length] * count))
    if args.profile:
        (batch,) = texts(args, args.rows, [args.length])
        print_kernels(lambda: training.step(batch), target.device)
    if args.vary:
        lengths = [args.length // 2 + 37 * step % (args.length // 2) for step in range(count)]
        for name, multiple in (("as they come", 1), (f"padded to a multiple of {GPU_WIDTH}", GPU_WIDTH)):
            print(f"lengths from {min(lengths)} to {max(lengths)}, {name}:")
            measure_parts(training, texts(args, args.rows, [rounded_up(length, multiple) for length in lengths]))
    if importlib.util.find_spec("speculators"):
        compare_with_speculators(training, args)
    else:
        print("speculators is not installed: nothing to compare with")


if __name__ == "__main__":
    main()
