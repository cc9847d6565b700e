"""Checkpoints of drafters that are broken or lie: each loads, or is refused in one line, soon and without memory."""

import json
import pickle
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import TRAINABLE, noisy
from hostile_values import VALUES, changed, paths
from public_checkpoints import PUBLIC
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models import DRAFTERS, Target, load_drafter, save_drafter
from draftsmith.models.drafter_configs import DRAFTER_CONFIGS
from draftsmith.models.errors import UserError

CASES = 30  # of each layout


@pytest.fixture(scope="module")
def deep_target(make_target_dir: Any) -> Target:
    return Target.from_pretrained(make_target_dir(num_hidden_layers=8), "cpu", torch.float32)


def refusal(folder: Path, target: Target) -> str:
    """What `load_drafter` says of a checkpoint, in one line; nothing where it loads."""
    try:
        load_drafter(folder, target)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", [*PUBLIC, *TRAINABLE])
def test_no_value_in_config_json_gives_a_traceback(layout: str, deep_target: Target, tmp_path: Path) -> None:
    """Any entry may hold anything, or be left out. 10^12 heads would take for ever, or all memory."""
    folder = tmp_path / "head"
    if layout in PUBLIC:
        PUBLIC[layout](deep_target, folder)
    else:
        save_drafter(noisy(layout, deep_target), folder)
    file = folder / "config.json"
    text = file.read_text()
    cases = [(path, value) for path in paths(json.loads(text)) for value in VALUES]
    for path, value in random.Random(layout).sample(cases, min(CASES, len(cases))):
        file.write_text(changed(text, path, value))
        assert "\n" not in refusal(folder, deep_target)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("eagle3", {"num_attention_heads": 10**6}),
        ("eagle3", {"head_dim": 10**6}),
        ("eagle", {"intermediate_size": 10**6}),
        ("eagle3", {"draft_vocab_size": 10**9}),
        ("medusa", {"num_heads": 10**8}),
        ("p_eagle", {"num_hidden_layers": 10**8}),
        ("mlp_speculator", {"inner_dim": 10**6, "n_predict": 100}),
        ("draft_model", {"num_hidden_layers": 10**8}),
        ("draft_model", {"vocab_size": 10**12}),
    ],
)
def test_sizes_are_held_against_the_tensors_first(
    kind: str, changes: dict[str, Any], tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules of such a config would take gigabytes, or a loop of hours."""
    save_drafter(noisy(kind, tiny_target), tmp_path)
    change_config(tmp_path, changes)
    made: list[Any] = []
    monkeypatch.setattr(DRAFTERS[kind], "__init__", counting(DRAFTERS[kind].__init__, made))
    start = time.process_time()
    message = refusal(tmp_path, tiny_target)
    assert message
    assert "cpu" not in made
    assert time.process_time() - start < 1


def counting(build: Callable[..., None], made: list[Any]) -> Callable[..., None]:
    """`build`, which notes on which device it runs."""

    def noted(*args: Any, **options: Any) -> None:
        made.append(str(torch.get_default_device()))
        build(*args, **options)

    return noted


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_newer_checkpoint_says_that_it_is_newer(tiny_target: Target, tmp_path: Path) -> None:
    save_drafter(noisy("eagle3", tiny_target), tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())["draftsmith"]
    change_config(tmp_path, {"draftsmith": {**own, "speed": "ludicrous"}})
    assert "'speed', which this version of draftsmith does not know: update" in refusal(tmp_path, tiny_target)


@pytest.mark.parametrize("context", [0, -128])
def test_a_draft_model_without_room_for_text_is_refused(context: int, tiny_target: Target, tmp_path: Path) -> None:
    """It would load, and then fail at its first token."""
    save_drafter(noisy("draft_model", tiny_target), tmp_path)
    change_config(tmp_path, {"max_position_embeddings": context})
    assert f"gives texts {context} tokens (max_position_embeddings)" in refusal(tmp_path, tiny_target)


@pytest.mark.parametrize("kind", [kind for kind in DRAFTER_CONFIGS if kind != "none"])
def test_limits_hold_where_a_config_is_made_in_python(kind: str) -> None:
    """By the types of its fields, whatever they are: no number of parts may be 0, no weight NaN, no text a number."""
    config_class = DRAFTER_CONFIGS[kind]
    for name, value in vars(config_class()).items():
        texts = () if isinstance(value, str) or name == "model" else ("x",)
        for wrong in (-1, 10**12, float("nan"), object(), [None], *texts):
            with pytest.raises(UserError, match=rf"^drafter\.{name}[.=]"):
                config_class(**{name: wrong})


# --- files of weights


def with_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Write the tensors anew, one of them changed."""

    def rewrite(file: Path) -> None:
        tensors = load_file(file)
        save_file({**tensors, name: change(tensors[name]).contiguous()}, file)

    return rewrite


def pickled(content: Callable[[dict[str, Tensor]], Any], packed: bool = False) -> Callable[[Path], None]:
    """Put a file of torch.save in place of the safetensors file; `packed`: its parts are compressed."""

    def rewrite(file: Path) -> None:
        tensors = load_file(file)
        file.unlink()
        path = file.with_name("pytorch_model.bin")
        torch.save(content(tensors), path)
        if packed:
            with zipfile.ZipFile(path) as archive:
                parts = {name: archive.read(name) for name in archive.namelist()}
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, part in parts.items():
                    archive.writestr(name, part)

    return rewrite


def put(file: Path, content: bytes) -> None:
    file.write_bytes(content)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "Git LFS": (lambda file: put(file, b"version https://git-lfs.github.com/spec/v1"), "Git LFS pointer, .*lfs pull"),
    "copied without links": (lambda file: put(file, b"../../blobs/0a1b2c"), "text of a link .*cp -rL"),
    "a web page": (lambda file: put(file, b"<!DOCTYPE html><html>"), "a web page"),
    "empty": (lambda file: put(file, b""), "is damaged"),
    "cut": (lambda file: put(file, file.read_bytes()[:-9]), "is damaged"),
    "a pickle by another name": (lambda file: put(file, pickle.dumps({"a": 1})), "is a pickle, .*safetensors"),
    "gone": (lambda file: file.unlink(), "holds no .safetensors file"),
    "NaN": (with_tensor("norm.weight", lambda norm: norm * float("nan")), "norm.weight holds NaN"),
    "infinity": (with_tensor("norm.weight", lambda norm: norm / 0), "norm.weight holds NaN or infinity"),
    "whole numbers": (with_tensor("norm.weight", Tensor.int), "norm.weight is of type torch.int32"),
    "another shape": (with_tensor("norm.weight", lambda norm: norm[:2]), r"\[2\] instead of \[32\]"),
    "no such token": (with_tensor("d2t", lambda d2t: d2t + 10**6), "draft vocabulary is not of distinct token ids"),
    "twice": (lambda file: put(file.with_name("b.safetensors"), file.read_bytes()), "is in .*another file"),
    "pickled list": (pickled(lambda tensors: list(tensors.values())), "other things than plain tensors"),
    "pickled number": (pickled(lambda tensors: {**tensors, "norm.weight": 3}), "other things than plain tensors"),
    "pickled sparse": (pickled(lambda tensors: {"norm.weight": torch.eye(3).to_sparse()}), "other things than plain"),
    "pickled without memory": (pickled(lambda tensors: {"a": torch.empty(10**12, device="meta")}), "larger tensors"),
    "pickled repetition": (pickled(lambda tensors: {"a": torch.ones(1).expand(10**12)}), "claims larger tensors"),
    "packed pickle": (pickled(lambda tensors: tensors, packed=True), "other things than plain tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_weights_are_called_what_they_are(case: str, tiny_target: Target, tmp_path: Path) -> None:
    """And no message tells how to switch safety off."""
    save_drafter(noisy("eagle3", tiny_target, draft_vocab_size=6), tmp_path)
    breaks, message = BROKEN[case]
    breaks(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message) as refused:
        load_drafter(tmp_path, tiny_target)
    assert not any(word in str(refused.value) for word in ("weights_only", "trust_remote_code", "\n"))


def test_what_is_no_folder_of_a_checkpoint(tiny_target: Target, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert "holds no config.json" in refusal(tmp_path / "empty", tiny_target)
    assert "is a file: give the folder" in refusal(tmp_path / "file", tiny_target)
    assert "longer than 255 bytes" in refusal(Path("x" * 300), tiny_target)
    for content, reason in (("[]", "no JSON object"), ("{", "is not JSON"), ("../../blobs/0a", "the text of a link")):
        (tmp_path / "empty/config.json").write_text(content)
        assert reason in refusal(tmp_path / "empty", tiny_target)
