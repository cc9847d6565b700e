"""The training of a challenger: the amounts that a budget of time allows, and the config of its run."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.answers.prepare import PrepareSettings
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.samples.samples import HELD_OUT
from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.recipes.auto.budget import recipe_of_auto, target_is_small
from draftsmith.recipes.configs.training_settings import RefreshSettings
from draftsmith.recipes.quickstart.budget import time_step, timed_samples
from draftsmith.train import TrainConfig

ANSWER_SHARE, TRAINING_SHARE = 0.3, 0.5  # of the budget; the rest is for judging and slack
NEW_SHARE = 0.9  # of the text: the rest is older, so that nothing is forgotten
BATCH_SIZE = 32  # prompts answered at a time
CHECKPOINTS, PATIENCE = 8, 2  # of a run, and those without gain after which it ends
MOST_EPOCHS = 4  # over the text: more would learn it by heart
RATE_SHARE = 0.2  # of the recipe's learning rate, for a drafter that has learnt already
HELD_OUT_PROMPTS = 64  # whose answers tell when training brings nothing more; where there are fewer, noise would tell


@dataclass(frozen=True)
class RoundPlan:
    """The amounts of a round's training."""

    kind: str
    num_new: int  # prompts that the target answers
    num_old: int
    num_steps: int  # at most
    max_new_tokens: int

    @property
    def text(self) -> str:
        """The plan in words."""
        return (
            f"{self.kind} trains on the answers to {self.num_new} new and {self.num_old} older prompts, for "
            f"{self.num_steps} steps at most"
        )

    @property
    def answers(self) -> PrepareSettings:
        """The settings by which the target answers."""
        return PrepareSettings(max_new_tokens=self.max_new_tokens, batch_size=BATCH_SIZE)


def recipe_of(kind: str, target: Target) -> TrainConfig:
    """Return the recipe by which a challenger trains on from the champion."""
    config = recipe_of_auto(kind, target_is_small(target))
    config.optimizer.decay = "cosine"
    config.optimizer.learning_rate *= RATE_SHARE
    return config


def make_plan(
    target: Target, champion: Drafter, new: list[Prompt], old: list[Prompt], settings: RefreshSettings
) -> RoundPlan:
    """Return what the budget allows: a batch of answers and a few steps are timed, unless the steps are given.

    `new` and `old` are all prompts that may be trained on. Where there are few older ones, new ones take their time.
    """
    num_answers, num_steps = len(new) + len(old), settings.steps
    config = recipe_of(champion.kind, target)
    if num_steps is None:
        seconds = 3600 * settings.budget
        plain = SpeculativeDecoder(target, load_drafter("none", target))
        first = [*new, *old][:BATCH_SIZE]
        answers = PrepareSettings(max_new_tokens=settings.max_new_tokens, batch_size=BATCH_SIZE)
        samples, batch_seconds = timed_samples(plain, first, answers)
        num_answers = max(len(first), int(ANSWER_SHARE * seconds / batch_seconds * len(first)))
        step = time_step(config, champion, target, samples)
        num_steps = int(TRAINING_SHARE * seconds / (step.features + step.loss))
    num_new = min(len(new), max(round(NEW_SHARE * num_answers), num_answers - len(old)))
    share_of_old = round((1 / NEW_SHARE - 1) * num_new)
    num_old = min(len(old), max(share_of_old, BATCH_SIZE), num_answers - num_new)
    most_steps = MOST_EPOCHS * (num_new + num_old) // config.data.batch_size
    return RoundPlan(champion.kind, num_new, num_old, max(1, min(num_steps, most_steps)), settings.max_new_tokens)


def training_config(plan: RoundPlan, target: Target, champion: Path, folder: Path, device: str | None) -> TrainConfig:
    """Return the config of a challenger's run in the folder of its round."""
    config = recipe_of(plan.kind, target)
    config.target, config.init_from = target.name, str(champion)
    config.data.samples, config.data.held_out_prompts = str(folder / "samples"), 0
    config.evaluation.prompts = None
    if plan.num_new + plan.num_old >= HELD_OUT * HELD_OUT_PROMPTS:
        config.data.held_out_prompts, config.evaluation.patience = HELD_OUT_PROMPTS, PATIENCE
    config.run.dir, config.run.device = str(folder / "run"), device
    config.run.steps, config.run.checkpoint_every = plan.num_steps, -(-plan.num_steps // CHECKPOINTS)
    config.run.log_every = config.run.checkpoint_every
    config.run.keep_checkpoints = 2
    return config
