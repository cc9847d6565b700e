"""Exported folders: what engines read there, and that it is the drafter that was trained."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import target_and_plain_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.schedule import Schedule, for_sglang, for_vllm
from draftsmith.models import DRAFTERS, Checkpoint, Drafter, Target, load_drafter, save_drafter
from draftsmith.models.drafter_configs import DraftModelConfig
from draftsmith.models.drafter_parts.drafts import Draft
from draftsmith.models.errors import UserError
from draftsmith.recipes.engine_rules.engine_table import how_known
from draftsmith.recipes.engine_rules.loader_rules import LOADER_RULES, UNSERVED
from draftsmith.recipes.serving import export
from draftsmith.recipes.serving.export import export_checkpoint, write_files
from draftsmith.recipes.serving.serve_commands import write_scripts

DRAFT_VOCABULARY = [3, 7, 40, 41, 200, 271]  # of the tiny target's tokens


def save_checkpoint(kind: str, target: Target, directory: Path, **fields: Any) -> Path:
    """A drafter with noise on its starting weights, so that weights left at their start would show."""
    torch.manual_seed(0)
    drafter_class = DRAFTERS[kind]
    drafter = drafter_class.from_target(drafter_class.config_class(kind=kind, **fields), target)
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    counts[DRAFT_VOCABULARY] = torch.arange(len(DRAFT_VOCABULARY)) + 1  # the rarest first, for order must not count
    drafter.fit_vocabulary(counts)
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_drafter(drafter, directory)
    return directory


def drafts_of(drafter: Drafter, target: Target, draft_length: int) -> list[Draft]:
    """Everything it proposes while two prompts are decoded."""
    found: list[Draft] = []
    propose = drafter.propose
    drafter.propose = lambda state, length: found.append(propose(state, length)) or found[-1]  # type: ignore
    decoder = SpeculativeDecoder(target, drafter)
    decoder.generate(["heat the iron", "A draft is"], max_new_tokens=10, draft_length=draft_length, temperature=1.0)
    return found


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("eagle", {}),
        ("eagle3", {}),
        ("eagle3", {"draft_vocab_size": 6}),
        ("p_eagle", {"num_layers": 2, "draft_vocab_size": 6}),
        ("dflash", {"num_layers": 2}),
        ("dflash2", {"num_layers": 2}),
        ("dspark", {"num_layers": 2}),
        ("domino", {"num_layers": 2}),
        ("medusa", {}),
        ("draft_model", {"num_layers": 2}),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_exported_drafter_proposes_the_same(
    engine: str, kind: str, fields: dict[str, Any], tiny_target: Target, tmp_path: Path
) -> None:
    """Tokens and probabilities to the bit: nothing is lost, renamed or reordered on the way."""
    checkpoint = save_checkpoint(kind, tiny_target, tmp_path / "checkpoint", **fields)
    if (engine, kind) not in LOADER_RULES:
        with pytest.raises(UserError, match=re.escape(UNSERVED[engine, kind])):
            export_checkpoint(checkpoint, engine, tiny_target, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    export_checkpoint(checkpoint, engine, tiny_target, tmp_path / "out")
    expected = drafts_of(load_drafter(checkpoint, tiny_target), tiny_target, 4)
    shutil.rmtree(checkpoint)  # the export stands alone
    found = drafts_of(load_drafter(tmp_path / "out", tiny_target), tiny_target, 4)
    assert len(found) == len(expected) > 1
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert ours.logits is not None
        assert theirs.logits is not None
        assert torch.equal(ours.logits, theirs.logits)


def test_layer_ids_of_both_engines(tiny_target: Target, tmp_path: Path) -> None:
    """vLLM counts the layers passed, SGLang names the layer itself: the same state is N for one, N - 1 for the other.

    Each reads a key of its own. One list under both would feed a drafter features it was not trained on, in silence.
    """
    checkpoint = save_checkpoint("eagle3", tiny_target, tmp_path / "checkpoint", layer_ids=[1, 2, 3])
    export_checkpoint(checkpoint, "vllm", tiny_target, tmp_path / "out")
    config = read_config(tmp_path / "out")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["num_aux_hidden_states"] == 3


def test_whole_vocabulary_has_no_d2t(tiny_target: Target, tmp_path: Path) -> None:
    """Engines refuse the tables, or take them for a reduced vocabulary."""
    checkpoint = save_checkpoint("eagle3", tiny_target, tmp_path / "checkpoint")
    export_checkpoint(checkpoint, "vllm", tiny_target, tmp_path / "out")
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "out/model.safetensors"))
    assert read_config(tmp_path / "out")["draft_vocab_size"] == tiny_target.vocab_size


def test_reduced_vocabulary_has_offsets(tiny_target: Target, tmp_path: Path) -> None:
    """d2t holds target id minus draft id, not the id: engines add it to what the drafter chose."""
    checkpoint = save_checkpoint("eagle3", tiny_target, tmp_path / "checkpoint", draft_vocab_size=6)
    export_checkpoint(checkpoint, "vllm", tiny_target, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [3 - 0, 7 - 1, 40 - 2, 41 - 3, 200 - 4, 271 - 5]
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero()[:, 0].tolist() == DRAFT_VOCABULARY
    assert tensors["lm_head.weight"].shape[0] == 6
    assert read_config(tmp_path / "out")["draft_vocab_size"] == 6


def export_and_serve(checkpoint: Path, engine: str, target: Target, out: Path, draft_length: int = 4) -> list[str]:
    """The words of serve_ENGINE.sh, which must be a script that a shell can read and the user can start."""
    exported = export_checkpoint(checkpoint, engine, target, out)
    command = write_scripts(exported, out, draft_length)[engine]
    script = out / f"serve_{engine}.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True)
    version = {"vllm": "vLLM 0.32.0", "sglang": "SGLang 0.5.23"}[engine]
    known = {"run": "was run", "read": "was only read"}[how_known(engine, exported.kind)]
    checked = f"# checked against the loader rules of {version}, which {known}"
    here = f"cd {shlex.quote(os.getcwd())} || exit"
    assert script.read_text() == f"#!/bin/sh\n{checked}\n{here}\nexec {command}\n"
    return shlex.split(command)


def test_engines_are_told_the_schedule(tiny_target: Target, tmp_path: Path) -> None:
    """With its longest length beside it: vLLM cuts at that, SGLang wants it among the candidates."""
    out, schedule = tmp_path / "out", Schedule(((1, 3), (8, 5), (24, 0)))
    exported = export_checkpoint(save_checkpoint("eagle3", tiny_target, tmp_path / "in"), "vllm", tiny_target, out)
    commands = write_scripts(exported, out, 3, schedule)
    settings = json.loads(shlex.split(commands["vllm"])[-1])
    assert settings["num_speculative_tokens"] == 5
    assert settings["num_speculative_tokens_per_batch_size"] == for_vllm(schedule)
    words = shlex.split(commands["sglang"])
    assert words[words.index("--speculative-num-steps") + 1] == "5"
    written = Path(words[words.index("--speculative-adaptive-config") + 1])
    assert json.loads(written.read_text()) == for_sglang(schedule)
    assert "adaptive" not in write_scripts(exported, "name/on-the-hub", 3, schedule)["sglang"]  # no file to read there
    assert write_scripts(exported, out, 3, Schedule(((1, 0),))) == write_scripts(exported, out, 3)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "p_eagle", "medusa", "draft_model"])
def test_vllm_is_told_the_method(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    """vLLM otherwise guesses it from the folder's path. A path with blanks must survive the shell."""
    out = tmp_path / "my drafter's"
    words = export_and_serve(save_checkpoint(kind, tiny_target, tmp_path / "checkpoint"), "vllm", tiny_target, out)
    assert words[:3] == ["vllm", "serve", tiny_target.name]
    settings = json.loads(words[words.index("--speculative-config") + 1])
    told = {"method": "eagle3", "parallel_drafting": True} if kind == "p_eagle" else {"method": kind}
    assert settings == {**told, "model": str(out), "num_speculative_tokens": 4}


