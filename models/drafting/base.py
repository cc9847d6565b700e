"""What every drafter is: a config, three methods, a checkpoint. Decoder, loop and files know no more than this.

Shapes: B rows, T tokens, N drafted tokens (nodes), V vocabulary of the target.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.layers import checkpoint_tensors
from draftsmith.models.losses.chain_loss import ChainLoss, Depth, LossSums, divergence_over_depths
from draftsmith.models.losses.divergences import Divergence
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream, cut, sample
from draftsmith.models.sampling.trees import Chain, Shape
from draftsmith.models.target.slots import Window
from draftsmith.models.target.target import Features, Target

OWN_EMBEDDING = "embed_tokens.weight"  # of a checkpoint; without it the embedding is the target's
NO_TOKEN = -1  # fills a draft where a row has nothing to propose; matches nothing


@dataclass
class Draft:
    """What a drafter proposes for each row: a chain, or a tree of nodes sorted parent before child.

    Column 0 of a round's window is the newest committed token, the root of the tree; node i stands in column i + 1.
    """

    tokens: Tensor  # [B, N] int64; NO_TOKEN where there is none
    parents: Tensor  # [B, N] int64 index of each node's parent node, -1 for the root
    depth: int  # nodes on the longest path; N for a chain
    logits: Tensor | None = None  # [B, P, V] fp32, cut: what the children of column i were drawn from; None: no chance

    @property
    def is_chain(self) -> bool:
        return self.depth == self.tokens.shape[1]


def chain(tokens: Tensor, logits: Tensor | None = None) -> Draft:
    """A draft in which every token follows the one before it. tokens [B, N], logits [B, N, V]"""
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
    return Draft(tokens, parents, tokens.shape[1], logits)


def lookup_chain(tokens: Tensor) -> Draft:
    """The draft of a drafter that has nothing to say in some rounds: tokens [B, N], then NO_TOKEN."""
    if tokens.device.type == "cpu":  # a shorter window is cheaper to verify; on a GPU all rounds have one shape
        tokens = tokens[:, : int((tokens != NO_TOKEN).any(0).sum())]
    return chain(tokens)


def in_target_vocabulary(draft: Draft, ids: Tensor | None, vocab_size: int) -> Draft:
    """Return the draft by target ids. `ids` [Vd] are those of the vocabulary it was made in; None: the target's."""
    if ids is None:
        return draft
    tokens = torch.where(draft.tokens < 0, draft.tokens, ids[draft.tokens])  # NO_TOKEN stays
    logits = draft.logits
    if logits is not None:
        whole = logits.new_full((*logits.shape[:2], vocab_size), float("-inf"))
        logits = whole.index_copy(2, ids, logits)
    return replace(draft, tokens=tokens, logits=logits)


