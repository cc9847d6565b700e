"""Predicted against measured speedup, on settings that the cost model was not fitted on.

    python benchmarks/cost_model.py RUNS [--kinds hydra,medusa,eagle3,draft_model] [--out docs/cost_model.png]

RUNS is the folder of benchmarks/families.py, with a checkpoint of each kind and held_out.jsonl. Writes
benchmarks/results/cost_model.txt and the figure. The rounds that each request takes are those measured, so that what is
compared is the costs alone. Each of `--visits` fits the costs anew and measures all settings anew; their means are
compared, and how far the visits lie apart is the noise of both, which no prediction can be better than. Decoding
computes with one thread; `--thread-time` counts the time of that thread instead of the wall's, for a machine that does
other things too.
"""

import argparse
import time
from dataclasses import dataclass
from math import erf, sqrt
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.decoder import check_sampling, resolve_settings
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.planning.cost_measurement import CostRange, measure_costs
from draftsmith.inference.planning.fixed_batches import RequestProfile, batch_milliseconds
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

ROOT = Path(__file__).resolve().parent.parent
BATCHES, LENGTHS = (1, 2, 3, 6, 12), (3, 5, 7)  # the fit takes 1, 2, 4, 8, 16 and 1, 2, 4, 8
PARTS, REPEATS = 3, 2  # batches of prompts, at most; runs of a visit, after one to warm up


@dataclass
class Times:
    """The milliseconds of one setting in each visit, predicted and measured, summed over batches of prompts."""

    predicted: list[float]
    measured: list[float]
    tokens: int = 0
    rounds: int = 0  # of the request with the most in each batch of prompts


@dataclass
class ComparedSetting:
    """A setting with its predicted and its measured speedup."""

    kind: str
    batch: int
    draft_length: int
    acceptance_length: float
    predictions: list[float]  # speedup, by the fit of each visit
    visits: list[float]  # measured speedup in each

    @property
    def predicted(self) -> float:
        return float(np.mean(self.predictions))

    @property
    def measured(self) -> float:
        return float(np.mean(self.visits))

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def noise(self) -> float:
        """Standard error of the error, from how far the visits lie apart."""
        return sqrt(standard_error(self.predictions) ** 2 + standard_error(self.visits) ** 2)


def standard_error(values: list[float]) -> float:
    """Return the standard error of the mean, relative to it."""
    return float(np.std(values, ddof=1) / sqrt(len(values)) / np.mean(values))


def decode(
    decoder: SpeculativeDecoder, draft_length: int, prompts: list[list[int]], new: int
) -> tuple[float, list[int]]:
    """Return the milliseconds from the first token on, and the rounds of each request."""
    settings = resolve_settings(decoder.drafter, check_sampling(0, 1, 0), new, draft_length, stop_at_eos=False)
    generation = decoder.start(prompts, settings)
    generation.step()
    start = time.perf_counter()
    while generation.running():
        generation.step()
    return (time.perf_counter() - start) * 1000, [int(request.stats.num_rounds) for request in generation.requests]


def profiles(prompts: list[list[int]], rounds: list[int], new: int) -> list[RequestProfile]:
    return [RequestProfile(len(prompt), new - 1, count) for prompt, count in zip(prompts, rounds, strict=True)]


def rows_of(
    kind: str, drafter: Drafter, target: Target, visits: int, seconds: float, prompts: list[list[int]], new: int
) -> list[ComparedSetting]:
    """Return the predicted and measured speedup of each setting.

    Each visit fits the costs and then measures. The settings of one batch size take turns, plain decoding among them.
    """
    most = drafter.max_draft_length or max(LENGTHS)
    lengths = [0, *(length for length in LENGTHS if length <= most)]
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    decoders = {length: SpeculativeDecoder(target, drafter) if length else plain for length in lengths}
    zeros = [0.0] * visits
    times_of = {(batch, length): Times(zeros.copy(), zeros.copy()) for batch in BATCHES for length in lengths}
    for visit in range(visits):
        costs = measure_costs(target, drafter, CostRange(batch=16, context=160, seconds=seconds), kind)
        for batch in BATCHES:
            for start in range(0, min(len(prompts), PARTS * batch), batch):
                part = prompts[start : start + batch]
                for length, taken in run_in_turns(decoders, part, new).items():
                    times = times_of[batch, length]
                    rounds = taken[0][1] if length else [new - 1] * len(part)
                    predicted = batch_milliseconds(costs, length, profiles(part, rounds, new), drops_rows=True)
                    times.predicted[visit] += predicted
                    times.measured[visit] += float(np.median([milliseconds for milliseconds, _ in taken]))
                    times.tokens, times.rounds = times.tokens + new - 1, times.rounds + max(rounds)
    rows = []
    for (batch, length), times in times_of.items():
        if length:
            base = times_of[batch, 0]
            speedups = [
                [plain_ms / ms for plain_ms, ms in zip(of_plain, of_rounds, strict=True)]
                for of_plain, of_rounds in ((base.predicted, times.predicted), (base.measured, times.measured))
            ]
            rows.append(ComparedSetting(kind, batch, length, times.tokens / times.rounds, *speedups))
    return rows


