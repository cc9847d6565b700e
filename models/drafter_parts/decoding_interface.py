"""The part of a drafter that the decoder uses: a cache, prefill, and a draft each round.

Shapes: b rows of some prompts, P tokens of the longest of them.
"""

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.drafter_parts.tree_drafting import tree_indices
from draftsmith.models.sampling.trees import Chain, Shape
from draftsmith.models.slots.window import Window
from draftsmith.models.target.target import Features, Target


class DecodingDrafter:
    """The part of a drafter that proposes tokens. The flags say what the decoder may ask and has to provide."""

    target: Target
    layer_ids: tuple[int, ...] = ()  # hidden states of the target that it reads
    can_sample: ClassVar[bool] = True  # has probabilities to draw from
    can_branch: ClassVar[bool] = False  # drafts trees too
    independent_depths: ClassVar[bool] = False  # what it drafts at a depth does not hang on what it drafted before
    reads_predictions: ClassVar[bool] = False  # needs the target's predictions after every node of its last draft
    max_draft_length: int | None = None  # most nodes on a path; None: any number
    prefills_from_tokens: bool = False  # `prefill` needs no features, so that it can be put off
    attends_to_text: bool = False  # by layers that learnt it from the texts of its training alone
    looks_up_first: ClassVar[bool] = False  # asks what is trained only in rows where it looks up nothing

    @property
    def knows_confidence(self) -> bool:
        """Return whether the drafter can tell how sure it is of its drafts, so that a chain may end by that."""
        return self.can_sample

    def own_shape(self, draft_length: int) -> Shape:
        """Return the shape of its drafts where chains of this length are asked for."""
        return Chain(draft_length)

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> Any:
        """Return what it keeps of the rows' texts from round to round, for drafts of the shape; None for nothing.

        The cache's `rows(index)` is a view of some rows, by their indices [b] or a slice from the first row on. It may
        hold copies of the weights as they are now. By default it holds what growing trees needs to know of them.
        """
        return tree_indices(shape, self.target.device) if self.can_branch else None

    def prefill(self, cache: Any, token_ids: Tensor, features: Features, window: Window) -> None:
        """Read a part of some prompts [b, P + 1] (one place is free), given the target's features of a window of them.

        `cache` is a view of the prompts' rows. The newest token of a prompt comes again in the first round's
        `propose`, as does in each round what the last one committed.
        """

    def read_last_pass(self, state: DecodingState, num_columns: int) -> None:
        """Read the first columns of what the target read last, in a round in which this drafter drafts nothing.

        The target's next pass writes over these features.
        """
        positions = state.positions[:, :num_columns]
        window = Window(positions, positions, positions[:, 0])
        self.prefill(state.cache, state.token_ids, state.features.up_to(num_columns), window)

    @abstractmethod
    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Return tokens to follow each row's newest one, as many as the shape has nodes or fewer."""

    def remember(self, token_ids: list[int]) -> None:
        """Learn from a finished request, its prompt with its answer."""

    def forget(self) -> None:
        """Drop all that `remember` was told, so that a measurement can be repeated."""
