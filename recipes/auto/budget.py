"""The amounts that the time of `draftsmith auto` allows: answers to train on, and training in each rung of the race."""

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftsmith.data.answers.prepare import PrepareSettings
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import tokenise
from draftsmith.data.samples.sample import Sample
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.certify import CertifySettings, certify
from draftsmith.inference.traffic.stages import LEAST_FOR_P95
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Depth, checked
from draftsmith.recipes.auto.traffic import MOST, TrafficSummary
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.budget import (
    ANSWERS,
    MOST_STORED,
    StepTime,
    fastest_num_threads,
    mean_answer,
    stored_bytes,
    time_step,
    timed_samples,
)
from draftsmith.train import TrainConfig

# Shares of the time: measuring at the end, at least and at most, and slack. In the rest the target answers and drafters
# learn.
MEASURE_SHARE, MOST_MEASURING, SLACK_SHARE = 0.17, 0.45, 0.08
# At the end so many drafters, the winner with so many more drafts, and plain decoding answer each prompt of the test.
FINALISTS, OTHER_DRAFTS = 4, 2
SCORING_SHARE = 0.15  # of the time at most, for scores; where that is short they are of fewer prompts
FEWEST_RACING = 16  # prompts of a score
TEST_SHARE = 0.2  # of the time at most, for each prompt of the test once; where that is short there are fewer
OTHER_SCORES = 5  # beside those of the race: of two lookups, the winner, a lookup before it, and its tree
COST_SHARE = 0.005  # of the time, for the costs of one drafter
COST_SECONDS = (6.0, 60.0)  # they take at least, and at most
OTHER_COSTS = 4  # beside those of the kinds: of two lookups, one before the winner, and the winner's tree
LEAST_LEARNING = 0.3  # of the time, for answers and training, even where the search then takes longer than it should
LEAST_ANSWERING, MOST_ANSWERING = 0.15, 0.4  # shares of the time, for the target's answers and features
RACE_SHARE = 0.58  # of the time for training; the winner has the rest
PASSES = 4  # of the winner over the answers: with many more it learns them by heart
SMALL_TARGET = 1024  # narrower targets take the quickstart's recipes
TIMED_PROMPTS = 8
TIMED_BATCHES = 2  # of answers: one alone ends with few requests that still run
TIMED_SAMPLES = 32  # that steps of training are timed on
PROBE_SHARE = 0.25  # of a rung, which the probe before the first one takes
FEWEST_STEPS = 8  # of a kind in a rung, and of the winner
# How often all certificates take what that of one lookup takes. They are of the best drafter and of what is exported,
# and one that is trained is verified in more modes.
CERTIFICATES = 2.5
TRIAL = CertifySettings(num_prompts=4, num_texts=16)  # a certificate that is timed
WHOLE = CertifySettings(num_prompts=MOST)  # a certificate of a search that has time enough
FEWEST_TEXTS = 64  # sampled in each mode; greedily a quarter of them is decoded


@dataclass(frozen=True)
class AutoPlan:
    """The amounts that the time allows."""

    target: str
    hours: float
    num_prompts: int  # that the target answers for training
    answers_per_prompt: int  # more than one where there is time for more, and no more prompts
    num_racing: int  # prompts that a score is of
    num_tested: int  # prompts that tell the result
    num_threads: int | None  # of the CPU, that decodes fastest; None on a GPU
    step_seconds: dict[str, float]  # of training, by kind
    stored_layers: list[int] | None  # whose states are stored once for all kinds; None: the target runs in each step
    rung_seconds: float  # of training in each rung of the race
    final_seconds: float  # of training the winner
    certificates: CertifySettings  # the texts that certify at the end that what is chosen is lossless
    measure_minutes: float  # of measuring at the end
    target_is_small: bool  # so that it takes the quickstart's recipes
    least_seconds: float = 0.0  # about, that timing, scores, and the fewest answers and steps take

    @property
    def num_answers(self) -> int:
        """Number of answers of the target; a dialogue counts as one."""
        return self.num_prompts * self.answers_per_prompt

    @property
    def num_rungs(self) -> int:
        """Number of rungs, after each of which half of the kinds are dropped."""
        return num_rungs(len(self.step_seconds))

    def steps_in_rung(self, kind: str, num_alive: int, before: int) -> int:
        """Return the steps that a kind has taken in all at the end of a rung, which so many kinds share.

        `before` are those that it had taken when the rung began.
        """
        return self._steps(kind, self.rung_seconds / num_alive, before)

    def steps_of_probe(self, kind: str, num_alive: int) -> int:
        """Return the steps of a kind in its probe, before the first rung, which so many share."""
        return self._steps(kind, PROBE_SHARE * self.rung_seconds / num_alive, before=0)

    def final_steps(self, kind: str, before: int) -> int:
        """Return the steps of the winner at the end."""
        return self._steps(kind, self.final_seconds, before)

    def _steps(self, kind: str, seconds: float, before: int) -> int:
        """Return the steps after more seconds; a run goes on from where its learning rate began to fall."""
        kept = recipe_of_auto(kind, self.target_is_small).optimizer.decay_start(before)
        return kept + max(FEWEST_STEPS, int(seconds / self.step_seconds[kind]))


