"""DSpark (arXiv 2607.05147): DFlash in which each token depends on the one before it, with an estimate for each token.

The token before a slot adds logits of its own to those of the slot (`MarkovHead`), and a confidence head estimates how
likely the target is to accept the token that is drafted there. Row k predicts the token behind its place, so that a
block of R rows drafts R tokens.
"""

from typing import Any

from torch.nn import functional as F
from transformers import LlamaConfig

from draftsmith.models.block_parts.slot_correctors import ConfidenceHead, MarkovHead
from draftsmith.models.drafter_configs import DSparkConfig
from draftsmith.models.drafters.dflash import DFlash
from draftsmith.models.errors import UserError
from draftsmith.models.losses.chain_loss import ChainLoss, Depth
from draftsmith.models.target.target import Features, Target

HEADS = {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}


class DSpark(DFlash):
    kind = "dspark"
    config_class = DSparkConfig
    independent_depths = False
    learns_acceptance = True

    def __init__(self, config: DSparkConfig, layer_config: LlamaConfig, target: Target) -> None:
        super().__init__(config, layer_config, target)
        self.markov_head = MarkovHead(target.vocab_size, self.config.draft_vocab_size, config.markov_rank)
        self.confidence_head = ConfidenceHead(layer_config.hidden_size + config.markov_rank)

    def start_own_parts(self) -> None:
        self.markov_head.start()

    @property
    def corrector(self) -> MarkovHead:
        return self.markov_head

    def add_divergences(self, chain_loss: ChainLoss, depths: list[Depth], features: Features) -> None:
        """Add the divergence, and the confidence head's cross-entropy to the chance that a drawn token is accepted."""
        super().add_divergences(chain_loss, depths, features)
        for depth, rows in zip(depths, chain_loss.added, strict=True):
            assert depth.confidence is not None
            entropy = F.binary_cross_entropy_with_logits(depth.confidence, rows.acceptance, reduction="none")
            chain_loss.total = chain_loss.total + self.config.confidence_weight * (depth.weight * entropy).sum()

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return the config of the plain layout, in which some of DFlash's entries stand at the top level, too."""
        config = super().engine_config()
        return {
            **config,
            "architectures": ["Qwen3DSparkModel"],
            "target_layer_ids": config["dflash_config"]["target_layer_ids"],
            "mask_token_id": self.config.mask_token_id,
            "markov_rank": self.config.markov_rank,
            **HEADS,
        }

    @classmethod
    def own_sizes(cls, config: dict[str, Any]) -> dict[str, int]:
        for key, value in HEADS.items():
            if config.get(key, value) != value:
                raise UserError(f"this DSpark drafter has {key} {config[key]!r}: draftsmith computes {value!r} alone")
        cls.check_has(("markov_rank",), config)
        return {"markov_rank": config["markov_rank"]}
