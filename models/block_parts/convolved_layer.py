"""DFlash2's decoder layer: convolutions mix neighbouring rows of a block before and behind attention and MLP.

As in speculators 0.9.0, where it is called grouped dynamic convolution. A new layer is that of DFlash.

Shapes: B rows, T rows of whole blocks, R rows of a block, P taps, C groups of channels that share a kernel, H hidden
width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from draftsmith.models.block_parts.block_layer import BlockLayer
from draftsmith.models.errors import UserError
from draftsmith.models.layers import made_anew

INPUT, OUTPUT = 0, 1  # sides of a sublayer


class BlockConvolution(nn.Module):
    """Convolutions of what a sublayer reads and of what it writes, with kernels of their own for each row.

    A row is mixed with the rows before it in its block, as many as there are taps less one. The kernel of a channel is
    a weight of its own and a part that its group shares, which is made from what the sublayer reads.
    """

    def __init__(self, width: int, block_size: int, taps: int, group_size: int) -> None:
        """`width`: H. Raises `UserError` for groups that do not divide it."""
        super().__init__()
        if width % group_size:
            raise UserError(f"drafter.conv_group_size {group_size} does not divide the layers' width {width}")
        self.block_size, self.taps, self.group_size = block_size, taps, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group_size), bias=False)

    def start(self) -> None:
        """Set the weights of a new one, which changes nothing."""
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def forward(self, x: Tensor, read: Tensor, side: int) -> Tensor:
        """Convolve x [B, T, H] on one side of a sublayer that reads `read` [B, T, H] before any convolution."""
        shared = self.kernel_projection(read).unflatten(-1, (2, self.taps, -1, 1))[:, :, side]  # [B, T, P, C, 1]
        own = self.base_kernel[side].unflatten(-1, (-1, self.group_size))  # [P, C, H / C]
        rows = x.unflatten(-1, (-1, self.group_size))  # [B, T, C, H / C]
        mixed = own[0] * rows + shared[:, :, 0] * rows  # apart, so that no whole kernel of each row is kept
        blocks = rows.unflatten(1, (-1, self.block_size))  # [B, M, R, C, H / C]
        for tap in range(1, self.taps):
            before = F.pad(blocks[:, :, :-tap], (0, 0, 0, 0, tap, 0)).flatten(1, 2)
            mixed = mixed + own[tap] * before + shared[:, :, tap] * before
        return mixed.flatten(2).to(x.dtype)


class ConvolvedLayer(BlockLayer):
    """A layer of a block drafter with convolutions around its attention and its MLP; the context is not convolved."""

    def __init__(
        self, config: LlamaConfig, key_norm: bool, sliding_window: int | None, convolution: tuple[int, int, int]
    ) -> None:
        """`convolution`: rows of a block, taps, channels of a group."""
        super().__init__(config, key_norm, sliding_window)
        self.attention_conv = BlockConvolution(config.hidden_size, *convolution)
        self.mlp_conv = BlockConvolution(config.hidden_size, *convolution)

    def project(self, hidden: Tensor, rotary: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = self.input_layernorm(hidden)
        return self.self_attn.project(made_anew(self.attention_conv, read, read, INPUT), rotary, positions)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        written = self.self_attn.o_proj(attended.flatten(2))
        hidden = residual + made_anew(self.behind_attention, written, residual)
        read = self.post_attention_layernorm(hidden)
        written = self.mlp(made_anew(self.mlp_conv, read, read, INPUT))
        return hidden + made_anew(self.mlp_conv, written, read, OUTPUT)

    def behind_attention(self, written: Tensor, residual: Tensor) -> Tensor:
        """Return what attention has written [B, T, H], convolved."""
        return self.attention_conv(written, self.input_layernorm(residual), OUTPUT)
