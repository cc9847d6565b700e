"""Which targets can be served: refusals that need no more than a config, and a check of the loaded model in numbers.

A target is served when transformers' own modelling decodes trees on the slot cache: each layer keeps a key and a value
of every token, takes the token's position, and attends through the function that `slots` registers.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel

from draftsmith.models.errors import UserError, library_errors
from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.target.fused_layers import FusedDecoder
from draftsmith.models.target.loading import is_multimodal, model_class_of, whole_of
from draftsmith.models.target.slots import ATTENTION, SlotCache, Window, chain_window

RunOnSlots = Callable[[Tensor, Window, SlotCache], Tensor]  # new tokens [B, T] of a window -> last hidden [B, T, H]

PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}
RECURRENT_LAYERS = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "recurrent"}


# --- by the config


def check_served_family(config: PretrainedConfig, name: str) -> None:
    """Refuse, before its weights are loaded, a target that cannot be served. Raises `UserError` with the reason."""
    with library_errors(f"target {name!r} has a config.json of no model", "take another copy"):
        reason = why_not_served(config)
    if reason is not None:
        raise UserError(f"target {name!r} cannot be served: {reason} (docs/targets.md lists what can)")


def why_not_served(config: PretrainedConfig) -> str | None:
    """Return what keeps a model of this config from decoding on slots, as config and class tell; None: nothing."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder; give a decoder-only model"
    text = config.get_text_config(decoder=True)
    return _why_not_these_layers(text) or _why_not_this_class(config, text)


def _why_not_these_layers(text: PretrainedConfig) -> str | None:
    fields: dict[str, Any] = text.to_dict()
    kinds = set(getattr(text, "layer_types", None) or ())
    if rank := fields.get("kv_lora_rank"):
        return (
            f"multi-head latent attention (kv_lora_rank {rank}) caches compressed keys, the slot cache whole ones; "
            "give a target with plain, grouped or sliding attention"
        )
    if recurrent := kinds & RECURRENT_LAYERS:
        return (
            f"its {' and '.join(sorted(recurrent))} layers carry a running state, which cannot go back to the accepted "
            "branch of a draft; give a target with attention in every layer"
        )
    if others := kinds - PLAIN_LAYERS - {"moe", "mlp"}:
        return (
            f"its {' and '.join(sorted(others))} layers choose by rules of their own what a token sees; "
            "give a target with full or sliding attention"
        )
    if not hasattr(text, "num_hidden_layers"):
        return "it is not one stack of decoder layers"
    if text.model_type in ("bloom", "mpt") or fields.get("alibi"):
        return (
            "ALiBi counts distances in the cache's slots, and in a tree these are not the positions'; give one without"
        )
    both_ways = fields.get("use_bidirectional_attention") in (True, "all") or fields.get("is_causal") is False
    if both_ways or (fields.get("is_decoder") is False and "add_cross_attention" in fields):
        return "it reads text in both directions; give a causal language model"
    return None


