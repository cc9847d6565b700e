"""A real vLLM drafts with an exported head for further tokens what draftsmith drafts, to the token.

DRAFTSMITH_VLLM=VENV pytest -m engine -s tests/recipes/test_mtp_engine.py     VENV holds vLLM 0.32.0 for CPU
"""

import os
from pathlib import Path

import pytest
from head_targets import export_trained_head
from rich.console import Console

from draftsmith.models import load_drafter
from draftsmith.recipes.serving.engine_check import check_engine, print_reports
from draftsmith.recipes.serving.serve_commands import speculative_config

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("family", ["qwen2", "glm4_moe"])
def test_vllm_accepts_what_we_accept(family: str, tmp_path: Path) -> None:
    """In MiMo's layout and in GLM-4.5's."""
    if not (venv := os.environ.get("DRAFTSMITH_VLLM")):
        pytest.skip("DRAFTSMITH_VLLM names no environment with vLLM")
    texts = [f"strike {i} times and heat it" for i in range(50)]
    served = export_trained_head(tmp_path, family, texts)
    prompts = [served.encode(text) for text in texts]
    settings = speculative_config("mtp", served.name, 3)
    report = check_engine(venv, settings, load_drafter("mtp", served), served, prompts, 40)
    print_reports([report], Console(width=120))
    ours, theirs = report.ours, report.engine.counters
    assert (theirs.num_drafts, theirs.num_accepted_tokens) == (ours.num_drafts, ours.num_accepted_tokens)
    assert 0.2 < ours.num_accepted_tokens / (3 * ours.num_drafts) < 0.9
    assert report.texts.identical == 50
