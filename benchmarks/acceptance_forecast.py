"""How well acceptance is known before training: from the target's entropy on a traffic, from lookups, and from a probe.

    python benchmarks/acceptance_forecast.py FOLDER [--steps 200] [--probe 20]

The embedded target answers prompts of six kinds of traffic. For each of them the entropy of its answers and the
acceptance length of n-grams are measured, drafters of five kinds are trained for a few steps (the probe), and anew for
all steps. Forecasts of the share of drafted tokens that is accepted at the end, in log-odds, are fitted on five
traffics and judged on the sixth. FOLDER keeps what was found: give the same command again to go on.
"""

import argparse
import platform
import random
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from learning import DRAFT_LENGTH, Step, acceptance_lengths, fit
from refresh import all_prompts
from scipy.special import expit, logit

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.features.vocabulary import token_counts
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.data.prompts.splits import write_prompts
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import read_samples
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.inference.replay.replay import Recording, read_texts, record, select_layers
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.files import write_json
from draftsmith.models.storage.reading import read_typed
from draftsmith.recipes.auto.traffic import longest_prompt
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for

KINDS = ("eagle3", "medusa", "hydra", "dflash", "draft_model")
NUM_PROMPTS, NUM_TESTED, NEW_TOKENS = 600, 64, 64
LEAST, MOST = 0.002, 0.998  # between which shares are moved
TABLE_LINES = 8  # of a prompt


@dataclass(frozen=True)
class Observed:
    """What is known of a traffic before training, and what a kind reached on it."""

    traffic: str
    kind: str
    entropy: float  # nats a token, of the target's distributions along its greedy answers
    lookup: float  # acceptance length of n-grams
    probe: float  # share of the drafted tokens that is accepted after the probe
    end: float  # the same after all steps


# --- traffic


def traffics(target: Target) -> dict[str, list[Prompt]]:
    """Return the prompts of each kind of traffic in random order."""
    questions = [prompt for prompt in prompts_for(target, held_out=False) if prompt.messages is not None]
    room = longest_prompt(target, NEW_TOKENS)
    short = [prompt for prompt in tables() if len(target.encode(str(prompt.text))) <= room]
    return {**all_prompts(), "questions": questions, "tables": short}


def tables() -> list[Prompt]:
    """Return the beginnings of tables of character codes, which repeat themselves from line to line."""
    texts = []
    for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / "encodings").glob("*.py")):
        rows = [line for line in path.read_text("utf-8").splitlines() if "#  0x" in line]
        texts += ["\n".join(rows[i : i + TABLE_LINES]) + "\n" for i in range(0, len(rows), TABLE_LINES)]
    random.Random(0).shuffle(texts)
    return [Prompt(text=text) for text in dict.fromkeys(texts)]


def entropy_of(target: Target, recording: Recording) -> float:
    """Return the mean entropy of the target's distributions, in nats a token, along recorded answers."""
    sums, count = 0.0, 0
    for batch, features, _ in read_texts(target, recording, ()):
        log_p = target.logits(features.last_hidden[0]).float().log_softmax(-1)[batch.loss_mask[0].roll(-1)]
        sums, count = sums - float((log_p.exp() * log_p).sum()), count + len(log_p)
    return sums / count


# --- runs


def observe(folder: Path, traffic: str, prompts: list[Prompt], steps: int, probe: int) -> Iterator[Observed]:
    """Yield what every kind reached on a traffic, beside what was known before."""
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    write_prompts(folder / "prompts.jsonl", prompts[:NUM_PROMPTS])
    prepare(target, str(folder / "prompts.jsonl"), folder / "samples", PrepareSettings(NEW_TOKENS, batch_size=64))
    plan = BatchPlan(read_samples(folder / "samples"), 8, 512, 8 * 512, seed=0)
    tested = encode_prompts(prompts[-NUM_TESTED:], target)
    recording = record(target, tested, Sampling(0.0), NEW_TOKENS, DRAFT_LENGTH)
    [lookup] = acceptance_lengths(target, load_drafter("ngram", target), [recording])
    entropy = entropy_of(target, recording)
    drafters = {kind: DRAFTERS[kind].from_target(RECIPES[f"quickstart_{kind}"]().drafter, target) for kind in KINDS}
    layer_ids = tuple(sorted({layer_id for drafter in drafters.values() for layer_id in drafter.layer_ids}))
    batches = [plan.collate(plan.micro_batches(step, 0, 1)[0]) for step in range(steps)]
    features = [target.features(batch, layer_ids) for batch in batches]

    def share(kind: str, num_steps: int) -> float:
        """Return the accepted share of a kind after so many steps."""
        torch.manual_seed(0)
        recipe = RECIPES[f"quickstart_{kind}"]()
        drafter: Drafter = DRAFTERS[kind].from_target(recipe.drafter, target)
        drafter.fit_vocabulary(token_counts(plan, target.vocab_size))
        own: list[Step] = [
            (batch, select_layers(found, layer_ids, drafter.layer_ids))
            for batch, found in zip(batches[:num_steps], features[:num_steps], strict=True)
        ]
        [length] = acceptance_lengths(target, fit(drafter, own, recipe.optimizer), [recording])
        return (length - 1) / DRAFT_LENGTH

    for kind in KINDS:
        yield Observed(traffic, kind, entropy, lookup, share(kind, probe), share(kind, steps))


