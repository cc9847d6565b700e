"""vocabulary.json of a run: the draft vocabulary, and the bound that it sets to acceptance."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.features.stored import FeatureSource
from draftsmith.data.features.vocabulary import Coverage, measure_vocabulary
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.models import Drafter, Target
from draftsmith.models.drafter_parts.vocabulary import vocabulary_hash
from draftsmith.models.storage.reading import read_typed

VOCABULARY = "vocabulary.json"


@dataclass(frozen=True)
class DraftVocabulary:
    """The content of vocabulary.json."""

    size: int
    target_size: int
    hash: str
    domains: dict[str, Coverage]  # "": text without a domain


def vocabulary_of(drafter: Drafter, plan: BatchPlan, source: FeatureSource, target: Target) -> DraftVocabulary | None:
    """Measure a reduced draft vocabulary; return None for a whole one.

    All processes call this together, since a target in pieces computes when all do.
    """
    ids = drafter.draft_to_target()
    if ids is None:
        return None
    domains = measure_vocabulary(ids, plan, source, target)
    return DraftVocabulary(len(ids), target.vocab_size, vocabulary_hash(ids), domains)


def read_vocabulary(run: Path) -> DraftVocabulary | None:
    """Return the draft vocabulary of a run; None where the run drafts from the whole vocabulary."""
    path = run / VOCABULARY
    return read_typed(DraftVocabulary, path) if path.is_file() else None


def vocabulary_text(vocabulary: DraftVocabulary) -> str:
    """Return the content of vocabulary.json in a line."""
    bounds = ", ".join(
        f"{name or 'all text'} {inside.greedy:.3f} greedy, {inside.sampled:.3f} sampled"
        for name, inside in vocabulary.domains.items()
    )
    return (
        f"draft vocabulary: {vocabulary.size} of {vocabulary.target_size} tokens; of what the target would write it "
        f"holds, and drafts can be accepted at, no more than: {bounds}"
    )
