"""Acceptance and speed of drafters beside plain decoding, in one process, interleaved, with an interval.

Every repeat decodes every batch once with each contender, plain decoding among them, in turn, on the same target,
kernels, prompts and stop rules. A batch's time is its median over the repeats, so that a disturbance of the machine
touches one repeat of one contender; the interval is a paired bootstrap over batches (over prompts at batch size 1),
of a single batch over its repeats.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from draftsmith.inference.decoding.batch_engine import GenerationSettings
from draftsmith.inference.decoding.counters import Stats, length_interval
from draftsmith.inference.decoding.decoder import Output, SpeculativeDecoder, check_sampling, resolve_settings
from draftsmith.inference.decoding.schedule import AnySchedule
from draftsmith.inference.measuring.bandwidth import bandwidth_floor_share, memory_bandwidth
from draftsmith.inference.measuring.baselines import Baseline
from draftsmith.inference.measuring.lossless import LosslessCheck, compare
from draftsmith.inference.measuring.speed import (
    Outputs,
    batch_totals,
    counted,
    decode_fields,
    first_token_parts,
    milliseconds_per_round,
    percentiles,
    speed,
    speedup_fields,
    throughput,
    time_per_token,
    time_to_first_token,
)
from draftsmith.inference.replay.calibration import calibration_fields
from draftsmith.inference.replay.replay import expected_stats
from draftsmith.inference.replay.teacher_forcing import teacher_forced_fields, teacher_forced_traces
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import require_at_least
from draftsmith.models.sampling.trees import Chain, DynamicTree, StaticTree

P = TypeVar("P")
Run = Callable[[list[int]], Output]  # decodes a batch, given as places among the prompts
LEAST_REPEATS = 2  # of a setting with a time limit
MANY_BATCHES = 8  # so many say enough of noise that a single repeat will do where time is short


@dataclass(frozen=True)
class MeasureSettings:
    """One setting of an evaluation: one row of evaluation.json for each drafter."""

    temperature: float = 0.0
    top_p: float = 1.0
    batch_size: int = 1
    draft: int | StaticTree | DynamicTree | AnySchedule = 4  # length of a chain, a schedule of them, or a tree
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
        """For one drafter; `UserError` for what it cannot do."""
        return resolve_settings(
            drafter,
            check_sampling(self.temperature, self.top_p, 0),
            self.max_new_tokens,
            self.draft,
            self.verification_mode,
            self.seed,
            synthetic_rates=self.synthetic_rates,
        )


@dataclass
class PromptSet:
    name: str
    token_ids: list[list[int]]
    domains: list[str] = field(default_factory=list)  # of each prompt; empty where they were not told apart
    tokenise_seconds: list[float] = field(default_factory=list)  # of each prompt; empty where they came as token ids

    @property
    def by_domain(self) -> dict[str, list[int]]:
        """The prompts of each domain, by their index."""
        found: dict[str, list[int]] = {}
        for index, domain in enumerate(self.domains):
            found.setdefault(domain, []).append(index)
        return found


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
) -> dict[str, dict[str, Any]]:
    """Measure each drafter; returns name -> a row of `results` in evaluation.json.

    `on_progress` is called after each batch of each repeat. Acceptance is counted over all prompts once (it is the same
    in every repeat), times over all repeats. Of a trained drafter's chains in greedy decoding a row also says what
    training predicts (teacher_forcing.py), and how its confidence is calibrated.
    `baselines` take part at batch size 1.
    """
    check_settings(settings, drafters)
    contenders = {"none": load_drafter("none", target), **drafters}
    how = {name: settings.resolve(drafter) for name, drafter in contenders.items()}
    ids, size = prompts.token_ids, settings.batch_size
    batches = [list(range(i, min(i + size, len(ids)))) for i in range(0, len(ids), size)]
    baselines = baselines if size == 1 else ()

    runs = {name: own_run(target, drafter, prompts, how[name], size) for name, drafter in contenders.items()}
    drafting = replace(how["none"], shape=Chain(settings.draft_length))
    runs |= {baseline.key: baseline_run(baseline, prompts, drafting) for baseline in baselines}

    def forget() -> None:
        for drafter in contenders.values():
            drafter.forget()

    outputs = interleaved(runs, batches, settings, forget, on_progress)
    for repeats in (repeats for batch in outputs.values() for repeats in batch):
        for run in repeats:
            run.token_ids = [counted(each, target.eos_token_ids, settings.max_new_tokens) for each in run.token_ids]

    plain = outputs["none"]
    rows = {name: result_row(target, how[name], prompts, settings, outputs[name], plain) for name in drafters}
    for name in drafters:
        beside = [baseline for baseline in baselines if baseline.drafter in (None, name)]
        if beside:
            is_greedy = how["none"].sampling.greedy
            fields = {one.name: baseline_fields(outputs[one.key], plain, is_greedy) for one in beside}
            rows[name]["baselines"] = fields
    if isinstance(settings.draft, int) and how["none"].sampling.greedy:
        trained = {
            name: drafter
            for name, drafter in drafters.items()
            if how[name].verification_mode == "greedy" and drafter.trainable()
        }
        for name, fields in training_predictions(target, trained, ids, outputs, settings).items():
            rows[name] |= fields
    return rows


def training_predictions(
    target: Target,
    drafters: dict[str, Drafter],
    prompts: list[list[int]],
    outputs: dict[str, Outputs],
    settings: MeasureSettings,
) -> dict[str, dict[str, Any]]:
    """Of trained drafters' chains in greedy decoding, by name. Those that wrote the same texts share their passes."""
    assert isinstance(settings.draft, int)
    answers = {name: [ids for batch in outputs[name] for ids in batch[0].token_ids] for name in drafters}
    fields = {}
    while answers:
        written = next(iter(answers.values()))
        alike = {name: drafters[name] for name, found in answers.items() if found == written}
        answers = {name: found for name, found in answers.items() if name not in alike}
        forced = teacher_forced_traces(target, alike, prompts, written, settings.draft, settings.max_new_tokens)
        for name, traces in forced.items():
            expected = [expected_stats(trace, Chain(settings.draft), "greedy") for trace in traces]
            decoded = [request for batch in outputs[name] for request in batch[0].stats.requests]
            calibration = calibration_fields(traces, settings.draft, "greedy")
            fields[name] = teacher_forced_fields(expected, decoded) | calibration
    return fields


