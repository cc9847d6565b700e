"""Synthetic runs and evaluations, for the tests of reports."""

import json
from pathlib import Path
from typing import Any

import yaml

from draftsmith.inference.measuring.results import Evaluation, Result, upgraded
from draftsmith.models.storage.typed_json import from_json

PLAIN_MILLISECONDS = 10.0
TEMPERATURES = (0.0, 1.0)
ENVIRONMENT = {
    "versions": {"python": "3.12.1", "torch": "2.11.0"},
    "device": "Abacus 9000, 2 cores",
    "num_threads": 2,
    "dtype": "float32",
    "target_fingerprint": "0123456789abcdef",
    "git_commit": "abc1234",
    "command": "draftsmith quickstart",
    "template_hash": None,
    "data_hash": "fedcba9876543210",
    "data_written_by": "decoder",
}


def result(
    keep: float, draft_ms: float, temperature: float = 0.0, divergences: int = 0, length: int = 4, batch_size: int = 1
) -> dict[str, Any]:
    """A row of evaluation.json in which each drafted token is accepted with chance `keep`."""
    drafts, checked = 1000, 0 if temperature else 16
    survived = [*(round(drafts * keep**i) for i in range(length + 1)), 0]
    accepted = sum(survived[1:])
    tokens = 1 + accepted / drafts
    round_ms = draft_ms + PLAIN_MILLISECONDS + 1
    speedup = tokens * PLAIN_MILLISECONDS / round_ms
    times = {"p50": PLAIN_MILLISECONDS, "p95": 11.0, "p99": 12.0}
    return {
        "prompt_set": "held_out", "num_prompts": 16, "temperature": temperature, "top_p": 1.0,
        "verification_mode": "probabilistic" if temperature else "greedy",
        "batch_size": batch_size, "draft_length": length,
        "tree_nodes": None, "max_new_tokens": 64, "num_rounds": drafts, "num_drafts": drafts,
        "num_draft_tokens": length * drafts,
        "num_accepted_tokens": accepted, "num_emitted_tokens": drafts + accepted,
        "mean_acceptance_length": tokens, "draft_acceptance_rate": accepted / drafts / length,
        "per_position_acceptance_rates": [n / drafts for n in survived[1 : length + 1]],
        "conditional_acceptance_rates": [survived[i + 1] / survived[i] if survived[i] else None for i in range(length)],
        "acceptance_histogram": [a - b for a, b in zip(survived[:-1], survived[1:], strict=True)],
        "baseline_tokens_per_second": 100.0, "tokens_per_second": 100 * speedup, "speedup": speedup,
        "speedup_ci95": [speedup - 0.09, speedup + 0.08], "repeats": 5, "ttft_ms": times, "tpot_ms": times,
        "baseline_tpot_ms": times,
        "milliseconds_per_round": {"draft": draft_ms, "verify": PLAIN_MILLISECONDS, "host": 1.0},
        "step_cost_ratio": tokens / speedup,
        "lossless": {
            "checked": checked, "identical": max(0, checked - 1 - divergences),
            "near_tie_divergences": min(1, checked), "divergences": min(divergences, checked),
            "first_differences": [
                {
                    "request": 2, "position": 16, "plain_token": 71, "speculative_token": 61, "top_two_gap": 0.0,
                    "top_two_gap_fp32": 0.0069, "token_gap_fp32": 0.0069, "near_tie_gap": 0.28, "near_tie": True,
                }
            ][:checked],
        },
    }  # fmt: skip


def typed_result(*args: Any, **kwargs: Any) -> Result:
    """Return `result` as a type."""
    return from_json(Evaluation, upgraded(evaluation([result(*args, **kwargs)]))).results[0]


def evaluation(results: list[dict[str, Any]], drafter: str = "d", kind: str = "k") -> dict[str, Any]:
    """Return the content of an evaluation.json."""
    return {"target": "t", "drafter": drafter, "drafter_kind": kind, "environment": ENVIRONMENT, "results": results}


def write_results(path: Path, results: list[dict[str, Any]], drafter: str = "d", kind: str = "k") -> None:
    path.write_text(json.dumps(evaluation(results, drafter, kind)))


