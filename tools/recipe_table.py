"""Print the tables of docs/recipes.md: what the recipes for public targets take, by formulae."""

import functools

from draftsmith.models.target.shape import TargetWeights, target_weights
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS, SIZES, TOKENS_PER_SAMPLE
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train.config import TrainConfig
from draftsmith.train.hardware.estimates import H100, RunEstimate, estimate

KINDS = ("eagle3", "dflash", "dflash2", "dspark", "domino", "mtp", "new_mtp")


@functools.cache
def public_weights(name: str) -> TargetWeights:
    """Return the numbers of weights of a public target, whose model is made for it, without memory."""
    return target_weights(PUBLIC_TARGETS[name].config, name)


def needs(recipe: TrainConfig, name: str) -> RunEstimate:
    """Return what a recipe takes for a public target, in bf16 on a GPU."""
    return estimate(recipe, PUBLIC_TARGETS[name].config, TOKENS_PER_SAMPLE, weights=public_weights(name))


def table() -> str:
    """Return what the recipes take, in Markdown."""
    head = ["recipe", "parameters (active)", *(f"hours, {size}" for size in SIZES), "GB on each GPU", "one H100 80 GB?"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in PUBLIC_TARGETS:
        weights = public_weights(name)
        taken = {size: needs(RECIPES[f"eagle3_{name}_{size}"](), name) for size in SIZES}
        memory = taken["usable"].total_bytes
        row = [
            f"`eagle3_{name}_SIZE`",
            f"{weights.num_weights / 1e9:.1f} B ({weights.active_weights / 1e9:.1f} B)",
            *(
                f"{hours:.2f}" if hours < 10 else f"{hours:.0f}"
                for hours in (cost.hours(H100) for cost in taken.values())
            ),
            f"{memory / 1e9:.0f}",
            "yes" if memory < H100.memory else "no: `data.features=stored`",
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def table_of_kinds() -> str:
    """Return hours and memory of the usable recipes of every kind, in Markdown."""
    lines = [f"| target | {' | '.join(f'`{kind}`' for kind in KINDS)} |", "|" + "---|" * (1 + len(KINDS))]
    for name in PUBLIC_TARGETS:
        recipes = [RECIPES.get(f"{kind}_{name}_usable") for kind in KINDS]
        taken = [recipe and needs(recipe(), name) for recipe in recipes]
        cells = [f"{cost.hours(H100):.1f} h, {cost.total_bytes / 1e9:.0f} GB" if cost else "-" for cost in taken]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), table_of_kinds(), sep="\n", end="")
