"""EAGLE-3 trained with forward KL, with the LK hybrid, and with LK after a start with KL: acceptance in the decoder.

    python benchmarks/eagle3_losses.py --samples DIR [--steps N] [--prompts N] [--variants NAME ...]

The same samples, order, steps and seed each; then the decoder drafts chains of 4 on held-out prompts.
"""

import argparse
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from learning import fit, steps_with_features

from draftsmith.data.features.vocabulary import token_counts
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import read_samples
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Drafter, Target
from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for

VARIANTS: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "lk_hybrid": {"divergence": "lk_hybrid"},
    "forward_kl_then_lk_hybrid": {"divergence": "lk_hybrid", "kl_share": 0.5},
}


def trained(target: Target, plan: BatchPlan, settings: dict[str, Any], num_steps: int) -> Drafter:
    """Return a drafter by the quickstart's recipe with other settings of its loss."""
    config = RECIPES["quickstart_eagle3"]()
    assert isinstance(config.drafter, Eagle3Config)
    torch.manual_seed(0)
    drafter = Eagle3.from_target(replace(config.drafter, **settings), target)
    drafter.fit_vocabulary(token_counts(plan, target.vocab_size))
    return fit(drafter, steps_with_features(target, plan, drafter.layer_ids, num_steps), config.optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--target", default=str(EMBEDDED_TARGET))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.from_pretrained(arguments.target, "cpu")
    samples = read_samples(arguments.samples)
    batch_size = RECIPES["quickstart_eagle3"]().data.batch_size
    plan = BatchPlan(samples, batch_size, 512, batch_size * 512, seed=0)
    prompts = encode_prompts(prompts_for(target, held_out=True)[: arguments.prompts], target)
    machine = platform.processor() or platform.machine()
    print(f"{machine}, one thread, torch {torch.__version__}, commit {git_commit()}")
    print(
        f"{len(samples)} samples, {arguments.steps} steps of {batch_size}, {len(prompts)} prompts, 64 tokens",
        flush=True,
    )
    for name in arguments.variants:
        start = time.perf_counter()
        drafter = trained(target, plan, VARIANTS[name], arguments.steps)
        seconds = time.perf_counter() - start
        decoder = SpeculativeDecoder(target, drafter)
        lengths = []
        for temperature in (0.0, 1.0):
            output = decoder.generate(prompts, 64, temperature, draft_length=4, seed=1)
            stats = output.stats.total
            lengths.append(1 + stats.num_accepted_tokens / stats.num_drafts)
        print(f"{name}: {lengths[0]:.3f} at T=0, {lengths[1]:.3f} at T=1 ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