def write_run(folder: Path, keep: float, draft_ms: float, divergences: int = 0) -> Path:
    """A run of 400 steps and two checkpoints, the second one the better."""
    folder.mkdir(parents=True)
    config = {
        "target": "models/tiny_target",
        "drafter": {"kind": folder.name},
        "data": {"samples": "data/tiny"},
        "run": {"steps": 400, "seed": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    lines: list[dict[str, Any]] = []
    for step in range(10, 401, 10):
        simulated = 1 + 2.2 * keep * step / (step + 80)
        lines.append({"step": step, "loss": 6 / step**0.3, "simulated_acceptance_length": simulated})
        if step % 200 == 0:
            rows = [result(keep * step / 400, draft_ms, temperature, divergences) for temperature in TEMPERATURES]
            checkpoint = folder / "checkpoints" / f"step-{step:06d}"
            checkpoint.mkdir(parents=True)
            write_results(checkpoint / "evaluation.json", rows, str(checkpoint), folder.name)
            ngram = [result(0.25, 0.3, temperature) for temperature in TEMPERATURES]
            write_results(checkpoint / "evaluation.ngram.json", ngram, "ngram", "ngram")
            length, speedup = rows[0]["mean_acceptance_length"], rows[0]["speedup"]
            lines.append({"step": step, "acceptance_length": length, "speedup": speedup})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_samples(folder: Path) -> None:
    pieces = [{"text": "    if a <b>&", "accepted": True}, {"text": " 1:\n", "accepted": False}]
    drafted = [
        {"text": text, "target_probability": p, "drafter_probability": q}
        for text, p, q in (("    if", 0.9, 0.8), (" a", 0.7, 0.5), (" <b>&", 0.6, None), ("</script>", 0.003, 0.25))
    ]
    rounds = [
        {"text": "    if a <b>& 1:\n", "num_tokens": 4, "num_accepted": 3, "pieces": pieces, "drafted": drafted}
    ] * 3
    drafter = str(folder / "eagle3/checkpoints/step-000400")
    prompt = "<script>alert(1)</script>\ndef f(a):\n"
    samples = [{"prompt": prompt, "drafter": drafter, "temperature": 0.0, "rounds": rounds}]
    (folder / "samples.json").write_text(json.dumps(samples))


def choice_content(drafter: str, draft_length: int, *predicted: dict[str, Any]) -> dict[str, Any]:
    """The content of a choice.json."""
    return {
        "drafter": drafter, "draft_length": draft_length, "tree": None, "fitted_on": "others",
        "schedule": {"draft_lengths": [[1, 2], [8, 0]]}, "predicted": list(predicted),
        "vllm": {"num_speculative_tokens_per_batch_size": [[1, 7, 2], [8, 8, 0]]},
    }  # fmt: skip


def plan_content(name: str) -> dict[str, Any]:
    """The content of a plan.json with one drafter and one acceptance."""
    draft = {"batch_size": 1, "draft_length": 4, "acceptance_length": 2.0, "speedup": 1.25}
    row = {
        "batch_size": 1, "plain_ms": 10.0, "round_ms": {"4": 16.0}, "break_even_acceptance_length": {"4": 1.6},
        "tree_break_even_acceptance_length": {}, "highest_speedup": 3.1,
    }  # fmt: skip
    expected = {"where": name, "source": name, "rates": [0.5] * 4, "by_batch_size": [draft]}
    drafter = {
        "drafter": name, "drafter_kind": name, "by_batch_size": [row], "tree_depths": {}, "expected": [expected],
        "held_out": {"settings": 1.0}, "verdicts": [name],
    }  # fmt: skip
    return {"target": name, "context": 64, "environment": ENVIRONMENT, "drafters": [drafter]}


def replay_content(name: str) -> dict[str, Any]:
    """The content of a replay.json with two draft lengths of one drafter."""
    rows = [
        {
            "drafter": name, "prompt_set": name, "temperature": 0.0, "verification_mode": "greedy",
            "draft_length": length, "tree_nodes": None, "mean_acceptance_length": 1 + length / 4,
            "mean_acceptance_length_ci95": [1.0, 3.0],
        }
        for length in (1, 4)
    ]  # fmt: skip
    return {"target": name, "environment": ENVIRONMENT, "results": rows}


def write_comparison(folder: Path, number: int, **changes: Any) -> None:
    path = folder / f"comparison/{number}-some/evaluation.json"
    path.parent.mkdir(parents=True)
    name = str(folder / "eagle3/checkpoints/step-000200")
    write_results(path, [{**result(0.9, 1.0), **changes.pop("result", {})}], name, "eagle3")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_grid(folder: Path) -> None:
    """An evaluation of eagle3 and ngram at three batch sizes and draft lengths; verification costs more for each.

    At batch size 1 eagle3 is fastest with two tokens; between 4 and 16 it stops to pay.
    """
    for number, (name, keep, draft_ms) in enumerate((("eagle3", 0.6, 1.0), ("ngram", 0.3, 0.1)), 1):
        rows = [
            slower(result(keep, draft_ms * length, length=length, batch_size=size), 0.04 * length * size)
            for size in (1, 4, 16)
            for length in (1, 2, 4)
        ]
        path = folder / f"{number}-{name}/evaluation.json"
        path.parent.mkdir(parents=True)
        drafter = "eagle3/checkpoints/step-000400" if name == "eagle3" else name
        write_results(path, rows, drafter, name)


def slower(row: dict[str, Any], steps: float) -> dict[str, Any]:
    """The row with so many plain steps more in each verification."""
    verify = row["milliseconds_per_round"]["verify"] + steps * PLAIN_MILLISECONDS
    phases = {**row["milliseconds_per_round"], "verify": verify}
    cost = sum(phases.values()) / PLAIN_MILLISECONDS
    speedup = row["mean_acceptance_length"] / cost
    interval = [0.95 * speedup, 1.05 * speedup]
    changed = {"milliseconds_per_round": phases, "step_cost_ratio": cost, "speedup": speedup, "speedup_ci95": interval}
    return {**row, **changed}
