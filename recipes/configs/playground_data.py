"""Data that the playground starts with: devices, the costs of families, and the acceptance that others reached.

Costs of families are counts of weights for the shape of Llama-3.1-8B, that is what a pass of the drafter reads over
what a step of the target reads. They leave out the host and the launches of kernels, so that they are lower bounds.
"""

from dataclasses import dataclass

from draftsmith.inference.planning.best_draft import acceptance_length, equal_rates
from draftsmith.inference.planning.gpus import GPUS
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS
from draftsmith.recipes.configs.published_acceptance import PUBLISHED

BYTES = 2  # of a weight, and of a number in the cache: bf16
DRAFT_VOCABULARY, BLOCK_LAYERS, HEADS = 32_000, 5, 4  # of EAGLE-3, of DFlash, of Medusa, as published


@dataclass(frozen=True)
class PlaygroundDevice:
    """A GPU by its data sheet: dense bf16 arithmetic, and the bandwidth of its memory."""

    name: str
    flops: float  # operations a second
    bandwidth: float  # bytes a second

    @property
    def ridge(self) -> float:
        """Tokens of a pass that take as long to compute (2 operations a weight) as the weights take to read."""
        return self.flops / 2 / (self.bandwidth / BYTES)


@dataclass(frozen=True)
class PlaygroundFamily:
    """A family of drafters, and the cost of one of its passes in steps of the target at batch size 1."""

    name: str
    draft_cost: float
    parallel: bool  # one pass drafts all tokens
    note: str


@dataclass(frozen=True)
class ReachedAcceptance:
    """A rate of acceptance that somebody reached: the equal rates of all depths that give their acceptance length."""

    kind: str
    where: str
    source: str
    rate: float


@dataclass(frozen=True)
class PlaygroundData:
    """Everything that the page holds besides its formulas."""

    devices: list[PlaygroundDevice]
    ridges: list[float]  # of the devices
    families: list[PlaygroundFamily]
    reached: list[ReachedAcceptance]
    cache_share: float  # of the target
    target: str


DEVICES = [
    PlaygroundDevice(name, GPUS[name].bf16, GPUS[name].bandwidth) for name in ("H100", "A100-80GB", "L40S", "RTX-4090")
]


def playground_data() -> PlaygroundData:
    """Return what the page starts with, for the shape of Llama-3.1-8B."""
    shape = PUBLIC_TARGETS["llama_3_1_8b"].shape
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    cache_width = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * width * width + 2 * width * cache_width + 3 * width * shape["intermediate_size"]
    head = width * shape["vocab_size"]
    read = layers * layer + head  # by a step of the target, which reads single rows of its embedding
    weights = {
        "n-grams, suffix": (0, False, "Looked up in the text: nothing is read."),
        "EAGLE-3": (layer + width * DRAFT_VOCABULARY, False, "One layer and a head of 32,000 tokens, for each token."),
        "EAGLE, MTP": (layer + 2 * width * width + head, False, "One layer and the target's head, for each token."),
        "Medusa": (HEADS * (width * width + head), True, "Four heads at once, each with a vocabulary of its own."),
        "DFlash": (BLOCK_LAYERS * layer + head, True, "Five layers and the target's head, once for a whole block."),
        "draft model of 1 B": (10**9, False, "A whole model of a billion weights, for each token."),
    }
    return PlaygroundData(
        devices=DEVICES,
        ridges=[device.ridge for device in DEVICES],
        families=[
            PlaygroundFamily(name, number / read, parallel, note) for name, (number, parallel, note) in weights.items()
        ],
        reached=[
            ReachedAcceptance(entry.kind, entry.where, entry.source, equal_rate(entry.rates)) for entry in PUBLISHED
        ],
        cache_share=2 * layers * cache_width / read,
        target="Llama-3.1-8B",
    )


def equal_rate(rates: list[float]) -> float:
    """Return the one rate of all depths at which drafts have the acceptance length of these conditional rates."""
    return equal_rates(acceptance_length(rates, len(rates)), len(rates))[0]
