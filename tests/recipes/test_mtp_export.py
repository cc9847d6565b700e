"""A head for further tokens in a copy of its target: what an engine finds there, and that nothing else changes."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from drafters import first_round, noisy, random_batch
from head_targets import add_head, save_head_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models import Drafter, Target, load_drafter, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.storage.files import file_hash
from draftsmith.recipes.serving.export import Exported, export_checkpoint
from draftsmith.recipes.serving.serve_commands import write_scripts


def load(folder: Path) -> Target:
    return Target.from_pretrained(folder, "cpu", torch.float32)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        assert not found.keys() & load_file(path).keys()  # engines read every file, and the last one would count
        found |= load_file(path)
    return found


def with_part_of(head: dict[str, Tensor], path: Path) -> bool:
    return path.suffix == ".safetensors" and not load_file(path).keys().isdisjoint(head)


def export_head(target: Target, out: Path, **fields: str) -> tuple[Drafter, Exported]:
    """A head that was trained, and what is exported of it."""
    drafter = noisy("mtp", target, **fields)
    save_drafter(drafter, out.with_name("checkpoint"))
    return drafter, export_checkpoint(out.with_name("checkpoint"), "vllm", target, out)


@pytest.mark.parametrize(
    ("family", "shard_size", "count"),
    [("glm4_moe", "40KB", "num_nextn_predict_layers"), ("qwen3_5_text", "50GB", "mtp_num_hidden_layers")],
)
def test_a_trained_head_takes_the_place_of_the_targets_own(
    family: str, shard_size: str, count: str, tmp_path: Path
) -> None:
    """In the same files, under the same index. All other tensors, files and config.json stay as they are."""
    folder = save_head_target(tmp_path / "target", family, shard_size)
    add_head(folder, **{count: 1})
    target = load(folder)
    drafter, _ = export_head(target, tmp_path / "out")
    before, after, head = tensors_in(folder), tensors_in(tmp_path / "out"), drafter.engine_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], head.get(name, tensor)) for name, tensor in before.items())
    unchanged = {name for name in head if torch.equal(after[name], before[name])}
    assert unchanged <= {"model.layers.4.mlp.gate.e_score_correction_bias"}  # which is not trained
    others = {path.name for path in folder.iterdir() if not with_part_of(head, path)}
    assert all(file_hash(folder / name) == file_hash(tmp_path / "out" / name) for name in others)
    assert {"config.json", "tokenizer.json"} < others
    if shard_size == "40KB":
        assert any(name.endswith(".safetensors") for name in others)
    found = load_drafter("mtp", load(tmp_path / "out")).engine_tensors()
    assert all(torch.equal(found[name], tensor) for name, tensor in head.items())


def test_an_untrained_head_is_written_as_it_was(tmp_path: Path) -> None:
    folder = save_head_target(tmp_path / "target", "glm4_moe")
    add_head(folder)
    target = load(folder)
    save_drafter(load_drafter("mtp", target), tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", "vllm", target, tmp_path / "out")
    before, after = tensors_in(folder), tensors_in(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("shard_size", ["40KB", "50GB"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_new_head_is_one_that_vllm_finds(family: str, shard_size: str, tmp_path: Path) -> None:
    """As MiMo's, by the architecture; a Llama is written as the Qwen2 that computes the same."""
    target = load(save_head_target(tmp_path / "target", family, shard_size))
    drafter, exported = export_head(target, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["MiMoForCausalLM"], "qwen2")
    assert config["num_nextn_predict_layers"] == 1
    assert any("mtp" in path.name for path in (tmp_path / "out").iterdir()) == (shard_size == "40KB")
    served, token_ids = load(tmp_path / "out"), random_batch(target).token_ids
    expected, found = (
        one.propose(first_round(one, its_target, token_ids, sample_drafts=True), Chain(3))
        for one, its_target in ((drafter, target), (load_drafter("mtp", served), served))
    )
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    command = write_scripts(exported, tmp_path / "out", 3)["vllm"]
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", str(tmp_path / "out")]
    assert json.loads(words[-1]) == {"method": "mtp", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {}, "no engine serves a Qwen3 target"),
        ("llama", {"head_dim": 16}, "it has head_dim 16"),
        ("llama", {"attention_bias": True}, "it has attention_bias True"),
        ("mistral", {}, "it has sliding_window 5"),
    ],
)
def test_targets_that_no_engine_serves_with_a_head(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    target = load(save_head_target(tmp_path / "target", family, **changes))
    with pytest.raises(UserError, match=message):
        export_head(target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="SGLang's rules for MTP heads"):
        export_checkpoint(tmp_path / "checkpoint", "sglang", target, tmp_path / "out")


def test_a_part_of_a_head_is_refused(tmp_path: Path) -> None:
    folder = save_head_target(tmp_path / "target", "glm4_moe")
    add_head(folder)
    target = load(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.4.hnorm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_drafter(noisy("mtp", target, starting_layers="random"), tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"a part of a head, without model\.layers\.4\.hnorm\.weight"):
        export_checkpoint(tmp_path / "checkpoint", "vllm", target, tmp_path / "out")
