"""Passes of transformers' models over new tokens: on a slot cache, or over whole rows of text.

Shapes: B rows, T new tokens a row, M slots, H hidden width.
"""

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.row_attention import Sight
from draftsmith.models.slots.running_states import reading
from draftsmith.models.slots.window import Window


def context_of(config: PretrainedConfig) -> int:
    """Return the largest number of tokens that a model of the config can hold on slots.

    LongRoPE turns all keys by other angles as soon as a text is longer than its first context, which ends it here: what
    is in the cache cannot be turned again. Llama 4 scales queries by positions that it counts itself, on a slot cache
    always from 0 on; that is right for the first `floor_scale` - 1 tokens of a text, which are all scaled by 1.
    """
    if getattr(config, "attn_temperature_tuning", False) and hasattr(config, "floor_scale"):
        return min(config.max_position_embeddings, int(config.floor_scale) - 1)
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "longrope":
        return rotary["original_max_position_embeddings"]
    return config.max_position_embeddings


def reads_masks(model: PreTrainedModel) -> bool:
    """Return whether layers read masks themselves, to choose what they attend to: those of DeepSeek's sparse attention.

    They need one in every pass, of bool [B, 1, T, M]; transformers makes those of its own attention itself.
    """
    config = model.config.get_text_config()
    return getattr(config, "index_topk", None) is not None and config._attn_implementation == ATTENTION


def run_on_slots(model: PreTrainedModel, token_ids: Tensor, window: Window, cache: SlotCache) -> Tensor:
    """Run the base model on the new tokens [B, T] of a window; return its last hidden state [B, T, H].

    Positions are clamped to the model's context, so that drafts reaching past it (never kept) stay harmless.
    """
    cache.write_to(window.slots)
    mask = window.bool_mask(cache.num_seen) if reads_masks(model) else window.mask(cache.num_seen)
    with reading(cache.states, cache.chosen_rows(len(token_ids)), window):
        output = model.base_model(
            input_ids=token_ids,
            position_ids=window.positions.clamp(max=context_of(model.config) - 1),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
    return output.last_hidden_state


def run_causal(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Run the base model on whole right-padded rows [B, T], without a cache; return its last hidden state [B, T, H].

    Padding at the end needs no mask: no real token looks to its right. Packed rows need their positions [B, T] and the
    mask of `Batch.attention_mask`.
    """
    mask = causal_rows(model, token_ids, mask)
    output = model.base_model(input_ids=token_ids, position_ids=positions, attention_mask=mask, use_cache=False)
    return output.last_hidden_state


def causal_rows(model: PreTrainedModel, token_ids: Tensor, mask: Tensor | None = None) -> Tensor | None:
    """Return what a model needs to read whole rows [B, T] causally, by the mask of `Batch.attention_mask`.

    That mask, or bool [B, 1, T, T] for layers that read masks themselves.
    """
    if not reads_masks(model):
        return mask
    edges, all_tokens = None if mask is None else mask.flatten(), slice(None)
    sight = Sight((token_ids.shape[0], token_ids.shape[1]), edges)
    return sight.mask(all_tokens, all_tokens, token_ids.device).expand(len(token_ids), -1, -1, -1)
