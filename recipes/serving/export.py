"""Checkpoints in the form that a serving engine, or the project that a family comes from, loads.

A checkpoint already has the engines' layout; exporting adapts what differs from engine to engine, holds the result
against the engine's loader rules, reads it back, and writes beside it how to serve it and what it is.
"""

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.inference.decoding.schedule import Schedule, for_sglang, for_vllm
from draftsmith.models import CHANGED_TARGET, Checkpoint, Target, build_drafter, checkpoint_of, read_checkpoint
from draftsmith.models.drafting.base import OWN_EMBEDDING
from draftsmith.models.errors import UserError
from draftsmith.recipes.serving import vllm_medusa
from draftsmith.recipes.serving.engine_rules import (
    DTYPES,
    RULES,
    VLLM,
    check_name,
    rules_for,
    speculative_config,
)
from draftsmith.recipes.serving.loader_check import check_directory, engines_that_serve

WEIGHT_FILES = {"safeailab": "pytorch_model.bin", "fasterdecoding": "medusa_lm_head.pt"}  # else model.safetensors
PLUGIN = Path(vllm_medusa.__file__)  # lies beside Medusa heads, for a vLLM that has none of its own
SGLANG_ADAPTIVE = ("EAGLE", "EAGLE3")  # algorithms whose draft length SGLang can change
SGLANG_SCHEDULE = "sglang_schedule.json"
# fmt: off
SPECULATORS_LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "vocab_size", "max_position_embeddings", "rope_parameters",
)
# fmt: on


@dataclass(frozen=True)
class Exported:
    """An exported drafter."""

    directory: Path
    engine: str
    kind: str
    target: str
    target_fingerprint: str | None  # of the one that it was trained for; None: not known
    max_draft_length: int | None
    served_by: tuple[str, ...]  # the engines


def export_checkpoint(
    checkpoint: str | Path, engine: str, target: Target, out: Path, hub_name: str | None = None
) -> Exported:
    """Write the drafter of a checkpoint (a directory or a Hub name) for an engine, or in an original layout, to `out`.

    The target's embedding, head and sizes are enough, as `Target.head_from_pretrained` loads them.
    `hub_name`: what it will be served under, where that is not `out`. Raises `UserError`, before anything is written,
    where that engine cannot serve it as it was trained.
    """
    if str(checkpoint) in ("ngram", "suffix", "lookahead", "none") and not Path(checkpoint).is_dir():
        raise UserError(f"{checkpoint} is no trained drafter: give a checkpoint, such as runs/NAME/best")
    if out.resolve() == Path(checkpoint).resolve():
        raise UserError(f"{out} is the checkpoint itself: give another --out")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty, and all that lies there would be served and pushed: give another --out")
    changed = Path(checkpoint) / CHANGED_TARGET
    if changed.is_dir() and Path(target.name).resolve() != changed.resolve():
        raise UserError(f"this drafter was trained along with its target: give --target {changed}")
    source = read_checkpoint(checkpoint, target)
    drafter = build_drafter(source, target)  # also shows that it is whole and fits the target
    whole = checkpoint_of(drafter, dtype_of(source.tensors))
    trained_for = drafter.trained_for or whole.config["draftsmith"]["trained_for"]
    whole.config["draftsmith"]["trained_for"] = trained_for
    files = adapt(whole, engine, target)
    if engine in ("vllm", "sglang"):
        check_directory(engine, files.kind, files.config, files.tensors, target)
    if files.kind != "draft_model" or engine != "sglang":
        method = RULES["vllm", files.kind].method
        check_name(method, "--out", str(out.resolve()))
        if hub_name is not None:
            check_name(method, "--push", hub_name)
    write(files, engine, out, target)
    check_round_trip(source, out, target)
    if engine in ("vllm", "sglang"):
        served_by = engines_that_serve(files.kind, files.config, files.tensors, target)
    else:
        served_by = ["vllm"] if engine == "speculators" else []
    fingerprint = trained_for.get("target_fingerprint")
    return Exported(out, engine, files.kind, target.name, fingerprint, drafter.max_draft_length, tuple(served_by))


def dtype_of(tensors: dict[str, Tensor]) -> torch.dtype:
    """The floating-point type of the weights, fp32 where they have several: all of them are exact in it."""
    found = {tensor.dtype for name, tensor in tensors.items() if name not in DTYPES}
    if not found <= {torch.float32, torch.bfloat16, torch.float16}:
        raise UserError("the checkpoint's weights are not plain floating-point ones: export it before quantising it")
    return found.pop() if len(found) == 1 else torch.float32


