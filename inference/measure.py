"""Acceptance and speed of drafters beside plain decoding, in one process, interleaved, with an interval.

Every repeat decodes every batch once with each contender, plain decoding first among them in turn, on the same target,
kernels, prompts and stop rules. A batch's time is its median over the repeats, so that a disturbance of the machine
touches one repeat of one contender; the interval is a paired bootstrap over batches (over prompts at batch size 1).
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from draftsmith.inference.decoder import Output, SpeculativeDecoder, check_sampling, resolve_settings
from draftsmith.inference.lossless import LosslessCheck, compare
from draftsmith.inference.rows import GenerationSettings
from draftsmith.inference.stats import Stats, resamples
from draftsmith.inference.teacher_forcing import teacher_forced_fields, teacher_forced_stats
from draftsmith.inference.verify import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError, require_at_least
from draftsmith.models.trees import DynamicTree, StaticTree

P = TypeVar("P")


@dataclass(frozen=True)
class MeasureSettings:
    """One setting of an evaluation: one row of evaluation.json for each drafter."""

    temperature: float = 0.0
    top_p: float = 1.0
    batch_size: int = 1
    draft: int | StaticTree | DynamicTree = 4  # length of a chain, or a tree
    max_new_tokens: int = 64
    repeats: int = 5
    seed: int = 0
    verification_mode: VerificationMode | None = None  # None: the usual one for temperature and drafter
    synthetic_rates: tuple[float, ...] = ()

    @property
    def draft_length(self) -> int:
        """Tokens on the longest path of a draft."""
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
) -> dict[str, dict[str, Any]]:
    """Measure each drafter; returns name -> a row of `results` in evaluation.json.

    `on_progress` is called after each batch of each repeat. A row's fields are DESIGN's; acceptance is counted over
    all prompts once (it is the same in every repeat), times over all repeats. Of a trained drafter's chains in greedy
    decoding a row also says what training predicts (teacher_forcing.py).
    """
    check_settings(settings, drafters)
    contenders = {"none": load_drafter("none", target), **drafters}
    decoders = {name: SpeculativeDecoder(target, drafter) for name, drafter in contenders.items()}
    how = {name: settings.resolve(drafter) for name, drafter in contenders.items()}
    ids = prompts.token_ids
    batches = [list(range(i, min(i + settings.batch_size, len(ids)))) for i in range(0, len(ids), settings.batch_size)]

    def decode(name: str, batch: list[int]) -> Output:
        return decoders[name].decode([ids[i] for i in batch], how[name], batch)

    for name in contenders:  # warm-up, not counted
        decode(name, batches[0])
    outputs: dict[str, list[list[Output]]] = {name: [[] for _ in batches] for name in contenders}
    names = list(contenders)
    for repeat in range(settings.repeats):
        for drafter in contenders.values():
            drafter.forget()  # the warm-up, and what it decoded in the repeats before
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        for number, batch in enumerate(batches):
            for name in order:
                outputs[name][number].append(decode(name, batch))
            on_progress()
    rows = {name: result_row(target, how[name], prompts, settings, outputs[name], outputs["none"]) for name in drafters}
    for name, drafter in drafters.items():
        if how[name].verification_mode == "greedy" and isinstance(settings.draft, int) and drafter.trainable():
            runs = [batch[0] for batch in outputs[name]]
            answers = [answer for run in runs for answer in run.token_ids]
            forced = teacher_forced_stats(target, drafter, ids, answers, settings.draft, settings.max_new_tokens)
            rows[name] |= teacher_forced_fields(forced, [request for run in runs for request in run.stats.requests])
    return rows


def result_row(
    target: Target,
    how: GenerationSettings,
    prompts: PromptSet,
    settings: MeasureSettings,
    outputs: list[list[Output]],
    plain: list[list[Output]],
) -> dict[str, Any]:
    """One row of evaluation.json from the outputs [batch][repeat] of a drafter and of plain decoding."""
    stats = [request for batch in outputs for request in batch[0].stats.requests]
    total = sum(stats[1:], stats[0])
    tokens, seconds = batch_totals(outputs)
    plain_tokens, plain_seconds = batch_totals(plain)
    speed, plain_speed = sum(tokens) / sum(seconds), sum(plain_tokens) / sum(plain_seconds)
    low, high = bootstrap_ratio(tokens, seconds, plain_tokens, plain_seconds)
    speedup = speed / plain_speed
    return {
        "prompt_set": prompts.name,
        "num_prompts": len(prompts.token_ids),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "verification_mode": how.verification_mode,
        "batch_size": settings.batch_size,
        "draft_length": settings.draft_length,
        "tree_nodes": None if isinstance(settings.draft, int) else settings.draft.num_nodes,
        "max_new_tokens": settings.max_new_tokens,
        **acceptance_fields(total),
        "baseline_tokens_per_second": plain_speed,
        "tokens_per_second": speed,
        "speedup": speedup,
        "speedup_ci95": [low, high],
        "repeats": settings.repeats,
        "ttft_ms": percentiles([run.timing.to_first_token * 1000 for batch in outputs for run in batch]),
        "tpot_ms": percentiles(time_per_token(outputs)),
        "baseline_tpot_ms": percentiles(time_per_token(plain)),
        "milliseconds_per_round": milliseconds_per_round(outputs),
        "step_cost_ratio": total.mean_acceptance_length / speedup,
        "lossless": lossless(target, how.verification_mode, prompts, outputs, plain).as_dict(),
        **({"domains": domain_fields(prompts, stats, outputs, plain)} if any(prompts.domains) else {}),
    }


def domain_fields(
    prompts: PromptSet, stats: list[Stats], outputs: list[list[Output]], plain: list[list[Output]]
) -> dict[str, dict[str, Any]]:
    """Acceptance by domain, and the speedup where every batch is a single prompt; `stats` by prompt."""
    fields: dict[str, dict[str, Any]] = {}
    for domain, indices in prompts.by_domain.items():
        total = sum((stats[i] for i in indices[1:]), stats[indices[0]])
        fields[domain] = {
            "num_prompts": len(indices),
            "num_drafts": total.num_drafts,
            "num_emitted_tokens": total.num_emitted_tokens,
            "mean_acceptance_length": total.mean_acceptance_length,
            "draft_acceptance_rate": total.draft_acceptance_rate,
        }
        if len(outputs) == len(prompts.token_ids):
            tokens, seconds = batch_totals([outputs[i] for i in indices])
            plain_tokens, plain_seconds = batch_totals([plain[i] for i in indices])
            speedup = sum(tokens) / sum(seconds) * sum(plain_seconds) / sum(plain_tokens)
            fields[domain]["speedup"] = speedup
            fields[domain]["speedup_ci95"] = list(bootstrap_ratio(tokens, seconds, plain_tokens, plain_seconds))
    return fields


def acceptance_fields(total: Stats) -> dict[str, Any]:
    return {
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


def batch_totals(outputs: list[list[Output]]) -> tuple[list[int], list[float]]:
    """Emitted tokens of each batch, and its seconds from prompt to last token, median over repeats."""
    tokens = [sum(map(len, batch[0].token_ids)) for batch in outputs]
    return tokens, [statistics.median(run.timing.total for run in batch) for batch in outputs]


def bootstrap_ratio(
    tokens: list[int], seconds: list[float], plain_tokens: list[int], plain_seconds: list[float]
) -> tuple[float, float]:
    """95 % interval of the ratio of the two speeds, batches drawn with replacement, both sides together."""
    picks = resamples(len(tokens))
    totals = [np.asarray(values)[picks].sum(1) for values in (tokens, seconds, plain_tokens, plain_seconds)]
    ratios = (totals[0] / totals[1]) / (totals[2] / totals[3])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}


def time_per_token(outputs: list[list[Output]]) -> list[float]:
    """TPOT in ms of every batch and repeat: time after the first token over the tokens after it of the longest row."""
    times = []
    for batch in outputs:
        for run in batch:
            after_first = max(map(len, run.token_ids)) - 1
            if after_first:
                times.append((run.timing.total - run.timing.to_first_token) * 1000 / after_first)
    if not times:
        raise UserError("every output ended with its first token, which leaves nothing to measure: give other prompts")
    return times


def milliseconds_per_round(outputs: list[list[Output]]) -> dict[str, float]:
    """Mean time of a round in drafting, in the target's pass with its verification, and in everything else."""
    runs = [run for batch in outputs for run in batch]
    rounds = sum(max(request.num_rounds for request in run.stats.requests) for run in runs)
    return {
        phase: sum(run.timing.phases[phase] for run in runs) / max(1, rounds) for phase in ("draft", "verify", "host")
    }


def lossless(
    target: Target,
    mode: str,
    prompts: PromptSet,
    outputs: list[list[Output]],
    plain: list[list[Output]],
) -> LosslessCheck:
    """Output equality where the law of the mode demands it: greedy, and one-hot on the same noise."""
    if mode not in ("greedy", "one_hot"):  # at best the same distribution, but not the same tokens
        return LosslessCheck()
    found = [ids for batch in outputs for ids in batch[0].token_ids]
    expected = [ids for batch in plain for ids in batch[0].token_ids]
    if mode == "greedy":
        return compare(target, prompts.token_ids, expected, found)
    identical = sum(a == b for a, b in zip(expected, found, strict=True))
    return LosslessCheck(len(found), identical, 0, len(found) - identical)


def pick_prompts(prompts: list[P], count: int, seed: int = 0) -> list[P]:
    """`count` of the prompts, the same ones each time, in their order."""
    if count >= len(prompts):
        return prompts
    picked = sorted(random.Random(seed).sample(range(len(prompts)), count))
    return [prompts[i] for i in picked]
