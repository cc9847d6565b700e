"""`auto` and `refresh` given targets and champions that they cannot use: one line says what is wrong and what to do."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import TRAINABLE, untrained
from families import LOCAL_EXPERTS, RUN_BY_ENGINES, SLIDES, family_config, plain_model
from head_targets import save_head_target
from huggingface_hub.errors import LocalEntryNotFoundError
from quantised import FORMS, quantise, set_config
from safetensors.torch import load_file, save_file
from tiny_target import save_target, tiny_tokenizer
from torch import Tensor
from transformers import CONFIG_MAPPING

from draftsmith.models import Target, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.storage import model_files
from draftsmith.recipes.auto import auto
from draftsmith.recipes.auto.contenders import new_contenders
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.engine_rules.loader_rules import is_served
from draftsmith.recipes.refreshing import refresh, traffic
from draftsmith.recipes.refreshing.state import read_state

GOES_ON = "error: it goes on"


# --- targets, each made in a folder where the tiny target is already


def copied(change: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    """The tiny target with a change in its files."""

    def make(folder: Path, tiny: Path) -> None:
        shutil.copytree(tiny, folder)
        change(folder)

    return make


def with_tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path, Path], None]:
    def write(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})

    return copied(write)


def with_fields(**fields: Any) -> Callable[[Path, Path], None]:
    return copied(lambda folder: set_config(folder, **fields))


def saved(**changes: Any) -> Callable[[Path, Path], None]:
    return lambda folder, _: save_target(folder, **changes) and None


def config_alone(model_type: str) -> Callable[[Path, Path], None]:
    return lambda folder, _: CONFIG_MAPPING[model_type]().save_pretrained(folder)


def of_family(model_type: str, changes: dict[str, Any]) -> Callable[[Path, Path], None]:
    def make(folder: Path, _: Path) -> None:
        plain_model(family_config(model_type, changes)).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    return make


def without_a_shard(folder: Path, _: Path) -> None:
    save_target(folder, max_shard_size="60kB")
    min(folder.glob("model-*.safetensors")).unlink()


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def quantised(folder: Path, tiny: Path) -> None:
    quantise(tiny, folder, folder.with_name("plain"), FORMS["fp8 in blocks"])


def without_end(folder: Path) -> None:
    for path in folder.glob("*config.json"):
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in fields.items() if not key.startswith("eos_token")}))
    set_config(folder, eos_token_id=None)


OTHERS = r"give another target \(docs/targets.md lists"
WHOLE = "get it whole"
# How a target is made, and what is told of it: by both commands, or by `auto` and by `refresh`.
TARGETS: dict[str, tuple[Callable[[Path, Path], Any], str | tuple[str, str]]] = {
    "nowhere": (lambda folder, _: None, "no target at .*nowhere': give a Hub name or a model directory"),
    "a file": (lambda folder, _: folder.write_text("x"), "is a file: give a Hub name or a model directory"),
    "an empty folder": (lambda folder, _: folder.mkdir(), "for there is no config.json: give a Hub name"),
    "no JSON": (copied(lambda folder: (folder / "config.json").write_text("{")), "config.json is not JSON"),
    "no weights": (copied(lambda folder: (folder / "model.safetensors").unlink()), f"has neither model.*: {WHOLE}"),
    "a shard less": (without_a_shard, f"lacks model-00001-of-.*, which its index names: {WHOLE}"),
    "half a file": (copied(lambda folder: cut(folder / "model.safetensors")), "is damaged .*: get it or write it anew"),
    "a layer less": (
        with_tensors(lambda tensors: {name: tensors[name] for name in tensors if "layers.3" not in name}),
        "lacks 9 of its weights.*: give a whole",
    ),
    "NaN": (
        with_tensors(lambda tensors: {**tensors, "model.norm.weight": torch.full([32], math.nan)}),
        "model.norm.weight holds NaN or infinity.*: take another one",
    ),
    "weights of another size": (with_fields(intermediate_size=48), "these files are not of one model, take another"),
    "weights of zeros": (
        with_tensors(lambda tensors: {name: 0 * tensors[name] for name in tensors}),
        f"its logits are zero or no numbers, in float32: its weights are damaged.*; {OTHERS}",
    ),
    "weights that are too large": (
        with_tensors(lambda tensors: {**tensors, "lm_head.weight": 3e38 * tensors["lm_head.weight"].sign()}),
        f"its logits are zero or no numbers, in float32: its weights are damaged.*; {OTHERS}",
    ),
    "a drafter": (
        lambda folder, tiny: save_drafter(untrained("eagle3", Target.from_pretrained(tiny, "cpu")), folder),
        "is a drafter: give the target that it was trained for",
    ),
    "no tokenizer": (
        copied(lambda folder: [path.unlink() for path in folder.glob("tokenizer*")]),
        "the tokenizer of .* does not load.*: give a model whose tokenizer files, such as tokenizer.json, are whole",
    ),
    "fewer tokens than its tokenizer": (
        saved(vocab_size=60, bos_token_id=0, eos_token_id=0, pad_token_id=0),
        (
            "holds token id 2.., and the vocabulary of .* ends at 59: use the tokenizer that the target was trained",
            "made for a target with vocab_size 300, but .* has 60: use the target that it was trained on",
        ),
    ),
    "unknown": (with_fields(model_type="of_its_own"), "does not recognize this architecture.*: give a whole copy"),
    "an encoder-decoder": (config_alone("t5"), "is an encoder-decoder, .*: give another"),
    "a masked model": (config_alone("bert"), "reads text in both directions.*; give another target"),
    "ALiBi": (config_alone("bloom"), "ALiBi.*; give another target"),
    "a rule of its own": (of_family("jamba", RUN_BY_ENGINES["jamba"]), f"cannot be decoded here.*prepare.*{OTHERS}"),
    "other logits": (
        of_family("phimoe", {**LOCAL_EXPERTS, **SLIDES}),
        f"PhimoeForCausalLM cannot be decoded here: .*; {OTHERS}",
    ),
    "a context for nothing": (saved(max_position_embeddings=12), f"it reads 12 tokens at most.*; {OTHERS}"),
    "a context without room": (
        saved(max_position_embeddings=16),
        "--max-new-tokens 16 leaves no room for a prompt, for .* reads 16 tokens at most: give less",
    ),
    "a context too short for the traffic": (
        saved(max_position_embeddings=20),
        (
            "--traffic .*: 0 different prompts, beside 120 of more than 4 tokens .* give less for longer prompts",
            "--traffic: none of 120 new prompts can be answered, 120 of more than 4 tokens .*: give others",
        ),
    ),
    "AWQ": (
        with_fields(quantization_config={"quant_method": "awq", "bits": 4}),
        "quantised by 'awq', .*: give the BF16 model",
    ),
    "fp8": (quantised, GOES_ON),
    "no end": (copied(without_end), GOES_ON),
    "one layer": (
        saved(num_hidden_layers=1),
        ("--drafters: leave out eagle3, which cannot be trained for .*: .* the target has 1 layers", GOES_ON),
    ),
}


@pytest.fixture(scope="module")
def champion(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("champion") / "medusa"
    save_drafter(untrained("medusa", tiny_target), folder)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    rows = [{"prompt": f"strike {'the iron ' * (i % 4)}{i}"} for i in range(120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Refuse = Callable[..., None]


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command, twice, and expect a line each time; nothing is written but a first champion and its target."""

    def goes_on(*_: Any) -> None:
        raise UserError("it goes on")

    monkeypatch.setattr(auto, "make_plan", goes_on)
    monkeypatch.setattr(refresh.Refresh, "look", goes_on)
    monkeypatch.setattr(traffic, "NOISE_BITS", math.inf)

    def contents() -> dict[Path, bytes]:
        files = (path for path in tmp_path.rglob("*") if path.is_file() and "champion" not in str(path))
        return {path: path.read_bytes() for path in files if path.name != "state.json"}

    def run(told: str, command: str, *arguments: Any) -> None:
        given = [command, "--out", tmp_path / "out", "--device", "cpu", "--max-new-tokens", 16, *arguments]
        before = contents()
        capsys.readouterr()  # bars of the models that a test has written
        for _ in range(1 if told == GOES_ON else 2):
            code, printed = main([str(argument) for argument in given]), capsys.readouterr()
            (line,) = printed.err.splitlines()
            assert re.match("error: ", line)
            assert re.search(told, line), line
            assert code == 2
            if told != GOES_ON:
                assert not printed.out
                assert contents() == before

    return run


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_cannot_be_used_is_told_in_a_line(
    name: str, champion: Path, log: Path, tiny_target_dir: Path, tmp_path: Path, refuse: Refuse
) -> None:
    make, told = TARGETS[name]
    folder = tmp_path / name
    make(folder, tiny_target_dir)
    by_auto, by_refresh = (told, told) if isinstance(told, str) else told
    given = ("--target", folder, "--traffic", log)
    refuse(by_auto, "auto", *given, "--drafters", "medusa,eagle3")
    refuse(by_refresh, "refresh", *given, "--drafter", champion)


