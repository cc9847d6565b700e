"""Acceptance and speed of drafters beside plain decoding, in one process, on the same prompts.

All contenders decode in turns (interleaving.py). Acceptance is counted once, and times give the ratio of two speeds
with an interval (speed.py).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from draftsmith.inference.decoding.batch_engine import GenerationSettings
from draftsmith.inference.decoding.counters import Stats, length_interval, total_of
from draftsmith.inference.decoding.decoder import SpeculativeDecoder, check_sampling, resolve_settings
from draftsmith.inference.decoding.schedule import AnySchedule, Confident
from draftsmith.inference.measuring.bandwidth import bandwidth_floor_share, memory_bandwidth
from draftsmith.inference.measuring.baselines import Baseline
from draftsmith.inference.measuring.calibration import calibration_bins, calibration_error
from draftsmith.inference.measuring.interleaving import DecodeBatch, decode_in_turns
from draftsmith.inference.measuring.lossless import compare_outputs
from draftsmith.inference.measuring.results import (
    BaselineResult,
    DomainResult,
    LosslessCheck,
    RequestCounts,
    Result,
    Setting,
)
from draftsmith.inference.measuring.spans import Markers, stats_by_label
from draftsmith.inference.measuring.speed import (
    Outputs,
    batch_totals,
    counted,
    ratio_interval,
    speed,
    speed_beside,
    speedup_of,
)
from draftsmith.inference.measuring.teacher_forcing import gap_to_training, predicted_acceptance, teacher_forced_traces
from draftsmith.inference.replay.replay import expected_stats
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import require_at_least
from draftsmith.models.sampling.trees import Chain, Tree

P = TypeVar("P")


DraftSetting = int | Tree | AnySchedule  # length of a chain, a tree, or a schedule of chains


@dataclass(frozen=True)
class MeasureSettings:
    """A setting of an evaluation, which gives one row of evaluation.json for each drafter."""

    temperature: float = 0.0
    top_p: float = 1.0
    batch_size: int = 1
    draft: DraftSetting = 4
    max_new_tokens: int = 64
    repeats: int = 5  # the most, where `seconds` are given
    seed: int = 0
    verification_mode: VerificationMode | None = None  # None: the usual one for temperature and drafter
    synthetic_rates: tuple[float, ...] = ()
    seconds: float | None = None  # for this setting: as many repeats as fit

    @property
    def draft_length(self) -> int:
        """Tokens on the longest path of a draft."""
        if isinstance(self.draft, AnySchedule):
            return self.draft.longest
        return self.draft if isinstance(self.draft, int) else self.draft.depth

    def resolve(self, drafter: Drafter) -> GenerationSettings:
        """Return the settings of decoding with one drafter. Raises `UserError` for what it cannot do."""
        return resolve_settings(
            drafter,
            check_sampling(self.temperature, self.top_p, 0),
            self.max_new_tokens,
            self.draft,
            self.verification_mode,
            self.seed,
            synthetic_rates=self.synthetic_rates,
        )

    def allows(self, drafter: Drafter) -> bool:
        """Return whether a drafter can make drafts that are so long, branch where they do, and tell how sure it is."""
        if isinstance(self.draft, Tree) and not drafter.can_branch:
            return False
        if isinstance(self.draft, Confident) and not drafter.knows_confidence:
            return False
        return drafter.max_draft_length is None or self.draft_length <= drafter.max_draft_length


@dataclass
class PromptSet:
    """Prompts to measure on."""

    name: str
    token_ids: list[list[int]]
    domains: list[str] = field(default_factory=list)  # of each prompt; empty where they were not told apart
    tokenise_seconds: list[float] = field(default_factory=list)  # of each prompt; empty where they came as token ids
    images: list[list[str]] = field(default_factory=list)  # of each prompt, as data: URLs; empty where none has one

    def images_of(self, number: int) -> list[str]:
        """Return the images of a prompt, as data: URLs in the order of its text."""
        return self.images[number] if self.images else []

    @property
    def by_domain(self) -> dict[str, list[int]]:
        """The places of each domain's prompts."""
        places: dict[str, list[int]] = {}
        for index, domain in enumerate(self.domains):
            places.setdefault(domain, []).append(index)
        return places