@pytest.mark.parametrize(("kind", "algorithm"), [("eagle3", "EAGLE3"), ("draft_model", "STANDALONE")])
def test_sglang_is_told_the_algorithm(kind: str, algorithm: str, tiny_target: Target, tmp_path: Path) -> None:
    """A chain of 4 steps is 5 draft tokens there: SGLang counts the token that the target gave."""
    out = tmp_path / "out"
    words = export_and_serve(save_checkpoint(kind, tiny_target, tmp_path / "checkpoint"), "sglang", tiny_target, out)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert options == {
        "--model-path": tiny_target.name,
        "--speculative-algorithm": algorithm,
        "--speculative-draft-model-path": str(out),
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
    }


def test_sglang_computes_a_drafter_in_the_targets_precision(
    make_target_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Where a drafter is stored in fp32, it would take fp16 for it, and bf16 for the target."""
    folder = make_target_dir()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    target = Target.from_pretrained(folder, "cpu", torch.float32)
    checkpoint = save_checkpoint("eagle3", target, tmp_path / "checkpoint")
    words = export_and_serve(checkpoint, "sglang", target, tmp_path / "out")
    assert words[words.index("--dtype") + 1] == "bfloat16"


def test_a_draft_model_may_have_more_experts_than_tensors(tmp_path: Path) -> None:
    """Experts are stored in one tensor for all of them."""
    target, _ = target_and_plain_model("qwen3_moe", {"num_experts": 64})
    drafter = DRAFTERS["draft_model"].from_target(DraftModelConfig(num_layers=1), target)
    save_drafter(drafter, tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert len(tensors) < 64
    assert load_drafter(tmp_path / "drafter", target).config.kind == "draft_model"


def test_no_more_tokens_than_medusa_has_heads(tiny_target: Target, tmp_path: Path) -> None:
    checkpoint = save_checkpoint("medusa", tiny_target, tmp_path / "checkpoint", num_heads=2)
    words = export_and_serve(checkpoint, "vllm", tiny_target, tmp_path / "out")
    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 2


def test_speculators_config(tiny_target: Target, tmp_path: Path) -> None:
    """The keys that the format requires; False flags stand there, for a missing one is taken for True."""
    checkpoint = save_checkpoint("eagle3", tiny_target, tmp_path / "checkpoint", draft_vocab_size=6)
    export_checkpoint(checkpoint, "speculators", tiny_target, tmp_path / "out")
    config = read_config(tmp_path / "out")
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False
    assert config["draft_vocab_size"] == 6
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama"
    assert (layer["hidden_size"], layer["vocab_size"]) == (tiny_target.hidden_size, tiny_target.vocab_size)
    speculators = config["speculators_config"]
    assert set(speculators) >= {"algorithm", "default_proposal_method", "proposal_methods", "verifier"}
    types = [method["proposal_type"] for method in speculators["proposal_methods"]]
    assert speculators["default_proposal_method"] in types
    assert speculators["proposal_methods"][0]["speculative_tokens"] == 4
    assert speculators["verifier"] == {"name_or_path": tiny_target.name, "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_block_drafters_in_the_format_of_speculators(
    kind: str, window: int | None, tiny_target: Target, tmp_path: Path
) -> None:
    """vLLM takes full attention for causal unless it is told otherwise; layer ids are those after N layers."""
    fields = {"num_layers": 2, "layer_ids": [1, 3], "draft_vocab_size": 6, "sliding_window": window}
    checkpoint = save_checkpoint(kind, tiny_target, tmp_path / "checkpoint", **fields)
    assert export_checkpoint(checkpoint, "speculators", tiny_target, tmp_path / "out").served_by == ("vllm",)
    config = read_config(tmp_path / "out")
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert config["sliding_window_non_causal"] is (window is None)
    assert config["sample_from_anchor"] is (kind == "dspark")
    layers = config["transformer_layer_config"]
    assert (layers["use_sliding_window"], layers["sliding_window"]) == (window is not None, window)
    drafted = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert drafted == load_drafter(tmp_path / "out", tiny_target).max_draft_length


def test_layers_that_differ_are_not_exported_in_the_format_of_speculators(tiny_target: Target, tmp_path: Path) -> None:
    fields = {"num_layers": 2, "sliding_window": 4, "full_layers": [0]}
    checkpoint = save_checkpoint("dflash", tiny_target, tmp_path / "checkpoint", **fields)
    with pytest.raises(UserError, match=r"drafter.full_layers differ"):
        export_checkpoint(checkpoint, "speculators", tiny_target, tmp_path / "out")
    export_checkpoint(checkpoint, "vllm", tiny_target, tmp_path / "vllm")


@pytest.mark.parametrize("kind", ["medusa", "draft_model"])
def test_speculators_holds_only_some_kinds(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no {kind} drafters"):
        export_checkpoint(
            save_checkpoint(kind, tiny_target, tmp_path / kind), "speculators", tiny_target, tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_draft_model_is_an_ordinary_model(tied: bool, make_target_dir: Any, tmp_path: Path) -> None:
    """transformers loads the folder with nothing missing or left over, tokenizer included, and computes the same."""
    target = Target.from_pretrained(make_target_dir(tie_word_embeddings=tied), "cpu")
    checkpoint = save_checkpoint("draft_model", target, tmp_path / "checkpoint", num_layers=2)
    export_checkpoint(checkpoint, "vllm", target, tmp_path / "out")
    drafter: Any = load_drafter(checkpoint, target)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_hidden_layers == 2
    token_ids = torch.tensor([target.encode("heat the iron")])
    with torch.no_grad():
        expected = drafter.model(input_ids=token_ids, use_cache=False).logits
        torch.testing.assert_close(model(input_ids=token_ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("heat the iron")["input_ids"] == token_ids[0].tolist()


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("vllm", "eagle3"),
        ("sglang", "eagle"),
        ("vllm", "p_eagle"),
        ("sglang", "dflash"),
        ("vllm", "dspark"),
        ("vllm", "medusa"),
        ("vllm", "draft_model"),
        ("speculators", "eagle3"),
    ],
)
def test_a_target_without_its_layers_is_enough(engine: str, kind: str, tiny_target: Target, tmp_path: Path) -> None:
    """The same files to the byte, which tell of the target that the drafter was trained for."""
    checkpoint = save_checkpoint(kind, tiny_target, tmp_path / "checkpoint")
    ends = Target.head_from_pretrained(tiny_target.name, None, "cpu")
    for target, out in ((tiny_target, tmp_path / "whole"), (ends, tmp_path / "ends")):
        assert export_checkpoint(checkpoint, engine, target, out).target_fingerprint == tiny_target.fingerprint()
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "ends").iterdir()}


def test_it_stays_known_what_it_was_trained_for(tiny_target: Target, tmp_path: Path) -> None:
    """Not the target that it is exported with, which may differ in weights or precision."""
    checkpoint = save_checkpoint("medusa", tiny_target, tmp_path / "checkpoint")
    config = read_config(checkpoint)
    config["draftsmith"]["trained_for"]["target_fingerprint"] = "f" * 16
    (checkpoint / "config.json").write_text(json.dumps(config))
    exported = export_checkpoint(checkpoint, "vllm", tiny_target, tmp_path / "out")
    assert exported.target_fingerprint == "f" * 16
    assert read_config(tmp_path / "out")["draftsmith"]["trained_for"] == config["draftsmith"]["trained_for"]


@pytest.mark.parametrize(
    ("mark", "told"), [("template_hash", "another chat template"), ("tokenizer_fingerprint", "another tokenizer")]
)
def test_a_checkpoint_for_text_of_another_form_is_refused(
    mark: str, told: str, tiny_target: Target, tmp_path: Path
) -> None:
    """Its prompts would look otherwise to the drafter than all that it was trained on."""
    checkpoint = save_checkpoint("eagle3", tiny_target, tmp_path / "checkpoint")
    config = read_config(checkpoint)
    config["draftsmith"]["trained_for"][mark] = "f" * 16
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=told):
        export_checkpoint(checkpoint, "vllm", tiny_target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["lookahead", "none"])
def test_nothing_to_export_without_weights(name: str, tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trained drafter"):
        export_checkpoint(Path(name), "vllm", tiny_target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left", ["serve_sglang.sh", "evaluation.json", "model.safetensors", "my-notes.txt"])
def test_nothing_else_lies_in_the_folder(left: str, tiny_target: Target, tmp_path: Path) -> None:
    """What another export left there would be pushed, read in place of the new weights, or trusted by `watch`."""
    checkpoint, out = save_checkpoint("medusa", tiny_target, tmp_path / "checkpoint"), tmp_path / "out"
    out.mkdir()
    export_checkpoint(checkpoint, "vllm", tiny_target, out)  # an empty folder is welcome
    for path in out.iterdir():
        path.unlink()
    (out / left).write_text("old")
    with pytest.raises(UserError, match="is not empty"):
        export_checkpoint(checkpoint, "fasterdecoding", tiny_target, out)
    assert [path.name for path in out.iterdir()] == [left]


@pytest.mark.parametrize(
    ("engine", "kind", "file"),
    [
        ("vllm", "eagle3", "model.safetensors"),
        ("safeailab", "eagle", "pytorch_model.bin"),
        ("vllm", "eagle3", "config.json"),
    ],
)
def test_round_trip_finds_another_drafter(
    engine: str, kind: str, file: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight, or one number of config.json, is not what was trained."""
    checkpoint = save_checkpoint(kind, tiny_target, tmp_path / "checkpoint")

    def write_otherwise(files: Checkpoint, *where: Any) -> None:
        if file == "config.json":
            return write_files(replace(files, config={**files.config, "rms_norm_eps": 0.5}), *where)
        weight = files.tensors["fc.weight"]
        write_files(replace(files, tensors={**files.tensors, "fc.weight": torch.zeros_like(weight)}), *where)

    monkeypatch.setattr(export, "write_files", write_otherwise)
    with pytest.raises(UserError, match="read back as another drafter"):
        export_checkpoint(checkpoint, engine, tiny_target, tmp_path / "out")