def own_run(target: Target, drafter: Drafter, prompts: PromptSet, how: GenerationSettings, batch_size: int) -> Run:
    """All batches are decoded on the same rows, since on a GPU new ones would record their rounds in what is timed."""
    decoder = SpeculativeDecoder(target, drafter)
    engine = decoder.engine_for(how, min(batch_size, len(prompts.token_ids)), max(map(len, prompts.token_ids)))
    engine.warm_up()
    return lambda batch: decoder.decode_on(engine, [prompts.token_ids[i] for i in batch], batch)


def baseline_run(baseline: Baseline, prompts: PromptSet, how: GenerationSettings) -> Run:
    return lambda batch: baseline.decode(prompts.token_ids[batch[0]], how, batch[0])


def interleaved(
    runs: dict[str, Run],
    batches: list[list[int]],
    settings: MeasureSettings,
    before_repeat: Callable[[], object] = lambda: None,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, Outputs]:
    """The outputs of each contender, after a warm-up that is not counted.

    Every contender decodes a batch before any decodes the next one, in an order that moves on by one with every batch
    and every repeat, so that each stands in each place equally often.
    """
    start = time.perf_counter()
    for run in runs.values():
        run(batches[0])
    outputs: dict[str, Outputs] = {name: [[] for _ in batches] for name in runs}
    names = list(runs)
    num_repeats, repeat = settings.repeats, 0
    begun = time.perf_counter()
    while repeat < num_repeats:
        before_repeat()  # drafters forget the warm-up, and what they decoded in the repeats before
        for number, batch in enumerate(batches):
            first = (repeat + number) % len(names)
            for name in names[first:] + names[:first]:
                outputs[name][number].append(runs[name](batch))
            on_progress()
        repeat += 1
        if repeat == 1 and settings.seconds is not None:
            now = time.perf_counter()
            num_repeats = repeats_within(settings.seconds - (now - start), now - begun, settings.repeats, len(batches))
    return outputs


def repeats_within(seconds: float, seconds_each: float, most: int, num_batches: int) -> int:
    """How many repeats in all, of which one is done, so many seconds allow for: at most `most`.

    At least 1 of 8 batches or more, else 2. The interval is over batches: noise of the machine widens it just as well
    where each is timed once, and the mean of two times is no safer from a pause than one of them.
    """
    least = 1 if num_batches >= MANY_BATCHES else LEAST_REPEATS
    return min(most, max(least, 1 + math.floor(seconds / seconds_each)))