def write(files: Checkpoint, engine: str, out: Path, target: Target) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(files.config, indent=2) + "\n")
        if engine in WEIGHT_FILES:
            torch.save(files.tensors, out / WEIGHT_FILES[engine])
        else:
            save_file(files.tensors, out / "model.safetensors", metadata={"format": "pt"})
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    if files.kind == "medusa" and engine == "vllm":
        (out / PLUGIN.name).write_text(PLUGIN.read_text())
    if files.kind == "draft_model":
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(out)
        target.model.generation_config.save_pretrained(out)


def check_round_trip(source: Checkpoint, out: Path, target: Target) -> None:
    """Read the directory back: the same drafter to the bit. Raises `UserError` naming what differs."""
    expected, found = (build_drafter(files, target) for files in (source, read_checkpoint(out, target)))
    wrong = [] if found.kind == expected.kind else [f"kind {found.kind}"]
    for ours, theirs in (
        (expected.engine_tensors(), found.engine_tensors()),
        (expected.engine_config(), found.engine_config()),
    ):
        wrong += [name for name in ours.keys() | theirs.keys() if not same(ours.get(name), theirs.get(name))]
    if wrong:
        raise UserError(
            f"what was written to {out} is read back as another drafter ({', '.join(sorted(wrong)[:4])}): remove it"
        )


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


# --- layouts


def adapt(files: Checkpoint, engine: str, target: Target) -> Checkpoint:
    """A checkpoint in the engines' layout, in that of one engine or project."""
    if engine == "speculators":
        return in_speculators_layout(files, target)
    if engine == "safeailab":
        return in_safeailab_layout(files, target)
    if engine == "fasterdecoding":
        return in_fasterdecoding_layout(files, target)
    architecture = rules_for(engine, files.kind).architecture
    config = {key: value for key, value in files.config.items() if key != "quantization_config"}  # weights are plain
    if architecture is not None:
        config = {key: value for key, value in config.items() if value is not None}  # typed fields refuse null
        config["architectures"] = [architecture]
    return replace(files, config=config)


def refuse_other_kinds(files: Checkpoint, layout: str, *kinds: str) -> None:
    if files.kind not in kinds:
        raise UserError(f"{layout} has no {files.kind} drafters (it has {', '.join(kinds)}): export for vllm")


def in_speculators_layout(files: Checkpoint, target: Target) -> Checkpoint:
    """EAGLE-3 in the format of vllm-project/speculators 0.9.0."""
    refuse_other_kinds(files, "the speculators format", "eagle3")
    check_directory("vllm", "eagle3", adapt(files, "vllm", target).config, files.tensors, target)
    kept = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "dtype")
    return replace(
        files,
        config={
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {key: files.config[key] for key in SPECULATORS_LAYER_KEYS},
            **{key: files.config[key] for key in kept},
            "norm_before_residual": files.config["norm_before_residual"],  # vLLM takes a missing key for True
            "norm_before_fc": False,
            "norm_output": False,
            "embed_requires_grad": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                "verifier": {"name_or_path": target.name, "architectures": target.model.config.architectures},
            },
        },
    )


def in_safeailab_layout(files: Checkpoint, target: Target) -> Checkpoint:
    """EAGLE as SafeAILab's own code loads it: no layer ids, and no `target_hidden_size`."""
    refuse_other_kinds(files, "SafeAILab's layout", "eagle3", "eagle")
    config = dict(files.config)
    if files.kind == "eagle3":
        ids, reference = config["eagle_aux_hidden_state_layer_ids"], [2, target.num_layers // 2, target.num_layers - 3]
        if ids != reference:
            raise UserError(f"SafeAILab's code reads the layers {reference}, but this drafter was trained on {ids}")
        if config["norm_before_residual"] or OWN_EMBEDDING in files.tensors:
            raise UserError(
                "SafeAILab's layout has no norm_before_residual and shares the target's embedding: export for vllm"
            )
        if config["hidden_size"] != target.hidden_size:
            raise UserError("SafeAILab's code cannot load a drafter of another width than the target's")
    for key in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states"):
        config.pop(key, None)
    config.pop("draftsmith")
    config["architectures"] = ["LlamaForCausalLMEagle3" if files.kind == "eagle3" else "LlamaForCausalLM"]
    renamed = {
        name.replace("layers.0.", "midlayer.") if files.kind == "eagle3" else name: tensor
        for name, tensor in files.tensors.items()
    }
    return replace(files, config=config, tensors=renamed)


def in_fasterdecoding_layout(files: Checkpoint, target: Target) -> Checkpoint:
    """Medusa heads as FasterDecoding's own code loads them. It repeats one block, whatever the number of layers."""
    refuse_other_kinds(files, "FasterDecoding's layout", "medusa")
    num_heads, num_layers = files.config["num_heads"], files.config["num_hidden_layers"]
    if files.config["original_lm_head"] or "token_map" in files.tensors:
        raise UserError("FasterDecoding's code has a whole output matrix for each head: export for vllm")
    if num_layers != 1:
        raise UserError(
            f"these heads have {num_layers} blocks each, which FasterDecoding's code would load as one block repeated: "
            "export for vllm"
        )
    renamed = {}
    for head in range(num_heads):
        for part in ("weight", "bias"):
            renamed[f"{head}.0.linear.{part}"] = files.tensors[f"blocks.{head}.layers.0.{part}"]
        renamed[f"{head}.1.weight"] = files.tensors[f"lm_heads.{head}.weight"]
    config = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": target.name,
        "torch_dtype": files.config["torch_dtype"],
    }
    return replace(files, config=config, tensors=renamed)


