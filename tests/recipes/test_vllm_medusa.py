"""The plug-in that serves Medusa heads in newer vLLMs, in the hands of a runner that is played here.

That vLLM itself treats it so is for `pytest -m engine` (tests/recipes/test_engines.py).
"""

import importlib.util
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafters import noisy
from torch import Tensor, nn

from draftsmith.models import Target, save_drafter
from draftsmith.recipes.serving.export import PLUGIN, export_checkpoint
from draftsmith.recipes.serving.serve_commands import plugin_config, write_scripts

NUM_DRAFTS = 2


@pytest.fixture(params=[{"num_heads": 3}, {"num_heads": 2, "num_layers": 2, "output": "shared"}])
def exported(request: pytest.FixtureRequest, tiny_target: Target, tmp_path: Path) -> Any:
    """Our own heads, and the folder that was written of them."""
    drafter = noisy("medusa", tiny_target, **request.param)
    save_drafter(drafter, tmp_path / "checkpoint")
    return drafter.eval(), export_checkpoint(tmp_path / "checkpoint", "vllm", tiny_target, tmp_path / "out")


def plugged_in(folder: Path, target_model: nn.Module, num_drafts: int = NUM_DRAFTS) -> Any:
    """As vLLM 0.32.0 does it: `create_custom_proposer`, then `GPUModelRunner.load_model`."""
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=num_drafts))
    spec = importlib.util.spec_from_file_location("vllm_medusa", folder / PLUGIN.name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    proposer = getattr(module, str(plugin_config(num_drafts).model).rpartition(".")[2])(config)
    proposer.load_model(target_model)
    return proposer


class FakeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + 1


def step(proposer: Any, model: Any, states: Tensor, texts: list[list[int]], sampled: list[list[int]]) -> Any:
    """What the runner does: logits of all rows, the sampled tokens at the end of each text, then the drafts."""
    assert torch.equal(model.compute_logits(states), states + 1)
    table, lengths = np.zeros((8, 32), dtype=np.int32), np.zeros(8, dtype=np.int32)
    for row, (text, new) in enumerate(zip(texts, sampled, strict=True)):
        text.extend(new)
        table[row, : len(text)] = text
        lengths[row] = len(text)
    return proposer.propose(sampled, lengths, table, slot_mappings=None)


@torch.no_grad()
def test_each_request_is_drafted_for_from_its_newest_token(exported: Any, tiny_target: Target) -> None:
    drafter, written = exported
    model, states = FakeModel(), torch.randn(8, tiny_target.hidden_size)

    def expected(state: int) -> list[int]:
        heads = list(drafter.heads())[:NUM_DRAFTS]
        return [int(head(block(states[state])).argmax()) for block, head in heads]

    proposer = plugged_in(written.directory, model)
    first, second, third = [1, 2, 3], [4, 5], [6]
    # two prompts are read to their end, the third is not
    assert step(proposer, model, states[:3], [first, second, third], [[7], [8], []]) == [expected(0), expected(1), []]
    # rows: three of the second, no draft accepted; three of the first, one accepted; one of the third, a prompt's end
    found = step(proposer, model, states[:7], [second, first, third], [[9], [7, 7], [8]])
    assert found == [expected(0), expected(4), expected(6)]
    # vLLM dropped a draft, so that rows are not whose they seem: nothing, and all is well again in the next step
    assert step(proposer, model, states[:4], [second, first], [[9], [7]]) == [[], []]
    assert step(proposer, model, states[:2], [second, first], [[9], [7]]) == [expected(0), expected(1)]


def test_more_drafts_than_heads(exported: Any) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens 9: these are"):
        plugged_in(exported[1].directory, FakeModel(), 9)


def test_command(exported: Any) -> None:
    directory = exported[1].directory
    command = shlex.split(write_scripts(exported[1], directory, 9)["vllm_plugin"])
    assert command[:4] == ["env", f"PYTHONPATH={directory}", "vllm", "serve"]
    assert f'"num_speculative_tokens": {exported[0].config.num_heads}' in command[-1]
    assert (directory / "serve_vllm_plugin.sh").read_text().endswith(f"\nexec {shlex.join(command)}\n")
