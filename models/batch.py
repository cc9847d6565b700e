"""Training text in rows, one document a row or several packed side by side.

Shapes: B rows, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Batch:
    """Right-padded rows of training text."""

    token_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool, True on the tokens that the target wrote; never on a document's first
    documents: Tensor | None = None  # [B, T] int64: the document of its row that a token is of, padding -1; None: one

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on the device; from pinned memory it does not wait for the copy."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        documents = None if self.documents is None else change(self.documents)
        return Batch(change(self.token_ids), change(self.loss_mask), documents)

    @property
    def positions(self) -> Tensor:
        """Place of each token in its document, [B or 1, T]."""
        columns = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)[None]
        if self.documents is None:
            return columns
        starts = torch.ones_like(self.documents, dtype=torch.bool)
        starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return columns - torch.where(starts, columns, 0).cummax(1).values

    def attention_mask(self) -> Tensor | None:
        """Return which tokens each token sees, bool [B, 1, T, T]: those up to it in its document. None: all before."""
        if self.documents is None:
            return None
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return same.tril()[:, None]