# --- serving


def serve_command(
    exported: Exported, engine: str, where: str, draft_length: int, schedule: Schedule | None = None
) -> str:
    """The shell command that serves the target with the drafter at `where`: a directory, or its name on the Hub.

    A schedule that speculates at all sets the draft length for vLLM by the number of running requests, and its longest
    one in place of `draft_length`. SGLang reads a schedule from a file, which a command for a name on the Hub lacks.
    """
    draft_length = min(draft_length, exported.max_draft_length or draft_length)
    schedule = schedule if schedule and schedule.longest else None
    if engine == "sglang":
        method = rules_for(engine, exported.kind).method
        command = ["python", "-m", "sglang.launch_server", "--model-path", exported.target]
        command += ["--speculative-algorithm", method, "--speculative-draft-model-path", where]
        if schedule and method in SGLANG_ADAPTIVE and Path(where).is_dir():
            draft_length = schedule.longest
            command += ["--speculative-adaptive", "--speculative-adaptive-config", str(Path(where) / SGLANG_SCHEDULE)]
        command += ["--speculative-num-steps", str(draft_length), "--speculative-eagle-topk", "1"]
        return shlex.join([*command, "--speculative-num-draft-tokens", str(draft_length + 1)])
    settings = speculative_config(exported.kind, where, schedule.longest if schedule else draft_length)
    if schedule:
        settings["num_speculative_tokens_per_batch_size"] = for_vllm(schedule)
    return shlex.join(["vllm", "serve", exported.target, "--speculative-config", json.dumps(settings)])


def plugin_command(exported: Exported, where: str, draft_length: int) -> str:
    """vLLM imports the plug-in from a folder: where `where` is a name on the Hub, run it in a copy of the directory."""
    folder = where if Path(where).is_dir() else "."
    settings = plugin_config(min(draft_length, exported.max_draft_length or draft_length))
    command = ["env", f"PYTHONPATH={folder}", "vllm", "serve", exported.target]
    return shlex.join([*command, "--speculative-config", json.dumps(settings)])


def plugin_config(draft_length: int) -> dict[str, Any]:
    """What vLLM is told of the plug-in."""
    name = f"{PLUGIN.stem}.{vllm_medusa.MedusaProposer.__name__}"
    return {"method": "custom_class", "model": name, "num_speculative_tokens": draft_length}


def write_scripts(
    exported: Exported, where: str, draft_length: int, schedule: Schedule | None = None
) -> dict[str, str]:
    """serve_vllm.sh, serve_sglang.sh for the engines that serve the directory; returns engine -> command.

    serve_vllm_plugin.sh serves Medusa heads with a vLLM newer than 0.32. Paths in commands are as they were given, so a
    script goes to where they hold, unless it is made for a name on the Hub.
    """
    here = f"cd {shlex.quote(str(Path.cwd()))} || exit\n" if Path(where).is_dir() else ""
    commands = {e: serve_command(exported, e, where, draft_length, schedule) for e in exported.served_by}
    if (exported.directory / PLUGIN.name).is_file():
        commands["vllm_plugin"] = plugin_command(exported, where, draft_length)
    if SGLANG_SCHEDULE in commands.get("sglang", ""):
        assert schedule is not None
        (exported.directory / SGLANG_SCHEDULE).write_text(json.dumps(for_sglang(schedule), indent=2) + "\n")
    for engine, command in commands.items():
        script = exported.directory / f"serve_{engine}.sh"
        version = VLLM if engine == "vllm_plugin" else rules_for(engine, exported.kind).engine
        script.write_text(f"#!/bin/sh\n# checked against the loader rules of {version}\n{here}exec {command}\n")
        script.chmod(0o755)
    return commands