def test_a_target_without_an_end_has_no_token_for_masks(
    log: Path, tiny_target_dir: Path, tmp_path: Path, refuse: Refuse
) -> None:
    copied(without_end)(tmp_path / "target", tiny_target_dir)
    told = "--drafters: leave out dflash, which cannot be trained for .*: .* names no end of text for mask slots"
    refuse(told, "auto", "--target", tmp_path / "target", "--traffic", log)


def test_a_hub_that_cannot_be_reached_is_told_in_a_line(
    champion: Path, log: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any) -> None:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(model_files, "hf_hub_download", unreachable)
    told = (
        "no target at 'some/model', for it is no folder, and the Hub has none of this name or cannot be reached: give"
    )
    for command in (["auto"], ["refresh", "--drafter", champion]):
        refuse(told, *command, "--target", "some/model", "--traffic", log)


# --- engines


@pytest.mark.parametrize(
    ("engine", "kinds", "told"),
    [
        ("sglang", "medusa,hydra", "--engine sglang serves none of --drafters medusa,hydra: SGLang serves no medusa"),
        ("vllm", "hydra", "--engine vllm serves none of --drafters hydra: no engine serves Hydra heads; name other"),
        (
            "vllm",
            "eagle3",
            "--engine vllm would serve none of --drafters eagle3 for .*: of eagle3, vLLM .*; name other",
        ),
    ],
)
def test_what_the_engine_does_not_serve_is_not_trained(
    engine: str, kinds: str, told: str, log: Path, tmp_path: Path, refuse: Refuse
) -> None:
    """The last is for the target: EAGLE-3 reads one layer of two, and engines want the states after two or more."""
    save_target(tmp_path / "target", num_hidden_layers=2)
    refuse(told, "auto", "--target", tmp_path / "target", "--traffic", log, "--engine", engine, "--drafters", kinds)


