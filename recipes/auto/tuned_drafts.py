"""Drafts of a search's winner that are no chains of one length: a tree, and chains that end where it is unsure."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import PlainValidator

from draftsmith.inference.decoding.schedule import Confident, schedule_from_json
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.planning.tuning import tune
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.recipes.pages.tables import draft_text

NONE_BETTER = "neither a tree nor chains that end by confidence are predicted to beat chains of one length"


@dataclass(frozen=True)
class TunedDrafts:
    """Drafts that are predicted to beat the winner's best chain, and so are measured beside it."""

    text: str  # in words
    tree: StaticTree | None = None
    confident: Annotated[Confident, PlainValidator(schedule_from_json)] | None = None

    @property
    def drafts(self) -> list[StaticTree | Confident]:
        """All of them that there are."""
        return [draft for draft in (self.tree, self.confident) if draft]


def tuned_drafts(
    target: Target, drafter: Drafter, name: str, prompts: PromptSet, settings: MeasureSettings, cost_seconds: float
) -> TunedDrafts:
    """Return what is predicted to beat chains on some prompts, at the batch size and temperature of the settings.

    Costs are measured for about `cost_seconds`, with trees. Nothing is tried where that cannot be done, as on a target
    of a short context: the text then says why.
    """
    try:
        tuning, _ = tune(target, drafter, name, prompts, settings, [settings.batch_size], cost_seconds)
    except UserError as error:
        return TunedDrafts(f"{name}: neither a tree nor chains that end by confidence were tried: {error}")
    chain, *others = tuning.predicted
    if not others:
        return TunedDrafts(f"{name}: {NONE_BETTER}")
    told = ", ".join(f"{draft_text(draft)} {draft.speedup:.2f}×" for draft in others)
    confident = tuning.confidence.rule if tuning.confidence and tuning.confidence.pays else None
    return TunedDrafts(f"{name}: predicted at {told}; {draft_text(chain)} {chain.speedup:.2f}×", tuning.tree, confident)
