"""What training takes on more devices, from shapes alone.

`python tools/scale_table.py` prints the tables of docs/scale.md: of recipes, of the ways of making features, and of
figures that others published, none of which had a part in the formulae.
"""

from dataclasses import dataclass, replace

from recipe_table import needs, public_weights

from draftsmith.data.features.stored import token_bytes
from draftsmith.inference.planning.gpu_roofline import Machine
from draftsmith.inference.planning.gpus import GPUS
from draftsmith.models.target.loading import num_layers_of
from draftsmith.models.target.shape import target_shape
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS, SIZES, TOKENS_PER_SAMPLE, target_config
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.pages.tables import markdown
from draftsmith.recipes.planning.training_plan import ways_table
from draftsmith.train.hardware.estimates import H100, meta_drafter, share_in_pieces
from draftsmith.train.hardware.layouts import drafter_share
from draftsmith.train.hardware.ways import GPUS_OF_MACHINE, Training, stored, streamed, trained, training_plan

TARGETS = ("llama_3_1_8b", "qwen3_32b", "llama_3_3_70b", "qwen3_30b_a3b")
COUNTS = (1, 8, 16)
SIZE = "usable"


def bytes_on_each(name: str, count: int, layout: str, placement: str) -> float:
    """Return the memory of one device.

    `layout` is the drafter's, as in train/hardware/layouts.py; the target is `replicated`, `sharded` or `stored`.
    """
    weights, taken = public_weights(name), needs(RECIPES[f"eagle3_{name}_{SIZE}"](), name)
    num_layers = num_layers_of(PUBLIC_TARGETS[name].config.get_text_config())
    layers = {
        "replicated": float(weights.weights_of_layers),
        "sharded": weights.weights_of_layers * share_in_pieces(min(count, GPUS_OF_MACHINE), num_layers),
        "stored": 0.0,
    }[placement]
    target = 2 * (layers + weights.head_weights + weights.other_weights)
    return target + taken.drafter_bytes * drafter_share(layout, count) + taken.working_bytes


def features_bytes(name: str) -> float:
    """Return the bytes of a sample's stored features in bf16: captured layers and last hidden state of every token."""
    public = PUBLIC_TARGETS[name].config
    num_states = len(meta_drafter(RECIPES[f"eagle3_{name}_{SIZE}"](), public).layer_ids) + 1
    return TOKENS_PER_SAMPLE * token_bytes(num_states, public.hidden_size, "bfloat16")