def test_a_head_that_no_engine_finds_in_its_target_is_not_trained(log: Path, tmp_path: Path, refuse: Refuse) -> None:
    save_head_target(tmp_path / "target", "qwen3")
    told = "of mtp, no engine serves a Qwen3 target with a head for further tokens: train eagle3 or dflash"
    given = ("--target", tmp_path / "target", "--traffic", log, "--engine", "vllm", "--drafters", "mtp")
    refuse(told, "auto", *given)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_ordinary_target_lets_all_race_that_the_engine_serves(engine: str, tiny_target: Target) -> None:
    kinds = [kind for kind in TRAINABLE if is_served(kind, engine)]
    assert list(new_contenders(kinds, tiny_target, engine)) == kinds


def test_kinds_that_the_engine_serves_race_without_the_others(tmp_path: Path, capsys: Any) -> None:
    target = Target.from_pretrained(save_target(tmp_path / "target", num_hidden_layers=2), "cpu", torch.float32)
    assert list(new_contenders(["eagle3", "medusa"], target, "vllm")) == ["medusa"]
    assert "eagle3 does not race: vLLM" in capsys.readouterr().err
    assert list(new_contenders(["eagle3", "medusa"], target, None)) == ["eagle3", "medusa"]


# --- champions


def trained_for(kind: str = "medusa", **changes: Any) -> Callable[[Path, Target], Any]:
    """A champion of a target that differs from the tiny one in its config."""

    def make(folder: Path, _: Target) -> Path:
        save_target(folder / "target", **changes)
        own = Target.from_pretrained(folder / "target", "cpu", torch.float32)
        save_drafter(untrained(kind, own), folder / "drafter")
        return folder / "drafter"

    return make


def broken(change: Callable[[Path], Any]) -> Callable[[Path, Target], Any]:
    """A champion of the tiny target, with a change in its files."""

    def make(folder: Path, target: Target) -> Path:
        save_drafter(untrained("medusa", target), folder / "drafter")
        change(folder / "drafter")
        return folder / "drafter"

    return make


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(tensors.items())[: len(tensors) // 2])


def with_other_tokens(tiny: Path, folder: Path) -> None:
    """A copy of a target in whose tokenizer two tokens have changed places."""
    shutil.copytree(tiny, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))