def _why_not_this_class(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Check the class that transformers would load: one that writes text, with layers on its attention interface."""
    model_class = model_class_of(config)
    if model_class is None:
        return f"transformers has no causal language model of type {config.model_type}"
    if any(name.startswith(("vision", "audio")) for name in text.sub_configs):
        return f"no language model can be taken out of a multimodal {config.model_type}; give a target of text alone"
    if is_multimodal(config):
        model_class = MODEL_MAPPING.get(type(text), model_class)
    if model_class._is_stateful and not getattr(text, "layer_types", None):
        return "its layers carry a running state, which cannot go back to the accepted branch of a draft"
    module = sys.modules[model_class.__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return f"{model_class.__name__} computes attention in code of its own, not through transformers' interface"
    return None


# --- by numbers

NUM_READ = 11  # tokens of text before the tree
PARENTS = [-1, -1, 0, 1, 2]  # two branches side by side, of three nodes and of two
BRANCHES = [[0, 1, 3, 5], [0, 2, 4]]  # the columns of each, from the root on
SHORT_WINDOW = 4


@torch.no_grad()
def check_decodes_exactly(
    model: PreTrainedModel, fused: FusedDecoder | None, run: RunOnSlots, logits: Callable[[Tensor], Tensor]
) -> None:
    """Refuse a target whose logits on slots differ from transformers' own eager attention without a cache.

    `run` decodes as the target does, through `fused` layers where it has them, and `logits` is its head. On slots a
    text is read in two parts and a tree behind it; the eager model reads each branch as a text of its own. Sliding
    windows are cut short meanwhile: these few tokens would not reach past them. Raises `UserError`.
    """
    family, text_config = type(whole_of(model)).__name__, model.config.get_text_config()
    head_width = cast(Tensor, model.get_output_embeddings().weight).shape[1]
    if head_width != text_config.hidden_size:
        raise UserError(
            f"{family} cannot be served: its head reads {head_width} values where its layers give "
            f"{text_config.hidden_size}"
        )
    token_ids = torch.arange(1, NUM_READ + len(PARENTS) + 2, device=model.device) % text_config.vocab_size
    text, drafts = token_ids[:NUM_READ], token_ids[NUM_READ:]
    mend = "give another target (docs/targets.md lists what can be served)"
    with short_windows(model, fused):
        with library_errors(f"{family} cannot be served: it does not decode on slots", mend):
            text_logits, tree_logits = logits(hidden_on_slots(run, text, drafts)).split([NUM_READ, len(drafts)])
        with (
            library_errors(f"{family} cannot be served: transformers does not compute it", mend),
            eager_attention(model),
        ):
            branches = [torch.cat([text, drafts[columns]])[None] for columns in BRANCHES]
            expected = torch.cat([model(input_ids=branch, use_cache=False).logits[0] for branch in branches]).float()
    on_slots = torch.cat([part for columns in BRANCHES for part in (text_logits, tree_logits[columns])]).float()
    difference, size = (on_slots - expected).norm(), expected.norm()
    if not difference < size * (1e-3 if model.dtype == torch.float32 else 0.1):
        raise UserError(
            f"{family} cannot be served: on slots its logits differ from those of transformers' eager attention by "
            f"{difference / size:.1e} of their size, in its layers or in its head"
        )


def hidden_on_slots(run: RunOnSlots, text: Tensor, drafts: Tensor) -> Tensor:
    """Return the last hidden states [P + T, H] of a text [P], read in two parts, and of the drafts [T] behind it."""
    parents, start, end = text.new_tensor([PARENTS]), text.new_tensor([0]), text.new_tensor([NUM_READ])
    half, depth = NUM_READ // 2, len(BRANCHES[0]) - 1
    tree = chain_window(end, len(drafts))
    tree = Window(tree.slots, end[:, None] + node_depths(parents, depth), end, ancestor_words(parents, depth))
    cache = SlotCache(1, NUM_READ + len(drafts))
    first = run(text[None, :half], chain_window(start, half), cache)
    second = run(text[None, half:], chain_window(start + half, NUM_READ - half), cache)
    return torch.cat([first, second, run(drafts[None], tree, cache)], 1)[0]


@contextmanager
def short_windows(model: PreTrainedModel, fused: FusedDecoder | None) -> Iterator[None]:
    """Let sliding layers see the last SHORT_WINDOW tokens, wherever transformers and the fused layers keep that."""
    holders: list[Any] = [model.config.get_text_config(), *model.modules(), *(fused.layers if fused else [])]
    sliding = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    sliding = [(holder, size) for holder, size in sliding if isinstance(size, int)]
    for holder, _ in sliding:
        holder.sliding_window = SHORT_WINDOW
    try:
        yield
    finally:
        for holder, size in sliding:
            holder.sliding_window = size


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run the model on transformers' plain attention and masks."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)
