"""The commands of transformers' assisted generation, llama.cpp and TensorRT-LLM, and the files that they name."""

import shlex
from pathlib import Path

import yaml

from draftsmith.data.console import shell_path
from draftsmith.models.drafter_configs import NgramConfig
from draftsmith.models.storage.files import write_whole
from draftsmith.models.storage.reading import read_json_object
from draftsmith.recipes.engine_rules.loader_rules import TRAINING_FREE, rules_for
from draftsmith.recipes.serving.export import ASSISTED, Exported

TENSORRT_OPTIONS = "tensorrt_llm.yaml"
OUT_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # of a GGUF, by the type of config.json


def transformers_words(exported: Exported, where: Path | str, draft_length: int) -> list[str]:
    """Return the words that answer the prompts of the standard input, a line each, by assisted generation."""
    folder = where if isinstance(where, Path) else Path(".")
    if exported.kind in TRAINING_FREE:
        drafter = ["--ngrams", str(NgramConfig.longest)]
    else:
        drafter = ["--draft-model", shell_path(where)]
    words = ["python", shell_path(folder / ASSISTED.name), shell_path(exported.target)]
    return [*words, *drafter, "--draft-length", str(draft_length)]


def llama_cpp_words(exported: Exported, where: Path | str, draft_length: int) -> list[str]:
    """Return the words of llama.cpp's server, which reads GGUF files that `llama_cpp_conversions` makes."""
    folder = where if isinstance(where, Path) else Path(".")
    words = ["llama-server", "-m", shell_path(folder / "target.gguf")]
    if exported.kind in TRAINING_FREE:
        length = NgramConfig.shortest  # it looks for n-grams of one length, and drafts no fewer tokens than these have
        words += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(length)]
        return [*words, "--spec-ngram-simple-size-m", str(max(draft_length, length))]
    method = rules_for("llama_cpp", exported.kind).method
    words += ["-md", shell_path(folder / "drafter.gguf"), "--spec-type", method]
    return [*words, "--spec-draft-n-max", str(draft_length)]


def llama_cpp_conversions(exported: Exported, where: Path | str) -> list[str]:
    """Return the lines of a script that convert target and drafter, each where its GGUF is not there yet.

    The converter is llama.cpp's own, and needs the package gguf. A target.gguf that lies there is served as it is.
    """
    folder = where if isinstance(where, Path) else Path(".")
    target = shlex.quote(shell_path(exported.target))
    if not Path(exported.target).is_dir():
        target = f"$(hf download {target})"
    converter = 'python "$LLAMA_CPP/convert_hf_to_gguf.py"'
    lines = [': "${LLAMA_CPP:?the folder of llama.cpp, which holds convert_hf_to_gguf.py}"', f"TARGET={target} || exit"]
    gguf = shlex.quote(shell_path(folder / "target.gguf"))
    lines.append(f'[ -f {gguf} ] || {converter} "$TARGET" --outfile {gguf} || exit')
    if exported.kind not in TRAINING_FREE:
        gguf = shlex.quote(shell_path(folder / "drafter.gguf"))
        config = read_json_object(exported.directory / "config.json")
        out_type = OUT_TYPES[str(config.get("dtype") or config["torch_dtype"])]
        source = f'{shlex.quote(shell_path(folder))} --target-model-dir "$TARGET" --outtype {out_type}'
        lines.append(f"[ -f {gguf} ] || {converter} {source} --outfile {gguf} || exit")
    return lines


def tensorrt_llm_words(exported: Exported, where: Path | str) -> list[str]:
    """Return the words of TensorRT-LLM's server, which reads the options that `write_tensorrt_llm_options` writes."""
    options = (where if isinstance(where, Path) else Path(".")) / TENSORRT_OPTIONS
    words = ["trtllm-serve", shell_path(exported.target), "--backend", "pytorch"]
    return [*words, "--extra_llm_api_options", shell_path(options)]


def write_tensorrt_llm_options(exported: Exported, where: Path | str, draft_length: int) -> None:
    """Write the options of its server. It takes EAGLE-3's layers from here alone, and counts them from 0."""
    config: dict[str, object] = {"decoding_type": "NGram", "max_draft_len": draft_length}
    if exported.kind in TRAINING_FREE:
        config["max_matching_ngram_size"] = NgramConfig.longest
    else:
        config |= {"decoding_type": rules_for("tensorrt_llm", exported.kind).method, "speculative_model": str(where)}
    if exported.kind == "eagle3":
        layers = read_json_object(exported.directory / "config.json")["eagle_aux_hidden_state_layer_ids"]
        config["eagle3_layers_to_capture"] = [layer_id - 1 for layer_id in layers]
    text = yaml.safe_dump({"speculative_config": config}, sort_keys=False)
    write_whole(exported.directory / TENSORRT_OPTIONS, text)
