"""The few blocks that drafters of our own share, in plain PyTorch.

Shapes: B rows, T tokens, H hidden width, N heads, D head width.
"""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

__all__ = ["GatedMLP", "LlamaRotaryEmbedding", "RMSNorm", "apply_rotary_pos_emb"]


class RMSNorm(nn.RMSNorm):
    """torch's fused RMSNorm over the last dimension; `weight` [H] as in every Llama-like checkpoint."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), the SwiGLU of Llama."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, N * D] -> [B, N, T, D]"""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, N, T, D] -> [B, T, N * D]"""
    return x.transpose(1, 2).flatten(2)


def shift_left(x: Tensor, by: int) -> Tensor:
    """x[:, t] <- x[:, t + by] along dimension 1, zeros (False) coming in at the end."""
    if by == 0:
        return x
    shifted = torch.zeros_like(x)
    shifted[:, :-by] = x[:, by:]
    return shifted
