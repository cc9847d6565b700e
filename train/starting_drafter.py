"""The drafter that a run starts with: a new one, or the one of a checkpoint (`init_from`)."""

from dataclasses import asdict, replace

from accelerate import PartialState
from torch import Tensor

from draftsmith.data.progress import notice
from draftsmith.models import DRAFTERS, Checkpoint, Drafter, Target, build_drafter, read_checkpoint
from draftsmith.models.drafter_configs import DrafterConfig, LayersLikeTarget, MtpConfig, ReducedVocabulary
from draftsmith.models.drafter_parts.checkpoint_interface import OWN_EMBEDDING
from draftsmith.models.drafter_parts.target_layers import why_not_copied
from draftsmith.models.drafter_parts.vocabulary import ranking, too_large, with_size
from draftsmith.models.errors import UserError
from draftsmith.models.target.identity import check_identity, differences
from draftsmith.models.target.target_files import why_not_read
from draftsmith.train.config import TrainConfig


def fit_vocabulary_size(config: TrainConfig, vocab_size: int) -> None:
    """Draft from all of a target's vocabulary where it is smaller than what the recipe drafts from.

    Raises `UserError` where the user asked for a size that is too large.
    """
    drafter = config.drafter
    if not isinstance(drafter, ReducedVocabulary) or (size := drafter.draft_vocab_size or 0) <= vocab_size:
        return
    if "drafter.draft_vocab_size" in config.explicit_keys:
        raise UserError(too_large(size, vocab_size))
    if PartialState().is_main_process:
        notice(f"the recipe drafts from {size} tokens, and the target has {vocab_size}: all of them are drafted from")
    config.drafter = replace(drafter, draft_vocab_size=None)


def fit_starting_layers(config: TrainConfig, target: Target) -> None:
    """Start with random layers where the recipe copies the target's, and these have another shape.

    Raises `UserError` where the user asked for the copy, or where a drafter that is trained on has layers already.
    """
    drafter = config.drafter
    if not isinstance(drafter, LayersLikeTarget) or drafter.starting_layers == "random":
        return
    reason = "init_from brings the layers"
    if config.init_from is None:
        reason = why_not_copied(target, drafter.intermediate_size, drafter.num_starting_layers) or ""
        if not reason and why_not_read(target.name):
            reason = f"the layers of {target.name} are quantised in a form that is not unpacked"
    if reason and "drafter.starting_layers" in config.explicit_keys:
        raise UserError(f"drafter.starting_layers=target: {reason}; give drafter.starting_layers=random")
    if reason and config.init_from is None and PartialState().is_main_process:
        notice(f"{reason}: the drafter's start at random")
    if reason:
        config.drafter = replace(drafter, starting_layers="random")


def starting_drafter(config: TrainConfig, target: Target, counts: Tensor) -> Drafter:
    """Return the drafter in fp32 on the CPU. A draft vocabulary is chosen by `counts` [V] of what the target wrote."""
    if config.init_from is not None:
        return continued(config, config.init_from, target)
    drafter_config = config.drafter
    if isinstance(drafter_config, ReducedVocabulary):
        drafter_config = with_size(drafter_config, counts, target.eos_token_ids)
    drafter = DRAFTERS[drafter_config.kind].from_target(drafter_config, target)
    drafter.fit_vocabulary(ranking(counts, target.eos_token_ids))
    note = drafter.starting_note(counts)
    is_open = isinstance(drafter_config, MtpConfig) and drafter_config.starting_layers is None
    if is_open and not drafter.comes_with_target:
        note = f"{target.name} has no head for further tokens, so a new one is trained: new_mtp is the recipe for one"
    if note and PartialState().is_main_process:
        notice(note)
    return drafter


def continued(config: TrainConfig, source: str, target: Target) -> Drafter:
    """Return the drafter of a checkpoint, to be trained as `config.drafter` says; the config takes its shape.

    Layers, widths, heads and draft vocabulary are the checkpoint's, whatever the recipe has; the rest is the config's.
    Raises `UserError` for a drafter of another kind or tokenizer, and where the user asked for another shape.
    """
    checkpoint, wanted = read_checkpoint(source, target), config.drafter
    if checkpoint.kind != wanted.kind:
        raise UserError(
            f"init_from={source} holds a drafter of kind {checkpoint.kind}, but this recipe trains {wanted.kind}: give "
            f"a recipe for {checkpoint.kind}, or another checkpoint"
        )
    own_embedding = checkpoint.tensors.pop(OWN_EMBEDDING, None) is not None
    drafter = build_drafter(with_training_of(checkpoint, wanted), target)
    check_shape(config, source, drafter)
    recorded = drafter.trained_for or {}
    mend = "give a drafter for this tokenizer, or train a new one"
    check_identity(f"init_from={source}", recorded, target, ["tokenizer_fingerprint"], mend)
    config.drafter = drafter.config
    if PartialState().is_main_process:
        keys = ["target_fingerprint"] * target.has_layers + ["template_hash"]
        notices = [f"was made with {difference}" for difference in differences(recorded, target, keys)]
        if own_embedding:
            notices.append(f"has an embedding of its own, in whose place that of {target.name} is used")
        for text in notices:
            notice(f"init_from={source} {text}: it is trained on for {target.name}")
    return drafter


def with_training_of(checkpoint: Checkpoint, wanted: DrafterConfig) -> Checkpoint:
    """Return the checkpoint with the config's settings, except for those that its tensors decide."""
    training = {name: value for name, value in asdict(wanted).items() if name not in wanted.fixed_fields}
    entry = {**checkpoint.config.get("draftsmith", {}), **training}
    return replace(checkpoint, config={**checkpoint.config, "draftsmith": entry})


def check_shape(config: TrainConfig, source: str, drafter: Drafter) -> None:
    """Refuse settings that the user asked for and the checkpoint does not have. A null asks for nothing."""
    for name, value in asdict(config.drafter).items():
        key, actual = f"drafter.{name}", getattr(drafter.config, name)
        if value == actual:
            continue
        if name not in config.drafter.fixed_fields:
            raise UserError(f"{key}={value}: a drafter that init_from loads has {actual}, leave one of them out")
        if key in config.explicit_keys and value is not None:
            raise UserError(f"{key}={value}, but init_from={source} has {actual}: leave one of them out")
