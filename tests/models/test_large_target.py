"""A target that is larger than the memory a process may have: trained for from stored features and its ends alone."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import MULTIMODAL, RECURRENT, RUN_BY_ENGINES, SERVED, VOCABULARY, family_config, plain_model
from huggingface_hub.errors import LocalEntryNotFoundError
from runs import arguments, make_config
from safetensors.torch import load_file
from tiny_target import save_target, tiny_tokenizer

from draftsmith.data.samples.folder import PREPARED
from draftsmith.data.samples.folder import write_samples as write_columns
from draftsmith.data.samples.sample import Sample
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.storage import model_files
from draftsmith.models.target import target_files
from draftsmith.models.target.loading import decoder_and_head, is_multimodal
from draftsmith.train import train
from draftsmith.train.run_folder.tracking import read_metrics

FAMILIES = SERVED | RECURRENT | MULTIMODAL | RUN_BY_ENGINES
ALLOWED = 620_000_000  # bytes of memory
TAKEN = 490_000_000  # of them by Python, torch, pyarrow and draftsmith
WIDE = {"hidden_size": 256, "intermediate_size": 16384, "num_hidden_layers": 6}  # 51 MB a layer


def write_samples(folder: Path, target: Target) -> None:
    """Random text, which nothing has to decode."""
    folder.mkdir()
    samples = [Sample([3 + 7 * i + j for j in range(12)], [Span(4, 12)]) for i in range(8)]
    write_columns(folder, [samples], iter)
    prepared = {"target": target.name, "target_fingerprint": target.fingerprint(), "written_by": "decoder"}
    (folder / PREPARED).write_text(json.dumps(prepared))


def test_training_with_less_memory_than_the_target_takes(python: str, tmp_path: Path) -> None:
    """A process has room for less than half of the weights: enough for stored features, too little for the target."""
    target_dir = save_target(tmp_path / "target", max_shard_size="100MB", **WIDE)
    assert sum(file.stat().st_size for file in target_dir.glob("*.safetensors")) > 2 * (ALLOWED - TAKEN)
    write_samples(tmp_path / "samples", Target.from_pretrained(target_dir, "cpu"))
    base = {"target": target_dir, "data.samples": tmp_path / "samples", "data.batch_size": 8, "run.device": "cpu"}
    parts: Any = {"data": {"features": "stored"}, "run": {"steps": 2, "precision": "fp32"}}
    whole = train(make_config("medusa", base, tmp_path / "whole", **parts))
    settings = ["medusa", "drafter.draft_vocab_size=null", *arguments(base, tmp_path / "limited", **parts)]
    command = [python, str(Path(__file__).parents[1] / "helpers" / "limited.py"), str(ALLOWED), *settings]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, cwd=tmp_path, env=one_thread)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert outcomes["stored"] == "exit code 0", done.stderr[-3000:]
    assert outcomes["beside"] == "exit code 2"
    assert "error: out of memory" in done.stderr
    loss = read_metrics(whole)[-1]["loss"]
    assert read_metrics(tmp_path / "limited")[-1]["loss"] == pytest.approx(loss, rel=1e-5)


def shards(target: Path) -> dict[str, Path]:
    """The file of each of the target's tensors."""
    index = json.loads((target / "model.safetensors.index.json").read_text())
    return {name: target / file for name, file in index["weight_map"].items()}


@pytest.fixture
def target_in_shards(make_target_dir: Callable[..., Path]) -> Path:
    return make_target_dir(max_shard_size="40KB")


def of_layers(target: Path) -> set[Path]:
    """Files without embedding, head and final norm."""
    files = shards(target)
    return set(files.values()) - {file for name, file in files.items() if ".layers." not in name}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_ends_of_every_family_are_read_alone(model_type: str, tmp_path: Path) -> None:
    """What layers alone are in is not there, and final norm and head give what those of the whole target do."""
    config = family_config(model_type, FAMILIES[model_type])
    whole = plain_model(config)
    decoder = decoder_and_head(whole)[0] if is_multimodal(config) else whole.base_model
    decoder = whole.model if decoder is whole else decoder
    whole.save_pretrained(tmp_path, max_shard_size="10KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    for file in of_layers(tmp_path):
        file.unlink()
    ends = Target.head_from_pretrained(tmp_path, "0" * 16, "cpu", torch.float32)
    hidden, token_ids = torch.randn(5, ends.hidden_size), torch.arange(VOCABULARY)
    head = decoder_and_head(whole)[1] if is_multimodal(config) else whole.get_output_embeddings()
    assert torch.equal(ends.head_module(hidden), head(hidden))
    assert torch.equal(ends.embedding(token_ids), decoder.get_input_embeddings()(token_ids))
    seen: list[torch.Tensor] = []
    last_layer = [m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3][0][-1]
    last_layer.register_forward_hook(lambda *call: seen.append(call[2] if torch.is_tensor(call[2]) else call[2][0]))
    expected = decoder(token_ids[None, :9], use_cache=False).last_hidden_state
    states = decoder.hc_head(seen[0]) if model_type == "hy_v4" else seen[0]  # Hy4's layers give several streams
    assert torch.equal(ends.final_norm(states), expected)


def test_ends_of_a_target_that_is_no_safetensors(make_target_dir: Callable[..., Path]) -> None:
    """It is read whole."""
    directory = make_target_dir()
    tensors = load_file(directory / "model.safetensors")
    torch.save(tensors, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    ends = Target.head_from_pretrained(directory, "0" * 16, "cpu")
    assert torch.equal(ends.head_weight(), tensors["lm_head.weight"])


def test_only_files_with_ends_are_downloaded(target_in_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a Hub name, of which a folder takes the place."""
    asked = set()

    def download(name: str, file: str) -> str:
        assert name == "org/model"
        if not (target_in_shards / file).is_file():
            raise LocalEntryNotFoundError(file)
        asked.add(target_in_shards / file)
        return str(target_in_shards / file)

    monkeypatch.setattr(model_files, "hf_hub_download", download)
    tensors = target_files.stored_tensors("org/model", lambda name: ".layers." not in name)
    assert tensors is not None
    assert set(tensors) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert asked == {*target_in_shards.iterdir()} - of_layers(target_in_shards) - {*target_in_shards.glob("[!m]*")}
    assert of_layers(target_in_shards)


@pytest.mark.parametrize("error", [RuntimeError("no protocol"), OSError("no route"), KeyError("x")])
def test_whatever_the_hub_raises_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the HTTP client's own errors, where HF_ENDPOINT is no address."""

    def download(name: str, file: str) -> str:
        raise error

    monkeypatch.setattr(model_files, "hf_hub_download", download)
    with pytest.raises(UserError, match=r"config.json of 'org/model' cannot be had \(.*\): give a Hub name"):
        Target.without_weights("org/model")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [Path.unlink, truncate])
@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_damaged_shard_is_told(damage: Callable[[Path], None], tensor: str, target_in_shards: Path) -> None:
    file = shards(target_in_shards)[tensor]
    damage(file)
    with pytest.raises(UserError, match=f"{file.name}.*: get it"):
        Target.head_from_pretrained(target_in_shards, "0" * 16, "cpu")


def test_a_missing_end_is_told(target_in_shards: Path) -> None:
    """Transformers would draw it at random."""
    index = target_in_shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"lacks 1 of its weights, lm_head.weight"):
        Target.head_from_pretrained(target_in_shards, "0" * 16, "cpu")
