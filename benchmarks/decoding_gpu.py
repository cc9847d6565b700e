"""Decoding of an 8B target on a GPU beside the time that reading its weights takes, in one process.

    python benchmarks/decoding_gpu.py [--context 512] [--batch-size 1] [--temperature 0] [--max-new-tokens 256]

Llama-3.1-8B's shape with random weights in bf16; an untrained EAGLE-3 drafter of the published shape (draft
vocabulary 32000) whose drafts are accepted at given chances. The floor of a step is the time that this machine takes to
read what the step must read, at the speed of a copy of four gigabytes measured here. Goals:

1. plain decoding: at least 75 % of the floor's speed
2. a drafted token: at most twice its own floor
3. a round at K = 4: at least 65 % of the floor's speed
"""

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.decoder import Output, resolve_settings
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.target.slots import ATTENTION
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS

K = 4
RATES = (0.8, 0.7, 0.6, 0.5)  # chance of each drafted token, given those before it


def random_target(num_layers: int, device: str) -> Target:
    config = PUBLIC_TARGETS["llama_3_1_8b"].config
    assert isinstance(config, LlamaConfig)
    config.num_hidden_layers, config._attn_implementation = num_layers, ATTENTION
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return Target(model.eval().requires_grad_(False), None, "a random Llama-3.1-8B")


def copy_speed(device: str, num_bytes: int = 2 << 30) -> float:
    """Bytes a second, read and written, of copying a tensor to another."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    sink, times = torch.empty_like(source), []
    for _ in range(8):
        synchronise(device)
        start = time.perf_counter()
        sink.copy_(source)
        synchronise(device)
        times.append(time.perf_counter() - start)
    return 2 * num_bytes / statistics.median(times[2:])


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def decode(target: Target, drafter: Drafter, args: argparse.Namespace) -> Output:
    """The fastest of a few runs after one that compiles and records."""
    rates = () if drafter.kind == "none" else RATES
    mode: VerificationMode | None = "synthetic" if rates else None
    sampling = Sampling(args.temperature)
    settings = resolve_settings(drafter, sampling, args.max_new_tokens, K, mode, 0, False, rates)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(target.vocab_size, (args.batch_size, args.context), generator=generator).tolist()
    decoder = SpeculativeDecoder(target, drafter)
    decoder.decode(prompts, settings, batch_size=args.batch_size)
    runs = (decoder.decode(prompts, settings, batch_size=args.batch_size) for _ in range(args.repeats))
    return min(runs, key=lambda output: output.timing.total)


def bytes_of(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="cpu only to see that the script runs")
    args = parser.parse_args()
    target = random_target(args.layers, args.device)
    drafter = Eagle3.from_target(Eagle3Config(draft_vocab_size=32000), target).to(args.device, torch.bfloat16).eval()
    drafter.rotary.float()
    speed = copy_speed(args.device)
    text = target.text_config
    cached = 2 * 2 * args.layers * text.num_key_value_heads * text.head_dim * (args.context + args.max_new_tokens // 2)
    cached *= args.batch_size
    target_bytes = bytes_of(target.model) - bytes_of(target.embedding) + cached
    drafted_bytes = bytes_of(drafter) - bytes_of(drafter.fc)  # `fc` is read once a round

    env = environment(target)
    print(f"{env.device}, torch {env.versions['torch']}, triton {env.versions['triton']}, {env.git_commit}")
    print(f"copies run at {speed / 1e9:.0f} GB/s; {args.layers} layers, {args.context} tokens read before, ", end="")
    print(f"batch {args.batch_size}, temperature {args.temperature:g}\n")
    plain = decode(target, load_drafter("none", target), args)
    step = 1000 * (plain.timing.total - plain.timing.to_first_token) / (args.max_new_tokens - 1)
    floor = 1000 * target_bytes / speed
    print(f"plain step      {step:7.3f} ms, floor {floor:7.3f}: {floor / step:.0%} of its speed (goal 75 %)")

    round_ = decode(target, drafter, args)
    rounds = round_.stats.total.num_rounds / args.batch_size
    drafted = round_.timing.phases["draft"] / rounds / K
    own = 1000 * drafted_bytes / speed
    print(f"drafted token   {drafted:7.3f} ms, floor {own:7.3f}: {drafted / own:.2f} times it (goal 2)")
    whole = 1000 * (round_.timing.total - round_.timing.to_first_token) / rounds
    least = floor + K * own + 1000 * bytes_of(drafter.fc) / speed
    print(f"round, K = {K}    {whole:7.3f} ms, floor {least:7.3f}: {least / whole:.0%} of its speed (goal 65 %)")
    length = round_.stats.total.mean_acceptance_length
    print(f"\nat acceptance length {length:.2f} a speedup of {length * step / whole:.2f}")


if __name__ == "__main__":
    main()
