"""How fast drafters of the embedded target learn, by starting weights, norms and optimiser: acceptance by variant.

    python benchmarks/learning.py --samples DIR [--kind KIND] [--variants NAME ...] [--seeds N ...] [--steps N]

Each variant is trained by the quickstart's recipe with some settings changed, on the same batches for each seed. The
seconds are those of the drafter's part: with other `--steps`, variants are compared after the same time. Then
held-out texts of the target, one greedy and one at temperature 1, tell what chains of 4 would have had accepted
(`inference/replay`), which takes no decoding.
"""

import argparse
import platform
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.features.vocabulary import token_counts
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import read_samples
from draftsmith.inference.decoding.counters import total_of
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.inference.replay.replay import Recording, expected_stats, record, replay
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.batch import Batch
from draftsmith.models.devices import training_precision
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.target.target import Features
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for
from draftsmith.train.config import OptimizerConfig
from draftsmith.train.optimizer import learning_rate, optimizer_of, set_learning_rate

Step = tuple[Batch, Features]  # of training: a batch, and what the target gives for it
KINDS = ("eagle", "eagle3", "p_eagle", "mtp", "dflash", "dflash2", "dspark", "domino")
DRAFT_LENGTH, MAX_NEW_TOKENS = 4, 64
MODES: dict[float, VerificationMode] = {0.0: "greedy", 1.0: "probabilistic"}


@dataclass
class Variant:
    """What differs from a recipe whose layers start at random, without norms of the features, by AdamW at 4e-3."""

    drafter: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


TARGET_START, EACH = {"starting_layers": "target"}, {"feature_norm": "each"}
MUON: dict[str, Any] = {"matrices": "muon"}
EAGLE31: dict[str, Any] = {**EACH, "norm_output": True}
FAST: dict[str, Any] = {**MUON, "learning_rate": 8e-3}
VARIANTS = {
    "plain": Variant(),
    "Muon 4e-3": Variant({}, MUON),
    "Muon 8e-3": Variant({}, FAST),
    "feature norm": Variant(EACH),
    "feature norm, Muon 8e-3": Variant(EACH, FAST),
    "EAGLE-3.1": Variant(EAGLE31),
    "EAGLE-3.1, Muon 4e-3": Variant(EAGLE31, MUON),
    "EAGLE-3.1, Muon 8e-3": Variant(EAGLE31, FAST),
    "EAGLE-3.1, Muon 8e-3, 1024 draft tokens": Variant({**EAGLE31, "draft_vocab_size": 1024}, FAST),
    "EAGLE-3.1, Muon 8e-3, 512 draft tokens": Variant({**EAGLE31, "draft_vocab_size": 512}, FAST),
    "EAGLE-3.1, Muon 8e-3, late decay": Variant(EAGLE31, {**FAST, "decay": "late"}),
    "target's layer": Variant(TARGET_START),
    "target's layer, EAGLE-3.1": Variant({**TARGET_START, **EAGLE31}),
    "target's layer, Muon 4e-3": Variant(TARGET_START, MUON),
    "target's layer, Muon 8e-3": Variant(TARGET_START, FAST),
    "target's layer, feature norm, Muon 8e-3": Variant({**TARGET_START, **EACH}, FAST),
    "target's layer, EAGLE-3.1, Muon 8e-3": Variant({**TARGET_START, **EAGLE31}, FAST),
}


def trained(kind: str, target: Target, plan: BatchPlan, steps: list[Step], variant: Variant, seed: int) -> Drafter:
    """Return a drafter of a variant after these steps of a plan."""
    recipe = RECIPES[f"quickstart_{kind}"]()
    plain: dict[str, Any] = {"starting_layers": "random", "feature_norm": "none", "norm_output": False}
    settings = {name: value for name, value in plain.items() if hasattr(recipe.drafter, name)} | variant.drafter
    torch.manual_seed(seed)
    drafter = DRAFTERS[kind].from_target(replace(recipe.drafter, **settings), target)
    drafter.fit_vocabulary(token_counts(plan, target.vocab_size))
    return fit(drafter, steps, OptimizerConfig(**{"learning_rate": 4e-3, **variant.optimizer}))


def steps_with_features(target: Target, plan: BatchPlan, layer_ids: tuple[int, ...], num_steps: int) -> list[Step]:
    """Return the first batches of a plan, which all variants of a seed are trained on."""
    batches = [plan.collate(plan.micro_batches(step, 0, 1)[0]) for step in range(num_steps)]
    return [(batch, target.features(batch, layer_ids)) for batch in batches]


def fit(drafter: Drafter, steps: list[Step], config: OptimizerConfig) -> Drafter:
    """Train a new drafter as the training loop does it, without its files, and return it."""
    optimizer = optimizer_of(drafter, config)
    for step, (batch, features) in enumerate(steps):
        drafter.progress = step / len(steps)
        set_learning_rate(optimizer, learning_rate(step, len(steps), config))
        with training_precision(batch.token_ids.device, None):
            total, count = drafter.loss(batch, features)["loss"]
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), config.max_gradient_norm)
            optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def acceptance_lengths(target: Target, drafter: Drafter, recordings: list[Recording]) -> list[float]:
    """Return the acceptance length on each recording, in the mode of its temperature."""
    lengths = []
    for recording in recordings:
        traces = replay(target, recording, {"own": drafter}, DRAFT_LENGTH)["own"]
        mode = MODES[recording.sampling.temperature]
        total = total_of([expected_stats(trace, Chain(DRAFT_LENGTH), mode) for trace in traces])
        lengths.append(total.mean_acceptance_length)
    return lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--kind", default="eagle3", choices=KINDS)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=157)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    samples = read_samples(arguments.samples)
    prompts = encode_prompts(prompts_for(target, held_out=True)[: arguments.prompts], target)
    recordings = [record(target, prompts, Sampling(temperature), MAX_NEW_TOKENS, DRAFT_LENGTH) for temperature in MODES]
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, commit {git_commit()}")
    print(
        f"{arguments.kind}: {len(samples)} samples, {arguments.steps} steps of 8, {len(prompts)} held-out prompts, "
        f"{MAX_NEW_TOKENS} tokens, chains of {DRAFT_LENGTH}",
        flush=True,
    )
    for seed in arguments.seeds:
        plan = BatchPlan(samples, 8, 512, 8 * 512, seed=seed)
        drafter = DRAFTERS[arguments.kind].from_target(RECIPES[f"quickstart_{arguments.kind}"]().drafter, target)
        steps = steps_with_features(target, plan, drafter.layer_ids, arguments.steps)
        for name in arguments.variants:
            begin = time.process_time()
            drafter = trained(arguments.kind, target, plan, steps, VARIANTS[name], seed)
            seconds = time.process_time() - begin
            greedy, sampled = acceptance_lengths(target, drafter, recordings)
            print(f"seed {seed}, {name}: {greedy:.3f} at T=0, {sampled:.3f} at T=1, {seconds:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
