"""Decoding on a GPU beside the time that reading what each step must read takes, in one process.

    python benchmarks/decoding_gpu.py [--target llama_3_1_8b|qwen3_30b_a3b] [--settings 512:1:0 4096:1:0 512:8:1 ...]
    python benchmarks/decoding_gpu.py --profile 20      # each kernel's time and the gap before it, over 20 rounds
    python benchmarks/decoding_gpu.py --tiny            # a small target on a CPU, to see that the script runs

A setting is CONTEXT:BATCH:TEMPERATURE. Targets have a public shape and random weights in bf16, the drafter is an
untrained EAGLE-3 of the published shape (draft vocabulary 32000). Greedy drafts are accepted at given chances; at a
temperature drafts are sampled and verified as they are, so that hardly any is accepted, and the speedup is the one that
the same chances would give.

The floor of a step is the time that this machine takes to read the weights and the cache, at the speed of a large copy
measured here. Of a mixture of experts those count that the newest tokens of the texts chose. Goals:

1. plain decoding: at least 75 % of the floor's speed
2. a drafted token: at most twice its own floor
3. a round at K = 4: at least 65 % of the floor's speed
"""

import argparse
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from kernel_times import print_kernels
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.decoder import GenerationSettings, Output, resolve_settings
from draftsmith.inference.measuring.bandwidth import memory_bandwidth, weight_bytes
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.target.shape import shape_of
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS

K = 4
RATES = (0.8, 0.7, 0.6, 0.5)  # chance of each drafted token, given those before it
LENGTH = 1 + sum(itertools.accumulate(RATES, lambda x, y: x * y))  # acceptance length at these chances
CPU_BANDWIDTH = 1e10  # bytes a second, an assumption that lets the script run on a CPU
SETTINGS = ["512:1:0", "512:1:1", "4096:1:0", "32768:1:0", "512:8:0", "512:64:0", "4096:8:0"]
TINY: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
TINY |= {
    "eos_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
}


@dataclass(frozen=True)
class Setting:
    context: int
    batch_size: int
    temperature: float

    @classmethod
    def of(cls, text: str) -> "Setting":
        context, batch_size, temperature = text.split(":")
        return cls(int(context), int(batch_size), float(temperature))


def random_target(args: argparse.Namespace) -> Target:
    """Return a target with random weights in bf16."""
    config = PUBLIC_TARGETS[args.target].config
    if args.tiny:
        config.update({name: value for name, value in TINY.items() if hasattr(config, name)})
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.bfloat16)
    return Target(model.eval().requires_grad_(False), None, f"a random {args.target}")


def random_drafter(target: Target) -> Drafter:
    """Return an untrained EAGLE-3, as wide as the recipes make it for a mixture."""
    sparse = hasattr(target.text_config, "num_experts_per_tok")
    config = Eagle3Config(
        draft_vocab_size=min(32000, target.vocab_size // 2),
        intermediate_size=4 * target.hidden_size if sparse else None,
    )
    drafter = Eagle3.from_target(config, target).to(target.device, torch.bfloat16).eval()
    drafter.rotary.float()
    return drafter


def settings_of(drafter: Drafter, setting: Setting, num_tokens: int) -> GenerationSettings:
    """Return settings by which greedy drafts are accepted at `RATES`, and others as they are."""
    mode: VerificationMode | None = None
    if drafter.kind != "none":
        mode = "probabilistic" if setting.temperature else "synthetic"
    rates = RATES if mode == "synthetic" else ()
    return resolve_settings(drafter, Sampling(setting.temperature), num_tokens, K, mode, 0, False, rates)


def prompts_of(target: Target, setting: Setting) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (setting.batch_size, setting.context), generator=generator).tolist()


def decode(target: Target, drafter: Drafter, setting: Setting, args: argparse.Namespace) -> Output:
    """Return the fastest of a few runs after one that compiles and records."""
    settings, prompts = settings_of(drafter, setting, args.max_new_tokens), prompts_of(target, setting)
    decoder = SpeculativeDecoder(target, drafter)
    decoder.decode(prompts, settings, batch_size=setting.batch_size)
    runs = (decoder.decode(prompts, settings, batch_size=setting.batch_size) for _ in range(args.repeats))
    return min(runs, key=lambda output: output.timing.total)


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def experts_of(target: Target) -> list[nn.Module]:
    """Return the modules that hold all experts of a layer; none of a dense target."""
    return [module for name, module in target.model.named_modules() if name.endswith("mlp.experts")]


