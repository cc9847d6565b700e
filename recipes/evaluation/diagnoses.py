"""Diagnoses: what `evaluate` says of rows whose acceptance is low."""

import json
from pathlib import Path
from typing import Any

from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.diagnosis.diagnose import diagnose, is_low
from draftsmith.inference.diagnosis.replayed_drafter import Finding, Reference
from draftsmith.inference.diagnosis.weaknesses import temperature
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.replay.replay import REPLAYED_MODES, Recording, expected_stats, record, replay
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain

DIAGNOSED_PROMPTS = 16  # first ones of a set that a diagnosis reads


def add_diagnoses(
    contents: list[dict[str, Any]], drafters: list[Drafter], target: Target, prompt_sets: list[PromptSet]
) -> None:
    """Put `diagnosis` into rows of chains of trained drafters whose acceptance is low.

    Greedy rows get the whole diagnosis. Sampled ones are only told where temperature 0, measured in the same run, is
    better. Of several rows of one setting, which differ in batch size, all get the same.
    """
    sets = {prompts.name: prompts for prompts in prompt_sets}
    texts = Texts(target)
    for content, drafter in zip(contents, drafters, strict=True):
        chains = [row for row in content["results"] if row["tree_nodes"] is None and drafter.trainable()]
        greedy = {(row["prompt_set"], row["draft_length"]) for row in chains if row["verification_mode"] == "greedy"}
        known: dict[tuple, list[Finding]] = {}
        for row in chains:
            setting = row["prompt_set"], row["draft_length"]
            if setting not in greedy or row["verification_mode"] not in REPLAYED_MODES or not is_low(stats_of(row)):
                continue
            key = *setting, row["temperature"], row["top_p"], row["verification_mode"]
            if key not in known:
                known[key] = diagnosed(row, drafter, texts, sets[row["prompt_set"]], content["drafter"])
            if known[key] or row["verification_mode"] == "greedy":
                row["diagnosis"] = known[key]


class Texts:
    """What the target writes after the first prompts of a set, recorded once for all drafters."""

    def __init__(self, target: Target) -> None:
        self.target, self._found = target, dict[tuple, Recording]()

    def of(self, prompts: PromptSet, sampling: Sampling, max_new_tokens: int, longest: int) -> Recording:
        key = prompts.name, sampling, max_new_tokens, longest
        if key not in self._found:
            picked = prompts.token_ids[:DIAGNOSED_PROMPTS]
            self._found[key] = record(self.target, picked, sampling, max_new_tokens, longest)
        return self._found[key]


def diagnosed(row: dict[str, Any], drafter: Drafter, texts: Texts, prompts: PromptSet, name: str) -> list[Finding]:
    """The findings for one row, on the first prompts of its set."""
    length, target = row["draft_length"], texts.target
    at_zero = texts.of(prompts, Sampling(), row["max_new_tokens"], length)
    if row["verification_mode"] == "greedy":
        return diagnose(target, drafter, at_zero, length, prompts.domains[:DIAGNOSED_PROMPTS], reference_of(name))

    def stats(recording: Recording, mode: VerificationMode) -> list[Stats]:
        traces = replay(target, recording, {"d": drafter}, length)["d"]
        return [expected_stats(one, Chain(length), mode) for one in traces]

    above = texts.of(prompts, Sampling(row["temperature"], row["top_p"]), row["max_new_tokens"], length)
    return list(temperature(stats(above, row["verification_mode"]), stats(at_zero, "greedy"), row["temperature"]))


def stats_of(row: dict[str, Any]) -> Stats:
    """The counters of a row that acceptance is judged by."""
    return Stats(row["draft_length"], row["num_drafts"], acceptance_histogram=row["acceptance_histogram"])


def reference_of(name: str) -> Reference | None:
    """What the checkpoint in a folder accepted of first tokens: by its own evaluation, else in training."""
    folder = Path(name)
    if (folder / "evaluation.json").is_file():
        for row in json.loads((folder / "evaluation.json").read_text())["results"]:
            first = row["conditional_acceptance_rates"][0] if row["conditional_acceptance_rates"] else None
            if row["verification_mode"] == "greedy" and row["tree_nodes"] is None and first is not None:
                return Reference(first, str(folder / "evaluation.json"), in_training=False)
    metrics = folder.resolve().parent.parent / "metrics.jsonl"
    if metrics.is_file():
        lines = [json.loads(line) for line in metrics.read_text().splitlines() if "accuracy_0" in line]
        if lines:
            return Reference(lines[-1]["accuracy_0"], str(metrics), in_training=True)
    return None
