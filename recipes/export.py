"""Checkpoints in the form that a serving engine loads, with the command that serves them.

A checkpoint already holds config.json and tensors as engines read them, so exporting copies it, adapts what differs
from engine to engine, and writes the command with every setting spelled out: left to guess, engines guess from paths.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError

VLLM_METHODS = {"eagle3": "eagle3", "medusa": "medusa", "draft_model": "draft_model"}
SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "draft_model": "STANDALONE"}


def export_checkpoint(checkpoint: Path, engine: str, target: Target, out: Path, draft_length: int = 4) -> str:
    """Write the checkpoint for `vllm`, `sglang` or `speculators` into `out`; return the serving command.

    Raises `UserError` where the engine cannot serve that kind of drafter.
    """
    drafter = load_drafter(checkpoint, target)  # also shows that it is whole and fits the target
    if not drafter.trainable():
        raise UserError(f"{checkpoint} is no trained drafter")
    if out.resolve() == checkpoint.resolve():
        raise UserError(f"{out} is the checkpoint itself: give another --out")
    draft_length = min(draft_length, drafter.max_draft_length or draft_length)
    command = serve_command(drafter, engine, target.name, out, draft_length)
    try:
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint / "model.safetensors", out / "model.safetensors")
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    config = json.loads((checkpoint / "config.json").read_text())
    if engine == "speculators":
        config = speculators_config(config, target, draft_length)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "serve.sh").write_text(f"#!/bin/sh\nexec {command}\n")
    (out / "serve.sh").chmod(0o755)
    if drafter.kind == "draft_model" and target.tokenizer is not None:
        target.tokenizer.save_pretrained(out)
    return command


def serve_command(drafter: Drafter, engine: str, target: str, out: Path, draft_length: int) -> str:
    """The shell command that serves the target with this drafter."""
    if engine == "sglang":
        if drafter.kind not in SGLANG_ALGORITHMS:
            raise UserError(f"SGLang serves no {drafter.kind} drafters: export for vllm, or train another kind")
        return shlex.join(
            ["python", "-m", "sglang.launch_server", "--model-path", target]
            + ["--speculative-algorithm", SGLANG_ALGORITHMS[drafter.kind], "--speculative-draft-model-path", str(out)]
            + ["--speculative-num-steps", str(draft_length), "--speculative-eagle-topk", "1"]
            + ["--speculative-num-draft-tokens", str(draft_length + 1)]
        )
    if engine == "speculators" and drafter.kind != "eagle3":
        raise UserError(f"the speculators format has no {drafter.kind} drafters: export for vllm")
    settings = {"method": VLLM_METHODS[drafter.kind], "model": str(out), "num_speculative_tokens": draft_length}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings)])


def speculators_config(config: dict[str, Any], target: Target, draft_length: int) -> dict[str, Any]:
    """config.json of the speculators format for an EAGLE-3 drafter."""
    layer_keys = [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "vocab_size",
        "max_position_embeddings",
        "rope_parameters",
    ]
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {key: config[key] for key in layer_keys},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "norm_before_residual": False,  # engines take a missing key for True
        "norm_before_fc": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "dtype": config["dtype"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_length}],
            "verifier": {"name_or_path": target.name, "architectures": target.model.config.architectures},
        },
    }
