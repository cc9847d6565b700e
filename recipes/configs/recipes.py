"""Recipes: functions that return the whole config of a run. A variant calls another and changes what differs.

Each is a starting point for a target of 1 to 10 billion parameters unless its docstring says otherwise. What depends
on the user (target, samples, folder, prompts) is left empty and asked for.
"""

from collections.abc import Callable

from draftsmith.models.drafters.draft_model import DraftModelConfig
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.drafters.hydra import HydraConfig
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.drafters.mlp_speculator import MLPSpeculatorConfig
from draftsmith.models.drafters.p_eagle import PEagleConfig
from draftsmith.recipes.configs.public_targets import TARGET_RECIPES
from draftsmith.train import TrainConfig
from draftsmith.train.config import DataConfig


def eagle() -> TrainConfig:
    """EAGLE-1, trained on its own guesses, too; made for the dynamic trees of EAGLE-2."""
    config = TrainConfig(target="", drafter=EagleConfig(), data=DataConfig(""))
    config.optimizer.learning_rate = 3e-5
    config.run.steps = 40000
    config.run.checkpoint_every = 4000
    return config


def eagle3() -> TrainConfig:
    """EAGLE-3 with a draft vocabulary of 32000 and an unrolled length of 5."""
    config = TrainConfig(target="", drafter=Eagle3Config(draft_vocab_size=32000, unroll_steps=5), data=DataConfig(""))
    config.optimizer.learning_rate = 1e-4
    config.run.steps = 20000
    config.run.checkpoint_every = 2000
    return config


def p_eagle() -> TrainConfig:
    """P-EAGLE of four layers with a draft vocabulary of 32000; drafts up to 8 tokens in one pass."""
    config = TrainConfig(target="", drafter=PEagleConfig(draft_vocab_size=32000), data=DataConfig(""))
    config.optimizer.learning_rate = 1e-4
    config.run.steps = 20000
    config.run.checkpoint_every = 2000
    return config


def medusa() -> TrainConfig:
    """Four Medusa heads with an output matrix each."""
    config = TrainConfig(target="", drafter=MedusaConfig(), data=DataConfig(""))
    config.optimizer.learning_rate = 5e-4
    config.run.steps = 10000
    config.run.checkpoint_every = 1000
    return config


def medusa_2() -> TrainConfig:
    """Medusa heads and low-rank corrections to the target, trained together. The target is no longer the same model."""
    config = medusa()
    config.drafter = MedusaConfig(adapt_target="low_rank")
    return config


def hydra() -> TrainConfig:
    """Four Hydra heads with an output matrix each."""
    config = medusa()
    config.drafter = HydraConfig()
    return config


def mlp_speculator() -> TrainConfig:
    """An MLP speculator of four stages, as wide as the target."""
    config = TrainConfig(target="", drafter=MLPSpeculatorConfig(), data=DataConfig(""))
    config.optimizer.learning_rate = 1e-3
    config.run.steps = 10000
    config.run.checkpoint_every = 1000
    return config


def draft_model() -> TrainConfig:
    """A standalone draft model of two of the target's layers; `drafter.model=NAME` starts from a small model.

    What it accepts before training is measured, too.
    """
    config = TrainConfig(target="", drafter=DraftModelConfig(), data=DataConfig(""))
    config.optimizer.learning_rate = 3e-4
    config.run.steps = 20000
    config.run.checkpoint_every = 2000
    config.evaluation.untrained = True
    return config


def quickstart_eagle() -> TrainConfig:
    """EAGLE-1 for the embedded target, in a minute or two on a CPU."""
    config = _quickstart(eagle())
    config.drafter = EagleConfig(divergence_weight=1.0)  # features alone lead to its acceptance, but slowly
    config.optimizer.learning_rate = 4e-3
    return config


def quickstart_eagle3() -> TrainConfig:
    """EAGLE-3 for the embedded target, in a minute or two on a CPU."""
    config = _quickstart(eagle3())
    config.drafter = Eagle3Config(unroll_steps=3)
    config.optimizer.learning_rate = 4e-3
    return config


def quickstart_p_eagle() -> TrainConfig:
    """P-EAGLE of two layers for the embedded target, in a minute or two on a CPU."""
    config = _quickstart(p_eagle())
    config.drafter = PEagleConfig(num_layers=2, num_depths=5)
    config.optimizer.learning_rate = 4e-3
    return config


def quickstart_medusa() -> TrainConfig:
    """Medusa heads for the embedded target, in a minute on a CPU."""
    config = _quickstart(medusa())
    config.optimizer.learning_rate = 4e-3
    return config


def quickstart_hydra() -> TrainConfig:
    """Hydra heads for the embedded target, in a minute on a CPU."""
    config = _quickstart(hydra())
    config.optimizer.learning_rate = 1e-2
    return config


def quickstart_mlp_speculator() -> TrainConfig:
    """An MLP speculator for the embedded target, in a minute on a CPU."""
    config = _quickstart(mlp_speculator())
    config.optimizer.learning_rate = 1e-2
    return config


def quickstart_draft_model() -> TrainConfig:
    """A one-layer draft model for the embedded target, in a minute on a CPU."""
    config = _quickstart(draft_model())
    config.drafter = DraftModelConfig(num_layers=1)
    config.optimizer.learning_rate = 2e-3
    return config


def _quickstart(config: TrainConfig) -> TrainConfig:
    """Small batches and short evaluations; steps and prompts are set by the time there is, so none is cut here."""
    config.data.batch_size = 8
    config.evaluation.max_new_tokens = 48
    config.evaluation.num_prompts = 8
    config.evaluation.repeats = 2  # of two checkpoints of one drafter, more prompts tell more than more repeats
    config.evaluation.time_share = None
    return config


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "p_eagle": p_eagle,
    "medusa": medusa,
    "medusa_2": medusa_2,
    "hydra": hydra,
    "mlp_speculator": mlp_speculator,
    "draft_model": draft_model,
    "quickstart_eagle": quickstart_eagle,
    "quickstart_eagle3": quickstart_eagle3,
    "quickstart_p_eagle": quickstart_p_eagle,
    "quickstart_medusa": quickstart_medusa,
    "quickstart_hydra": quickstart_hydra,
    "quickstart_mlp_speculator": quickstart_mlp_speculator,
    "quickstart_draft_model": quickstart_draft_model,
    **TARGET_RECIPES,
}
