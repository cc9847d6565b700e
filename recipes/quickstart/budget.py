"""The amounts that the time of a quickstart allows on this machine: prompts, steps, threads, and what is stored.

It is measured once and kept in plan.yaml, so that an interrupted quickstart goes on with the same numbers.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from draftsmith.data.answers.prepare import PrepareSettings, decode_answers
from draftsmith.data.answers.turns import Dialogue, Markers
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import tokenise
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.sample import Sample, loss_mask
from draftsmith.data.samples.samples import Samples
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.measuring.measure import MeasureSettings
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.devices import training_precision
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.reading import read_yaml
from draftsmith.models.storage.typed_json import from_json
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import TrainConfig
from draftsmith.train.optimizer import optimizer_of, set_learning_rate
from draftsmith.train.starting_drafter import fit_starting_layers, fit_vocabulary_size

# Shares of the time, by what each part is estimated to take. They add up to more than 1, because answers take half of
# their estimate, but not to much more, because a shared machine may become slower after it was measured.
PREPARE_SHARE, TRAINING_SHARE, CHECKPOINT_SHARE, COMPARISON_SHARE = 0.48, 0.40, 0.03, 0.22
# How the drafters divide the time for training. Heads learn fast, layers with attention go on learning.
WEIGHTS = {
    "eagle3": 5,
    "eagle": 5,
    "p_eagle": 5,
    "dflash": 5,
    "dflash2": 5,
    "dspark": 5,
    "domino": 5,
    "mtp": 5,
    "hydra": 1,
    "mlp_speculator": 1,
    "medusa": 1,
    "draft_model": 1,
}
CHECKPOINTS = 2  # a run
NUM_HELD_OUT = 32  # prompts for the comparison, and again as many for checkpoints
ANSWERS = PrepareSettings(max_new_tokens=96, batch_size=64, batches_a_share=64)  # the training text
COMPARISON = MeasureSettings(draft=4, max_new_tokens=96, repeats=2)  # Medusa and Hydra have four heads
TIMED_PROMPTS = 8
# Bytes of features on the disk, which all drafters read. Where there would be more, the target runs for each drafter.
MOST_STORED = 4 << 30


@dataclass
class Budget:
    """The amounts that the time allows, as plan.yaml holds them."""

    target: str
    minutes: float
    num_prompts: int  # that the target answers for training
    num_checkpoint_prompts: int  # that a checkpoint is measured on
    num_comparison_prompts: int
    num_threads: int | None  # of the CPU, that decodes fastest; None on a GPU
    steps: dict[str, int]  # by drafter
    stored_layers: list[int] | None = None  # of the target, that its one pass stores for all drafters; None: no store
    seed: int = 0


def load_budget(path: Path, target: str, minutes: float, kinds: list[str], seed: int) -> Budget | None:
    """Return the budget of an earlier call of a quickstart; `UserError` where that had other settings."""
    if not path.is_file():
        return None
    budget = from_json(Budget, read_yaml(path))
    if (budget.target, budget.minutes, list(budget.steps), budget.seed) != (target, minutes, kinds, seed):
        raise UserError(
            f"{path.parent} holds a quickstart with --target {budget.target} --minutes {budget.minutes:g} --drafters "
            f"{','.join(budget.steps)} --seed {budget.seed}: give these to go on, another --out, or remove it"
        )
    return budget


def measure_budget(target: Target, prompts: list[Prompt], kinds: list[str], minutes: float) -> Budget:
    """Time a batch of answers, a decoded prompt and a few training steps of each drafter, and divide the time."""
    seconds = minutes * 60
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    samples, batch_seconds = timed_samples(plain, prompts[: ANSWERS.batch_size])
    num_batches = max(2, int(seconds * PREPARE_SHARE / batch_seconds))
    num_threads, per_token = fastest_num_threads(plain, prompts[:TIMED_PROMPTS])
    brief = RECIPES[f"quickstart_{kinds[0]}"]().evaluation
    # a prompt is decoded plainly and with each contender, which take about as long
    checked_tokens = mean_answer(samples, brief.max_new_tokens) * brief.repeats * CHECKPOINTS
    checkpoint_prompt = 3 * len(kinds) * per_token * checked_tokens
    compared_tokens = mean_answer(samples, COMPARISON.max_new_tokens) * COMPARISON.repeats
    contenders = 2 * len(kinds) + 2  # each alone and behind n-grams, n-grams, and plain decoding
    comparison_prompt = contenders * per_token * compared_tokens
    num_prompts = min(len(prompts), num_batches * ANSWERS.batch_size)
    drafters = {kind: new_drafter(RECIPES[f"quickstart_{kind}"](), target) for kind in kinds}
    layers = sorted({layer_id for drafter in drafters.values() for layer_id in drafter.layer_ids})
    in_store = stored_bytes(samples, layers, target) * num_prompts / len(samples) <= MOST_STORED
    steps = steps_in(seconds * TRAINING_SHARE, drafters, target, samples, num_prompts if in_store else None)
    return Budget(
        target=target.name,
        minutes=minutes,
        num_prompts=num_prompts,
        num_checkpoint_prompts=min(NUM_HELD_OUT, max(2, int(seconds * CHECKPOINT_SHARE / checkpoint_prompt))),
        num_comparison_prompts=min(NUM_HELD_OUT, max(4, int(seconds * COMPARISON_SHARE / comparison_prompt))),
        num_threads=num_threads,
        steps=steps,
        stored_layers=layers if in_store else None,
    )


def timed_samples(
    plain: SpeculativeDecoder, prompts: list[Prompt], answers: PrepareSettings = ANSWERS
) -> tuple[list[Sample], float]:
    """Return the target's answers to prompts, as `prepare` would write them, and the seconds that they took."""
    on_gpu = plain.target.device.type == "cuda"  # where a batch's size has kernels and recorded rounds of its own
    warm_up = [tokenise(prompt, plain.target) for prompt in (prompts if on_gpu else prompts[:1])]
    plain.generate(warm_up, max_new_tokens=4, batch_size=answers.batch_size)
    start = time.perf_counter()
    markers = Markers.of_target(plain.target)
    dialogues = [Dialogue(prompt, i, i, Sampling(1.0), plain.target, markers) for i, prompt in enumerate(prompts)]
    samples = [sample for dialogue in decode_answers(plain, dialogues, answers) for sample in dialogue.samples]
    return samples, time.perf_counter() - start