def result_row(
    target: Target,
    how: GenerationSettings,
    prompts: PromptSet,
    settings: MeasureSettings,
    outputs: Outputs,
    plain: Outputs,
) -> dict[str, Any]:
    """One row of evaluation.json from the outputs of a drafter and of plain decoding."""
    stats = [request for batch in outputs for request in batch[0].stats.requests]
    total = sum(stats[1:], stats[0])
    ratio = speedup_fields(outputs, plain)
    bandwidth = memory_bandwidth(target.device)
    return {
        "prompt_set": prompts.name,
        "num_prompts": len(prompts.token_ids),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "verification_mode": how.verification_mode,
        "batch_size": settings.batch_size,
        **shape_fields(settings, how),
        "max_new_tokens": settings.max_new_tokens,
        **acceptance_fields(total),
        "mean_acceptance_length_ci95": length_interval(stats),
        "baseline_tokens_per_second": speed(batch_totals(plain)),
        "tokens_per_second": speed(batch_totals(outputs)),
        **ratio,
        "repeats": len(outputs[0]),
        **decode_fields(outputs, plain),
        "throughput_tokens_per_second": throughput(outputs),
        "ttft_ms": percentiles(time_to_first_token(outputs, prompts.tokenise_seconds)),
        "ttft_parts_ms": first_token_parts(outputs, prompts.tokenise_seconds),
        "tpot_ms": percentiles(time_per_token(outputs)),
        "baseline_tpot_ms": percentiles(time_per_token(plain)),
        "milliseconds_per_round": milliseconds_per_round(outputs),
        "baseline_milliseconds_per_round": milliseconds_per_round(plain),
        "bandwidth_floor_share": bandwidth_floor_share(target, prompts.token_ids, outputs, bandwidth),
        "step_cost_ratio": total.mean_acceptance_length / ratio["speedup"],
        "lossless": lossless(target, how, prompts, outputs, plain).as_dict(),
        **({"domains": domain_fields(prompts, stats, outputs, plain)} if any(prompts.domains) else {}),
    }


def baseline_fields(outputs: Outputs, plain: Outputs, is_greedy: bool) -> dict[str, Any]:
    """What a row says of transformers' decoding; sampled texts are drawn on other noise and cannot be compared."""
    ratio = speedup_fields(outputs, plain)
    texts = zip(outputs, plain, strict=True)
    return {
        "num_emitted_tokens": sum(batch_totals(outputs)[0]),
        "tokens_per_second": speed(batch_totals(outputs)),
        "speedup_over_plain": ratio["speedup"],
        "speedup_over_plain_ci95": ratio["speedup_ci95"],
        "identical": sum(own[0].token_ids == beside[0].token_ids for own, beside in texts) if is_greedy else None,
    }


def shape_fields(settings: MeasureSettings, how: GenerationSettings) -> dict[str, Any]:
    """As it was asked for; where a drafter made a tree of a chain, that tree."""
    shape = settings.draft if isinstance(how.shape, Chain) else how.shape
    schedule = {"schedule": how.schedule.to_json()} if how.schedule else {}
    if isinstance(shape, StaticTree | DynamicTree):
        return {"draft_length": shape.depth, "tree_nodes": shape.num_nodes}
    return {"draft_length": settings.draft_length, "tree_nodes": None, **schedule}


def domain_fields(
    prompts: PromptSet, stats: list[Stats], outputs: Outputs, plain: Outputs
) -> dict[str, dict[str, Any]]:
    """Acceptance by domain, and the speedup where every batch is a single prompt; `stats` by prompt."""
    fields: dict[str, dict[str, Any]] = {}
    for domain, indices in prompts.by_domain.items():
        own = [stats[i] for i in indices]
        total = sum(own[1:], own[0])
        fields[domain] = {
            "num_prompts": len(indices),
            "num_drafts": total.num_drafts,
            "num_draft_tokens": total.num_draft_tokens,
            "num_accepted_tokens": total.num_accepted_tokens,
            "num_emitted_tokens": total.num_emitted_tokens,
            "mean_acceptance_length": total.mean_acceptance_length,
            "mean_acceptance_length_ci95": length_interval(own),
            "draft_acceptance_rate": total.draft_acceptance_rate,
        }
        if len(outputs) == len(prompts.token_ids):
            fields[domain] |= speedup_fields([outputs[i] for i in indices], [plain[i] for i in indices])
    return fields


def acceptance_fields(total: Stats) -> dict[str, Any]:
    return {
        "num_rounds": total.num_rounds,
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_tokens": total.num_accepted_tokens,
        "num_emitted_tokens": total.num_emitted_tokens,
        "mean_acceptance_length": total.mean_acceptance_length,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "per_position_acceptance_rates": total.per_position_acceptance_rates,
        "conditional_acceptance_rates": total.conditional_acceptance_rates,
        "acceptance_histogram": list(total.acceptance_histogram),
    }


def lossless(
    target: Target, how: GenerationSettings, prompts: PromptSet, outputs: Outputs, plain: Outputs
) -> LosslessCheck:
    """Output equality where the law of the mode demands it: greedy, and one-hot on the same noise."""
    if how.verification_mode not in ("greedy", "one_hot"):  # at best the same distribution, but not the same tokens
        return LosslessCheck()
    found = [ids for batch in outputs for ids in batch[0].token_ids]
    expected = [ids for batch in plain for ids in batch[0].token_ids]
    return compare(target, prompts.token_ids, expected, found, how)


def pick_prompts(prompts: list[P], count: int, seed: int = 0) -> list[P]:
    """`count` of the prompts, the same ones each time, in their order."""
    if count >= len(prompts):
        return prompts
    picked = sorted(random.Random(seed).sample(range(len(prompts)), count))
    return [prompts[i] for i in picked]
