"""Which targets can be decoded, and which can be trained for: by the config, and by a check of the loaded model.

A target is decoded here when transformers' own modelling decodes trees on the slot cache: each layer keeps a key and a
value of every token, takes the token's position, and attends through the function that `slots` registers. More targets
can be trained for, because an engine may run one: then only its embedding, its final norm and its head are needed here.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel

from draftsmith.models.errors import UserError, library_errors
from draftsmith.models.fused.fused_layers import FusedDecoder
from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.forward import context_of
from draftsmith.models.slots.running_states import has_rule
from draftsmith.models.slots.window import Window, chain_window
from draftsmith.models.target.loading import is_multimodal, model_class_of, whole_of
from draftsmith.models.target.target_files import read_config, why_not_read

RunOnSlots = Callable[[Tensor, Window, SlotCache], Tensor]  # new tokens [B, T] of a window -> last hidden [B, T, H]

SPARSE_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}  # the second one until transformers 5.20
PLAIN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"} | SPARSE_LAYERS
RECURRENT_LAYERS = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "recurrent"}
OTHER_TARGET = "give another target (docs/targets.md lists those that are decoded here)"
RUNNING_STATE = "carry a running state by a rule of their own, which cannot go back to the accepted branch of a draft"


# --- by the config


def read_decoded(name: str | Path) -> PretrainedConfig:
    """Return the config of a target that is decoded here: its layers and the form of its weights are known.

    Raises `UserError` as `check_decoded` does.
    """
    config = read_config(name)
    check_decoded(config, str(name), why_not_read(name))
    return config


def check_decoded(config: PretrainedConfig, name: str, of_weights: str | None = None) -> None:
    """Refuse, before its weights are loaded, a target that cannot be decoded here.

    `of_weights`: what keeps its weights from being read, if anything does. Raises `UserError` with the reason, and with
    the way to train for it where an engine runs it.
    """
    check_trained(config, name)
    with library_errors(f"target {name!r} has a config.json of no model", "take another copy"):
        reason = why_not_decoded(config) or of_weights
    if reason is not None:
        raise UserError(
            f"target {name!r} cannot be decoded here: {reason}. To train for it, let an engine run it: prepare "
            "--endpoint URL, then train data.features=streamed data.features_endpoint=URL without evaluation.prompts, "
            f"or with evaluation.engine=URL; or {OTHER_TARGET}"
        )


def check_trained(config: PretrainedConfig, name: str) -> None:
    """Refuse a target that no drafter can be trained for, not even where an engine runs it.

    Raises `UserError` with the reason.
    """
    with library_errors(f"target {name!r} has a config.json of no model", "take another copy"):
        reason = why_not_trained(config)
    if reason is not None:
        raise UserError(
            f"target {name!r} can be neither trained for nor decoded: {reason}; give another target (docs/targets.md "
            "lists which can)"
        )


def why_not_decoded(config: PretrainedConfig) -> str | None:
    """Return what keeps a model of this config from decoding on slots, as config and class tell; None: nothing."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if others := kinds - PLAIN_LAYERS - RECURRENT_LAYERS - {"moe", "mlp"}:
        return f"its {' and '.join(sorted(others))} layers choose by rules of their own what a token sees"
    if getattr(text, "index_kpool", 1) > 1:
        return "its indexed_attention layers choose pools of tokens in place of tokens"
    recurrent = kinds & RECURRENT_LAYERS
    if carries_states(config) and not has_rule(sys.modules[decoder_class(config).__module__], recurrent):
        return " ".join(["its", *filter(None, [" and ".join(sorted(recurrent))]), f"layers {RUNNING_STATE}"])
    return None


def carries_states(config: PretrainedConfig) -> bool:
    """Return whether layers of a model of this config carry a running state along the text."""
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    if kinds:
        return bool(kinds & RECURRENT_LAYERS)
    return model_class_of(config) is not None and bool(decoder_class(config)._is_stateful)


def why_not_trained(config: PretrainedConfig) -> str | None:
    """Return what keeps a drafter from being trained for a model of this config, whoever runs it; None: nothing."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and drafters are made for decoders alone"
    text = config.get_text_config(decoder=True)
    return _why_not_this_text(text) or _why_not_this_class(config, text)


def _why_not_this_text(text: PretrainedConfig) -> str | None:
    fields: dict[str, Any] = text.to_dict()
    if not hasattr(text, "num_hidden_layers"):
        return "it is not one stack of decoder layers"
    if text.model_type in ("bloom", "mpt") or fields.get("alibi"):
        return "ALiBi counts distances in the cache's slots, and in a tree these are not the positions'"
    both_ways = fields.get("use_bidirectional_attention") in (True, "all") or fields.get("is_causal") is False
    if both_ways or (fields.get("is_decoder") is False and "add_cross_attention" in fields):
        return "it reads text in both directions, and is no causal language model"
    return None


def _why_not_this_class(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Check the class that transformers would load: one that writes text, with layers on its attention interface."""
    if model_class_of(config) is None:
        return f"transformers has no causal language model of type {config.model_type}"
    if any(name.startswith(("vision", "audio")) for name in text.sub_configs):
        return f"no language model can be taken out of a multimodal {config.model_type}"
    model_class = decoder_class(config)
    if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        if model_class._is_stateful:
            return f"its layers {RUNNING_STATE}, and none is attention through transformers' interface"
        return f"{model_class.__name__} computes attention in code of its own, not through transformers' interface"
    return None