@dataclass(frozen=True)
class Contender:
    """A drafter that is measured, by its name, and the settings that it is measured at."""

    name: str
    drafter: Drafter
    settings: MeasureSettings


def check_settings(settings: MeasureSettings, drafters: dict[str, Drafter]) -> None:
    """Refuse settings that cannot be measured with these drafters."""
    require_at_least("batch_size", settings.batch_size)
    require_at_least("repeats", settings.repeats)
    require_at_least("max_new_tokens", settings.max_new_tokens, 2)  # a single one has no time per token
    for drafter in drafters.values():
        settings.resolve(drafter)


def measure(
    target: Target,
    drafters: dict[str, Drafter],
    prompts: PromptSet,
    settings: MeasureSettings,
    on_progress: Callable[[], None] = lambda: None,
    baselines: Sequence[Baseline] = (),
) -> dict[str, Result]:
    """Measure each drafter at the same settings; returns name -> a row of evaluation.json."""
    contenders = {name: Contender(name, drafter, settings) for name, drafter in drafters.items()}
    return measure_in_turns(target, contenders, prompts, on_progress, baselines)


def measure_in_turns(
    target: Target,
    contenders: dict[str, Contender],
    prompts: PromptSet,
    on_progress: Callable[[], None] = lambda: None,
    baselines: Sequence[Baseline] = (),
) -> dict[str, Result]:
    """Measure contenders beside one plain decoding; returns a row of evaluation.json for each key.

    Their settings differ in their drafts alone. No two of them share a drafter that remembers texts.

    `on_progress` is called after each batch of each repeat. Acceptance is counted over all prompts once (it is the same
    in every repeat), times over all repeats. The row of a trained drafter's chains in greedy decoding also says what
    training predicts (teacher_forcing.py), and how its confidence is calibrated.
    `baselines` take part at batch size 1, with drafts as long as those of the first contender.
    """
    for contender in contenders.values():
        check_settings(contender.settings, {contender.name: contender.drafter})
    settings = next(iter(contenders.values())).settings
    everyone = {"none": Contender("none", load_drafter("none", target), settings), **contenders}
    resolved = {key: contender.settings.resolve(contender.drafter) for key, contender in everyone.items()}
    baselines = baselines if settings.batch_size == 1 else ()
    outputs = decode_all(target, everyone, resolved, prompts, baselines, on_progress)
    plain, is_greedy = outputs["none"], resolved["none"].sampling.greedy
    results = {}
    for key, contender in contenders.items():
        row = result_of(target, resolved[key], prompts, contender.settings, outputs[key], plain)
        beside = [baseline for baseline in baselines if baseline.drafter in (None, contender.name)]
        by_name = {baseline.name: baseline_result(outputs[baseline.key], plain, is_greedy) for baseline in beside}
        results[key] = replace(row, baselines=by_name or None)
    greedy = {key: each for key, each in contenders.items() if resolved[key].verification_mode == "greedy"}
    add_training_predictions(results, target, greedy, prompts.token_ids, outputs)
    return results


def decode_all(
    target: Target,
    contenders: dict[str, Contender],
    resolved: dict[str, GenerationSettings],
    prompts: PromptSet,
    baselines: Sequence[Baseline],
    on_progress: Callable[[], None],
) -> dict[str, Outputs]:
    """Return the outputs of contenders, of whom `none` is plain decoding, and of baselines, by their keys.

    Answers are cut to the tokens that count.
    """
    settings, ids = contenders["none"].settings, prompts.token_ids
    size = settings.batch_size
    batches = [list(range(i, min(i + size, len(ids)))) for i in range(0, len(ids), size)]
    decoders = {
        key: own_decoder(target, contender.drafter, ids, resolved[key], size) for key, contender in contenders.items()
    }
    drafting = replace(resolved["none"], shape=Chain(settings.draft_length))
    decoders |= {baseline.key: baseline_decoder(baseline, ids, drafting) for baseline in baselines}

    def forget() -> None:
        for contender in contenders.values():
            contender.drafter.forget()

    outputs = decode_in_turns(decoders, batches, settings.repeats, settings.seconds, forget, on_progress)
    for run in (run for by_batch in outputs.values() for repeats in by_batch for run in repeats):
        run.token_ids = [counted(answer, target.eos_token_ids, settings.max_new_tokens) for answer in run.token_ids]
    return outputs