def num_rungs(num_kinds: int) -> int:
    """Return after how many halvings, rounded down, one kind is left; one kind alone has a rung, too."""
    return max(1, num_kinds.bit_length() - 1)


def recipe_of_auto(kind: str, small: bool) -> TrainConfig:
    """Return the recipe of a kind, whose rate falls late, so that a run can be made longer.

    `eagle3@2` is EAGLE-3 with two layers. Raises `UserError` for kinds without layers, and for what is no number.
    """
    family, at, layers = kind.partition("@")
    config = RECIPES[f"quickstart_{family}" if small else family]()
    config.optimizer.decay = "late"
    if at:
        drafter: Any = config.drafter
        if not hasattr(drafter, "num_layers"):
            raise UserError(f"--drafters {kind}: {family} has no number of layers to choose: leave out @{layers}")
        number = checked(Depth, layers, f"--drafters {kind}: the number of layers")
        config.drafter = replace(drafter, num_layers=number)
    return config


def target_is_small(target: Target) -> bool:
    """Return whether a target takes the quickstart's recipes."""
    return target.hidden_size < SMALL_TARGET


@dataclass(frozen=True)
class Timed:
    """The times of a few answers, decoded prompts and training steps, from which all amounts follow."""

    samples: list[Sample]  # the answers, as they are trained on
    answer_seconds: float  # of the target for an answer, in batches
    num_threads: int | None  # of the CPU, that decodes fastest; None on a GPU
    prompt_seconds: float  # of decoding a prompt once, which takes about as long with any drafter
    steps: dict[str, StepTime]  # of training, by kind


def time_parts(target: Target, prompts: list[Prompt], drafters: dict[str, Drafter], answers: PrepareSettings) -> Timed:
    """Time some answers to the first of the prompts, decoded prompts, and a few steps of new drafters of each kind."""
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    timed = prompts[: TIMED_BATCHES * answers.batch_size]
    samples, seconds = timed_samples(plain, timed, answers)
    num_threads, token_seconds = fastest_num_threads(plain, prompts[:TIMED_PROMPTS])
    small = target_is_small(target)
    return Timed(
        samples,
        answer_seconds=seconds / len(timed),
        num_threads=num_threads,
        prompt_seconds=token_seconds * mean_answer(samples, answers.max_new_tokens),
        steps={
            kind: time_step(recipe_of_auto(kind, small), drafter, target, samples[:TIMED_SAMPLES])
            for kind, drafter in drafters.items()
        },
    )


