"""Growing a draft level by level, for every drafter that can say what follows a token which it drafted itself.

Chains, static trees (Medusa, EAGLE-1), dynamic trees (EAGLE-2, arXiv 2406.16858, section 4) and trees of independent
depths (DDTree, arXiv 2604.12989). All sizes are known from the shape alone, and nothing waits for the device.

Shapes: B rows, N nodes, W tokens of a level that are read (the root at first), k children of each, P columns up to the
last that has children, V vocabulary of the drafter.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft, chain
from draftsmith.models.kernels import runs_kernels
from draftsmith.models.layers import gather_columns
from draftsmith.models.sampling.trees import WORD, Chain, DDTree, DynamicTree, Shape, StaticTree, pack
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import Window

if TYPE_CHECKING:
    from typing_extensions import Self

# Reads drafted tokens [B, W] and returns logits [B, W, V] of what follows each, or [B, 1, V] where that is the same for
# all. The second argument [B, W] says which of the tokens of the call before (at first: the root, 0) each follows, and
# is None for a chain.
Read = Callable[[Tensor, Tensor | None], Tensor]
# Returns how sure the drafter is of what follows the token that was read last, [B]; None: by its probabilities.
Confidence = Callable[[], Tensor | None]


def grow(
    shape: Shape,
    tree: "TreeIndices | Candidates | None",
    logits: Tensor,
    read: Read,
    state: DecodingState,
    confidence_head: Confidence | None = None,
) -> Draft:
    """Return a draft of the shape, in the drafter's vocabulary, from the newest token's logits [B, 1, V].

    `tree` is `tree_indices(shape)`. A static tree drawn by chance has siblings without replacement. For a `DDTree`,
    whose depths do not hang on each other, `read` gives one depth after the other, whatever it is asked.
    `confidence_head` is for chains, of a drafter that has one.
    """
    if isinstance(shape, Chain):
        return grow_chain(shape.depth, logits, read, state, confidence_head)
    assert isinstance(shape, StaticTree) or not state.sample_drafts, "the likeliest of many nodes are no sample"
    if isinstance(shape, DynamicTree):
        return grow_dynamic(shape, logits, read)
    if isinstance(shape, DDTree):
        assert isinstance(tree, Candidates)
        root = state.newest()[:, None]
        return grow_ddtree(shape, tree, torch.cat([logits, *(read(root, None) for _ in range(1, shape.depth))], 1))
    assert isinstance(tree, TreeIndices)
    return grow_static(tree, logits, read, state)


def grow_chain(
    depth: int, logits: Tensor, read: Read, state: DecodingState, confidence_head: Confidence | None = None
) -> Draft:
    """Grow a chain. A row whose confidence falls below the state's least drafts no more.

    On a CPU the drafter stops with the last row; on a GPU all rounds have one shape.
    """
    tokens = torch.empty(len(logits), depth, dtype=torch.int64, device=logits.device)
    num_drafted = depth
    drawn_from: list[Tensor] = []  # of each depth, [B, V]
    watched = bool(state.least_confidence) or state.confidence is not None
    confidence = torch.ones(len(logits), device=logits.device) if watched else None  # [B] in what is drafted so far
    ended: list[Tensor] = []  # before each depth, [B]
    for level in range(depth):
        if state.least_confidence and confidence is not None:
            ended.append(confidence < state.least_confidence)
            if not runs_kernels(logits.device) and ended[-1].all():
                num_drafted = level
                break
        if level:
            logits = read(tokens[:, level - 1 : level], None)
        cut_logits = state.choose(logits[:, 0], level, tokens[:, level])
        if cut_logits is not None:
            drawn_from.append(cut_logits)
        if confidence is not None:
            own = confidence_head() if confidence_head else None
            if own is None:
                own = (logits[:, 0] if cut_logits is None else cut_logits).float().softmax(-1).amax(-1)
            confidence = confidence * own
            if state.confidence is not None:
                state.confidence[:, level] = own
    tokens = tokens[:, :num_drafted]
    if ended:
        tokens = tokens.masked_fill(torch.stack(ended[:num_drafted], 1), NO_TOKEN)
    return chain(tokens, torch.stack(drawn_from, 1) if drawn_from else None)


# --- static trees


@dataclass
class Level:
    """Index tensors by which one level of a static tree comes from the level above it."""

    read: Tensor  # [W] the nodes above that have children, among all nodes above
    parents: Tensor  # [W] and their parents, among the nodes that were read a level before
    most: int  # k, children of the node that has most
    picks: Tensor  # the nodes of the level, among W * k children


@dataclass
class TreeIndices:
    """Index tensors that growing a static tree needs, on the device."""

    levels: list[Level]
    parents: Tensor  # [N] parent node of each node, -1 for the root
    read_at: Tensor  # [P] of each column with children its place among all that are read; 0 for the others

    def rows(self, index: Tensor | slice) -> "TreeIndices":
        """Return the indices themselves: a tree is the same for all rows."""
        return self


def tree_indices(shape: Shape, device: torch.device) -> "TreeIndices | Candidates | None":
    """Return the indices of a static tree or of a `DDTree`, to be made once; None for other shapes."""
    if isinstance(shape, DDTree):
        return candidates_of(shape, device)
    if not isinstance(shape, StaticTree):
        return None
    columns = [(), *shape.choices]
    inner = [path for path in columns if (*path, 0) in shape.choices]  # level by level, as `choices` are
    levels = []
    read_before: list[tuple[int, ...]] = [()]
    for depth in range(1, shape.depth + 1):
        above, nodes = ([path for path in columns if len(path) == d] for d in (depth - 1, depth))
        read = [path for path in above if path in inner]
        most = 1 + max(path[-1] for path in nodes)
        picks = [read.index(path[:-1]) * most + path[-1] for path in nodes]
        indices = [above.index(path) for path in read], [read_before.index(path[:-1]) for path in read], picks
        read_tensor, parents, picks_tensor = (torch.tensor(index, device=device) for index in indices)
        levels.append(Level(read_tensor, parents, most, picks_tensor))
        read_before = read
    up_to_last = columns[: columns.index(inner[-1]) + 1]
    return TreeIndices(
        levels,
        torch.tensor([columns.index(path[:-1]) - 1 for path in shape.choices], device=device),
        torch.tensor([inner.index(path) if path in inner else 0 for path in up_to_last], device=device),
    )


def grow_static(tree: TreeIndices, logits: Tensor, read: Read, state: DecodingState) -> Draft:
    """Read what has children, choose the children, keep those that are in the tree."""
    nodes: list[Tensor] = []  # of each level, [B, nodes]
    drawn_from: list[Tensor] = []
    for depth, level in enumerate(tree.levels):
        if depth:
            tokens = nodes[-1][:, level.read].clamp(min=0)  # NO_TOKEN, too, may have children in the tree
            logits = read(tokens, level.parents.expand_as(tokens))
        children, cut_logits = state.choose_children(logits, depth, level.most)  # [B, W or 1, k]
        children = children.expand(-1, len(level.read), -1)
        nodes.append(children.flatten(1)[:, level.picks])
        if cut_logits is not None:
            drawn_from.append(cut_logits.expand(-1, len(level.read), -1))
    tokens = torch.cat(nodes, 1)
    draft_logits = torch.cat(drawn_from, 1)[:, tree.read_at] if drawn_from else None
    return Draft(tokens, tree.parents.expand_as(tokens), len(tree.levels), draft_logits)


# --- dynamic trees


def grow_dynamic(shape: DynamicTree, logits: Tensor, read: Read) -> Draft:
    """Expand the best nodes of each level and keep the best of all, by the log-probability of their path (EAGLE-2).

    The kept nodes are a tree. A log-probability is at most 0, and rounding keeps it so: a child's value is at most its
    parent's. It stands behind its parent among all candidates, and of equal values the first are kept, so that no
    child is kept before its parent.
    """
    width = shape.width
    batch = len(logits)
    tokens: list[Tensor] = []  # of the candidates of each level, [B, W * width], as their values
    values: list[Tensor] = []
    read_nodes = [torch.full((batch, 1), -1, device=logits.device)]  # candidates that are read, -1 is the root: [B, W]
    value = torch.zeros(batch, 1, device=logits.device)
    for depth in range(shape.depth):
        if depth:
            chosen = best(values[-1], width)  # [B, width]
            value = values[-1].gather(1, chosen)
            logits = read(tokens[-1].gather(1, chosen), chosen // width)
            read_nodes.append(chosen + sum(level.shape[1] for level in tokens[:-1]))
        children = logits.log_softmax(-1, dtype=torch.float32).topk(width)  # [B, W or 1, width]
        values.append((value[:, :, None] + children.values).flatten(1))
        tokens.append(children.indices.expand(-1, value.shape[1], -1).flatten(1))

    kept = best(torch.cat(values, 1), shape.num_nodes).sort(1).values  # [B, N] candidates, parents first
    parent = torch.cat(read_nodes, 1).gather(1, kept // width)
    place = torch.searchsorted(kept, parent)  # the parent is among the kept
    return Draft(torch.cat(tokens, 1).gather(1, kept), torch.where(parent < 0, -1, place), shape.depth)


def best(values: Tensor, count: int) -> Tensor:
    """Return indices [B, count] of the highest values of each row, best first; of equal ones the first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