def bytes_read(target: Target, texts: list[list[int]], num_columns: int) -> float:
    """Return the bytes of weights that a pass over the newest tokens of some texts reads, `num_columns` of each."""
    experts = experts_of(target)
    if not experts:
        return weight_bytes(target)
    chosen: list[Tensor] = []
    hooks = [module.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1])) for module in experts]
    newest = torch.tensor([text[-64:] for text in texts], device=target.device)
    target.features(Batch(newest, torch.ones_like(newest, dtype=torch.bool)))
    for hook in hooks:
        hook.remove()
    read = 0.0
    for module, ids in zip(experts, chosen, strict=True):
        distinct = len(ids.view(*newest.shape, -1)[:, -num_columns:].unique())
        read += bytes_of(module) * distinct / target.text_config.num_experts
    return weight_bytes(target) - sum(map(bytes_of, experts)) + read


def measure(target: Target, drafter: Drafter, setting: Setting, args: argparse.Namespace) -> None:
    """Print speeds of plain decoding and of rounds at one setting, beside their floors."""
    bandwidth = memory_bandwidth(target.device) or CPU_BANDWIDTH
    kept = shape_of(target).kept_bytes(setting.context + args.max_new_tokens // 2, target.dtype.itemsize)
    cached = setting.batch_size * kept
    print(f"\ncontext {setting.context}, batch {setting.batch_size}, temperature {setting.temperature:g}")
    plain = decode(target, load_drafter("none", target), setting, args)
    step = 1000 * (plain.timing.total - plain.timing.to_first_token) / (args.max_new_tokens - 1)
    texts = [a + b for a, b in zip(prompts_of(target, setting), plain.token_ids, strict=True)]
    floor = 1000 * (bytes_read(target, texts, 1) + cached) / bandwidth
    print(
        f"plain step      {step:7.3f} ms, floor {floor:7.3f}: {floor / step:.0%} of its speed (goal 75 %)", flush=True
    )

    output = decode(target, drafter, setting, args)
    rounds = output.stats.total.num_rounds / setting.batch_size
    drafted = output.timing.phases["draft"] / rounds / K
    own = 1000 * (bytes_of(drafter) - bytes_of(drafter.get_submodule("fc"))) / bandwidth  # `fc` is read once a round
    print(f"drafted token   {drafted:7.3f} ms, floor {own:7.3f}: {drafted / own:.2f} times it (goal 2)")
    whole = 1000 * (output.timing.total - output.timing.to_first_token) / rounds
    fusion = bytes_of(drafter.get_submodule("fc"))
    least = K * own + 1000 * (bytes_read(target, texts, K + 1) + cached + fusion) / bandwidth
    print(f"round, K = {K}    {whole:7.3f} ms, floor {least:7.3f}: {least / whole:.0%} of its speed (goal 65 %)")
    print(f"at acceptance length {LENGTH:.2f} a speedup of {LENGTH * step / whole:.2f}", flush=True)


def print_profile(target: Target, drafter: Drafter, setting: Setting, num_rounds: int) -> None:
    """Print how long each kernel ran, and how long the device did nothing before it, over some rounds of decoding."""
    prompts = prompts_of(target, setting)
    decoder = SpeculativeDecoder(target, drafter)
    settings = settings_of(drafter, setting, num_rounds * (1 if drafter.kind == "none" else math.ceil(LENGTH)))
    decoder.decode(prompts, settings, batch_size=setting.batch_size)
    print(f"\nprofile of {drafter.kind}, prompt and {settings.max_new_tokens} tokens")
    print_kernels(lambda: decoder.decode(prompts, settings, batch_size=setting.batch_size), target.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama_3_1_8b", choices=["llama_3_1_8b", "qwen3_30b_a3b"])
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="CONTEXT:BATCH:TEMPERATURE")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=int, metavar="ROUNDS")
    parser.add_argument("--tiny", action="store_true", help="a small target on a CPU")
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    target = random_target(args)
    drafter = random_drafter(target)
    env, bandwidth = environment(target), memory_bandwidth(target.device) or CPU_BANDWIDTH
    print(f"{env.device}, torch {env.versions['torch']}, triton {env.versions['triton']}, {env.git_commit}")
    print(f"{target.name}, {target.num_layers} layers; copies run at {bandwidth / 1e9:.0f} GB/s", flush=True)
    for setting in map(Setting.of, args.settings):
        if args.profile:
            for profiled in (load_drafter("none", target), drafter):
                print_profile(target, profiled, setting, args.profile)
        else:
            measure(target, drafter, setting, args)


if __name__ == "__main__":
    main()