def make_plan(
    target: Target,
    prompts: list[Prompt],
    traffic: TrafficSummary,
    drafters: dict[str, Drafter],
    hours: float,
    answers: PrepareSettings,
) -> AutoPlan:
    """Time the parts of a search with new drafters of each kind, and divide the time.

    `prompts` are those of the traffic to train on.
    """
    started, seconds, small = time.perf_counter(), 3600 * hours, target_is_small(target)
    timed, first = time_parts(target, prompts, drafters, answers), prompts[: answers.batch_size]
    num_tested, test_seconds = affordable_tests(traffic.num_test, timed.prompt_seconds, seconds)
    ending = plan_ending(target, first, answers.max_new_tokens, seconds, test_seconds)
    num_racing, scoring_seconds = affordable_scores(len(drafters), traffic.num_racing, timed.prompt_seconds, seconds)
    timing_seconds = time.perf_counter() - started + (len(drafters) + OTHER_COSTS) * cost_seconds(hours)
    other_share = SLACK_SHARE + ending.share + (timing_seconds + scoring_seconds) / seconds
    learning_share = max(1 - other_share, LEAST_LEARNING)
    batch_sizes = {kind: recipe_of_auto(kind, small).data.batch_size for kind in drafters}
    feature_seconds = max(step.features / batch_sizes[kind] for kind, step in timed.steps.items())  # of a sample
    answer_seconds = timed.answer_seconds + feature_seconds
    sample_seconds = statistics.median(step.loss / batch_sizes[kind] for kind, step in timed.steps.items())
    share = answering_share(learning_share, answer_seconds, sample_seconds, len(drafters))
    affordable = max(len(first), int(share * seconds / answer_seconds))
    num_prompts, answers_per_prompt = prompts_to_answer(affordable, len(prompts), len(answers.samplings))
    num_answers = answers_per_prompt * num_prompts
    training_seconds = max(0.0, learning_share * seconds - num_answers * answer_seconds)
    layers = layers_to_store(target, drafters, timed.samples, num_answers)
    step_seconds = {
        kind: step.loss + step.features * (layers is None or drafters[kind].config.starts_from_layers)
        for kind, step in timed.steps.items()
    }
    return AutoPlan(
        target=target.name,
        hours=hours,
        num_prompts=num_prompts,
        answers_per_prompt=answers_per_prompt,
        num_racing=num_racing,
        num_tested=num_tested,
        num_threads=timed.num_threads,
        step_seconds=step_seconds,
        stored_layers=layers,
        rung_seconds=RACE_SHARE * training_seconds / (PROBE_SHARE + num_rungs(len(drafters))),
        final_seconds=(1 - RACE_SHARE) * training_seconds,
        certificates=ending.certificates,
        measure_minutes=ending.measure_minutes,
        target_is_small=small,
        least_seconds=timing_seconds
        + scoring_seconds
        + len(first) * answer_seconds
        + FEWEST_STEPS * (sum(step_seconds.values()) + max(step_seconds.values())),
    )


def layers_to_store(
    target: Target, drafters: dict[str, Drafter], samples: list[Sample], num_answers: int
) -> list[int] | None:
    """Return the target's layers that any of the kinds reads; None where features of so many answers are too large.

    `samples` tell how large those of an answer are.
    """
    layers = sorted({layer_id for drafter in drafters.values() for layer_id in drafter.layer_ids})
    fits = stored_bytes(samples, layers, target) * num_answers / len(samples) <= MOST_STORED
    return layers if fits else None


