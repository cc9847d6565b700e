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
from unittest import mock

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/launches.py"
STATE_KERNELS = ("convolution_kernel", "read_kernel")
STEP, DRAWN = 12, 4  # goals: launches of a draft step, the first one too, and of drawing its token
LAYERS, FEW = 32, (4, 5)  # of the target, and of those that are run: each layer adds the same launches
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


def test_verification_is_recorded_only_with_drafts(answers: dict[str, Any]) -> None:
    """A recorded verification reads the draft at the address of its capture: of drafts made anew it would be stale."""
    assert answers["recorded without"] == {"nothing": True, "drafter": False, "target": False}


@pytest.mark.parametrize("name", MOST_LAUNCHES)
def test_launches_stay_within_their_goals(answers: dict[str, Any], name: str) -> None:
    """Whoever needs fewer writes benchmarks/results/launches.txt anew."""
    for number, most in zip(answers["launches"][name], MOST_LAUNCHES[name], strict=True):
        assert number <= most
    assert answers["launches"][name][1] > 100, "a pass of 32 layers"


def test_a_layer_with_a_running_state_takes_two_kernels(answers: dict[str, Any]) -> None:
    """One for the convolution and one for the rule, whatever is drafted; its host takes no part either."""
    for draft in ("none", "chain", "tree"):
        kernels = answers["running states"][draft]
        assert {name: kernels[name] for name in STATE_KERNELS} == dict.fromkeys(STATE_KERNELS, 2), draft


def running_states(benchmark: dict[str, Any], model: Any, launched: list[str]) -> dict[str, dict[str, int]]:
    """Return the kernels of verification, by name, of a target with two layers of Kimi delta attention."""
    with mock.patch("draftsmith.models.target.target.check_decodes_exactly"):
        target = benchmark["Target"](benchmark["on_gpu"](model), None, "kimi_linear")
    shapes = {"none": ("none", 0), "chain": ("medusa", 3), "tree": ("medusa", benchmark["STATIC_TREE"])}
    rounds = {name: benchmark["Round"](kind, "greedy", shape) for name, (kind, shape) in shapes.items()}
    return {name: benchmark["count_round"](rounds[name], target, launched)["verify"].kernels for name in rounds}


def recorded_without(benchmark: dict[str, Any], target: Any) -> dict[str, bool]:
    """Return whether an engine records its rounds where nothing, its drafter or its target cannot be recorded."""
    from draftsmith.inference.decoding import batch_engine

    drafter = benchmark["make_drafter"]("eagle3", target)
    settings = benchmark["resolve_settings"](drafter, benchmark["Sampling"](), 64)
    refused = {"nothing": None, "drafter": drafter, "target": target.model}
    recorded = {}
    with mock.patch.dict(os.environ):
        del os.environ["DRAFTSMITH_GRAPHS"]
        for name, module in refused.items():
            with mock.patch.object(batch_engine, "can_be_recorded", lambda other, module=module: other is not module):
                recorded[name] = batch_engine.BatchEngine(target, drafter, settings, 1, 256).recorded.records
    return recorded


def main() -> None:
    """Print what the tests ask for."""
    import torch
    from transformers import AutoModelForCausalLM

    sys.path.append(str(BENCHMARK.parent))
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # before `families` of the benchmarks
    from families import KINDS, family_config

    benchmark = runpy.run_path(str(BENCHMARK))
    launched: list[str] = []
    answers: dict[str, Any] = {"launches": {}, "controls": {}, "rounds": 0}
    with torch.device("meta"):
        config = family_config(*KINDS["Kimi delta attention"])
        kimi = AutoModelForCausalLM.from_config(config, attn_implementation=benchmark["ATTENTION"])
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
        answers["running states"] = running_states(benchmark, kimi, launched)
        target = benchmark["make_target"](benchmark["meta_model"]("llama_3_1_8b", 2))
        answers["recorded without"] = recorded_without(benchmark, target)
        for round_ in benchmark["every_round"]():
            try:
                benchmark["count_round"](round_, target, launched)
            except ValueError:  # a drafter that does not draft so
                continue
            answers["rounds"] += 1
        targets = [benchmark["make_target"](benchmark["meta_model"]("llama_3_1_8b", num_layers)) for num_layers in FEW]
        for round_ in benchmark["ROUNDS"]:
            if round_.name in MOST_LAUNCHES:
                counts = [benchmark["count_round"](round_, target, launched) for target in targets]
                answers["launches"][round_.name] = [
                    with_all_layers(*(halves[half].total for halves in counts)) for half in ("draft", "verify")
                ]
    print(json.dumps(answers))


def with_all_layers(few: int, one_more: int) -> int:
    """Return the launches with `LAYERS` layers, from those with few layers and with one more."""
    return few + (one_more - few) * (LAYERS - FEW[0])


if __name__ == "__main__":
    main()
