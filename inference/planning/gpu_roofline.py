"""Predicted times of rounds on a GPU that is not here, by a roofline of its data sheet and the target's sizes.

A pass takes the longer of two times: to read its weights, or to multiply its tokens by them (Williams, Waterman and
Patterson, Roofline, CACM 2009). Added to it are the time in which attention reads the caches of all texts, and times
that no data sheet tells: of kernels that start one after the other, and of the engine between rounds. `Assumptions`
holds these; docs/roofline.md compares the predictions with measurements. recipes/pages/templates/plan_panel.js computes
the same.
"""

from dataclasses import dataclass, field
from typing import Literal

from draftsmith.inference.planning.gpus import Gpu
from draftsmith.models.ranges import AboveZero, Count, Natural, NonNegative
from draftsmith.models.target.shape import Amount, RoutedExperts, TargetShape

WeightType = Literal["bf16", "fp8", "int8", "int4", "fp4"]
Passes = Literal["token", "head", "block", "none"]
BYTES: dict[WeightType, float] = {"bf16": 2, "fp8": 1, "int8": 1, "int4": 0.53, "fp4": 0.56}  # with scales of groups
LARGEST_BATCH = 4096


@dataclass(frozen=True)
class Assumptions:
    """The numbers that no data sheet tells. Times are in milliseconds."""

    bandwidth_share: AboveZero = 0.9  # of a data sheet's bandwidth that reading weights and caches reaches
    flops_share: AboveZero = 0.7  # of its operations a second that products of matrices reach
    layer_ms: NonNegative = 0.02  # of a layer, for the starts and ends of its kernels
    step_ms: NonNegative = 1.0  # of a round or plain step, for scheduling, sampling and the host
    draft_pass_ms: NonNegative = 0.4  # of a pass of the drafter, for the same
    exchange_ms: NonNegative = 0.01  # of each of a layer's two exchanges among several GPUs
    memory_share: AboveZero = 0.9  # of a GPU's memory that weights and caches may fill
    cache_bytes: NonNegative = 2.0  # of a value in the cache of keys and values


@dataclass(frozen=True)
class DrafterShape:
    """The sizes of a drafter that its speed depends on.

    `passes` says how it drafts: "token", by one pass for each token; "head", likewise, with weights of its own for each
    token; "block", by one pass for all tokens; "none", by looking them up.
    """

    name: str
    passes: Passes
    weights: Amount  # that a pass reads, its head among them; of "head", those of all heads
    layers: Natural  # decoder layers of a pass
    cache_values: Natural  # of a token of the text
    longest: Natural | None  # most drafted tokens; None: any number


@dataclass(frozen=True)
class Machine:
    """Equal GPUs among which a target is divided, by tensor parallelism, and the type of its layers' weights."""

    gpu: Gpu
    num_gpus: Count = 1
    weights: WeightType = "bf16"
    assumptions: Assumptions = field(default_factory=Assumptions)

    @property
    def flops(self) -> float:
        """Operations a second of all GPUs, in the type in which they multiply such weights."""
        per_gpu = {"fp8": self.gpu.fp8, "fp4": self.gpu.fp4}.get(self.weights)
        return self.num_gpus * self.assumptions.flops_share * (per_gpu or self.gpu.bf16)

    @property
    def bandwidth(self) -> float:
        """Bytes a second of all GPUs."""
        return self.num_gpus * self.assumptions.bandwidth_share * self.gpu.bandwidth

    @property
    def layer_ms(self) -> float:
        exchanges = 2 * self.assumptions.exchange_ms if self.num_gpus > 1 else 0.0
        return self.assumptions.layer_ms + exchanges

    def pass_ms(self, weight_bytes: float, cache_bytes: float, operations: float, layers: int) -> float:
        """Return the milliseconds of a pass that reads so many bytes and takes so many operations.

        Weights are read while tokens are multiplied by them; caches are read in between, by attention.
        """
        products = max(weight_bytes / self.bandwidth, operations / self.flops)
        return 1000 * (products + cache_bytes / self.bandwidth) + layers * self.layer_ms


def touched(group: RoutedExperts, tokens: int) -> float:
    """Return the expected number of experts of a layer that read some of so many tokens, which choose independently."""
    return group.experts * (1 - (1 - group.chosen / group.experts) ** tokens)