def prompts_to_answer(affordable: int, num_prompts: int, most_answers: int) -> tuple[int, int]:
    """Return how many of the prompts are answered, and how often each, where there is time for so many answers."""
    return min(num_prompts, affordable), min(most_answers, max(1, affordable // num_prompts))


def cost_seconds(hours: float) -> float:
    """Return the seconds that measuring the costs of one drafter takes."""
    return float(np.clip(3600 * hours * COST_SHARE, *COST_SECONDS))


def affordable_scores(num_kinds: int, num_racing: int, prompt_seconds: float, seconds: float) -> tuple[int, float]:
    """Return how many of the racing prompts a score is of, and about what all scores take, of a search of `seconds`.

    Each decodes them once, which takes about as long with any drafter.
    """
    of_race = sum(max(1, num_kinds >> rung) for rung in range(num_rungs(num_kinds)))
    each = (num_kinds + of_race + OTHER_SCORES) * prompt_seconds  # seconds for each prompt
    number = min(num_racing, max(FEWEST_RACING, int(SCORING_SHARE * seconds / each)))
    return number, number * each


def affordable_tests(num_test: int, prompt_seconds: float, seconds: float) -> tuple[int, float]:
    """Return how many prompts tell the result of a search of `seconds`, and about what decoding them takes.

    All finalists decode them, the winner with other drafts, too, and plain decoding does.
    """
    each = (FINALISTS + OTHER_DRAFTS + 1) * prompt_seconds
    number = min(num_test, max(LEAST_FOR_P95, int(TEST_SHARE * seconds / each)))
    return number, number * each


@dataclass(frozen=True)
class Ending:
    """The end of a search: what certifies its drafters, how long they are measured, the share of the time for both."""

    certificates: CertifySettings
    measure_minutes: float
    share: float


def plan_ending(
    target: Target, prompts: list[Prompt], max_new_tokens: int, seconds: float, test_seconds: float
) -> Ending:
    """Return how a search of so many seconds ends, where each prompt of the test once takes `test_seconds` in all."""
    certificates, certificate_seconds = affordable_certificates(
        target, prompts, max_new_tokens, 2 / 3 * MEASURE_SHARE * seconds
    )
    share = measuring_share((certificate_seconds + test_seconds) / seconds)
    measure_seconds = max(MEASURE_SHARE * seconds / 3, share * seconds - certificate_seconds)
    return Ending(certificates, measure_seconds / 60, share)


def measuring_share(needed: float) -> float:
    """Return the share of the time for measuring at the end, where certificates and each prompt once need so much."""
    return min(max(needed, MEASURE_SHARE), MOST_MEASURING)


def answering_share(learning_share: float, answer_seconds: float, sample_seconds: float, num_kinds: int) -> float:
    """Return the share of the time in which the target answers, so that the winner sees each answer `PASSES` times.

    `learning_share` is that of answers and training. `answer_seconds` are those of an answer with its features, and
    `sample_seconds` those of training on one.
    """
    alive = [max(1, num_kinds >> rung) for rung in range(num_rungs(num_kinds))]
    of_winner = RACE_SHARE * statistics.fmean(1 / number for number in alive) + 1 - RACE_SHARE  # of the training
    share = learning_share / (1 + PASSES * sample_seconds / (of_winner * answer_seconds))
    return min(max(share, LEAST_ANSWERING), MOST_ANSWERING)


def affordable_certificates(
    target: Target, prompts: list[Prompt], max_new_tokens: int, seconds: float
) -> tuple[CertifySettings, float]:
    """Return the size of the certificates that a time allows at the end, within limits, and about what they take.

    A small certificate of a lookup is made, and timed. Larger ones take longer in proportion. Prompts may leave no room
    for more than `max_new_tokens`.
    """
    trial = replace(TRIAL, max_new_tokens=min(TRIAL.max_new_tokens, max_new_tokens))
    token_ids = [tokenise(prompt, target) for prompt in prompts]
    begin = time.perf_counter()
    certify(target, load_drafter("ngram", target), token_ids, trial)
    whole = CERTIFICATES * (time.perf_counter() - begin) * WHOLE.num_texts / TRIAL.num_texts
    share = min(1.0, seconds / whole)
    num_texts = max(FEWEST_TEXTS, int(share * WHOLE.num_texts))
    num_prompts = num_texts * MOST // WHOLE.num_texts
    return replace(trial, num_prompts=num_prompts, num_texts=num_texts), whole * num_texts / WHOLE.num_texts


def plan_lines(plan: AutoPlan) -> list[str]:
    """Return the plan in words."""
    steps = ", ".join(f"{kind} {1000 * seconds:.0f} ms" for kind, seconds in plan.step_seconds.items())
    least = plan.least_seconds / 3600
    twice = f", each {plan.answers_per_prompt} times" if plan.answers_per_prompt > 1 else ""
    too_small = (
        f"--budget {plan.hours:.2g} is too small: timing, scores, {ANSWERS.batch_size} answers, a rung and the "
        f"winner, of {FEWEST_STEPS} steps each, alone take about {least:.2g} hours here; give ten times that"
    )
    return [
        *([too_small] if least > plan.hours else []),
        f"the target answers {plan.num_prompts} prompts{twice}; a step takes: {steps}",
        f"{plan.num_rungs} rungs of {plan.rung_seconds / 60:.1f} minutes of training, then "
        f"{plan.final_seconds / 60:.1f} minutes for the winner and {plan.measure_minutes:.1f} minutes of measuring, "
        f"and certificates of {plan.certificates.num_texts} sampled texts",
        f"scores are of {plan.num_racing} prompts, and {plan.num_tested} tell the result",
    ]


def in_words(hours: float) -> str:
    """Return a budget in words: `8 hours`, or `10 minutes` where it is less than an hour."""
    return f"{hours:.3g} hours" if hours >= 1 else f"{60 * hours:.3g} minutes"