BESIDE = "give the checkpoint of a drafter that is trained beside its target"
CHAMPIONS: dict[str, tuple[Callable[[Path, Target], Any], str]] = {
    "other vocabulary": (trained_for(vocab_size=320), "vocab_size 320, but .* has 300: use the target that it was"),
    "other width": (trained_for(hidden_size=64), "hidden_size 64, but .* has 32: use the target that it was trained"),
    "more layers": (trained_for("eagle3", num_hidden_layers=8), r"drafter/?: layer_ids \[2, 4, 5\]: .* has 4 layers"),
    "a draft model": (trained_for("draft_model", vocab_size=320), "a draft model must share the target's vocabulary"),
    "ngram": (lambda *_: "ngram", f"--drafter ngram: {BESIDE}"),
    "lookahead": (lambda *_: "lookahead", f"--drafter lookahead: {BESIDE}"),
    "a kind": (lambda *_: "medusa", "'medusa' needs a checkpoint: give the directory of a trained one"),
    "nowhere": (lambda folder, _: folder / "none", "no drafter at .*: give a checkpoint directory"),
    "no config": (broken(lambda folder: (folder / "config.json").unlink()), "holds no config.json: give a checkpoint"),
    "no weights": (
        broken(lambda folder: (folder / "model.safetensors").unlink()),
        "no .safetensors file: get it whole",
    ),
    "half a file": (broken(lambda folder: cut(folder / "model.safetensors")), "is damaged .*: get it or write it anew"),
    "half the weights": (
        broken(lambda folder: change_weights(folder, half)),
        "drafter: these Medusa heads: tensors missing.*; take another copy",
    ),
    "NaN": (
        broken(lambda folder: change_weights(folder, lambda found: {key: found[key] * math.nan for key in found})),
        "drafter: .* holds NaN or infinity.*: take another one",
    ),
    "unknown": (
        broken(lambda folder: set_config(folder, draftsmith={"kind": "of_its_own"})),
        "drafter: this checkpoint holds a drafter of kind 'of_its_own', which this version does not know: give one of",
    ),
}


@pytest.mark.parametrize("name", CHAMPIONS)
def test_a_champion_that_cannot_be_used_is_told_in_a_line(
    name: str, log: Path, tiny_target: Target, tiny_target_dir: Path, tmp_path: Path, refuse: Refuse
) -> None:
    make, told = CHAMPIONS[name]
    drafter = make(tmp_path / "its own", tiny_target)
    refuse(told, "refresh", "--target", tiny_target_dir, "--traffic", log, "--drafter", drafter)
    assert not (tmp_path / "out").exists()


def test_a_first_call_without_a_champion_is_told_in_a_line(log: Path, tmp_path: Path, refuse: Refuse) -> None:
    """The target, which may take minutes to load, is not looked at before."""
    (tmp_path / "config.json").write_text("{}")
    told = "out holds no champion yet: give the one that serves now by --drafter"
    refuse(told, "refresh", "--target", tmp_path, "--traffic", log)


@pytest.mark.parametrize("more", [[], ["--follow", 1]])
def test_a_new_target_of_another_vocabulary_changes_nothing(
    more: list[Any], champion: Path, log: Path, tiny_target_dir: Path, tmp_path: Path, refuse: Refuse
) -> None:
    """The round that was going on for the old target goes on afterwards, with its prompts."""
    first = ("refresh", "--target", tiny_target_dir, "--traffic", log)
    refuse(GOES_ON, *first, "--drafter", champion)
    save_target(tmp_path / "v2", vocab_size=320)
    told = "champions/0: .* made for a target with vocab_size 300, but .*v2 has 320: use the target that it was trained"
    refuse(told, "refresh", "--target", tmp_path / "v2", "--traffic", log, *more)
    with_other_tokens(tiny_target_dir, tmp_path / "v3")
    refuse(
        "champions/0 was made with another tokenizer", "refresh", "--target", tmp_path / "v3", *more, "--traffic", log
    )
    refuse(GOES_ON, *first)
    assert [round.number for round in read_state(tmp_path / "out").rounds] == [1]
