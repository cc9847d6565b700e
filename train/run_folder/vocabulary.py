"""vocabulary.json of a run: the draft vocabulary, and the bound that it sets to acceptance."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.data.features.stored import FeatureSource
from draftsmith.data.features.vocabulary import measure_vocabulary
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.models import Drafter, Target
from draftsmith.models.drafter_parts.vocabulary import vocabulary_hash
from draftsmith.models.reading import read_json

VOCABULARY = "vocabulary.json"


def vocabulary_content(
    drafter: Drafter, plan: BatchPlan, source: FeatureSource, target: Target
) -> dict[str, Any] | None:
    """Measure a reduced draft vocabulary and return the content of vocabulary.json; None for a whole one.

    All processes call this together, since a target in pieces computes when all do.
    """
    ids = drafter.draft_to_target()
    if ids is None:
        return None
    domains = measure_vocabulary(ids, plan, source, target)
    return {
        "size": len(ids),
        "target_size": target.vocab_size,
        "hash": vocabulary_hash(ids),
        "domains": {name: asdict(inside) for name, inside in domains.items()},
    }


def read_vocabulary(run: Path) -> dict[str, Any] | None:
    """Return the content of a run's vocabulary.json; None where the run drafts from the whole vocabulary."""
    path = run / VOCABULARY
    return read_json(path) if path.is_file() else None


def vocabulary_text(content: dict[str, Any]) -> str:
    """Return the content of vocabulary.json in a line."""
    bounds = ", ".join(
        f"{name or 'all text'} {inside['greedy']:.3f} greedy, {inside['sampled']:.3f} sampled"
        for name, inside in content["domains"].items()
    )
    return (
        f"draft vocabulary: {content['size']} of {content['target_size']} tokens; of what the target would write it "
        f"holds, and drafts can be accepted at, no more than: {bounds}"
    )