def mean_answer(samples: list[Sample], max_new_tokens: int) -> float:
    """Return the mean number of tokens in answers like those of the samples, each cut at `max_new_tokens`."""
    return fmean(min(int(loss_mask(sample).sum()), max_new_tokens) for sample in samples)


def fastest_num_threads(plain: SpeculativeDecoder, prompts: list[Prompt]) -> tuple[int | None, float]:
    """Return the number of CPU threads, one or all, that decodes the prompts fastest, and its seconds a plain token.

    They are decoded plainly and with n-grams, because a pass over several tokens gains more by threads than one over a
    single token.
    """
    encoded = [tokenise(prompt, plain.target) for prompt in prompts]
    lookup = SpeculativeDecoder(plain.target, load_drafter("ngram", plain.target))
    lookup.generate(encoded[:1], COMPARISON.max_new_tokens)  # warms up
    candidates = [None] if plain.target.device.type == "cuda" else [torch.get_num_threads(), 1]
    runs = [(decoder, num_threads) for decoder in (plain, lookup) for num_threads in candidates]
    seconds = dict.fromkeys(runs, 0.0)
    for prompt in encoded:
        for decoder, num_threads in runs:  # in turns, because a shared machine changes its speed
            with cpu_threads(num_threads):
                output = decoder.generate([prompt], COMPARISON.max_new_tokens)
            seconds[decoder, num_threads] += output.timing.total / len(output.token_ids[0])
    fastest = min(candidates, key=lambda num_threads: sum(seconds[decoder, num_threads] for decoder in (plain, lookup)))
    return fastest, seconds[plain, fastest] / len(encoded)


def new_drafter(recipe: TrainConfig, target: Target) -> Drafter:
    """Return a drafter as a recipe begins it."""
    fit_vocabulary_size(recipe, target.vocab_size)
    fit_starting_layers(recipe, target)
    return DRAFTERS[recipe.drafter.kind].from_target(recipe.drafter, target).to(target.device)


def stored_bytes(samples: list[Sample], layers: list[int], target: Target) -> int:
    """Return the bytes of the features of samples: so many layers and the last one, in bf16."""
    return 2 * (len(layers) + 1) * target.hidden_size * sum(len(sample.token_ids) for sample in samples)


def steps_in(
    seconds: float, drafters: dict[str, Drafter], target: Target, samples: list[Sample], num_stored: int | None
) -> dict[str, int]:
    """Return the steps of each drafter in so many seconds for all.

    `num_stored` is the number of samples whose features are stored first; None: the target runs in each step, as
    it does in any case for drafters that are made of its layers.
    """
    times = {
        kind: time_step(RECIPES[f"quickstart_{kind}"](), drafter, target, samples) for kind, drafter in drafters.items()
    }
    if num_stored is not None:
        features = max(time.features for time in times.values())
        seconds = max(seconds / 2, seconds - features * num_stored / RECIPES["quickstart_eagle3"]().data.batch_size)
    per_weight = seconds / sum(WEIGHTS[kind] for kind in drafters)
    runs_target = {kind: num_stored is None or drafters[kind].config.starts_from_layers for kind in drafters}
    return {
        kind: max(8, int(per_weight * WEIGHTS[kind] / (time.loss + runs_target[kind] * time.features)))
        for kind, time in times.items()
    }


@dataclass
class StepTime:
    """Mean seconds of the two parts of a training step."""

    features: float  # the target's pass
    loss: float  # loss and gradient of the drafter, and the optimiser's step


def time_step(config: TrainConfig, drafter: Drafter, target: Target, samples: list[Sample]) -> StepTime:
    """Return the mean time of a step of a recipe's new drafter on samples, after one batch to warm up.

    The timed steps stand for a whole training, whose first steps may be shorter than its last ones.
    """
    optimizer = optimizer_of(drafter, config.optimizer)
    set_learning_rate(optimizer, 0.0)  # weights stay as they are
    size = min(config.data.batch_size, len(samples))
    batches = BatchPlan(Samples.of(samples), size, target.context, size * target.context, seed=0)
    times = []
    for step in range(1 + batches.steps_per_epoch):
        batch = batches.collate(batches.micro_batches(step, 0, 1)[0]).to(target.device)
        drafter.progress = step / (1 + batches.steps_per_epoch)
        start = time.perf_counter()
        features = target.features(batch, drafter.layer_ids)
        features.last_hidden.sum().item()  # waits for a GPU
        middle = time.perf_counter()
        with training_precision(target.device, config.run.precision):
            total, count = drafter(batch, features)["loss"]
            (total / count).backward()
            optimizer.step()
        optimizer.zero_grad()
        total.item()
        times.append((middle - start, time.perf_counter() - middle))
    features_seconds, loss_seconds = (sum(part[1:]) / len(part[1:]) for part in zip(*times, strict=True))
    return StepTime(features_seconds, loss_seconds)