def observed_on(folder: Path, traffic: str, prompts: list[Prompt], steps: int, probe: int) -> list[Observed]:
    """Return what was found on a traffic, by this call or an earlier one."""
    path = folder / traffic / f"observed-{steps}-{probe}.json"
    if not path.is_file():
        (folder / traffic).mkdir(parents=True, exist_ok=True)
        write_json(path, [asdict(row) for row in observe(folder / traffic, traffic, prompts, steps, probe)])
    return read_typed(list[Observed], path)


# --- forecasts

Columns = Callable[[Observed], list[float]]


def by_kind(row: Observed) -> list[float]:
    return [float(row.kind == kind) for kind in KINDS]


@dataclass(frozen=True)
class Forecast:
    """A linear fit of the log-odds at the end, or of what training adds to those of the probe."""

    columns: Columns
    adds_to_probe: bool = False

    def start(self, row: Observed) -> float:
        """Return the log-odds to which the fit is added."""
        return odds(row.probe) if self.adds_to_probe else 0.0


FORECASTS = {
    "the kind's mean": Forecast(by_kind),
    "kind, entropy": Forecast(lambda row: [*by_kind(row), row.entropy]),
    "kind, lookup": Forecast(lambda row: [*by_kind(row), row.lookup]),
    "kind, entropy, lookup": Forecast(lambda row: [*by_kind(row), row.entropy, row.lookup]),
    "probe": Forecast(lambda row: [1.0, odds(row.probe)]),
    "kind, probe": Forecast(lambda row: [*by_kind(row), odds(row.probe)]),
    "the kind's growth from the probe": Forecast(by_kind, adds_to_probe=True),
    "the same, entropy, lookup": Forecast(lambda row: [*by_kind(row), row.entropy, row.lookup], adds_to_probe=True),
}


def odds(share: float) -> float:
    """Return the log-odds of a share."""
    return float(logit(min(MOST, max(LEAST, share))))


def foretold(forecast: Forecast, known: list[Observed], row: Observed) -> float:
    """Return the acceptance length that a fit on known rows foretells for another one."""
    matrix = np.array([forecast.columns(one) for one in known])
    weights, *_ = np.linalg.lstsq(matrix, [odds(one.end) - forecast.start(one) for one in known], rcond=None)
    return length_of(float(expit(forecast.start(row) + np.array(forecast.columns(row)) @ weights)))


def length_of(share: float) -> float:
    """Return the acceptance length of an accepted share."""
    return 1 + DRAFT_LENGTH * share


def judge(name: str, rows: list[Observed]) -> str:
    """Return a line of the table: how far a forecast is off on traffics that it was not fitted on."""
    errors, losses, right = [], [], 0
    traffics_seen = list(dict.fromkeys(row.traffic for row in rows))
    for traffic in traffics_seen:
        known, new = [row for row in rows if row.traffic != traffic], [row for row in rows if row.traffic == traffic]
        guesses = [foretold(FORECASTS[name], known, row) for row in new]
        reached = [length_of(row.end) for row in new]
        errors += [abs(guess - length) for guess, length in zip(guesses, reached, strict=True)]
        chosen = reached[int(np.argmax(guesses))]
        losses.append(max(reached) - chosen)
        right += chosen == max(reached)
    return (
        f"| {name} | {statistics.median(errors):.2f} | {max(errors):.2f} | {right} of {len(traffics_seen)} "
        f"| {max(losses):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--probe", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, commit {git_commit()}")
    print(f"{arguments.steps} steps of 8, a probe of {arguments.probe}, chains of {DRAFT_LENGTH}, greedy\n")
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    rows: list[Observed] = []
    print(f"| traffic | entropy | lookup | {' | '.join(KINDS)} |\n|{'---|' * (3 + len(KINDS))}")
    for traffic, prompts in traffics(target).items():
        found = observed_on(arguments.folder, traffic, prompts, arguments.steps, arguments.probe)
        lengths = " | ".join(f"{length_of(row.probe):.2f} → {length_of(row.end):.2f}" for row in found)
        print(f"| {traffic} | {found[0].entropy:.2f} | {found[0].lookup:.2f} | {lengths} |", flush=True)
        rows += found
    print("\n| forecast from | median error | largest | names the best kind | lost at most |\n|---|---|---|---|---|")
    for name in FORECASTS:
        print(judge(name, rows))


if __name__ == "__main__":
    main()
