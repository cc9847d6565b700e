"""Recipes: functions that return the whole config of a run. A variant calls another and changes what differs.

Each is a starting point for a target of 1 to 10 billion parameters unless its docstring says otherwise. What depends
on the user (target, samples, folder, prompts) is left empty and asked for.
"""

import difflib
from collections.abc import Callable
from dataclasses import replace

from draftsmith.models.drafter_configs import (
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DrafterConfig,
    DraftModelConfig,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    HydraConfig,
    MedusaConfig,
    MLPSpeculatorConfig,
    MtpConfig,
    PEagleConfig,
)
from draftsmith.models.errors import UserError, shown
from draftsmith.recipes.configs.public_targets import target_recipes
from draftsmith.train.config import DataConfig, TrainConfig


def eagle() -> TrainConfig:
    """EAGLE-1, trained on its own guesses, too; made for the dynamic trees of EAGLE-2."""
    return _recipe(EagleConfig(), learning_rate=3e-5, steps=40000)


def eagle3() -> TrainConfig:
    """EAGLE-3.1 with a draft vocabulary of 32000 and an unrolled length of 5."""
    return _by_muon(_recipe(_eagle31(unroll_steps=5, draft_vocab_size=32000), learning_rate=1e-4, steps=20000), 10)


def _eagle31(unroll_steps: int, draft_vocab_size: int | None) -> Eagle3Config:
    """Return EAGLE-3 with the norms of EAGLE-3.1, from random weights: docs/eagle3.md shows that it learns fastest."""
    return Eagle3Config(
        draft_vocab_size=draft_vocab_size, unroll_steps=unroll_steps, feature_norm="each", norm_output=True
    )


def p_eagle() -> TrainConfig:
    """P-EAGLE of four layers with a draft vocabulary of 32000; drafts up to 8 tokens in one pass."""
    drafter = PEagleConfig(draft_vocab_size=32000, feature_norm="each")
    return _by_muon(_recipe(drafter, learning_rate=1e-4, steps=20000), 10)


def dflash() -> TrainConfig:
    """DFlash of five layers in blocks of 8, with the target's own head; drafts up to 7 tokens in one pass."""
    return _block_recipe(DFlashConfig())


def dflash2() -> TrainConfig:
    """DFlash of five layers in blocks of 8 with convolutions along the rows of a block."""
    return _block_recipe(DFlash2Config())


def dspark() -> TrainConfig:
    """DSpark of five layers in blocks of 7, whose tokens follow each other; drafts up to 7 tokens in one pass."""
    return _block_recipe(DSparkConfig(block_size=7))


def domino() -> TrainConfig:
    """Domino of five layers in blocks of 8, whose tokens follow all those before them; drafts up to 7 in one pass."""
    return _block_recipe(DominoConfig())


def mtp() -> TrainConfig:
    """The target's own head for further tokens, trained to draft three; what it accepts before that is measured, too.

    A target without one gets a new head, for which `new_mtp` has the rates.
    """
    config = _recipe(MtpConfig(), learning_rate=5e-5, steps=10000)
    config.evaluation.untrained = True
    return config


def new_mtp() -> TrainConfig:
    """A new head for further tokens from random weights, by the rates of EAGLE-3's new layer."""
    return _by_muon(_recipe(MtpConfig(starting_layers="random"), learning_rate=1e-4, steps=20000), 10)


def medusa() -> TrainConfig:
    """Four Medusa heads with an output matrix each."""
    return _recipe(MedusaConfig(), learning_rate=5e-4, steps=10000)


def medusa_2() -> TrainConfig:
    """Medusa heads and low-rank corrections to the target, trained together. The target is no longer the same model."""
    return _recipe(MedusaConfig(adapt_target="low_rank"), learning_rate=5e-4, steps=10000)


def hydra() -> TrainConfig:
    """Four Hydra heads with an output matrix each."""
    return _recipe(HydraConfig(), learning_rate=5e-4, steps=10000)


def mlp_speculator() -> TrainConfig:
    """An MLP speculator of four stages, as wide as the target."""
    return _recipe(MLPSpeculatorConfig(), learning_rate=1e-3, steps=10000)


def draft_model() -> TrainConfig:
    """A standalone draft model of two of the target's layers; `drafter.model=NAME` starts from a small model.

    What it accepts before training is measured, too.
    """
    config = _recipe(DraftModelConfig(), learning_rate=3e-4, steps=20000)
    config.evaluation.untrained = True
    return config


def _recipe(drafter: DrafterConfig, learning_rate: float, steps: int) -> TrainConfig:
    """Return a config with ten checkpoints, and a learning curve on samples of 64 prompts."""
    config = TrainConfig(target="", drafter=drafter, data=DataConfig("", held_out_prompts=64))
    config.optimizer.learning_rate = learning_rate
    config.run.steps, config.run.checkpoint_every = steps, steps // 10
    return config


def _block_recipe(drafter: DFlashConfig) -> TrainConfig:
    """Return the config of a block drafter, in small parts: its layers read a token 20 times, EAGLE-3's one 5 times."""
    config = _by_muon(_recipe(drafter, learning_rate=1e-3, steps=20000))
    config.data.tokens_per_micro_batch = 2048
    return config


def _by_muon(config: TrainConfig, rate_factor: float = 1.0) -> TrainConfig:
    """Return a config that trains inner matrices by Muon.

    1e-3 is the rate that speculators' authors found to be good for Muon with Qwen3-8B and others (its pull requests
    607, 746 and 1148). AdamW's is as high where it trains little; heads of EAGLE-3 and P-EAGLE keep the usual 1e-4.
    """
    config.optimizer.matrices, config.optimizer.matrices_rate_factor = "muon", rate_factor
    return config


