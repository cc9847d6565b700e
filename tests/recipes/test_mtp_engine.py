"""A real vLLM drafts with an exported head for further tokens what draftsmith drafts, to the token.

DRAFTSMITH_VLLM=VENV pytest -m engine -s tests/recipes/test_mtp_engine.py     VENV holds vLLM 0.32.0 for CPU
"""

import os
from pathlib import Path

import pytest
import torch
from drafters import trained
from head_targets import save_head_target
from rich.console import Console
from safetensors.torch import load_file, save_file

from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.recipes.serving.engine_check import check_engine, print_reports
from draftsmith.recipes.serving.export import export_checkpoint
from draftsmith.recipes.serving.serve_commands import speculative_config

pytestmark = pytest.mark.engine
WIDE = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}  # as vLLM's CPU has heads


@pytest.mark.parametrize("family", ["qwen2", "glm4_moe"])
def test_vllm_accepts_what_we_accept(family: str, tmp_path: Path) -> None:
    """In MiMo's layout and in GLM-4.5's.

    Rough norms and noise in the weights, so that a wrong state, order or norm changes the counters.
    """
    if not (venv := os.environ.get("DRAFTSMITH_VLLM")):
        pytest.skip("DRAFTSMITH_VLLM names no environment with vLLM")
    weights = save_head_target(tmp_path / "target", family, **WIDE, initializer_range=0.12) / "model.safetensors"
    tensors = load_file(weights)
    torch.manual_seed(3)
    tensors["model.norm.weight"] = 1 + 0.8 * torch.randn(64)
    save_file(tensors, weights, metadata={"format": "pt"})
    target = Target.from_pretrained(tmp_path / "target", "cpu", torch.float32)
    prompts = [target.encode(f"strike {i} times and heat it") for i in range(50)]
    drafter = trained("mtp", target, [prompt for prompt in prompts for _ in range(2)], num_steps=150)
    torch.manual_seed(0)  # other noise may leave too little that is accepted
    for parameter in drafter.parameters():
        parameter.data += 0.6 * torch.randn_like(parameter) * parameter.abs().mean()
    save_drafter(drafter, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", "vllm", target, tmp_path / "out")
    served = Target.from_pretrained(tmp_path / "out", "cpu", torch.float32)
    settings = speculative_config("mtp", str(tmp_path / "out"), 3)
    report = check_engine(venv, settings, load_drafter("mtp", served), served, prompts, 40)
    print_reports([report], Console(width=120))
    ours, theirs = report.ours, report.engine.counters
    assert (theirs.num_drafts, theirs.num_accepted_tokens) == (ours.num_drafts, ours.num_accepted_tokens)
    assert 0.2 < ours.num_accepted_tokens / (3 * ours.num_drafts) < 0.9
    assert report.texts.identical == 50
