"""Training text in rows, one document a row or several packed side by side.

Shapes: B rows, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the host does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # from other memory the copy would wait for all that the GPU has still to do
    return tensor.to(device, non_blocking=True)


@dataclass
class Batch:
    """Right-padded rows of training text.

    A batch on a device keeps its copy `on_host`: what depends on its values is made there, without waiting for the
    device.
    """

    token_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool, True on the tokens that the target wrote; never on a document's first
    documents: Tensor | None = None  # [B, T] int64 number of each token's document, -1 for padding; None: one a row
    source: "Batch | None" = None  # the batch in the host's memory that this one is a copy of

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on the device; the host does not wait for the copy."""
        return replace(self._map(lambda tensor: send(tensor, device)), source=self.on_host)

    @property
    def on_host(self) -> "Batch":
        """The same batch in the host's memory; one that was made on a GPU is copied from there, which waits."""
        if self.source is not None:
            return self.source
        return self._map(Tensor.cpu)

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
        return columns - torch.where(document_starts(self.documents), columns, 0).cummax(1).values

    def attention_mask(self) -> Tensor | None:
        """Return which tokens each token sees, those up to it in its document, as `slot_attention` reads it.

        None: each sees all tokens up to it. Else int64 [1, 1, 1, D + 1]: where each of D documents begins among all
        B * T slots, and the end; the padding of a row counts as a document.
        """
        documents = self.on_host.documents
        if documents is None:
            return None
        return send(document_edges(documents), self.token_ids.device)[None, None, None]


def document_starts(documents: Tensor) -> Tensor:
    """Return which tokens begin a document, or the padding of a row, bool [B, T] of documents [B, T]."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def document_edges(documents: Tensor) -> Tensor:
    """Return where each document begins among all B * T slots, and the end, int64 [D + 1], from documents [B, T]."""
    return torch.cat([document_starts(documents).flatten().nonzero()[:, 0], torch.tensor([documents.numel()])])