def quickstart_eagle() -> TrainConfig:
    """EAGLE-1 for the embedded target, in a minute or two on a CPU."""
    drafter = EagleConfig(divergence_weight=1.0)  # features alone lead to its acceptance, but slowly
    return _quickstart(eagle(), 4e-3, drafter)


def quickstart_eagle3() -> TrainConfig:
    """EAGLE-3.1 for the embedded target, in a minute or two on a CPU; the unroll grows for most of its steps."""
    drafter = replace(_eagle31(unroll_steps=3, draft_vocab_size=None), unroll_warmup=0.85)
    return _by_muon(_quickstart(eagle3(), 4e-3, drafter))


def quickstart_p_eagle() -> TrainConfig:
    """P-EAGLE of two layers for the embedded target, in a minute or two on a CPU."""
    drafter = PEagleConfig(num_layers=2, num_depths=5, feature_norm="each")
    return _by_muon(_quickstart(p_eagle(), 8e-3, drafter))


def quickstart_dflash() -> TrainConfig:
    """DFlash of two layers in blocks of 5 for the embedded target, in a minute or two on a CPU."""
    return _quickstart_block(dflash(), DFlashConfig(num_layers=2, block_size=5))


def quickstart_dflash2() -> TrainConfig:
    """DFlash2 of two layers in blocks of 5 for the embedded target, in a minute or two on a CPU."""
    return _quickstart_block(dflash2(), DFlash2Config(num_layers=2, block_size=5))


def quickstart_dspark() -> TrainConfig:
    """DSpark of two layers in blocks of 4 for the embedded target, in a minute or two on a CPU."""
    return _quickstart_block(dspark(), DSparkConfig(num_layers=2, block_size=4, markov_rank=64))


def quickstart_domino() -> TrainConfig:
    """Domino of two layers in blocks of 5 for the embedded target, in a minute or two on a CPU."""
    return _quickstart_block(domino(), DominoConfig(num_layers=2, block_size=5, memory_size=64, code_size=64))


def quickstart_mtp() -> TrainConfig:
    """A new head for further tokens of the embedded target, in a minute or two on a CPU."""
    return _by_muon(_quickstart(new_mtp(), 8e-3))


def quickstart_medusa() -> TrainConfig:
    """Medusa heads for the embedded target, in a minute on a CPU."""
    return _quickstart(medusa(), 4e-3)


def quickstart_hydra() -> TrainConfig:
    """Hydra heads for the embedded target, in a minute on a CPU."""
    return _quickstart(hydra(), 1e-2)


def quickstart_mlp_speculator() -> TrainConfig:
    """An MLP speculator for the embedded target, in a minute on a CPU."""
    return _quickstart(mlp_speculator(), 1e-2)


def quickstart_draft_model() -> TrainConfig:
    """A one-layer draft model for the embedded target, in a minute on a CPU."""
    return _quickstart(draft_model(), 2e-3, DraftModelConfig(num_layers=1))


def _quickstart_block(config: TrainConfig, drafter: DFlashConfig) -> TrainConfig:
    """Return the quickstart's recipe of a block drafter: of copied layers, by Muon, it learns most in few steps."""
    return _by_muon(_quickstart(config, 8e-3, replace(drafter, starting_layers="target")))


def _quickstart(config: TrainConfig, learning_rate: float, drafter: DrafterConfig | None = None) -> TrainConfig:
    """Return a recipe with small batches and short evaluations.

    Steps and prompts follow from the time that a user gives, so that no evaluation is cut short here.
    """
    config.drafter = drafter or config.drafter
    config.optimizer.learning_rate = learning_rate
    config.data.batch_size = 8
    config.data.held_out_prompts = 24  # a curve of 64 takes a sixth of a run of some hundred steps
    config.evaluation.max_new_tokens = 48
    config.evaluation.num_prompts = 8
    config.evaluation.repeats = 2  # of two checkpoints of one drafter, more prompts tell more than more repeats
    config.evaluation.time_share = None
    return config


TARGET_RECIPES = target_recipes(eagle3, dflash, dflash2, dspark, domino, mtp, new_mtp)
RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "p_eagle": p_eagle,
    "dflash": dflash,
    "dflash2": dflash2,
    "dspark": dspark,
    "domino": domino,
    "mtp": mtp,
    "new_mtp": new_mtp,
    "medusa": medusa,
    "medusa_2": medusa_2,
    "hydra": hydra,
    "mlp_speculator": mlp_speculator,
    "draft_model": draft_model,
    "quickstart_eagle": quickstart_eagle,
    "quickstart_eagle3": quickstart_eagle3,
    "quickstart_p_eagle": quickstart_p_eagle,
    "quickstart_dflash": quickstart_dflash,
    "quickstart_dflash2": quickstart_dflash2,
    "quickstart_dspark": quickstart_dspark,
    "quickstart_domino": quickstart_domino,
    "quickstart_mtp": quickstart_mtp,
    "quickstart_medusa": quickstart_medusa,
    "quickstart_hydra": quickstart_hydra,
    "quickstart_mlp_speculator": quickstart_mlp_speculator,
    "quickstart_draft_model": quickstart_draft_model,
    **TARGET_RECIPES,
}


def recipe_named(name: str) -> TrainConfig:
    """Return a recipe by its name. Raises `UserError` with the nearest names where there is none."""
    if name in RECIPES:
        return RECIPES[name]()
    near = difflib.get_close_matches(name, RECIPES, n=2, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    general = ", ".join(known for known in RECIPES if known not in TARGET_RECIPES)
    raise UserError(f"unknown recipe {shown(name)}; {hint}there are {general}, and those of docs/recipes.md")