def own_decoder(
    target: Target, drafter: Drafter, prompts: list[list[int]], settings: GenerationSettings, batch_size: int
) -> DecodeBatch:
    """Return a decoder of batches, all on one engine: on a GPU a new one would record its rounds in what is timed."""
    decoder = SpeculativeDecoder(target, drafter)
    engine = decoder.engine_for(settings, min(batch_size, len(prompts)), max(map(len, prompts)))
    engine.warm_up()
    return lambda batch: decoder.decode_on(engine, [prompts[i] for i in batch], batch)


def baseline_decoder(baseline: Baseline, prompts: list[list[int]], settings: GenerationSettings) -> DecodeBatch:
    """Return a decoder of single prompts by one of transformers' ways."""
    return lambda batch: baseline.decode(prompts[batch[0]], settings, batch[0])


def add_training_predictions(
    results: dict[str, Result],
    target: Target,
    contenders: dict[str, Contender],
    prompts: list[list[int]],
    outputs: dict[str, Outputs],
) -> None:
    """Add what training predicts to the results of trained drafters' chains, for contenders in greedy decoding.

    Drafters that wrote the same texts with drafts of the same length share the passes over them.
    """
    left = {
        key: (draft, answers_of(outputs[key]))
        for key, contender in contenders.items()
        if contender.drafter.trainable() and isinstance(draft := contender.settings.draft, int)
    }
    while left:
        first = next(iter(left))
        limit, (length, written) = contenders[first].settings.max_new_tokens, left[first]
        alike = {key: contenders[key].drafter for key, drafted in left.items() if drafted == left[first]}
        left = {key: drafted for key, drafted in left.items() if key not in alike}
        forced = teacher_forced_traces(target, alike, prompts, written, length, limit)
        for key, traces in forced.items():
            expected = [expected_stats(trace, Chain(length), "greedy") for trace in traces]
            bins = calibration_bins(traces, length, "greedy")
            results[key] = replace(
                results[key],
                teacher_forced=predicted_acceptance(expected),
                teacher_forced_gap=gap_to_training(expected, stats_by_prompt(outputs[key])),
                calibration=bins,
                calibration_error=[calibration_error(of_depth) for of_depth in bins],
            )


# --- rows


def stats_by_prompt(outputs: Outputs) -> list[Stats]:
    """Return the counters of each prompt."""
    return [request for batch in outputs for request in batch[0].stats.requests]


def result_of(
    target: Target,
    resolved: GenerationSettings,
    prompts: PromptSet,
    settings: MeasureSettings,
    outputs: Outputs,
    plain: Outputs,
) -> Result:
    """Return one row from the outputs of a drafter and of plain decoding."""
    stats = stats_by_prompt(outputs)
    total = total_of(stats)
    floor_share = bandwidth_floor_share(target, prompts.token_ids, outputs, memory_bandwidth(target.device))
    return Result(
        setting=setting_of(settings, resolved, prompts),
        acceptance=total,
        mean_acceptance_length_ci95=length_interval(stats),
        speed=speed_beside(outputs, plain, total.mean_acceptance_length, prompts.tokenise_seconds, floor_share),
        lossless=lossless_check(target, resolved, prompts, outputs, plain),
        domains=domain_results(prompts, stats, outputs, plain) if any(prompts.domains) else None,
        spans=span_results(target, prompts, outputs, total.draft_length),
        requests=[
            RequestCounts(len(prompt), len(answer), int(own.num_rounds))
            for prompt, answer, own in zip(prompts.token_ids, answers_of(outputs), stats, strict=True)
        ],
    )


def answers_of(outputs: Outputs) -> list[list[int]]:
    """Return the tokens that count of each prompt's answer."""
    return [ids for batch in outputs for ids in batch[0].token_ids]


