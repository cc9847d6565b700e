"""DFlash2: DFlash whose layers convolve the rows of a block (`ConvolvedLayer`), so that slots know of their neighbours.

The authors' candidate selector, which reorders the likeliest tokens of a slot, is not trained here: on its own it
brought nothing in the one published comparison of both parts. An export has a selector that changes nothing.
"""

from typing import Any

from torch import Tensor

from draftsmith.models.block_parts.convolved_layer import BlockConvolution, ConvolvedLayer
from draftsmith.models.drafter_configs import DFlash2Config
from draftsmith.models.drafters.dflash import DFlash
from draftsmith.models.errors import UserError
from draftsmith.models.target.target import Target

SELECTOR_RANK, SELECTOR_TOP_K = 16, 16  # of the selector in an export
SUCCESSORS = "candidate_selector.successor_codebook"
SELECTOR = ("candidate_selector.predecessor_codebook", SUCCESSORS, "candidate_selector.hidden_projection.weight")
SIZES = ("conv_kernel_size", "conv_group_size")
FACTORS = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": 0}  # of some targets


class DFlash2(DFlash):
    kind = "dflash2"
    config_class = DFlash2Config

    def new_layer(self, window: int | None) -> ConvolvedLayer:
        convolution = (self.config.block_size, self.config.conv_kernel_size, self.config.conv_group_size)
        return ConvolvedLayer(self.layer_config, self.config.key_norm, window, convolution)

    def start_own_parts(self) -> None:
        for part in self.modules():
            if isinstance(part, BlockConvolution):
                part.start()

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        config = super().engine_config()
        convolution = {
            "conv_kernel_size": self.config.conv_kernel_size,
            "conv_group_size": self.config.conv_group_size,
            "selector_rank": SELECTOR_RANK,
            "selector_top_k": SELECTOR_TOP_K,
        }
        nested = {**config["dflash_config"], **convolution}
        return {**config, "architectures": ["DFlash2DraftModel"], "dflash_config": nested}

    def engine_tensors(self) -> dict[str, Tensor]:
        """Return the tensors, with a candidate selector that changes nothing."""
        like, width = self.fc.weight, self.layer_config.hidden_size
        shapes = (
            (self.target.vocab_size, SELECTOR_RANK),
            (self.target.vocab_size, SELECTOR_RANK),
            (SELECTOR_RANK, width),
        )
        return super().engine_tensors() | {
            name: like.new_zeros(*shape) for name, shape in zip(SELECTOR, shapes, strict=True)
        }

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "DFlash":
        if SUCCESSORS in tensors and tensors[SUCCESSORS].any():
            raise UserError("this DFlash2 drafter has a trained candidate selector, which draftsmith does not compute")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in SELECTOR}
        return super().from_engine(config, tensors, target)

    @classmethod
    def own_sizes(cls, config: dict[str, Any]) -> dict[str, int]:
        nested = {**config, **config.get("dflash_config", {})}
        for key, value in FACTORS.items():
            if nested.get(key, value) not in (value, None):
                raise UserError(f"this DFlash2 drafter has {key} {nested[key]!r}, which draftsmith does not compute")
        cls.check_has(SIZES, nested, " (in dflash_config)")
        return {key: nested[key] for key in SIZES}
