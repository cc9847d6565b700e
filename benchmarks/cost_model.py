"""Predicted against measured speedup, on settings that the cost model was not fitted on.

    python benchmarks/cost_model.py RUNS [--kinds hydra,medusa,eagle3,draft_model]

RUNS is the folder of benchmarks/families.py, with a checkpoint of each kind and held_out.jsonl. Writes
benchmarks/results/cost_model.txt and docs/cost_model.png. Acceptance is that of the measured rounds, rows that are done
counted as running, so that what is compared is the costs alone.
"""

import argparse
import itertools
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from draftsmith.data.prompts import read_prompt_set
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.costs import CostRange, Costs, measure_costs
from draftsmith.inference.decoder import Output, check_sampling, resolve_settings
from draftsmith.inference.evaluation import environment
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.recipes.quickstart import EMBEDDED_TARGET

ROOT = Path(__file__).resolve().parent.parent
MAX_NEW_TOKENS, REPEATS, NUM_PROMPTS = 64, 3, 12
BATCHES, LENGTHS = (2, 3, 6, 12), (1, 3, 5, 7)  # the fit takes 1, 4, 16 and 1, 2, 4, 8


def seconds_of_rounds(outputs: list[Output]) -> float:
    """From the first token on, median over repeats."""
    return statistics.median(output.timing.total - output.timing.to_first_token for output in outputs)


def rows_of(target: Target, drafter: Drafter, costs: Costs, prompts: list[list[int]]) -> list[tuple]:
    """(batch, draft length, acceptance length, predicted, measured) of each setting."""
    plain = load_drafter("none", target)
    limits = check_sampling(0, 1, 0), MAX_NEW_TOKENS
    found = []
    for batch, length in itertools.product(BATCHES, LENGTHS):
        if drafter.max_draft_length is not None and length > drafter.max_draft_length:
            continue
        tokens = rounds = 0
        predicted_ms = measured_s = plain_ms = plain_s = 0.0
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            runs = []
            for one, draft in ((drafter, length), (plain, 0)):
                settings = resolve_settings(one, *limits, draft, stop_at_eos=False)
                runs.append((SpeculativeDecoder(target, one), settings))
            outputs: list[list[Output]] = [[], []]
            for _ in range(REPEATS + 1):  # the first to warm up
                for (decoder, settings), kept in zip(runs, outputs, strict=True):
                    kept.append(decoder.decode(part, settings))
            context = round(statistics.mean(map(len, part)) + MAX_NEW_TOKENS / 2)
            num_rounds = max(request.num_rounds for request in outputs[0][0].stats.requests)
            tokens, rounds = tokens + MAX_NEW_TOKENS - 1, rounds + num_rounds
            predicted_ms += num_rounds * costs.round(length, len(part), context)
            plain_ms += (MAX_NEW_TOKENS - 1) * costs.plain(len(part), context)
            measured_s += seconds_of_rounds(outputs[0][1:])
            plain_s += seconds_of_rounds(outputs[1][1:])
        found.append((batch, length, tokens / rounds, plain_ms / predicted_ms, plain_s / measured_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--kinds", default="hydra,medusa,eagle3,draft_model")
    args = parser.parse_args()
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    prompts = read_prompt_set(str(args.runs / "held_out.jsonl"), target, NUM_PROMPTS, MAX_NEW_TOKENS).token_ids
    env = environment(target)
    lines = [f"{env['command']}, {env['device']}, {env['num_threads']} threads, commit {env['git_commit']}", ""]
    lines.append(f"{'drafter':<12} {'batch':>5} {'K':>3} {'length':>7} {'predicted':>9} {'measured':>9} {'error':>7}")
    errors = []
    figure, axes = plt.subplots(figsize=(5, 5))
    for kind in args.kinds.split(","):
        (checkpoint,) = sorted((args.runs / kind / "checkpoints").glob("step-*"))[-1:]
        drafter = load_drafter(checkpoint, target)
        costs = measure_costs(target, drafter, CostRange(batch=16, context=160, seconds=25), kind)
        rows = rows_of(target, drafter, costs, prompts)
        for batch, length, emitted, predicted, measured in rows:
            errors.append(predicted / measured - 1)
            figures = f"{emitted:>7.2f} {predicted:>9.2f} {measured:>9.2f} {errors[-1]:>+7.1%}"
            lines.append(f"{kind:<12} {batch:>5} {length:>3} {figures}")
        axes.scatter([row[4] for row in rows], [row[3] for row in rows], label=kind, s=18)
    sizes = np.abs(errors)
    within = f"within 5 %: {(sizes <= 0.05).mean():.0%} of {len(sizes)} settings"
    lines += ["", f"error: median {np.median(sizes):.1%}, 90th percentile {np.quantile(sizes, 0.9):.1%}; {within}"]
    text = "\n".join(lines) + "\n"
    (ROOT / "benchmarks" / "results" / "cost_model.txt").write_text(text)
    print(text)

    low, high = axes.get_xlim()
    line = np.array([low, high])
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.fill_between(line, 0.95 * line, 1.05 * line, color="grey", alpha=0.2, label="5 %")
    axes.set(xlabel="measured speedup", ylabel="predicted speedup")
    axes.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "cost_model.png", dpi=120)


if __name__ == "__main__":
    main()
