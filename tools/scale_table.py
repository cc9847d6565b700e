"""What training takes on more devices, from shapes alone.

`python tools/scale_table.py` prints the table of docs/scale.md.
"""

from recipe_table import needs, public_weights

from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS, SIZES, TOKENS_PER_SAMPLE
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train.hardware.estimates import H100, meta_drafter
from draftsmith.train.hardware.layouts import drafter_share

TARGETS = ("llama_3_1_8b", "qwen3_32b", "llama_3_3_70b", "qwen3_30b_a3b")
GPUS = (1, 8, 16)
SIZE = "usable"


def bytes_on_each(name: str, count: int, layout: str, placement: str) -> float:
    """Return the memory of one device.

    `layout` is the drafter's, as in train/hardware/layouts.py; the target is `replicated`, `sharded` or `stored`.
    """
    weights, taken = public_weights(name), needs(RECIPES[f"eagle3_{name}_{SIZE}"](), name)
    layers = {
        "replicated": float(weights.weights_of_layers),
        "sharded": weights.weights_of_layers / count,
        "stored": 0.0,
    }[placement]
    target = 2 * (layers + weights.head_weights + weights.other_weights)
    return target + taken.drafter_bytes * drafter_share(layout, count) + taken.working_bytes


def features_bytes(name: str) -> float:
    """Disk of one sample's stored features in bf16: the captured layers and the last hidden state of every token."""
    public = PUBLIC_TARGETS[name].config
    num_states = len(meta_drafter(RECIPES[f"eagle3_{name}_{SIZE}"](), public).layer_ids) + 1
    return TOKENS_PER_SAMPLE * num_states * public.hidden_size * 2


def table() -> str:
    """Hours, memory and disk of the usable EAGLE-3 recipes, in Markdown: docs/scale.md."""
    head = ["target", "H100s", "hours", "GB: whole on each", "GB: in pieces", "GB: stored", "MB a sample, stored", "TB"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in TARGETS:
        hours = needs(RECIPES[f"eagle3_{name}_{SIZE}"](), name)
        for count in GPUS:
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


if __name__ == "__main__":
    print(table(), end="")
