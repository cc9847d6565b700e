"""Which targets can be served: refusals that need no more than a config, and a check of the loaded model in numbers.

A target is served when transformers' own modelling decodes trees on the slot cache: each layer keeps a key and a value
of every token, takes the token's position, and attends through the function that `slots` registers.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from draftsmith.models.errors import UserError, first_line
from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.target.slots import ATTENTION, SlotCache, Window, chain_window

if TYPE_CHECKING:
    from draftsmith.models.target.target import Target

PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}
RECURRENT_LAYERS = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "recurrent"}


# --- by the config


def check_served_family(config: PretrainedConfig, name: str) -> None:
    """Refuse, before its weights are loaded, a target that cannot be served. Raises `UserError` with the reason."""
    reason = why_not_served(config)
    if reason is not None:
        raise UserError(f"target {name!r} cannot be served: {reason} (docs/targets.md lists what can)")


def why_not_served(config: PretrainedConfig) -> str | None:
    """What about a model of this config keeps it from decoding on slots, as far as the config and its class tell."""
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
    """The class that transformers would load: a causal one, of text alone, on its attention interface."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_of_text = model_class is not None and model_class.config_class is type(text)
    if any(name.startswith(("vision", "audio")) for name in text.sub_configs) or (
        text is not config and not is_of_text
    ):
        return (
            f"{config.model_type} is a multimodal wrapper, and draftsmith reads text alone; save its language model by "
            "itself and give that directory"
        )
    if model_class is None:
        return f"transformers has no causal language model of type {config.model_type}"
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
def check_decodes_exactly(target: "Target") -> None:
    """Refuse a target whose logits on slots differ from transformers' own eager attention without a cache.

    On slots a text is read in two parts and a tree behind it; the eager model reads each branch as a text of its own.
    Sliding windows are cut short meanwhile: these few tokens would not reach past them.
    """
    family = type(target.model).__name__
    head_width = target.head_weight().shape[1]
    if head_width != target.hidden_size:
        raise UserError(
            f"{family} cannot be served: its head reads {head_width} values where its layers give {target.hidden_size}"
        )
    token_ids = torch.arange(1, NUM_READ + len(PARENTS) + 2, device=target.device) % target.vocab_size
    text, drafts = token_ids[:NUM_READ], token_ids[NUM_READ:]
    with short_windows(target):
        try:
            of_text, of_tree = logits_on_slots(target, text, drafts)
        except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
            raise UserError(f"{family} cannot be served: it does not decode on slots ({first_line(error)})") from None
        with eager_attention(target.model):
            branches = [torch.cat([text, drafts[columns]])[None] for columns in BRANCHES]
            expected = [target.model(input_ids=branch, use_cache=False).logits[0] for branch in branches]
    found = [torch.cat([of_text, of_tree[columns]]) for columns in BRANCHES]
    difference, size = torch.cat(found).float() - torch.cat(expected).float(), torch.cat(expected).float().norm()
    if not difference.norm() < size * (1e-3 if target.dtype == torch.float32 else 0.1):
        raise UserError(
            f"{family} cannot be served: on slots its logits differ from those of transformers' eager attention by "
            f"{difference.norm() / size:.1e} of their size, in its layers or in its head"
        )


def logits_on_slots(target: "Target", text: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [P, V] of a text [P] read in two parts, and [T, V] of the tree of drafts [T] behind it."""
    parents, start, end = text.new_tensor([PARENTS]), text.new_tensor([0]), text.new_tensor([NUM_READ])
    half, depth = NUM_READ // 2, len(BRANCHES[0]) - 1
    tree = chain_window(end, len(drafts))
    tree = Window(tree.slots, end[:, None] + node_depths(parents, depth), end, ancestor_words(parents, depth))
    cache = SlotCache(1, NUM_READ + len(drafts))
    first = target.run(text[None, :half], chain_window(start, half), cache)
    second = target.run(text[None, half:], chain_window(start + half, NUM_READ - half), cache)
    last = target.run(drafts[None], tree, cache)
    hidden = torch.cat([part.last_hidden for part in (first, second, last)], 1)[0]
    of_text, of_tree = target.logits(hidden).split([NUM_READ, len(drafts)])
    return of_text, of_tree


@contextmanager
def short_windows(target: "Target") -> Iterator[None]:
    """Let sliding layers see the last SHORT_WINDOW tokens, wherever transformers keeps their reach."""
    fused_layers = target.fused_decoder.layers if target.fused_decoder is not None else []
    holders: list[Any] = [target.text_config, *target.model.modules(), *fused_layers]
    kept = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    kept = [(holder, reach) for holder, reach in kept if isinstance(reach, int)]
    for holder, _ in kept:
        holder.sliding_window = SHORT_WINDOW
    try:
        yield
    finally:
        for holder, reach in kept:
            holder.sliding_window = reach


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run the model on transformers' plain attention and masks."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)
