"""Exports for transformers' assisted generation, llama.cpp and TensorRT-LLM, and the table of all engines."""

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import DRAFTERS, Drafter, Target, checkpoint_of, load_drafter, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.training_free.ngram import Ngram
from draftsmith.recipes.engine_rules.engine_table import ENGINES, KINDS, RUN, engine_table
from draftsmith.recipes.engine_rules.layout_check import check_files
from draftsmith.recipes.engine_rules.loader_rules import TRAINING_FREE, UNSERVED, is_served
from draftsmith.recipes.serving.assisted_generation import generate
from draftsmith.recipes.serving.export import adapt, export_checkpoint
from draftsmith.recipes.serving.serve_commands import write_scripts

Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def untrained(kind: str, target: Target, **fields: Any) -> Drafter:
    drafter_class = DRAFTERS[kind]
    return drafter_class.from_target(drafter_class.config_class(kind=kind, **fields), target).eval()


def exported_to(engine: str, kind: str, target: Target, folder: Path, **fields: Any) -> Path:
    """An export of an untrained drafter with its scripts, in folder/served."""
    save_drafter(untrained(kind, target, **fields), folder / "checkpoint")
    exported = export_checkpoint(folder / "checkpoint", engine, target, folder / "served")
    write_scripts(exported, folder / "served", 3)
    return folder / "served"


# --- transformers: run here


