"""Diagnoses: what `evaluate` says of rows whose acceptance is low."""

from dataclasses import replace
from pathlib import Path

from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.diagnosis.diagnose import diagnose, is_low
from draftsmith.inference.diagnosis.replayed_drafter import Reference
from draftsmith.inference.diagnosis.weaknesses import temperature
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.measuring.results import Evaluation, Finding, Result, read_evaluation
from draftsmith.inference.replay.replay import REPLAYED_MODES, Recording, expected_stats, record, replay
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.storage.files import real_path
from draftsmith.train.run_folder.tracking import read_metrics

DIAGNOSED_PROMPTS = 16  # first ones of a set that a diagnosis reads


def with_diagnoses(
    evaluations: list[Evaluation], drafters: list[Drafter], target: Target, prompt_sets: list[PromptSet]
) -> list[Evaluation]:
    """Return evaluations with a `diagnosis` in rows of chains of trained drafters whose acceptance is low.

    Greedy rows get the whole diagnosis. Sampled ones are only told where temperature 0, measured in the same run, is
    better. Of several rows of one setting, which differ in batch size, all get the same.
    """
    sets = {prompts.name: prompts for prompts in prompt_sets}
    texts = TargetTexts(target)
    return [
        diagnosed(evaluation, drafter, texts, sets) if drafter.trainable() else evaluation
        for evaluation, drafter in zip(evaluations, drafters, strict=True)
    ]


class TargetTexts:
    """The texts that the target writes after the first prompts of a set, recorded once for all drafters."""

    def __init__(self, target: Target) -> None:
        self.target, self._recordings = target, dict[tuple, Recording]()

    def recording(self, prompts: PromptSet, sampling: Sampling, max_new_tokens: int, longest: int) -> Recording:
        """Return the target's texts, which drafts of up to `longest` tokens can be replayed on."""
        key = prompts.name, sampling, max_new_tokens, longest
        if key not in self._recordings:
            picked = prompts.token_ids[:DIAGNOSED_PROMPTS]
            self._recordings[key] = record(self.target, picked, sampling, max_new_tokens, longest)
        return self._recordings[key]


def diagnosed(evaluation: Evaluation, drafter: Drafter, texts: TargetTexts, sets: dict[str, PromptSet]) -> Evaluation:
    """Return the evaluation of one trained drafter with its diagnoses."""
    settings = [row.setting for row in evaluation.results if row.setting.is_chain]
    greedy = {(own.prompt_set, own.draft_length) for own in settings if own.verification_mode == "greedy"}
    diagnoses: dict[tuple, list[Finding]] = {}
    results = []
    for row in evaluation.results:
        own = row.setting
        is_measured_greedily = own.is_chain and (own.prompt_set, own.draft_length) in greedy
        if is_measured_greedily and own.verification_mode in REPLAYED_MODES and is_low(row.acceptance):
            key = own.prompt_set, own.draft_length, own.temperature, own.top_p, own.verification_mode
            if key not in diagnoses:
                diagnoses[key] = findings_of(row, drafter, texts, sets[own.prompt_set], evaluation.drafter)
            if diagnoses[key] or own.verification_mode == "greedy":
                row = replace(row, diagnosis=diagnoses[key])
        results.append(row)
    return replace(evaluation, results=results)


def findings_of(row: Result, drafter: Drafter, texts: TargetTexts, prompts: PromptSet, name: str) -> list[Finding]:
    """Return the findings for one row, on the first prompts of its set."""
    own, target = row.setting, texts.target
    length, mode = own.draft_length, own.verification_mode
    at_zero = texts.recording(prompts, Sampling(), own.max_new_tokens, length)
    if mode == "greedy":
        return diagnose(target, drafter, at_zero, length, prompts.domains[:DIAGNOSED_PROMPTS], reference_of(name))

    def stats(recording: Recording, mode: VerificationMode) -> list[Stats]:
        traces = replay(target, recording, {"d": drafter}, length)["d"]
        return [expected_stats(trace, Chain(length), mode) for trace in traces]

    above_zero = texts.recording(prompts, Sampling(own.temperature, own.top_p), own.max_new_tokens, length)
    return list(temperature(stats(above_zero, mode), stats(at_zero, "greedy"), own.temperature))


def reference_of(name: str) -> Reference | None:
    """Return what the checkpoint in a folder accepted of first tokens: by its own evaluation, else in training."""
    path = Path(name) / "evaluation.json"
    if path.is_file():
        for row in read_evaluation(path).results:
            first = next(iter(row.acceptance.conditional_acceptance_rates), None)
            if row.setting.verification_mode == "greedy" and row.setting.tree_nodes is None and first is not None:
                return Reference(first, str(path), in_training=False)
    metrics = real_path(Path(name)).parent.parent / "metrics.jsonl"
    lines = [line for line in read_metrics(metrics.parent) if "accuracy_0" in line]
    if lines:
        return Reference(lines[-1]["accuracy_0"], str(metrics), in_training=True)
    return None