def table() -> str:
    """Return hours, memory and disk of the usable EAGLE-3 recipes, in Markdown: docs/scale.md."""
    head = ["target", "H100s", "hours", "GB: whole on each", "GB: in pieces", "GB: stored", "MB a sample, stored", "TB"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in TARGETS:
        hours = needs(RECIPES[f"eagle3_{name}_{SIZE}"](), name)
        for count in COUNTS:
            pieces = f"{bytes_on_each(name, count, 'FSDP2', 'sharded') / 1e9:.0f}" if count > 1 else "-"
            row = [
                PUBLIC_TARGETS[name].name,
                str(count),
                f"{hours.hours(H100, count):.2g}",
                f"{bytes_on_each(name, count, 'DDP', 'replicated') / 1e9:.0f}",
                pieces,
                f"{bytes_on_each(name, count, 'DDP', 'stored') / 1e9:.0f}",
                f"{features_bytes(name) / 1e6:.0f}",
                f"{features_bytes(name) * SIZES[SIZE][0] / 1e12:.1f}",
            ]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def training_of(
    name: str, gpu: str, count: int, samples: int, tokens: int, epochs: int, unroll_steps: int = 5
) -> Training:
    """Return a training of EAGLE-3 for a public target, to be planned."""
    config, hub_name = target_config(name)
    recipe = RECIPES["eagle3"]()
    recipe.drafter = replace(recipe.drafter, unroll_steps=unroll_steps)  # type: ignore[call-arg]
    drafter, shape = meta_drafter(recipe, config), target_shape(config, hub_name)
    return Training("eagle3", recipe, drafter, config, shape, Machine(GPUS[gpu], count), samples, tokens, epochs)


def ways() -> str:
    """Return the ways of training EAGLE-3 for Llama-3.3-70B on the samples of a large run, in Markdown."""
    return markdown(ways_table(training_plan(training_of("llama_3_3_70b", "H100", 8, 500_000, 1500, 3), 2.5))) + "\n"


TAKEN = f"{TOKENS_PER_SAMPLE} tokens a sample taken"  # where a source does not tell


@dataclass(frozen=True)
class Figure:
    """A figure that others published, and what the formulae give for it."""

    source: str
    what: str
    published: float
    predicted: float
    unit: str

    @property
    def row(self) -> str:
        numbers = f"{self.published:.3g} {self.unit} | {self.predicted:.3g} {self.unit}"
        return f"| {self.source} | {self.what} | {numbers} | {self.predicted / self.published - 1:+.0%} |"


def published() -> list[Figure]:
    """Return the figures that we know with target, samples and GPUs. What they do not tell is taken as said."""
    return [*published_sizes(), *published_times()]


def published_sizes() -> list[Figure]:
    """Return the figures of stored features on disk."""
    speculators = "speculators, tutorial", "disk, EAGLE-3 for Llama-3.1-8B, 50,000 samples of 1,024 tokens"
    one_sample = "speculators, documentation", "disk, the same, one sample of 8,192 tokens"
    spec_forge = "SpecForge issue 426", "disk, EAGLE-3 for gpt-oss-120b, one sample of 64k tokens"
    eagle = "EAGLE issue 30", f"disk, EAGLE-1 of width 4096, 68,000 samples; {TAKEN}"
    deep_spec = "DeepSpec", f"disk, DSpark for Qwen3-4B, 1.3 million samples; {TAKEN}"
    return [
        Figure(*speculators, 1.6, 50_000 * 1024 * token_bytes(4, 4096, "bfloat16") / 1e12, "TB"),
        Figure(*one_sample, 268, 8192 * token_bytes(4, 4096, "bfloat16") / 1e6, "MB"),
        Figure(*spec_forge, 1.17, 65_536 * token_bytes(4, 2880, "bfloat16") / 1e9, "GB"),
        Figure(*eagle, 740, 68_000 * TOKENS_PER_SAMPLE * token_bytes(1, 4096, "bfloat16") / 1e9, "GB"),
        Figure(*deep_spec, 38, 1_300_000 * TOKENS_PER_SAMPLE * token_bytes(6, 2560, "bfloat16") / 1e12, "TB"),
    ]


def by_adamw(training: Training) -> Training:
    """Let a training step by AdamW, as the runs that others published did, and return it."""
    training.config.optimizer.matrices, training.config.optimizer.matrices_rate_factor = "adamw", 1.0
    return training


def published_times() -> list[Figure]:
    """Return the figures of how long runs took."""
    offline = by_adamw(training_of("llama_3_1_8b", "H100", 2, 5000, 1024, 5, unroll_steps=3))
    half = by_adamw(training_of("qwen3_8b", "H100", 2, 5000, TOKENS_PER_SAMPLE, 5, unroll_steps=3))
    small = by_adamw(training_of("qwen3_8b", "RTX-4090", 4, 135_000, TOKENS_PER_SAMPLE, 3))
    large = by_adamw(training_of("qwen3_32b", "RTX-4090", 4, 100_000, TOKENS_PER_SAMPLE, 3))
    example, taken = "speculators, example", f"answers included; 3 epochs and {TAKEN}"
    by_server = "features of 5,000 samples by vLLM, Llama-3.1-8B, 2 H100; 1,024 tokens a sample taken"
    from_disk = "5 epochs of EAGLE-3 on these, from disk, 2 H100"
    by_two = f"5 epochs of EAGLE-3 for Qwen3-8B, 5,000 samples, 2 H100 that train and 2 that serve; {TAKEN}"
    of_small = "card of Eagle3-Qwen3-8B-zh", f"135,000 samples, 4 RTX 4090, {taken}"
    of_large = "card of Eagle3-Qwen3-32B-zh", f"100,000 samples, 4 RTX 4090, {taken}"
    return [
        Figure(example, by_server, 143, stored(offline, "by a vLLM").seconds(offline.link), "s"),
        Figure(example, from_disk, 327, trained(offline, "stored", "whole").seconds(offline.link), "s"),
        Figure(example, by_two, 942, streamed(half, half).seconds(half.link), "s"),
        Figure(*of_small, 3, online_seconds(small) / 86_400, "days"),
        Figure(*of_large, 7, online_seconds(large) / 86_400, "days"),
    ]


def online_seconds(training: Training) -> float:
    """Return what a training takes beside the whole target."""
    return trained(training, "online", "whole").seconds(training.link)


def published_table() -> str:
    """Return published figures beside what the formulae give, in Markdown."""
    head = ["source", "figure", "published", "predicted", "error"]
    rows = [figure.row for figure in published()]
    return "\n".join([f"| {' | '.join(head)} |", "|---|---|---:|---:|---:|", *rows]) + "\n"


if __name__ == "__main__":
    print(table(), ways(), published_table(), sep="\n", end="")