@dataclass(frozen=True)
class TargetTimes:
    """The times of a target on a machine, and what fits there."""

    shape: TargetShape
    machine: Machine

    def kept_bytes(self, context: int) -> float:
        """Return the bytes that are kept of a text of so many tokens."""
        return self.shape.kept_bytes(context, self.machine.assumptions.cache_bytes)

    def moved_bytes(self, context: int) -> float:
        """Return the bytes of a text that a pass reads and writes: what is kept of it, and its new running states."""
        return self.kept_bytes(context) + self.shape.state_bytes

    def weight_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a pass over so many tokens reads. The head stays in bf16."""
        routed = sum(group.layers * group.weights * touched(group, tokens) for group in self.shape.experts)
        layers = BYTES[self.machine.weights] * (self.shape.layer_weights + routed)
        return layers + BYTES["bf16"] * self.shape.head_weights

    def reading_ms(self, tokens: int, batch: int, context: int) -> float:
        """Return the milliseconds in which a pass reads weights and caches."""
        return 1000 * (self.weight_bytes(tokens) + batch * self.moved_bytes(context)) / self.machine.bandwidth

    def computing_ms(self, tokens: int) -> float:
        """Return the milliseconds of the products with weights; those of attention's scores are not counted."""
        return 1000 * 2 * tokens * self.shape.active_weights / self.machine.flops

    def verify(self, nodes: int, batch: int, context: int) -> float:
        """Return the time of a pass over `nodes` + 1 tokens of each text, all with `context` tokens in the cache."""
        tokens = batch * (nodes + 1)
        operations = 2 * tokens * self.shape.active_weights
        cached = batch * self.moved_bytes(context)
        return self.machine.pass_ms(self.weight_bytes(tokens), cached, operations, self.shape.layers)

    def plain(self, batch: int, context: int) -> float:
        """Return the time of a plain step."""
        return self.verify(0, batch, context) + self.machine.assumptions.step_ms

    def bound_from(self, context: int) -> int | None:
        """Return the batch size from which on a plain step computes longer than it reads; None: it never does."""
        sizes = (1 << power for power in range(LARGEST_BATCH.bit_length()))
        least = next((size for size in sizes if self.computes(size, context)), None)
        if least is None:
            return None
        low, high = least // 2, least  # it reads at the first, and computes at the second
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.computes(middle, context) else (middle, high)
        return high

    def free_tokens(self) -> int:
        """Return how many tokens of a pass are multiplied while its weights are read."""
        return (self.bound_from(0) or LARGEST_BATCH + 1) - 1

    def computes(self, batch: int, context: int) -> bool:
        """Return whether a plain step computes longer than it reads."""
        return self.computing_ms(batch) >= self.reading_ms(batch, batch, context)

    def stored_bytes(self) -> float:
        """Return the bytes of all weights; embeddings and head stay in bf16."""
        ends = self.shape.head_weights + self.shape.other_weights
        return BYTES[self.machine.weights] * (self.shape.num_weights - ends) + BYTES["bf16"] * ends

    def rows_that_fit(self, context: int) -> int:
        """Return how many texts of so many tokens fit beside the weights; 0 where these alone do not."""
        room = self.machine.num_gpus * self.machine.assumptions.memory_share * self.machine.gpu.memory
        return max(0, int((room - self.stored_bytes()) // max(1.0, self.kept_bytes(context))))


@dataclass(frozen=True)
class RooflineCosts:
    """The times of rounds in milliseconds, with the questions that `Costs` answers from measurements."""

    target: TargetTimes
    drafter: DrafterShape

    def plain(self, batch: int, context: int) -> float:
        return self.target.plain(batch, context)

    def draft(self, draft_length: int, batch: int, context: int) -> float:
        """Return the milliseconds of drafting chains for all texts. The drafter's weights are in bf16."""
        drafter, machine = self.drafter, self.target.machine
        if drafter.passes == "none" or draft_length == 0:
            return 0.0
        num_passes = 1 if drafter.passes == "block" else draft_length
        rows = batch * draft_length if drafter.passes == "block" else batch
        weights = drafter.weights / (drafter.longest or 1) if drafter.passes == "head" else drafter.weights
        cache = batch * context * drafter.cache_values * machine.assumptions.cache_bytes
        pass_ms = machine.pass_ms(BYTES["bf16"] * weights, cache, 2 * rows * weights, drafter.layers)
        return num_passes * (pass_ms + machine.assumptions.draft_pass_ms)

    def round(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float:
        """Return the time of a whole round; with `nodes` the draft is a tree of depth `draft_length`."""
        verify = self.target.verify(nodes or draft_length, batch, context)
        return self.draft(draft_length, batch, context) + verify + self.target.machine.assumptions.step_ms

    def break_even(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float:
        """Return the acceptance length at which the speedup is 1."""
        return self.round(draft_length, batch, context, nodes) / self.plain(batch, context)

    def speedup(
        self, acceptance_length: float, draft_length: int, batch: int, context: int, nodes: int | None = None
    ) -> float:
        """Return the speedup over plain decoding of rounds that emit so many tokens of each text."""
        return acceptance_length / self.break_even(draft_length, batch, context, nodes)


def reply_seconds(tokens: int, token_ms: float) -> float:
    """Return the seconds in which a text grows by so many tokens, one in `token_ms`, after its prompt was read."""
    return tokens * token_ms / 1000


def dollars_per_million(price: float, num_gpus: int, batch: int, token_ms: float) -> float:
    """Return the dollars for a million tokens, at a `price` of dollars an hour for a GPU.

    All rows of the batch are busy, and each grows by a token in `token_ms`.
    """
    tokens_a_second = batch / (token_ms / 1000)
    return price * num_gpus / 3600 / tokens_a_second * 1e6