def run_in_turns(
    decoders: dict[int, SpeculativeDecoder], prompts: list[list[int]], new: int
) -> dict[int, list[tuple[float, list[int]]]]:
    taken: dict[int, list[tuple[float, list[int]]]] = {length: [] for length in decoders}
    for _ in range(REPEATS + 1):
        for length, decoder in decoders.items():
            taken[length].append(decode(decoder, length, prompts, new))
    return {length: runs[1:] for length, runs in taken.items()}


def table(rows: list[ComparedSetting]) -> list[str]:
    heads = f"{'batch':>5} {'K':>3} {'length':>7} {'predicted':>9} {'measured':>9} {'error':>7} {'noise':>6}"
    lines = [f"{'drafter':<12} {heads}"]
    for row in rows:
        speedups = f"{row.acceptance_length:>7.2f} {row.predicted:>9.2f} {row.measured:>9.2f}"
        errors = f"{row.error:>+7.1%} {row.noise:>6.1%}"
        lines.append(f"{row.kind:<12} {row.batch:>5} {row.draft_length:>3} {speedups} {errors}")
    lines.append("")
    for kind in [*dict.fromkeys(row.kind for row in rows), "all"]:
        chosen = [row for row in rows if kind in (row.kind, "all")]
        sizes = np.abs([row.error for row in chosen])
        within = f"within 5 % at {(sizes <= 0.05).mean():.0%}"
        quantiles = f"median {np.median(sizes):.1%}, 90th percentile {np.quantile(sizes, 0.9):.1%}"
        floor = np.mean([erf(0.05 / sqrt(2) / max(row.noise, 1e-9)) for row in chosen])
        noise = f"noise: median {np.median([row.noise for row in chosen]):.1%}, with which"
        lines.append(
            f"{kind:<12} {len(chosen):>3} settings; error: {quantiles}, {within}; "
            f"{noise} exact predictions would be within 5 % at {floor:.0%}"
        )
    return lines


def draw(rows: list[ComparedSetting], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5, 5))
    for kind in dict.fromkeys(row.kind for row in rows):
        chosen = [row for row in rows if row.kind == kind]
        spread = [row.measured * standard_error(row.visits) for row in chosen]
        fits = [row.predicted * standard_error(row.predictions) for row in chosen]
        x, y = [row.measured for row in chosen], [row.predicted for row in chosen]
        axes.errorbar(x, y, fits, spread, label=kind, fmt="o", markersize=4, elinewidth=0.8)
    line = np.array([0.95 * min(*axes.get_xlim(), *axes.get_ylim()), max(*axes.get_xlim(), *axes.get_ylim())])
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.fill_between(line, 0.95 * line, 1.05 * line, color="grey", alpha=0.2, label="within 5 %")
    axes.set(
        xlabel="measured speedup (bars: standard errors over visits)", ylabel="predicted speedup", xlim=line, ylim=line
    )
    axes.set_aspect("equal")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--kinds", default="hydra,medusa,eagle3,draft_model")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "cost_model.png")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "cost_model.txt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=12, help="of measuring costs, about, for each drafter")
    parser.add_argument("--visits", type=int, default=3)
    parser.add_argument("--thread-time", action="store_true")
    args = parser.parse_args()
    if args.thread_time:
        time.perf_counter = time.thread_time  # what the decoder's own clock reads, too
    rows: list[ComparedSetting] = []
    with cpu_threads(1):
        target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
        held_out = str(args.runs / "held_out.jsonl")
        prompts = read_prompt_set(held_out, target, max(BATCHES), args.new_tokens).token_ids
        env = environment(target)
        for kind in args.kinds.split(","):
            (checkpoint,) = sorted((args.runs / kind / "checkpoints").glob("step-*"))[-1:]
            drafter = load_drafter(checkpoint, target)
            rows += rows_of(kind, drafter, target, args.visits, args.seconds, prompts, args.new_tokens)
            print(f"{kind}: done", flush=True)
    clock = "time of the computing thread" if args.thread_time else "wall time"
    head = f"{env.command}, {env.device}, 1 thread, {clock}, commit {env.git_commit}"
    text = "\n".join([head, "", *table(rows)]) + "\n"
    args.results.write_text(text)
    print(text)
    draw(rows, args.out)


if __name__ == "__main__":
    main()
