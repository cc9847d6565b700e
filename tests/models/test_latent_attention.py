"""Latent attention on slots: what is attended to is the same on latents as on keys and values."""

import pytest
import torch
from families import SERVED, family_config, plain_model
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from draftsmith.models.slots.attention import ATTENTION, slot_attention
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.latent_attention import expands_from, keep_latents
from draftsmith.models.slots.window import chain_window, unpacked_mask

SLOTS = 64


@pytest.fixture(scope="module")
def attention() -> DeepseekV3Attention:
    model = plain_model(family_config("deepseek_v3", SERVED["deepseek_v3"]))
    model.set_attn_implementation(ATTENTION)
    keep_latents(model)
    return next(module for module in model.modules() if isinstance(module, DeepseekV3Attention))


def test_latents_are_expanded_where_that_is_less_work() -> None:
    """DeepSeek-V3: r 512, Dr 64, Dn 128, Dv 128. GLM-4.7-Flash: Dn 192, Dv 256. Wide heads: always."""
    assert expands_from(512, 64, 128, 128) == pytest.approx(512 * 256 / (1088 - 320))
    assert round(expands_from(512, 64, 128, 128)) == 171
    assert round(expands_from(512, 64, 192, 256)) == 398
    assert expands_from(16, 4, 64, 64) == 0


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7, 15, 16, 40])
def test_attention_to_latents_is_attention_to_keys_and_values(length: int, attention: DeepseekV3Attention) -> None:
    """On both sides of 16 new tokens, from which on these small latents are expanded."""
    widths = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.kv_lora_rank
    assert expands_from(widths[2], widths[1], widths[0], attention.v_head_dim) == 16
    query = torch.randn(2, attention.num_heads, length, widths[0] + widths[1])
    latents, rotated = torch.randn(2, 1, SLOTS, widths[2]), torch.randn(2, 1, SLOTS, widths[1])
    window = chain_window(torch.tensor([3, 20]), length)
    mask = window.bool_mask(SLOTS)
    found, _ = slot_attention(attention, query, latents, rotated, mask, attention.scaling)
    key, value = DeepseekV3Attention.expand_kv(attention, latents, rotated)
    expected, _ = slot_attention(nn.Identity(), query, key, value, mask, attention.scaling)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_latents_in_a_cache_are_attended_to_where_they_lie(attention: DeepseekV3Attention) -> None:
    """Nothing as long as the cache is copied."""
    cache, rank = SlotCache(2, SLOTS), attention.kv_lora_rank
    cache.write_to(chain_window(torch.tensor([0, 5]), 3).slots)
    latents, rotated = cache.update(torch.randn(2, 1, 3, rank), torch.randn(2, 1, 3, 4), 0)
    seen: list[torch.Tensor] = []
    query = torch.randn(2, attention.num_heads, 3, attention.qk_head_dim)

    def compute(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        seen.extend([key, value])
        return query.new_zeros(2, 3, attention.num_heads, rank)

    attention.on_latents(query, latents, rotated, 1.0, compute)
    key, value = seen
    assert torch.equal(key, torch.cat([latents, rotated], 3))
    assert {part.untyped_storage().data_ptr() for part in (key, value)} == {latents.untyped_storage().data_ptr()}


def test_a_packed_mask_unpacks_to_what_each_token_sees() -> None:
    """Of chains, by theory."""
    window = chain_window(torch.tensor([2, 9]), 3)
    expected = torch.arange(SLOTS) <= torch.tensor([[2, 3, 4], [9, 10, 11]])[..., None]
    assert torch.equal(unpacked_mask(window.packed_mask(), SLOTS)[:, 0], expected)
