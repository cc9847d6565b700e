"""The part of a drafter that training uses, and whoever compares its predictions with a text.

Shapes: V vocabulary of the target, Vd draft vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.models.batch import Batch
from draftsmith.models.drafter_parts.vocabulary import head_of_tokens
from draftsmith.models.losses.chain_loss import ChainLoss, Depth, LossSums, divergence_over_depths
from draftsmith.models.losses.divergences import Divergence
from draftsmith.models.target.target import Features, Target
from draftsmith.models.text_team import Team


class TrainedDrafter(nn.Module):
    """The part of a drafter that learns from texts which the target wrote."""

    config: Any  # the family's own `DrafterConfig`
    target: Target
    training_depth: int = 0  # predictions in a row that training compares with the target's
    drafts_by_target_head: bool = False  # it has no head of its own, not even a copy
    progress: float = 0.0  # share of training that is done, kept by the training loop
    tells_acceptance: bool = True  # beside the loss, also in training; costly with a draft vocabulary
    learns_acceptance: ClassVar[bool] = False  # the loss itself is made of what the target would accept
    divides_texts: ClassVar[bool] = False  # several processes can take a text together
    team: Team = Team()  # the processes that do (`run.processes_per_text`)
    compile_loss: bool = False  # on a CPU, compare with the target by compiled code (`run.compile`)

    @property
    def depth_now(self) -> int:
        """Number of predictions in a row that the loss compares at this point of training."""
        return self.training_depth

    @property
    def simulated_depth(self) -> int:
        """Number of tokens drafted in a round, for the acceptance length that the loss tells."""
        return self.training_depth

    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.parameters())

    @property
    def training_passes(self) -> float:
        """Average number of times that a token of a text goes through what is trained, over the steps of a training."""
        return 1.0

    @property
    def layer_passes(self) -> float:
        """Average number of times that a token of a text goes through a decoder layer that is trained, in one step.

        Where that grows along a training it is the most, for memory goes by it.
        """
        return self.training_passes

    @property
    def head_passes(self) -> float:
        """Average number of times that logits are made of a token of a text."""
        return self.training_passes

    @property
    def loss_progress(self) -> float:
        """The share of training that is done, for a loss that changes along it.

        Outside of training, where losses of checkpoints are compared, it is all of it.
        """
        return self.progress if self.training else 1.0

    # --- the draft vocabulary

    def fit_vocabulary(self, counts: Tensor) -> None:
        """Choose a reduced draft vocabulary; called once before training.

        `counts` [V] is higher for tokens that should rather be drafted: `vocabulary.ranking` of how often the target
        wrote each.
        """

    def starting_note(self, counts: Tensor) -> str | None:
        """Return what a user should know of the starting weights, by how often the target wrote each token, [V]."""
        return None

    def draft_to_target(self) -> Tensor | None:
        """Return the target ids of a reduced draft vocabulary [Vd]; None where it can propose every token."""
        return None

    @cached_property
    def draftable(self) -> Tensor | None:
        """Which of the target's tokens it can propose, bool [V] in the host's memory; None: all.

        The device is asked once.
        """
        ids = self.draft_to_target()
        if ids is None:
            return None
        return torch.zeros(self.target.vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)

    @cached_property
    def head_of_drafted(self) -> Callable[[Tensor], Tensor] | None:
        """The target's head for the tokens of a reduced draft vocabulary alone; None where there is no such head."""
        ids = self.draft_to_target()
        return None if ids is None else head_of_tokens(self.target, ids)

    def forget_vocabulary(self) -> None:
        """Remove what was made of the draft vocabulary, after that has changed."""
        for made in ("draftable", "head_of_drafted"):
            vars(self).pop(made, None)

    # --- the loss

    def forward(self, batch: Batch, features: Features) -> LossSums:
        """Return the loss, under the name that wrappers for several devices call."""
        return self.loss(batch, features)

    def loss(self, batch: Batch, features: Features) -> LossSums:
        """Return sums and counts; "loss" is what training minimises, its count the trained tokens."""
        return self.chain_loss(batch, features).sums()

    def chain_loss(self, batch: Batch, features: Features) -> ChainLoss:
        """Return the loss of `depth_now` predictions in a row from each slot."""
        chain_loss = self.new_chain_loss(batch)
        depths = list(self.depths(chain_loss, batch, features, self.depth_now))
        self.add_divergences(chain_loss, depths, features)
        return chain_loss

    def new_chain_loss(self, batch: Batch) -> ChainLoss:
        """Return an empty loss of the chains in this process's part of a text that the drafter's vocabulary allows."""
        asked = self.tells_acceptance or self.learns_acceptance or not self.training
        tells_acceptance = asked or self.head_of_drafted is None
        part = self.team.part_of(batch, self.training_depth)
        return ChainLoss(batch, self.draftable, part, tells_acceptance)

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield what `depth` predictions in a row from each slot are made from, on the text as it is.

        Each `Depth` is of the slots that `chain_loss.next_depth()` marks for it; there are fewer where the drafter has
        no more. Features are those of `layer_ids`. Raises `TypeError` where it predicts nothing from a text alone.
        """
        raise TypeError(f"{type(self).__name__} predicts nothing from a text alone")

    def divergence(self) -> Divergence:
        """Return the divergence that the loss is made of, at this point of training."""
        return self.config.divergence

    def add_divergences(self, chain_loss: ChainLoss, depths: list[Depth], features: Features) -> None:
        """Add to the loss the divergence of a chain of predictions from the target's own.

        The divergence is one within the draft vocabulary. What is accepted hangs on the target's whole distribution.
        """
        head: Callable[[Tensor], Tensor] = self.target.head
        ids, last_hidden = self.draft_to_target(), features.last_hidden.flatten(0, 1)
        if self.head_of_drafted is not None and not chain_loss.tells_acceptance:
            head, ids = self.head_of_drafted, None
        chain_loss.total, losses = divergence_over_depths(
            depths, last_hidden, head, self.divergence(), ids, self.compile_loss, chain_loss.tells_acceptance
        )
        for rows in losses:
            chain_loss.add(rows)