def decoder_class(config: PretrainedConfig) -> Any:
    """Return the class that holds the decoder's code: of a multimodal config, that of its language model."""
    model_class = model_class_of(config)
    return MODEL_MAPPING.get(type(config.get_text_config()), model_class) if is_multimodal(config) else model_class


# --- by numbers

NUM_READ = 11  # tokens of text before the tree
PARENTS = [-1, -1, 0, 1, 2]  # two branches side by side, of three nodes and of two
BRANCHES = [[0, 1, 3, 5], [0, 2, 4]]  # the columns of each, from the root on
SHORT = {  # tokens that layers see at most: in a window, in a chunk, and chosen by DeepSeek's sparse attention
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "index_topk": 12,  # the last of those chosen may be near ties, which rounding decides: so most of the text
}


@torch.no_grad()
def check_decodes_exactly(
    model: PreTrainedModel, fused: FusedDecoder | None, run: RunOnSlots, logits: Callable[[Tensor], Tensor]
) -> None:
    """Refuse a target whose logits on slots differ from transformers' own eager attention without a cache.

    `run` decodes as the target does, through `fused` layers where it has them, and `logits` is its head. On slots a
    text is read in two parts and a tree behind it; the eager model reads each branch as a text of its own. Windows and
    choices are cut short meanwhile: these few tokens would not reach past them. Raises `UserError`.
    """
    family, text_config = type(whole_of(model)).__name__, model.config.get_text_config()
    head_width = cast(Tensor, model.get_output_embeddings().weight).shape[1]
    if head_width != text_config.hidden_size:
        raise UserError(
            f"{family} cannot be decoded here: its head reads {head_width} values where its layers give "
            f"{text_config.hidden_size}; {OTHER_TARGET}"
        )
    if (context := context_of(text_config)) < NUM_READ + len(BRANCHES[0]):
        raise UserError(
            f"{family} cannot be decoded here: it reads {context} tokens at most, and a draft is tried behind "
            f"{NUM_READ} of them; {OTHER_TARGET}"
        )
    token_ids = torch.arange(1, NUM_READ + len(PARENTS) + 2, device=model.device) % text_config.vocab_size
    text, drafts = token_ids[:NUM_READ], token_ids[NUM_READ:]
    with short_windows(model, fused):
        with library_errors(f"{family} cannot be decoded here: it does not decode on slots", OTHER_TARGET):
            text_logits, tree_logits = logits(hidden_on_slots(run, text, drafts)).split([NUM_READ, len(drafts)])
        with (
            library_errors(f"{family} cannot be decoded here: transformers does not compute it", OTHER_TARGET),
            eager_attention(model),
        ):
            branches = [torch.cat([text, drafts[columns]])[None] for columns in BRANCHES]
            expected = torch.cat([model(input_ids=branch, use_cache=False).logits[0] for branch in branches]).float()
    on_slots = torch.cat([part for columns in BRANCHES for part in (text_logits, tree_logits[columns])]).float()
    difference, size = (on_slots - expected).norm(), expected.norm()
    if not size.isfinite() or not size:
        raise UserError(
            f"{family} cannot be decoded here: its logits are zero or no numbers, in {str(model.dtype)[6:]}: its "
            f"weights are damaged, or too large for that type; {OTHER_TARGET}"
        )
    if not difference < size * (1e-3 if model.dtype == torch.float32 else 0.1):
        raise UserError(
            f"{family} cannot be decoded here: on slots its logits differ from those of transformers' eager attention "
            f"by {difference / size:.1e} of their size, in its layers or in its head; {OTHER_TARGET}"
        )


def hidden_on_slots(run: RunOnSlots, text: Tensor, drafts: Tensor) -> Tensor:
    """Return the last hidden states [P + T, H] of a text [P], read in two parts, and of the drafts [T] behind it."""
    parents, start, end = text.new_tensor([PARENTS]), text.new_tensor([0]), text.new_tensor([NUM_READ])
    half, depth = NUM_READ // 2, len(BRANCHES[0]) - 1
    tree = chain_window(end, len(drafts))
    tree = Window(tree.slots, end[:, None] + node_depths(parents, depth), end, ancestor_words(parents, depth))
    cache = SlotCache(1, NUM_READ + len(drafts))
    first = run(text[None, :half], chain_window(start, half, start + half), cache)
    rest = NUM_READ - half
    second = run(text[None, half:], chain_window(start + half, rest, start + rest), cache)
    return torch.cat([first, second, run(drafts[None], tree, cache)], 1)[0]


@contextmanager
def short_windows(model: PreTrainedModel, fused: FusedDecoder | None) -> Iterator[None]:
    """Let layers see few tokens, wherever transformers and the fused layers keep how many they see or choose."""
    holders: list[Any] = [model.config.get_text_config(), *model.modules(), *(fused.layers if fused else [])]
    limits = [(holder, name, getattr(holder, name, None)) for holder in holders for name in SHORT]
    limits = [(holder, name, limit) for holder, name, limit in limits if isinstance(limit, int)]
    for holder, name, _ in limits:
        setattr(holder, name, SHORT[name])
    try:
        yield
    finally:
        for holder, name, limit in limits:
            setattr(holder, name, limit)


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run the model on transformers' plain attention and masks."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)
