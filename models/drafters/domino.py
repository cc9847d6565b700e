"""Domino (arXiv 2605.29707): DFlash in which each token depends on all tokens before it in the block.

A recurrent unit reads the tokens of a block (`DominoCorrector`). The first token is drafted as by DFlash. In both
layouts a block drafts one token less than it has rows.
"""

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import LlamaConfig

from draftsmith.models.block_parts.slot_correctors import DominoCorrector, PrefixGRU
from draftsmith.models.drafter_configs import DominoConfig
from draftsmith.models.drafters.dflash import DFlash
from draftsmith.models.errors import UserError
from draftsmith.models.half_weights import DraftingLinear
from draftsmith.models.losses.chain_loss import ChainLoss, Depth
from draftsmith.models.target.target import Features, Target


class Domino(DFlash):
    kind = "domino"
    config_class = DominoConfig
    independent_depths = False

    def __init__(self, config: DominoConfig, layer_config: LlamaConfig, target: Target) -> None:
        super().__init__(config, layer_config, target)
        self.max_draft_length = self.training_depth = config.block_size - 1
        width = layer_config.hidden_size
        self.prefix_gru = PrefixGRU(width, config.memory_size)
        self.embed_proj = nn.Sequential(
            DraftingLinear(width + config.memory_size, config.code_size, bias=False),
            nn.SiLU(),
            DraftingLinear(config.code_size, self.config.draft_vocab_size, bias=False),
        )

    def start_own_parts(self) -> None:
        self.prefix_gru.start()
        nn.init.zeros_(self.corrector.readout.weight)

    @property
    def corrector(self) -> DominoCorrector:
        return DominoCorrector(self.target.embedding, self.prefix_gru, self.embed_proj)

    @property
    def head_passes(self) -> float:
        """Average number of times that logits are made of a token: with correction and without."""
        return 2 * super().head_passes

    def add_divergences(self, chain_loss: ChainLoss, depths: list[Depth], features: Features) -> None:
        """Add the divergence of the logits without correction and of those with it.

        The share of the former falls from `base_share` to 0 over the training.
        """
        share, width = self.config.base_share * (1 - self.loss_progress), self.layer_config.hidden_size
        compared = depths
        if share > 0:
            base = [replace(depth, hidden=depth.hidden[:, :width], head=self.head) for depth in depths]
            compared = [replace(depth, weight=(1 - share) * depth.weight) for depth in depths]
            compared += [replace(depth, weight=share * depth.weight) for depth in base]
        super().add_divergences(chain_loss, compared, features)
        del chain_loss.added[len(depths) :]  # what counts are the tokens that would be drafted

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return the config of the plain layout, which SGLang reads."""
        config = super().engine_config()
        corrector = {
            "projector_type": "domino",
            "shift_label": config.pop("sample_from_anchor"),
            "pure_draft_prefix_len": 1,
            "gru_hidden_dim": self.config.memory_size,
            "emb_dim": self.config.code_size,
        }
        return {**config, "dflash_config": {**config["dflash_config"], **corrector}}

    @classmethod
    def predicts_next(cls, config: dict[str, Any]) -> bool:
        return config["dflash_config"].get("shift_label", True)

    @classmethod
    def own_sizes(cls, config: dict[str, Any]) -> dict[str, int]:
        nested = config["dflash_config"]
        if (length := nested.get("pure_draft_prefix_len", 1)) != 1:
            raise UserError(f"this Domino drafter has pure_draft_prefix_len {length}: draftsmith computes 1 alone")
        cls.check_has(("gru_hidden_dim", "emb_dim"), nested, " (in dflash_config)")
        return {"memory_size": nested["gru_hidden_dim"], "code_size": nested["emb_dim"]}
