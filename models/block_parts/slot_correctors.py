"""Slot correctors: they let each token of a block follow the one that was drafted before it.

The rows of a block are computed at once, so that each slot predicts its token without those before it. A corrector
walks along the slots: it turns the token before a slot into a *code*, a few numbers, and a matrix turns the code into
what is added to the slot's logits. That is little work, and no layer is passed again.

In training the tokens before are those of the text, and all slots are corrected at once. In drafting they are the
drafted ones, and one slot is corrected after the other. Both are the same function of hidden states and tokens.

Shapes: N blocks, K slots of each, B rows, W drafted tokens that are read, H hidden width, r width of codes, S of
memory, V target vocabulary, Vd draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.models.layers import gather_columns


class SlotCorrector(ABC):
    """The interface of correctors, which know tokens by their target ids."""

    @property
    @abstractmethod
    def readout(self) -> nn.Linear:
        """The matrix [Vd, r] that codes are multiplied with."""

    @abstractmethod
    def codes(self, hidden: Tensor, token_ids: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the codes [N, K, r] of slots in a row, and what is remembered of them, [N, S] or None.

        `hidden` [N, K, H] is what the head reads of each slot, and `token_ids` [N, K] are the tokens before each.
        `memory` is that of the slots before; None: the first slot stands behind the anchor.
        """


class CorrectedHead(nn.Module):
    """A drafter's head that reads hidden state and code side by side, [..., H + r]."""

    def __init__(self, head: Callable[[Tensor], Tensor], readout: nn.Linear) -> None:
        super().__init__()
        self.head, self.readout = head, readout

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [..., Vd]."""
        rank = self.readout.in_features
        hidden, codes = inputs.split([inputs.shape[-1] - rank, rank], -1)
        return self.head(hidden) + self.readout(codes)


class ConfidenceHead(nn.Module):
    """DSpark's estimate of how sure the drafter is of a slot's token: one product with hidden state and code."""

    def __init__(self, width: int) -> None:
        """`width`: H + r."""
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [...] fp32 of the chance that the target accepts the token, from inputs [..., H + r]."""
        return self.proj(inputs)[..., 0].float()


class MarkovHead(nn.Module, SlotCorrector):
    """DSpark's corrector (arXiv 2607.05147): the token before a slot adds logits of its own, a matrix of low rank.

    A new one adds nothing.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def start(self) -> None:
        """Set the weights of a new one."""
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        nn.init.zeros_(self.markov_w2.weight)

    @property
    def readout(self) -> nn.Linear:
        return self.markov_w2

    def codes(self, hidden: Tensor, token_ids: Tensor, memory: Tensor | None) -> tuple[Tensor, None]:
        return self.markov_w1(token_ids), None


class PrefixGRU(nn.Module):
    """A gated recurrent unit over the tokens of a block, with the weights of `nn.GRU` without biases."""

    def __init__(self, width: int, memory: int) -> None:
        """`width`: of what it reads; `memory`: S."""
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * memory, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * memory, memory))

    def start(self) -> None:
        """Set the weights of a new one as PyTorch does."""
        for weight in (self.weight_ih_l0, self.weight_hh_l0):
            nn.init.uniform_(weight, -(self.weight_hh_l0.shape[1] ** -0.5), self.weight_hh_l0.shape[1] ** -0.5)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """Return the states [N, K, S] after each of x [N, K, width], from those before them [N, S]; None: zeros."""
        read = F.linear(x, self.weight_ih_l0)  # [N, K, 3 S]
        state = read.new_zeros(len(x), self.weight_hh_l0.shape[1]) if memory is None else memory
        states = []
        for gates in read.unbind(1):
            reset, update, new = gates.chunk(3, -1)
            own_reset, own_update, own_new = F.linear(state, self.weight_hh_l0).chunk(3, -1)
            new = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
            state = torch.lerp(new, state.to(new), torch.sigmoid(update + own_update))
            states.append(state)
        return torch.stack(states, 1)


class DominoCorrector(SlotCorrector):
    """Domino's corrector (arXiv 2605.29707): a code is made of the hidden state and of all tokens of the block before.

    The first slot, behind the anchor, is not corrected.
    """

    def __init__(self, embedding: Callable[[Tensor], Tensor], prefix_gru: PrefixGRU, embed_proj: nn.Sequential) -> None:
        """`embedding` [..., H] of tokens is the target's; `embed_proj` ends in the readout."""
        self._embedding, self._prefix_gru, self._embed_proj = embedding, prefix_gru, embed_proj

    @property
    def readout(self) -> nn.Linear:
        readout = self._embed_proj[-1]
        assert isinstance(readout, nn.Linear)
        return readout

    def codes(self, hidden: Tensor, token_ids: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        states = self._prefix_gru(self._embedding(token_ids), memory)
        codes = self._embed_proj[:-1](torch.cat([hidden, states], -1))
        if memory is None:
            codes = torch.cat([torch.zeros_like(codes[:, :1]), codes[:, 1:]], 1)
        return codes, states[:, -1]


class SlotWalk:
    """The slots of blocks in the order of drafting: the logits of each, given the tokens that stand before it."""

    def __init__(
        self,
        hidden: Tensor,
        logits: Tensor,
        corrector: SlotCorrector | None,
        confidence_head: ConfidenceHead | None,
        ids: Tensor | None,
    ) -> None:
        """Start at the first slot.

        `hidden` [B, K, H] is what the head reads, `logits` [B, K, Vd] are what it made of it. Drafted tokens are target
        ids by `ids` [Vd]; None: they are target ids.
        """
        self._hidden, self._logits, self._ids = hidden, logits, ids
        self._corrector, self._confidence_head = corrector, confidence_head
        self._depth = 0
        self._memory: Tensor | None = None  # [B, W, S]
        self._inputs: Tensor | None = None  # [B, W, H + r] of the slot that was read last

    def first(self, anchors: Tensor) -> Tensor:
        """Return the logits [B, 1, Vd] of the first slot, behind the anchors [B]."""
        return self._next(anchors[:, None], None)

    def read(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Return the logits [B, W or 1, Vd] of the next slot behind tokens [B, W], as `Read` of tree_drafting.py."""
        return self._next(tokens if self._ids is None else self._ids[tokens], parents)

    def confidence(self) -> Tensor | None:
        """Return how sure the confidence head is of the slot that was read last in a chain, [B]; None without one."""
        if self._confidence_head is None or self._inputs is None:
            return None
        return self._confidence_head(self._inputs[:, 0]).sigmoid()

    def _next(self, token_ids: Tensor, parents: Tensor | None) -> Tensor:
        slot = slice(self._depth, self._depth + 1)
        self._depth += 1
        if self._corrector is None:
            return self._logits[:, slot]
        hidden = self._hidden[:, slot].expand(-1, token_ids.shape[1], -1)  # [B, W, H]
        memory = self._memory
        if memory is not None:
            memory = (memory if parents is None else gather_columns(memory, parents)).flatten(0, 1)
        codes, memory = self._corrector.codes(hidden.flatten(0, 1)[:, None], token_ids.flatten()[:, None], memory)
        codes = codes.view(*token_ids.shape, -1)
        self._memory = None if memory is None else memory.view(*token_ids.shape, -1)
        self._inputs = torch.cat([hidden, codes], -1)
        return self._logits[:, slot] + self._corrector.readout(codes)
