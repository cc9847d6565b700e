"""The worker extension refuses another shape before it loads anything; the script that starts a vLLM with it.

That a real vLLM then counts as one that was started with the drafter is tested in test_judging_engine.py.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafters import untrained
from safetensors.torch import save_file

from draftsmith.models import DRAFTERS, Target, save_drafter
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.serving.vllm_swap import difference

CONFIG = {"hidden_size": 8, "architectures": ["A"], "draftsmith": {"kind": "eagle3"}, "bias": None}
WEIGHTS = {"fc.weight": (4, 8), "norm.weight": (8,)}


def write(folder: Path, config: dict, weights: dict[str, tuple[int, ...]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "weights", "reason"),
    [
        ({}, {}, ""),
        ({"architectures": ["B"], "draftsmith": {"kind": "eagle3", "trained_for": {}}, "bias": None}, {}, ""),
        ({"hidden_size": 16}, {}, "its config.json differs from that of the served drafter in hidden_size"),
        ({"layer_ids": [1]}, {}, "its config.json differs from that of the served drafter in layer_ids"),
        ({}, {"fc.weight": (8, 8)}, "the shape of its weights differs from that of the served drafter in fc.weight"),
        ({}, {"d2t": (4,)}, "the shape of its weights differs from that of the served drafter in d2t"),
    ],
)
def test_another_shape_is_named(config: dict, weights: dict[str, tuple[int, ...]], reason: str, tmp_path: Path) -> None:
    served = write(tmp_path / "served", CONFIG, WEIGHTS)
    other = write(tmp_path / "other", {**CONFIG, **config}, {**WEIGHTS, **weights})
    assert difference(served, other) == reason
    assert bool(difference(other, served)) == bool(reason)


def test_a_swappable_export(
    tiny_target: Target, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script starts the class of the file beside it, which needs neither draftsmith nor vLLM to be imported."""
    monkeypatch.chdir(tmp_path)
    eagle3 = DRAFTERS["eagle3"]
    save_drafter(eagle3.from_target(eagle3.config_class(kind="eagle3", draft_vocab_size=None), tiny_target), Path("c"))
    words = ["export", "c", "--target", str(tiny_target_dir), "--swappable", "--out"]
    assert main([*words, "out", "--engine", "vllm"]) == 0
    *_, command = Path("out/serve_vllm_swappable.sh").read_text().splitlines()
    parts = shlex.split(command)
    assert parts[:5] == ["exec", "env", "VLLM_SERVER_DEV_MODE=1", f"PYTHONPATH={Path('out').resolve()}", "vllm"]
    module, _, name = parts[parts.index("--worker-extension-cls") + 1].partition(".")
    code = f"import sys; import {module}; print(callable({module}.{name}().swap_drafter), 'draftsmith' in sys.modules)"
    blocked = "import sys; sys.modules['vllm'] = None; "
    done = subprocess.run(
        [sys.executable, "-c", blocked + code], cwd=tmp_path / "out", env={}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "False"], done.stderr
    assert main([*words, "other", "--engine", "sglang"]) == 2


@pytest.mark.parametrize("kind", ["medusa", "p_eagle"])
def test_an_export_that_no_server_would_swap_is_refused(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    save_drafter(untrained(kind, tiny_target), tmp_path / kind)
    words = ["export", str(tmp_path / kind), "--engine", "vllm", "--target", tiny_target.name, "--out"]
    assert main([*words, str(tmp_path / "plain")]) == 0
    assert main([*words, str(tmp_path / "swappable"), "--swappable"]) == 2
    assert not (tmp_path / "swappable").exists()