def setting_of(settings: MeasureSettings, resolved: GenerationSettings, prompts: PromptSet) -> Setting:
    """Return the setting as it was asked for; where a drafter made a tree of a chain, with that tree."""
    shape = settings.draft if isinstance(resolved.shape, Chain) else resolved.shape
    tree = shape if isinstance(shape, Tree) else None
    return Setting(
        prompt_set=prompts.name,
        num_prompts=len(prompts.token_ids),
        temperature=settings.temperature,
        top_p=settings.top_p,
        verification_mode=resolved.verification_mode,
        batch_size=settings.batch_size,
        draft_length=tree.depth if tree else settings.draft_length,
        tree_nodes=tree.num_nodes if tree else None,
        schedule=None if tree else resolved.schedule,
        max_new_tokens=settings.max_new_tokens,
    )


def baseline_result(outputs: Outputs, plain: Outputs, is_greedy: bool) -> BaselineResult:
    """Return transformers' decoding beside ours; sampled texts are drawn on other noise and cannot be compared."""
    texts = zip(outputs, plain, strict=True)
    return BaselineResult(
        num_emitted_tokens=sum(batch_totals(outputs)[0]),
        tokens_per_second=speed(batch_totals(outputs)),
        speedup_over_plain=speedup_of(outputs, plain),
        speedup_over_plain_ci95=ratio_interval(outputs, plain),
        identical=sum(own[0].token_ids == beside[0].token_ids for own, beside in texts) if is_greedy else None,
    )


def domain_results(prompts: PromptSet, stats: list[Stats], outputs: Outputs, plain: Outputs) -> dict[str, DomainResult]:
    """Return acceptance by domain, and the speedup where every batch is a single prompt; `stats` are by prompt."""
    results = {}
    for domain, indices in prompts.by_domain.items():
        of_domain = [stats[i] for i in indices]
        row = DomainResult.of(len(indices), total_of(of_domain), length_interval(of_domain))
        if len(outputs) == len(prompts.token_ids):
            own, beside = [outputs[i] for i in indices], [plain[i] for i in indices]
            row = replace(row, speedup=speedup_of(own, beside), speedup_ci95=ratio_interval(own, beside))
        results[domain] = row
    return results


def span_results(
    target: Target, prompts: PromptSet, outputs: Outputs, draft_length: int
) -> dict[str, DomainResult] | None:
    """Return acceptance by kind of span: thinking, answer, tool call, code. None where all is of one kind."""
    if target.tokenizer is None:
        return None
    markers, first = Markers.of_target(target), [batch[0] for batch in outputs]
    answers = [ids for run in first for ids in run.token_ids]
    rounds = [of_request for run in first for of_request in run.rounds]
    by_label: dict[str, list[Stats]] = {}
    for prompt, answer, of_request in zip(prompts.token_ids, answers, rounds, strict=True):
        labels = markers.labels(prompt, answer, target)
        for label, stats in stats_by_label(of_request, labels, draft_length).items():
            by_label.setdefault(label, []).append(stats)
    if len(by_label) < 2:
        return None
    return {
        label: DomainResult.of(len(stats), total_of(stats), length_interval(stats)) for label, stats in by_label.items()
    }


def lossless_check(
    target: Target, resolved: GenerationSettings, prompts: PromptSet, outputs: Outputs, plain: Outputs
) -> LosslessCheck:
    """Compare outputs where the verification mode gives the same ones: greedy, and one-hot on the same noise."""
    if resolved.verification_mode not in ("greedy", "one_hot"):  # at best the same distribution, not the same tokens
        return LosslessCheck()
    expected, actual = map(answers_of, (plain, outputs))
    return compare_outputs(target, prompts.token_ids, expected, actual, resolved)


def pick_prompts(prompts: list[P], count: int, seed: int = 0) -> list[P]:
    """Return `count` of the prompts, the same ones each time, in their order."""
    if count >= len(prompts):
        return prompts
    picked = sorted(random.Random(seed).sample(range(len(prompts)), count))
    return [prompts[i] for i in picked]