@pytest.mark.parametrize("kind", ["draft_model", "ngram"])
def test_assisted_generation_accepts_what_we_accept(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    """The same text in the same number of rounds, from a second token on: ours is drafted for behind the prompt.

    Half of the target's layers agree with it often enough that rounds of all lengths occur.
    """
    assistant, drafter = None, Ngram(Ngram.config_class(longest=2, shortest=1, occurrence="earliest"))
    if kind == "draft_model":
        folder = exported_to("transformers", kind, tiny_target, tmp_path, num_layers=2)
        drafter = load_drafter(folder, tiny_target)
        assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(tiny_target.name, dtype=torch.float32).eval()
    passes: list[int] = []
    target.register_forward_pre_hook(
        lambda _, args, inputs: passes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    decoder, accepted = SpeculativeDecoder(tiny_target, drafter), 0
    for text in ("heat the iron", "a b a b a b", "strikes strikes strikes"):
        prompt = tiny_target.encode(text)
        ours = decoder.generate([prompt], max_new_tokens=24, draft_length=3)
        accepted += ours.stats.total.num_accepted_tokens
        ids = torch.tensor([[*prompt, *ours.token_ids[0][:1]]])
        passes.clear()
        answer = generate(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, assistant, 3, 23, 2)
        assert answer[0, len(prompt) :].tolist() == ours.token_ids[0]
        assert len(passes) == ours.stats.total.num_rounds
    assert accepted > 0


def test_assisted_generation_beside_a_draft_model(tiny_target: Target, tmp_path: Path, python: str) -> None:
    """The script answers lines of its input, with nothing of draftsmith, as the decoder does."""
    folder = exported_to("transformers", "draft_model", tiny_target, tmp_path, num_layers=2)
    words = shlex.split((folder / "serve_transformers.sh").read_text().splitlines()[-1])[1:]
    assert words[0] == "python"
    command = [python, *words[1:], "--max-new-tokens", "8"]
    answer = subprocess.run(command, input="heat the iron\n", capture_output=True, text=True, check=True)
    ours = SpeculativeDecoder(tiny_target, load_drafter(folder, tiny_target)).generate(["heat the iron"], 8)
    assert answer.stdout.strip() == tiny_target.tokenizer.decode(ours.token_ids[0]).strip()  # type: ignore[union-attr]


# --- traps: what the engine would do is said in other_engines.py


def new_key(name: str, value: Any) -> Change:
    return lambda config, tensors: config.update({name: value})


def new_tensor(name: str) -> Change:
    return lambda config, tensors: tensors.update({name: torch.zeros(4)})


def two_layers_read(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config.update(eagle_aux_hidden_state_layer_ids=[1, 2], num_aux_hidden_states=2)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1]
    tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * config["target_hidden_size"]]


TRAPS: dict[str, tuple[str, str, Change, str]] = {
    "llama.cpp's three layers": ("llama_cpp", "eagle3", two_layers_read, "num_aux_hidden_states 2, not 3"),
    "llama.cpp's one layer": ("llama_cpp", "eagle3", new_key("num_hidden_layers", 2), "num_hidden_layers 2, not 1"),
    "norms that llama.cpp drops": ("llama_cpp", "eagle3", new_key("fc_norm", True), "fc_norm True"),
    "a flag that llama.cpp drops": ("llama_cpp", "eagle3", new_key("norm_output", True), "norm_output True"),
    "a bias": ("llama_cpp", "eagle3", new_tensor("fc.bias"), "fc.bias is unknown and would be refused"),
    "no table for DFlash": ("llama_cpp", "dflash", new_tensor("d2t"), "d2t is unknown and would be refused"),
    "attention by default": ("llama_cpp", "dflash", lambda c, t: c.pop("is_causal"), "is_causal None, which must be"),
    "the other layout": ("llama_cpp", "dspark", new_key("sample_from_anchor", False), "sample_from_anchor False"),
    "another corrector": ("llama_cpp", "dspark", new_key("markov_head_type", "rnn"), "markov_head_type 'rnn'"),
    "un-normed residual": ("tensorrt_llm", "eagle3", new_key("norm_before_residual", True), "norm_before_residual Tru"),
    "a flag in the wrong place": ("tensorrt_llm", "eagle3", new_key("norm_before_fc", True), "norm_before_fc True"),
    "own embedding": ("tensorrt_llm", "eagle3", new_tensor("embed_tokens.weight"), "embed_tokens.weight is unknown"),
    "another vocabulary": ("llama_cpp", "draft_model", new_key("vocab_size", 7), "vocab_size 7 is not the target's"),
    "assistant's vocabulary": ("transformers", "draft_model", new_key("vocab_size", 7), "vocab_size 7 is not the"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_trap_is_refused(trap: str, tiny_target: Target) -> None:
    engine, kind, change, message = TRAPS[trap]
    fields = {"eagle3": {"layer_ids": [1, 2, 3]}, "draft_model": {"num_layers": 2}}.get(kind, {})
    files = adapt(checkpoint_of(untrained(kind, tiny_target, **fields), torch.float32), engine, tiny_target)
    check_files(engine, files, tiny_target)
    change(files.config, files.tensors)
    with pytest.raises(UserError) as caught:
        check_files(engine, files, tiny_target)
    assert message in str(caught.value)


# --- commands


def test_layers_are_told_to_tensorrt_llm(tiny_target: Target, tmp_path: Path) -> None:
    """It reads none from config.json, and counts them from 0: without this it would read the states of others."""
    folder = exported_to("tensorrt_llm", "eagle3", tiny_target, tmp_path, layer_ids=[1, 2, 3])
    options = yaml.safe_load((folder / "tensorrt_llm.yaml").read_text())["speculative_config"]
    assert options["eagle3_layers_to_capture"] == [0, 1, 2]
    assert options["speculative_model"] == str(folder)
    assert options["max_draft_len"] == 3
    command = (folder / "serve_tensorrt_llm.sh").read_text()
    assert str(folder / "tensorrt_llm.yaml") in command
    assert "which was only read" in command


def test_llama_cpp_converts_once_and_serves(tiny_target: Target, tmp_path: Path) -> None:
    """Run with programs that write down their words: the names hold a quote, a blank and a dollar, and stay names."""
    root = tmp_path / "it's $HOME"
    folder = exported_to("llama_cpp", "eagle3", tiny_target, root, layer_ids=[1, 2, 3])
    programs = tmp_path / "programs"
    programs.mkdir()
    said = tmp_path / "said"
    for name in ("python", "llama-server"):
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >> {said}\n')
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "LLAMA_CPP": "/llama"}
    (folder / "target.gguf").touch()  # the user's own
    subprocess.run(["sh", folder / "serve_llama_cpp.sh"], env=environment, check=True)
    convert = ["python", "/llama/convert_hf_to_gguf.py", str(folder), "--target-model-dir", tiny_target.name]
    convert += ["--outtype", "f32", "--outfile", str(folder / "drafter.gguf")]
    serve = ["llama-server", "-m", str(folder / "target.gguf"), "-md", str(folder / "drafter.gguf")]
    assert said.read_text().splitlines() == [*convert, *serve, "--spec-type", "draft-eagle3", "--spec-draft-n-max", "3"]
    assert subprocess.run(["sh", folder / "serve_llama_cpp.sh"], env={"PATH": "/usr/bin:/bin"}).returncode != 0


@pytest.mark.parametrize("engine", ["transformers", "llama_cpp", "tensorrt_llm"])
def test_lookups_need_no_weights(engine: str, tiny_target: Target, tmp_path: Path) -> None:
    exported = export_checkpoint("ngram", engine, tiny_target, tmp_path / "served")
    assert exported.served_by == (engine,)
    assert list(write_scripts(exported, tmp_path / "served", 4)) == [engine]
    with pytest.raises(UserError, match=f"--engine {engine} has no drafter like suffix: give --engine vllm"):
        export_checkpoint("suffix", engine, tiny_target, tmp_path / "other")


def test_one_directory_is_of_one_engine(tiny_target: Target, tmp_path: Path) -> None:
    """A name from which vLLM would guess another method does not matter where vLLM is not asked."""
    folder = exported_to("llama_cpp", "draft_model", tiny_target, tmp_path / "eagle-like", num_layers=2)
    assert [path.name for path in folder.glob("*.sh")] == ["serve_llama_cpp.sh"]
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == tiny_target.vocab_size


# --- the table


def test_the_page_has_the_table_of_the_rules() -> None:
    assert engine_table() in PAGE.read_text()


def test_the_table_knows_all_kinds() -> None:
    """And calls run only what is served at all; what is not served has a reason, or its engine tells what it takes."""
    assert set(KINDS) == {*DRAFTERS, *TRAINING_FREE} - {"lookahead", "none"}
    assert set(RUN) == set(ENGINES)
    for engine, kinds in RUN.items():
        assert all(is_served(kind, engine) for kind in kinds), engine
    assert {kind for _, kind in UNSERVED} <= set(KINDS)
