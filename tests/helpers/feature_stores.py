"""Stores of target features that several test files make."""

from pathlib import Path
from typing import Any

from draftsmith.data.features.stored import Contents, FeatureSource, StoredFeatures, samples_hash
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.models import Target


def make_store(folder: Path, target: Target, plan: BatchPlan, **changes: Any) -> StoredFeatures:
    fields = {
        "target_fingerprint": target.fingerprint(),
        "ends_fingerprint": target.head_fingerprint(),
        "layer_ids": (1, 2),
        "hidden_size": target.hidden_size,
        "dtype": "float32",
        "samples_hash": samples_hash(plan),
    }
    return StoredFeatures(folder, Contents(**{**fields, **changes}), plan)


def source_of(store: StoredFeatures, target: Target) -> FeatureSource:
    return lambda rows, batch: target.features(batch, store.contents.layer_ids)
