"""The CUDA branches of a round on fake tensors of a CUDA device: the host takes no part, and launches are counted.

It runs in a process of its own, for in this one kernels are defined for Triton's interpreter.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/launches.py"
STEP, DRAWN = 12, 4  # goals: launches of a draft step, the first one too, and of drawing its token
MOST_LAUNCHES = {  # of drafting and of verification, in Llama-3.1-8B's shape
    "none, greedy, K = 0, batch 1": (0, 220),
    "eagle3, greedy, K = 1, batch 1": (STEP, 225),
    "eagle3, greedy, K = 4, batch 1": (4 * STEP, 225),
    "eagle3, probabilistic, K = 4, batch 1": (4 * (STEP + DRAWN), 235),
    "eagle, greedy, K = 1, batch 1": (STEP, 225),
    "eagle, greedy, K = 4, batch 1": (4 * STEP, 225),
    "draft_model, greedy, K = 1, batch 1": (STEP, 225),
    "eagle3, greedy, DynamicTree, batch 1": (90, 300),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_host_takes_no_part_in_any_round(answers: dict[str, Any]) -> None:
    """It neither waits for a value, nor sends one, nor mixes devices: any of it would have been an error."""
    assert answers["rounds"] > 40
    assert answers["controls"] == {
        "waits": "DataDependentOutputException",
        "decides": "DataDependentOutputException",
        "sends": "HostError",
        "mixes": "FakeTensorDeviceMismatchError",
    }


@pytest.mark.parametrize("name", MOST_LAUNCHES)
def test_launches_stay_within_their_goals(answers: dict[str, Any], name: str) -> None:
    """Whoever needs fewer writes benchmarks/results/launches.txt anew."""
    for number, most in zip(answers["launches"][name], MOST_LAUNCHES[name], strict=True):
        assert number <= most
    assert answers["launches"][name][1] > 100, "a pass of 32 layers"


def main() -> None:
    """Print what the tests ask for."""
    import torch

    sys.path.append(str(BENCHMARK.parent))
    benchmark = runpy.run_path(str(BENCHMARK))
    launched: list[str] = []
    answers: dict[str, Any] = {"launches": {}, "controls": {}, "rounds": 0}
    models = {num_layers: benchmark["meta_model"](num_layers) for num_layers in (2, 32)}
    faults = {
        "waits": lambda tensor: tensor[0].item(),
        "decides": lambda tensor: tensor if tensor.any() else None,
        "sends": lambda tensor: tensor + torch.tensor([1.0, 2.0, 3.0], device="cuda"),
        "mixes": lambda tensor: tensor + torch.ones(3),
    }
    with benchmark["fake_gpu"](launched):
        for name, fault in faults.items():
            try:
                benchmark["count"](lambda fault=fault: fault(torch.ones(3, device="cuda")), launched)
            except Exception as error:
                answers["controls"][name] = type(error).__name__
        target = benchmark["make_target"](models[2])
        for round_ in benchmark["every_round"]():
            try:
                benchmark["count_round"](round_, target, launched)
            except ValueError:  # a drafter that does not draft so
                continue
            answers["rounds"] += 1
        target = benchmark["make_target"](models[32])
        for round_ in benchmark["ROUNDS"]:
            if round_.name in MOST_LAUNCHES:
                halves = benchmark["count_round"](round_, target, launched)
                answers["launches"][round_.name] = [halves[half].total for half in ("draft", "verify")]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