# --- trees of independent depths


@dataclass
class Candidates:
    """Index tensors of the paths that a `DDTree` is chosen from, on the device."""

    levels: list[tuple[Tensor, Tensor]]  # of each depth: parents among the best paths a depth above, ranks of tokens
    kept: list[int]  # best paths of each depth that are gone on with
    most: int  # ranks that any depth needs

    def rows(self, index: Tensor | slice) -> "Candidates":
        """Return the indices themselves: the candidates are the same for all rows."""
        return self


def candidates_of(shape: DDTree, device: torch.device) -> Candidates:
    """Return the candidates of each depth.

    A path of the i-th best parent and the r-th best token (from 1) has i * r - 1 others of its depth that are no worse.
    All of them fit into the tree, beside one path of each depth above, or it is no candidate.
    """
    levels, width = [], 1
    for depth in range(shape.depth):
        room = shape.num_nodes - depth
        pairs = [(parent, rank) for parent in range(width) for rank in range(room // (parent + 1))]
        levels.append((pairs, min(len(pairs), room)))
        width = levels[-1][1]
    index = [torch.tensor(pairs, device=device).unbind(1) for pairs, _ in levels]
    return Candidates([(parents, ranks) for parents, ranks in index], [count for _, count in levels], shape.num_nodes)


def grow_ddtree(shape: DDTree, candidates: Candidates, logits: Tensor) -> Draft:
    """Keep the likeliest paths by the logits [B, K, V] of each depth (DDTree, arXiv 2604.12989, its best-first search).

    Values fall along a path, rounded as they are, and of equal values the first are kept, so that what is kept is a
    tree.
    """
    likeliest = logits.log_softmax(-1, dtype=torch.float32).topk(min(candidates.most, logits.shape[-1]))
    missing = candidates.most - likeliest.values.shape[-1]  # of a vocabulary smaller than the tree
    chances = nn.functional.pad(likeliest.values, (0, missing), value=float("-inf"))  # [B, K, most]
    tokens_of_ranks = nn.functional.pad(likeliest.indices, (0, missing), value=NO_TOKEN)
    tokens: list[Tensor] = []  # of the best paths of each depth, [B, W], as their parents and values
    parents: list[Tensor] = []
    values: list[Tensor] = []
    value = torch.zeros(len(logits), 1, device=logits.device)
    first = -1  # index of the first path of the depth above; the root's is -1
    for depth, (above, ranks) in enumerate(candidates.levels):
        children = value[:, above] + chances[:, depth, ranks]
        chosen = best(children, candidates.kept[depth])
        value = children.gather(1, chosen)
        values.append(value)
        tokens.append(tokens_of_ranks[:, depth].gather(1, ranks[chosen]))
        parents.append(above[chosen] + first)
        first += 1 if depth == 0 else candidates.kept[depth - 1]
    kept = best(torch.cat(values, 1), shape.num_nodes).sort(1).values  # [B, N], parents first
    parent = torch.cat(parents, 1).gather(1, kept)
    place = torch.searchsorted(kept, parent)  # the parent is among the kept
    return Draft(torch.cat(tokens, 1).gather(1, kept), torch.where(parent < 0, -1, place), shape.depth)


# --- the drafter's cache


class DrafterCache:
    """Keys and values that a drafter keeps from round to round; made once for the shape of its drafts.

    Beside them stand the numbers that are the same in each round: of the R drafted tokens that the drafter reads, each
    has a slot of its own, in the order of reading. That is not where they stand in the draft, most of which is never
    read.
    """

    def __init__(self, num_rows: int, num_slots: int, shape: Shape, device: torch.device, first_read: int = 0) -> None:
        """`first_read`: slot of the first drafted token that is read, counted from a row's length."""
        self.tree = tree_indices(shape, device)
        self.kv = SlotCache(num_rows, num_slots + shape.num_read)
        self.read_slots = torch.arange(first_read, first_read + shape.num_read, device=device)  # [R]
        words = -(-shape.num_read // WORD)
        self.own_bits = pack(torch.eye(shape.num_read, words * WORD, dtype=torch.int64, device=device))  # [R, words]

    def rows(self, index: Tensor | slice) -> "Self":
        """Return a view of some rows: their indices [b], or a slice from the first row on."""
        view = copy.copy(self)
        view.kv = self.kv.rows(index)
        return view


class LevelWindows:
    """Windows in the drafter's own cache, of the drafted tokens that it reads, level by level."""

    def __init__(self, lengths: Tensor, cache: DrafterCache) -> None:
        """`lengths` [B] of the committed text."""
        self._lengths, self._cache = lengths, cache
        self._all: Window | None = None  # of all R tokens that are read, made when the first is
        self._num_read = self._depth = 0
        self._seen: Tensor | None = None  # [B, W, words] by the tokens of the level before

    def next(self, width: int, parents: Tensor | None) -> Window:
        """Return the window of the next level: `width` tokens that follow `parents` [B, W] of the level before."""
        if self._all is None:
            all_slots = self._lengths[:, None] + self._cache.read_slots
            self._all = Window(all_slots, all_slots, all_slots[:, 0])
        depth, columns = self._depth, slice(self._num_read, self._num_read + width)
        self._depth += 1
        self._num_read += width
        if parents is None:
            return self._all.part(columns)
        own = self._cache.own_bits[columns].expand(len(parents), -1, -1)
        self._seen = own if self._seen is None else gather_columns(self._seen, parents) | own
        slots, prefix = self._all.slots, self._all.prefix
        return Window(slots[:, columns], slots[:, depth : depth + 1].expand(-1, width), prefix, self._seen)
