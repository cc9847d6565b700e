"""Untrained drafters of a recipe's shape, and the sizes of them that set their speed."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from draftsmith.inference.planning.gpu_roofline import DrafterShape, Passes
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.drafter_configs import ReducedVocabulary, with_random_layers
from draftsmith.models.errors import UserError
from draftsmith.models.layers import MergedLinear
from draftsmith.models.target.shape import target_shape
from draftsmith.recipes.configs.public_targets import target_config
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import TrainConfig
from draftsmith.train.hardware.estimates import meta_target, num_multiplied

PASSES: dict[str, Passes] = {  # of the weights of each kind, for a draft
    **dict.fromkeys(("eagle", "eagle3", "mtp", "draft_model"), "token"),
    **dict.fromkeys(("medusa", "hydra", "mlp_speculator"), "head"),
    **dict.fromkeys(("p_eagle", "dflash", "dflash2", "dspark", "domino"), "block"),
    **dict.fromkeys(("ngram", "suffix"), "none"),
}
DRAFT_MODELS = ("draft_model", "quickstart_draft_model")  # made of a target's own layers, which are not loaded
KEPT = ("k_proj", "v_proj", "kv_a_proj_with_mqa")  # projections whose outputs are kept of every token


def drafter_of_shape(name: str, target: Target) -> tuple[Drafter, TrainConfig | None]:
    """Return an untrained drafter by the name of a kind or recipe, with the recipe; else a loaded one."""
    if name not in RECIPES or Path(name).is_dir():
        if name not in DRAFTERS and "/" not in name and not Path(name).exists():
            known = ", ".join(sorted(RECIPES))
            raise UserError(f"drafter {name}: no such kind, recipe or directory: give one of {known}, or a checkpoint")
        return load_drafter(name, target), None
    config = RECIPES[name]()
    shape = config.drafter
    if isinstance(shape, ReducedVocabulary) and (shape.draft_vocab_size or 0) > target.vocab_size:
        config.drafter = replace(shape, draft_vocab_size=None)  # the target's vocabulary is smaller than that
    config.drafter = with_random_layers(config.drafter)
    drafter = DRAFTERS[config.drafter.kind].from_target(config.drafter, target)
    for parameter in drafter.parameters():  # its buffers keep their precision
        parameter.data = parameter.data.to(target.dtype)
    return drafter.to(target.device).eval(), config


def drafter_shape(name: str, config: PretrainedConfig, target_name: str) -> tuple[DrafterShape, str]:
    """Return the sizes of a drafter for a target of this config, and its kind; nothing of either is loaded.

    `name`: a kind or recipe, or a whole model that drafts. Raises `UserError` for other names, and for a kind whose
    drafts cost what their text decides.
    """
    if PASSES.get(name) == "none":
        return DrafterShape(name, "none", 0, 0, 0, None), name
    if name in DRAFT_MODELS or name not in RECIPES:
        return draft_model_shape(name), "draft_model"
    if RECIPES[name]().drafter.changes_target:
        raise UserError(
            f"drafter {name}: it trains the target's layers along, which --gpu does not load: give its kind"
        )
    with torch.device("meta"):
        target = meta_target(config, target_name)
        drafter, _ = drafter_of_shape(name, target)
    head = target.head_weight().numel() if drafter.drafts_by_target_head else 0
    kept = kept_values(drafter)
    weights = num_multiplied(drafter) + head
    return DrafterShape(
        name, PASSES[drafter.kind], weights, len(kept), sum(kept), drafter.max_draft_length
    ), drafter.kind


def draft_model_shape(name: str) -> DrafterShape:
    """Return the sizes of a whole model that drafts token by token."""
    if name in DRAFT_MODELS or name in DRAFTERS:
        known = ", ".join(kind for kind in PASSES if kind not in DRAFT_MODELS)
        mend = "for a draft model its name or folder" if name in DRAFT_MODELS else "such a kind"
        raise UserError(f"drafter {name}: with --gpu its cost is not known: give {mend}; the kinds are {known}")
    shape = target_shape(*target_config(name))
    kept = sum(group.layers * group.values for group in shape.caches)
    return DrafterShape(shape.name, "token", shape.active_weights, shape.layers, kept, None)


def kept_values(drafter: nn.Module) -> list[int]:
    """Return how many values each attention of a drafter keeps of a token."""
    kept = []
    for module in drafter.modules():
        sizes: dict[str, int] = {}
        for name, part in module.named_children():
            if isinstance(part, MergedLinear):
                sizes |= part.parts
            elif isinstance(part, nn.Linear):
                sizes[name] = part.out_features
        if not isinstance(module, MergedLinear) and (found := sum(sizes.get(name, 0) for name in KEPT)):
            kept.append(found)
    return kept
