"""Targets that are broken or lie: each loads, or is refused in one line, soon, without memory; no code of it runs."""

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_values import VALUES, changed, paths
from safetensors.torch import load_file, save_file

from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.target.chat_template import opened_question

CASES = 15  # of each file and way to load


@pytest.fixture
def folder(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target, to be broken."""
    return Path(shutil.copytree(tiny_target_dir, tmp_path / "target"))


def whole(folder: Path) -> Target:
    return Target.from_pretrained(folder, "cpu", torch.float32)


def head(folder: Path) -> Target:
    return Target.head_from_pretrained(folder, None, "cpu", torch.float32)


def first_layer(folder: Path) -> Target:
    return Target.first_layers_from_pretrained(folder, 1, torch.device("cpu"), torch.float32)


WAYS = {"whole": whole, "head": head, "first layer": first_layer, "without weights": Target.without_weights}


def refusal(folder: Path, load: Callable[[Path], Target] = whole) -> str:
    """What loading says, nothing where it loads; advice to switch safety off and further lines are no part of it."""
    try:
        load(folder).encode("hello")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_no_value_in_a_file_of_json_gives_a_traceback(file: str, way: str, folder: Path) -> None:
    text = (folder / file).read_text()
    more = {
        "layer_types",
        "text_config",
        "sliding_window",
        "quantization_config",
        "rope_scaling",
        "dtype",
        "eos_token_id",
        "auto_map",
    }
    cases = [(path, value) for path in [*paths(json.loads(text)), *((key,) for key in more)] for value in VALUES]
    for path, value in random.Random(file + way).sample(cases, CASES):
        (folder / file).write_text(changed(text, path, value))
        told = refusal(folder, WAYS[way])
        assert not any(word in told for word in ("\n", "trust_remote_code=", "weights_only"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**8),
        ("num_hidden_layers", 1000),
        ("num_attention_heads", 10**7),
        ("head_dim", 10**9),
        ("vocab_size", 10**12),
        ("intermediate_size", 10**9),
    ],
)
@pytest.mark.parametrize("way", ["whole", "head"])
def test_sizes_are_held_against_the_tensors_first(way: str, key: str, value: int, folder: Path) -> None:
    """Layers by the million would be built one by one; weights that no file holds would be allocated."""
    (folder / "config.json").write_text(changed((folder / "config.json").read_text(), (key,), json.dumps(value)))
    start = time.process_time()
    assert refusal(folder, WAYS[way]) or way == "head"  # which has no layers
    assert time.process_time() - start < 1


def test_a_chat_that_the_tokenizer_does_not_encode_is_a_line(folder: Path) -> None:
    """The library compares each text's length with the limit that the tokenizer's file gives."""
    content = json.loads((folder / "tokenizer_config.json").read_text())
    changes = {"chat_template": "{{ messages[0].content }}", "model_max_length": []}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | changes))
    with pytest.raises(UserError, match="does not encode a text"):
        opened_question(whole(folder), "hello")


def with_config(**fields: Any) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return write


def with_index(file: Any) -> Callable[[Path], Any]:
    """Name `file` as the place of all weights."""

    def write(folder: Path) -> None:
        weights = folder / "model.safetensors"
        places = dict.fromkeys(load_file(weights), file)
        weights.rename(folder.parent / "outside.safetensors")
        (folder / "link.safetensors").symlink_to(folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))

    return write


def with_norm(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] = change(tensors["model.norm.weight"])
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return write


def text(file: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_text(content)


def pickled(folder: Path) -> None:
    """Weights that touch a file when they are read by a careless loader."""

    class Payload:
        def __reduce__(self) -> Any:
            return (Path.touch, (folder / "ran",))

    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload()}, folder / "pytorch_model.bin")


def with_own_code(folder: Path) -> None:
    with_config(model_type="of_its_own", auto_map={"AutoConfig": "code.Config"})(folder)
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Config: pass\n")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "Git LFS": (text("model.safetensors", "version https://git-lfs.github.com/spec/v1"), "Git LFS pointer"),
    "copied without links": (text("config.json", "../../blobs/0a1b2c"), "text of a link"),
    "a pickle": (pickled, "holds more than tensors, and no code of it is run"),
    "code of its own": (with_own_code, "needs code that comes with it, and draftsmith runs none"),
    "NaN": (with_norm(lambda norm: norm * float("nan")), "model.norm.weight holds NaN"),
    "another shape": (with_norm(lambda norm: norm[:2].clone()), r"model.norm.weight has the shape \[2\], and \[32\]"),
    "an index out of its folder": (with_index("../outside.safetensors"), "names '../outside.safetensors', which"),
    "an index to a link": (with_index("link.safetensors"), "names 'link.safetensors', which is no file of its folder"),
    "an index with a zero byte": (with_index("a\0b"), r"names 'a\\x00b', which is no file of its folder"),
    "an index of lists": (with_index(["x"]), r"names .* which is no file of its folder"),
    "an index to nowhere": (with_index("gone.safetensors"), "lacks gone.safetensors"),
    "an index with a long name": (with_index("x" * 300), "lacks x+, which its index names|no file of its folder"),
    "a damaged tokenizer": (text("tokenizer.json", '{"model": 1}'), "the tokenizer of .* does not load"),
    "a damaged generation config": (text("generation_config.json", "{"), "generation_config.json is not JSON"),
    "an end that is no token": (text("generation_config.json", '{"eos_token_id": 9999}'), "mend eos_token_id"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "unknown rope": (with_config(rope_parameters={"rope_type": "x", "rope_theta": 1.0}), "does not load|no model"),
    "unknown quantisation": (with_config(quantization_config={"quant_method": "awq"}), "quantised by .awq."),
    "no language model": (with_config(text_config=-1), "has '-1' where the language model's config belongs"),
    "weights elsewhere": (with_config(transformers_weights="../x"), "has transformers_weights, which is not read"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_targets_are_called_what_they_are(case: str, folder: Path) -> None:
    breaks, message = BROKEN[case]
    breaks(folder)
    with pytest.raises(UserError, match=message) as refused:
        whole(folder)
    assert not any(word in str(refused.value) for word in ("weights_only", "trust_remote_code", "\n"))
    assert not (folder / "ran").exists()


def test_what_is_no_folder_of_a_target(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert "there is no config.json" in refusal(tmp_path / "empty")
    assert "is a file: give a Hub name or a model directory" in refusal(tmp_path / "file")


def test_links_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    """Its snapshots consist of links to blobs, which are named by their hashes."""
    snapshot, blobs = tmp_path / "cache/snapshots/1234", tmp_path / "cache/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    with_index("model-1.safetensors")(folder)
    (tmp_path / "outside.safetensors").rename(folder / "model-1.safetensors")
    (folder / "link.safetensors").unlink()
    for number, file in enumerate(folder.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert not refusal(snapshot)
