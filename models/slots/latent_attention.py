"""Multi-head latent attention on the slot cache, which keeps a short latent of every token in place of keys and values.

transformers' modules store the latent [r] and the rotated part of the key [Dr], which all heads share, then expand what
all slots hold to keys and values of every head. Few new tokens are cheaper without that: their queries are taken to the
latents instead, and what they attend to is taken back (DeepSeek-V2, arXiv 2405.04434, section 2.1.3 and appendix C).

Shapes: B rows, T new tokens a row, M slots, H heads, r latent width, Dn and Dr widths of the parts of a query and key
without and with rotary angles, Dv width of values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.slots.attention import ATTENTION

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # of query, key, value and scale: [B, T, H, Dv]


def keep_latents(model: nn.Module) -> None:
    """Let `slots.slot_attention` attend to the latents of a model's modules of latent attention."""
    module: Any
    for module in model.modules():
        if hasattr(module, "expand_kv") and module.kv_b_proj.bias is None:
            module.expand_kv = partial(_hand_on, module)
            module.on_latents = OnLatents(module)


def _hand_on(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Take the place of a module's `expand_kv`: on slots hand on what is cached, for other attention expand it."""
    if module.config._attn_implementation != ATTENTION:
        return type(module).expand_kv(module, latents, rotated)
    return latents, rotated


@dataclass
class OnLatents:
    """The attention of a module: to the latents themselves, or to what they expand to, whichever takes less work."""

    module: Any

    def __call__(self, query: Tensor, latents: Tensor, rotated: Tensor, scale: float, compute: Attention) -> Tensor:
        """Return attention [B, T, H, Dv] of query [B, H, T, Dn + Dr] over latents [B, 1, M, r], rotated [B, 1, M, Dr].

        Without a cache, where M is T, all is expanded, as in training.
        """
        module, length = self.module, query.shape[2]
        widths = module.qk_nope_head_dim, module.v_head_dim
        if length == latents.shape[2] or length >= expands_from(latents.shape[3], rotated.shape[3], *widths):
            key, value = type(module).expand_kv(module, latents, rotated)
            return compute(query, key, value, scale)
        of_key, of_value = module.kv_b_proj.weight.view(query.shape[1], sum(widths), -1).split(widths, 1)  # [H, D, r]
        plain, turned = query.split([widths[0], rotated.shape[3]], 3)
        query = torch.cat([plain @ of_key, turned], 3)  # [B, H, T, r + Dr]
        both = side_by_side(latents, rotated)  # of which the kernel reads the latents once, as keys and as values
        attended = compute(query, both, both[..., : latents.shape[3]], scale)  # [B, T, H, r]
        return torch.einsum("bthr,hvr->bthv", attended, of_value)


def expands_from(latent: int, rotated: int, of_key: int, of_value: int) -> float:
    """Return the number of new tokens from which on it takes less work to expand what a slot holds, by its widths.

    A slot and head cost T (2 r + Dr) products on latents, and T (Dn + Dr + Dv) + r (Dn + Dv) expanded.
    """
    more = 2 * latent + rotated - (of_key + rotated + of_value)
    return latent * (of_key + of_value) / more if more > 0 else 0.0


def side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """Return [..., a + b] of two tensors [..., a] and [..., b]: without a copy where they lie so in memory."""
    width, end = first.shape[-1] + second.shape[-1], first.storage_offset() + first.shape[-1]
    steps = zip(first.shape, first.stride(), second.stride(), strict=True)
    alike = all(size == 1 or step == other for size, step, other in steps)  # steps of one head mean nothing
    same = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    if same and alike and second.storage_offset() == end:
        return first.as_strided((*first.shape[:-1], width), first.stride(), first.storage_offset())
    return torch.cat([first, second], -1)