@dataclass
class DecodingState:
    """What the decoder shows a drafter at the start of a round."""

    token_ids: Tensor  # [B, M] int64 committed tokens, then anything
    lengths: Tensor  # [B] number of committed tokens; the target has not read the newest one yet
    features: Features  # of the last positions that the target read, [B, T, ...]
    positions: Tensor  # [B, T] those positions
    num_new: Tensor  # [B] how many of them, from the left, are committed tokens that `propose` has not met
    sampling: Sampling
    noise: Noise
    sample_drafts: bool  # draw draft tokens by chance (probabilistic verification) or take the likeliest
    cache: Any = None  # the drafter's own, of `new_cache`
    own_drafts: bool = True  # what the last round verified was this drafter's draft
    least_confidence: float = 0.0  # a chain ends where the drafter's confidence in what it has drafted is below this
    confidence: Tensor | None = None  # [B, K] where somebody asks: at each depth the chance of the likeliest token
    predictions: Tensor | None = None  # [B, N + 1] the target's likeliest token after each column of the last draft;
    # NO_TOKEN in rows that have had none; for drafters that read it

    def first(self, count: int) -> "DecodingState":
        """A view of the first rows: what is written to it stays."""
        if count == len(self.lengths):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:count],
            lengths=self.lengths[:count],
            features=self.features.first(count),
            positions=self.positions[:count],
            num_new=self.num_new[:count],
            noise=self.noise.first(count),
            cache=self.cache and self.cache.rows(slice(count)),
            confidence=None if self.confidence is None else self.confidence[:count],
            predictions=None if self.predictions is None else self.predictions[:count],
        )

    def newest(self) -> Tensor:
        """The newest committed token of each row, [B]."""
        return self.token_ids.gather(1, self.lengths[:, None] - 1)[:, 0]

    def choose(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """The draft token at `depth` (from 0) out of target-vocabulary logits [B, V]: ids [B], what they came from."""
        if not self.sample_drafts:
            return logits.argmax(-1), None
        logits = cut(logits, self.sampling)
        uniforms = self.noise.uniforms(self.lengths[:, None], Stream.DRAFT, branch=depth)[:, 0]
        return sample(logits.softmax(-1), uniforms), logits

    def choose_children(self, logits: Tensor, depth: int, most: int) -> tuple[Tensor, Tensor | None]:
        """`most` distinct draft tokens out of each logits [B, W, V] at `depth`: ids [B, W, most], what they came from.

        The likeliest, or drawn one by one without replacement: the order of logits + Gumbel noise is one of drawing
        (arXiv 1903.06059, section 3). NO_TOKEN when there are no more. All W share their noise. A walk down the tree
        meets one of them at most, and which one hangs on other noise.
        """
        if not self.sample_drafts:
            return logits.topk(most).indices, None
        logits = cut(logits, self.sampling)
        branch = depth * logits.shape[-1] + torch.arange(logits.shape[-1], device=logits.device)
        uniforms = self.noise.uniforms(self.lengths[:, None], Stream.DRAFT, branch)  # [B, V]
        scores, tokens = (logits - (-uniforms.log()).log().float()[:, None]).topk(most)
        return tokens.masked_fill(scores == float("-inf"), NO_TOKEN), logits


def stack_chain(chosen: list[tuple[Tensor, Tensor | None]]) -> Draft:
    """One chain from the (tokens [B], cut logits [B, V] or None) of each depth."""
    tokens = torch.stack([tokens for tokens, _ in chosen], 1)
    drawn_from = [logits for _, logits in chosen if logits is not None]
    return chain(tokens, torch.stack(drawn_from, 1) if drawn_from else None)


@dataclass
class DrafterConfig:
    """Fields of a family's own config come in a subclass beside its module."""

    kind: str
    fixed_fields: ClassVar[tuple[str, ...]] = ()  # decided by a checkpoint's tensors; the others by training

    @property
    def changes_target(self) -> bool:
        """Whether the target is trained along, so that a checkpoint holds a target of its own in `target/`."""
        return False

    @property
    def starts_from_files(self) -> bool:
        """Whether a new drafter is read from files, which decide on its size."""
        return False

    def for_overfitting(self) -> "DrafterConfig":
        """The same drafter trained without what only helps it on text that it has not seen."""
        return self


class Drafter(nn.Module):
    """Proposes tokens for one target. Subclasses say what they need of the target as class or instance data.

    A drafter without parameters has no `loss` and no checkpoint.
    """

    kind: ClassVar[str]
    config_class: ClassVar[type[DrafterConfig]]
    layer_ids: tuple[int, ...] = ()  # hidden states of the target that it reads
    can_sample: ClassVar[bool] = True  # has probabilities to draw from
    can_branch: ClassVar[bool] = False  # drafts trees too
    can_embed: ClassVar[bool] = False  # a checkpoint may bring an embedding in place of the target's
    reads_predictions: ClassVar[bool] = False  # what the target said of every node of its last draft
    max_draft_length: int | None = None  # nodes on a path
    prefills_from_tokens: bool = False  # `prefill` needs no features, so that what was not read can be later
    looks_up_first: ClassVar[bool] = False  # asks what is trained only in rows where it looks up nothing
    drafts_by_target_head: ClassVar[bool] = False  # it has no head of its own, not even a copy
    progress: float = 0.0  # share of training that is done, kept by the training loop
    compile_loss: bool = False  # on a CPU, compare with the target by compiled code (`run.compile`)

    config: Any
    target: Target  # of drafters that are trained
    trained_for: dict[str, Any] | None = None  # that target's identity (identity.py), as the checkpoint has it

    @classmethod
    @abstractmethod
    def from_target(cls, config: Any, target: Target) -> "Drafter":
        """A new drafter for the target, with starting weights."""

    @property
    def training_passes(self) -> float:
        """How often a token of a text goes through what is trained, on average, in a pass of training."""
        return 1.0

    def own_shape(self, draft_length: int) -> Shape:
        """The shape of its drafts where chains of this length are asked for."""
        return Chain(draft_length)

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> Any:
        """What it keeps of the rows' texts from round to round, for drafts of the shape; None where that is nothing.

        `rows(index)` of it is a view of some rows, by their indices [b] or a slice from the first. It may hold copies
        of the weights as they are now.
        """
        return None

    def prefill(self, cache: Any, token_ids: Tensor, features: Features, window: Window) -> None:
        """Take in a part of some prompts [b, P + 1] (one place is free): what the target computed in a window of them.

        The newest token of a prompt comes again in the first round's `propose`, as in each round does what the last
        one committed. `memory` is a view of the prompts' rows.
        """

    @abstractmethod
    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Tokens to follow each row's newest one, as many as the shape has nodes or fewer."""

    def remember(self, token_ids: list[int]) -> None:
        """A request is done: its prompt with its answer, for drafters that learn from what was decoded before."""

    def forget(self) -> None:
        """Drop all that `remember` was told, so that a measurement can be repeated."""

    def loss(self, batch: Batch, features: Features) -> LossSums:
        """Sums and counts; "loss" is what training minimises, its count the trained tokens (`loss_mask.sum()`)."""
        raise TypeError(f"{self.kind} has nothing to train")

    def depths(self, slots: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """What `depth` predictions in a row from each slot are made from, on the text as it is (teacher forcing).

        One `Depth` each, of the slots that `slots.next_depth()` marks for it; fewer where the drafter has no more.
        Features are those of `layer_ids`.
        """
        raise TypeError(f"{self.kind} predicts nothing from a text alone")

    def divergence(self) -> Divergence:
        """What `chain_loss` compares by, at this point of training."""
        return self.config.divergence

    def slots(self, batch: Batch) -> ChainLoss:
        """The slots of a text, from which chains of this drafter's vocabulary start."""
        ids = self.draft_to_target()
        return ChainLoss(batch.loss_mask, None if ids is None else torch.isin(batch.token_ids, ids))

    def chain_loss(self, batch: Batch, features: Features, depth: int) -> ChainLoss:
        """The loss of `depth` predictions in a row from each slot."""
        slots = self.slots(batch)
        return self.compare(slots, list(self.depths(slots, batch, features, depth)), features)

    def compare(self, chain_loss: ChainLoss, depths: list[Depth], features: Features) -> ChainLoss:
        """Fill in the divergence of a chain of predictions from the target's own."""
        chain_loss.total, losses = divergence_over_depths(
            depths,
            features.last_hidden.flatten(0, 1),
            self.target.logits,
            self.divergence(),
            self.draft_to_target(),
            self.compile_loss,
        )
        for rows in losses:
            chain_loss.add(rows)
        return chain_loss

    def as_target(self) -> Target | None:
        """Itself as a model that writes text, with the weights as they are at each moment; None: it only drafts."""
        return None

    def draft_to_target(self) -> Tensor | None:
        """Target ids of a reduced draft vocabulary [Vd]; None where it can propose every token."""
        return None

    def forward(self, batch: Batch, features: Features) -> LossSums:
        """The loss, under the name that wrappers for several devices call."""
        return self.loss(batch, features)

    def fit_vocabulary(self, counts: Tensor) -> None:
        """Called once before training with the rank of each token, [V], higher for one that should rather be drafted.

        `vocabulary.ranking` of how often the target wrote it. A reduced vocabulary uses it.
        """

    def engine_config(self) -> dict[str, Any]:
        """config.json as the serving engines read it."""
        raise TypeError(f"{self.kind} has no checkpoint")

    def engine_tensors(self) -> dict[str, Tensor]:
        """model.safetensors as the serving engines read it."""
        raise TypeError(f"{self.kind} has no checkpoint")

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "Drafter":
        """The inverse of the two above."""
        raise TypeError(f"{cls.kind} has no checkpoint")

    def write_changed_target(self, directory: Path) -> None:
        """The target that was trained along, as an ordinary Hugging Face directory."""
        raise TypeError(f"{self.kind} does not change the target")

    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.parameters())


def drafter_entry(drafter: Drafter) -> dict[str, Any]:
    """What config.json keeps under "draftsmith", beside the keys that engines read."""
    return asdict(drafter.config)


def check_same_shape(what: str, config: dict[str, Any], target: Target) -> None:
    """Refuse a drafter that was made for a target of another width or vocabulary."""
    for key, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        found = config.get("target_hidden_size", config.get(key)) if key == "hidden_size" else config.get(key)
        if found != expected:
            raise UserError(
                f"{what} was made for a target with {key} {found}, but {target.name} has {expected}: "
                "use the target that it was trained on"
            )


def load_tensors(module: nn.Module, tensors: dict[str, Tensor], what: str) -> None:
    """Load all tensors or refuse, naming what is missing, unknown or of another shape."""
    own = checkpoint_tensors(module)
    wrong = sorted(own.keys() ^ tensors.keys()) + sorted(
        name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape
    )
    if wrong:
        raise UserError(f"{what}: tensors missing, unknown or of another shape: {', '.join(wrong[:6])}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
