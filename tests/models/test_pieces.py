"""A target whose layers lie in pieces on four processes, which pretend to be two machines of two."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_pieces import TOKEN_IDS
from safetensors.torch import load_file
from torch.distributed.elastic.utils.distributed import get_free_port

from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.target.pieces import LAYERS_AT_ONCE, processes_of_pieces

SCRIPT = Path(__file__).parents[1] / "helpers" / "in_pieces.py"
NUM_LAYERS, FLOAT = 4, 4  # the latter in bytes


def without_weights(target: Path, copy: Path) -> Path:
    """Return a copy of a target that lacks the files of its weights."""
    return Path(shutil.copytree(target, copy, ignore=shutil.ignore_patterns("*.safetensors")))


def run_processes(python: str, targets: list[Path], out: Path) -> list[Any]:
    """Start a process for each target, two on each machine. Return what they wrote."""
    where = {"WORLD_SIZE": str(len(targets)), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    where |= {"MASTER_PORT": str(get_free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([python, str(SCRIPT), str(target), str(out)], env={**os.environ, **where, "RANK": str(rank)})
        for rank, target in enumerate(targets)
    ]
    assert [process.wait(400) for process in processes] == [0] * len(targets)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(len(targets))]


@pytest.fixture(scope="module")
def out(python: str, tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes wrote, of which the first alone finds weights in the target's folder."""
    out = tmp_path_factory.mktemp("out")
    run_processes(python, [tiny_target_dir, *[without_weights(tiny_target_dir, out / "without")] * 3], out)
    return out


@pytest.fixture(scope="module")
def seen(out: Path) -> list[list[dict[str, Any]]]:
    """Of each process, with pieces on those of a machine, and of both machines."""
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]


def test_weights_are_read_once(seen: list[list[dict[str, Any]]], tiny_target_dir: Path) -> None:
    """By the first process; all others have the same target."""
    whole = Target.from_pretrained(tiny_target_dir, "cpu", torch.float32)
    for rank, both in enumerate(seen):
        for one in both:
            assert one["loads"] == (rank == 0)
            assert one["fingerprints"] == [whole.fingerprint(), whole.head_fingerprint()]


def test_features_are_those_of_a_whole_target(out: Path, tiny_target_dir: Path) -> None:
    whole = Target.from_pretrained(tiny_target_dir, "cpu", torch.float32)
    features = whole.features(Batch(TOKEN_IDS, torch.ones_like(TOKEN_IDS, dtype=torch.bool)), (1, 2))
    for rank in range(4):
        found = load_file(out / f"{rank}.safetensors")
        torch.testing.assert_close(found, {"last_hidden": features.last_hidden, "layers": features.layers})


def test_each_machine_holds_all_pieces(seen: list[list[dict[str, Any]]]) -> None:
    for number, num_pieces in enumerate((2, 4)):
        own = [both[number]["own"] for both in seen]
        assert sum(own) == 4 // num_pieces * seen[0][number]["all"]
        assert max(own) <= 1.1 * seen[0][number]["all"] / num_pieces


def test_three_layers_are_whole_at_once(seen: list[list[dict[str, Any]]]) -> None:
    """The one in use, the buffer that it came in, and that of the next; and for a moment the copy that gloo makes."""
    for both in seen:
        for one in both:
            layer = FLOAT * one["all"] // NUM_LAYERS
            assert one["most_in_pass"] == pytest.approx((LAYERS_AT_ONCE + 1) * layer, rel=0.1)


def test_a_process_that_is_sent_weights_holds_its_pieces_and_one_layer(
    seen: list[list[dict[str, Any]]], tiny_target: Target
) -> None:
    """Or at the end its pieces, and all that is whole on each. gloo may let go of the last weight of a layer late."""
    sent = max(weight.numel() for weight in tiny_target.decoder_layers.parameters())
    for both in seen[1:]:
        for one in both:
            ends = sum(weight.numel() for weight in tiny_target.model.parameters()) - one["all"]
            most = one["own"] + max(one["all"] // NUM_LAYERS, ends + sent)
            assert one["most_in_loading"] <= 1.05 * FLOAT * most


def test_a_layer_is_gathered_while_the_one_before_computes(seen: list[list[dict[str, Any]]]) -> None:
    """When a layer begins, it alone is whole, and the gathering of the next one has begun. Nothing stays whole."""
    expected = ["gather"]
    for number in range(NUM_LAYERS):
        expected += ["gather"] * (number + 1 < NUM_LAYERS) + [f"whole: [{number}]"]
    for both in seen:
        for one in both:
            assert one["events"] == expected
            assert one["whole_after"] == []


def test_all_processes_refuse_what_the_first_cannot_read(
    python: str, make_target_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """None of them waits for the others."""
    found = run_processes(python, [without_weights(make_target_dir(), tmp_path / "without")] * 2, tmp_path)
    assert found[0] == found[1]
    assert isinstance(found[0], str)  # what an error says


@pytest.mark.parametrize(
    ("num_processes", "of_machine", "over_machines", "expected"),
    [(16, 8, False, 8), (16, 8, True, 16), (8, 8, False, 8), (2, 1, False, 2), (12, 8, False, 12)],
)
def test_pieces_are_those_of_a_machine_where_it_has_several(
    num_processes: int, of_machine: int, over_machines: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_machine))
    assert processes_of_pieces(num_processes, over_machines) == expected
