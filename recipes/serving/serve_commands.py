"""The commands that serve a target with an exported drafter, and the scripts that hold them."""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.data.console import shell_path
from draftsmith.inference.decoding.schedule import Schedule, for_sglang, for_vllm
from draftsmith.models.drafter_configs import NgramConfig
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import real_path, write_json, write_whole
from draftsmith.recipes.engine_rules.engine_table import how_known
from draftsmith.recipes.engine_rules.loader_rules import SGLANG, TRAINING_FREE, VLLM, rules_for
from draftsmith.recipes.engine_rules.other_engines import LLAMA_CPP, TENSORRT_LLM, TRANSFORMERS
from draftsmith.recipes.serving import vllm_swap
from draftsmith.recipes.serving.export import PLUGIN, Exported
from draftsmith.recipes.serving.other_commands import (
    llama_cpp_conversions,
    llama_cpp_words,
    tensorrt_llm_words,
    transformers_words,
    write_tensorrt_llm_options,
)
from draftsmith.recipes.serving.vllm_medusa import MedusaProposer
from draftsmith.recipes.serving.vllm_run import SpeculativeConfig
from draftsmith.recipes.serving.vllm_swap import METHODS, DraftSwap

SGLANG_ADAPTIVE = ("EAGLE", "EAGLE3")  # algorithms whose draft length SGLang can change
SWAP = Path(vllm_swap.__file__)  # lies beside a drafter whose weights a vLLM may swap
SGLANG_SCHEDULE = "sglang_schedule.json"
VERSIONS = {"sglang": SGLANG, "transformers": TRANSFORMERS, "llama_cpp": LLAMA_CPP, "tensorrt_llm": TENSORRT_LLM}


def speculative_config(kind: str, model: str, draft_length: int) -> SpeculativeConfig:
    """Return what vLLM is told of a drafter, `model` being its directory or its name on the Hub."""
    if kind in TRAINING_FREE:
        config = SpeculativeConfig(method=kind, num_speculative_tokens=draft_length)
        if kind != "ngram":
            return config
        return replace(config, prompt_lookup_max=NgramConfig.longest, prompt_lookup_min=NgramConfig.shortest)
    rules = rules_for("vllm", kind)
    return SpeculativeConfig(
        method=rules.method,
        model=None if rules.in_target else model,
        num_speculative_tokens=draft_length,
        parallel_drafting=True if rules.parallel_drafting else None,
    )


def plugin_config(draft_length: int) -> SpeculativeConfig:
    """Return what vLLM is told of the plug-in that serves Medusa heads."""
    name = f"{PLUGIN.stem}.{MedusaProposer.__name__}"
    return SpeculativeConfig(method="custom_class", model=name, num_speculative_tokens=draft_length)


def serve_command(
    exported: Exported, engine: str, where: Path | str, draft_length: int, schedule: Schedule | None = None
) -> str:
    """Return the shell command that serves the target with the drafter at `where`: a directory, or its name on the Hub.

    A schedule that speculates at all sets the draft length for vLLM by the number of running requests, and its longest
    one in place of `draft_length`. SGLang reads a schedule from a file, which a command for a name on the Hub lacks.
    """
    if schedule and not schedule.longest:
        schedule = None
    draft_length = at_most_drafted(exported, draft_length)
    if engine == "sglang":
        return shlex.join(sglang_words(exported, where, draft_length, schedule))
    if engine == "transformers":
        return shlex.join(transformers_words(exported, where, draft_length))
    if engine == "llama_cpp":
        return shlex.join(llama_cpp_words(exported, where, draft_length))
    if engine == "tensorrt_llm":
        return shlex.join(tensorrt_llm_words(exported, where))
    config = speculative_config(exported.kind, str(where), schedule.longest if schedule else draft_length)
    if schedule:
        config = replace(config, num_speculative_tokens_per_batch_size=for_vllm(schedule))
    served = where if exported.in_target else exported.target
    return shlex.join(["vllm", "serve", shell_path(served), "--speculative-config", config.text])


def sglang_words(exported: Exported, where: Path | str, draft_length: int, schedule: Schedule | None) -> list[str]:
    """Return the words of SGLang's command."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", shell_path(exported.target)]
    if exported.target_dtype:  # else SGLang computes with an fp32 drafter in fp16, beside a bf16 target
        words += ["--dtype", exported.target_dtype]
    if exported.kind in TRAINING_FREE:
        words += ["--speculative-algorithm", exported.kind.upper()]
        return [*words, "--speculative-num-draft-tokens", str(draft_length + 1)]  # the newest token among them
    method = rules_for("sglang", exported.kind).method
    words += ["--speculative-algorithm", method, "--speculative-draft-model-path", shell_path(where)]
    if schedule and method in SGLANG_ADAPTIVE and isinstance(where, Path):
        draft_length = schedule.longest
        words += ["--speculative-adaptive", "--speculative-adaptive-config", shell_path(where / SGLANG_SCHEDULE)]
    if method in ("DFLASH", "DSPARK"):  # a block at once: the newest token and the drafted ones
        return [*words, "--speculative-num-draft-tokens", str(draft_length + 1)]
    words += ["--speculative-num-steps", str(draft_length), "--speculative-eagle-topk", "1"]
    return [*words, "--speculative-num-draft-tokens", str(draft_length + 1)]


def plugin_command(exported: Exported, where: Path | str, draft_length: int) -> str:
    """Return the command of the plug-in, which vLLM imports from a folder.

    Where `where` is a name on the Hub, it must be run in a copy of the directory.
    """
    folder = where if isinstance(where, Path) else "."
    config = plugin_config(at_most_drafted(exported, draft_length))
    words = ["env", f"PYTHONPATH={folder}", "vllm", "serve", shell_path(exported.target)]
    return shlex.join([*words, "--speculative-config", config.text])


def check_swaps(exported: Exported) -> None:
    """Raise `UserError` where a running vLLM would refuse to swap the drafter."""
    speculative = speculative_config(exported.kind, "", 1)
    if speculative.method not in METHODS or speculative.parallel_drafting:
        raise UserError(
            f"--swappable: a vLLM that drafts by {exported.kind} takes no other weights while it runs; leave it out, "
            "and start the server anew for each checkpoint"
        )


def write_swappable(exported: Exported, where: Path, draft_length: int) -> str:
    """Write serve_vllm_swappable.sh and what it needs into the folder; return its command.

    A vLLM that was started so takes other checkpoints of the drafter while it runs. Its developer mode answers whoever
    reaches it: it is for measuring, and not for the open.
    """
    shutil.copy(SWAP, exported.directory)
    where = real_path(where)
    environment = ["env", "VLLM_SERVER_DEV_MODE=1", f"PYTHONPATH={shell_path(where)}"]
    extension = ["--worker-extension-cls", f"{SWAP.stem}.{DraftSwap.__name__}"]
    command = shlex.join([*environment, *shlex.split(serve_command(exported, "vllm", where, draft_length)), *extension])
    write_script(exported.directory / "serve_vllm_swappable.sh", VLLM, where, command)
    return command


def at_most_drafted(exported: Exported, draft_length: int) -> int:
    """Return a draft length, cut to the longest that the drafter can propose."""
    return min(draft_length, exported.max_draft_length or draft_length)


def write_scripts(
    exported: Exported, where: Path | str, draft_length: int, schedule: Schedule | None = None
) -> dict[str, str]:
    """Write serve_vllm.sh, serve_sglang.sh for the engines that serve the directory; return engine -> command.

    `where` is the directory in which it will be served, or its name on the Hub. serve_vllm_plugin.sh serves Medusa
    heads with a vLLM newer than 0.32. Paths in commands are as they were given, so a script goes to where they hold,
    unless it is made for a name on the Hub.
    """
    commands = {engine: serve_command(exported, engine, where, draft_length, schedule) for engine in exported.served_by}
    if (exported.directory / PLUGIN.name).is_file():
        commands["vllm_plugin"] = plugin_command(exported, where, draft_length)
    if schedule is not None and SGLANG_SCHEDULE in commands.get("sglang", ""):
        write_json(exported.directory / SGLANG_SCHEDULE, for_sglang(schedule))
    for engine, command in commands.items():
        known = "was run" if how_known(engine.removesuffix("_plugin"), exported.kind) == "run" else "was only read"
        version = f"{VERSIONS.get(engine, VLLM)}, which {known}"
        before = llama_cpp_conversions(exported, where) if engine == "llama_cpp" else []
        write_script(exported.directory / f"serve_{engine}.sh", version, where, command, before)
    if "tensorrt_llm" in commands:
        write_tensorrt_llm_options(exported, where, at_most_drafted(exported, draft_length))
    return commands


def write_script(script: Path, version: str, where: Path | str, command: str, before: Sequence[str] = ()) -> None:
    """Write a command as a script, behind lines `before` it; with a path, for the folder in which the path holds."""
    here = [f"cd {shlex.quote(str(Path.cwd()))} || exit"] if isinstance(where, Path) else []
    lines = ["#!/bin/sh", f"# checked against the loader rules of {version}", *here, *before, f"exec {command}\n"]
    write_whole(script, os.fsencode("\n".join(lines)))  # a path may hold bytes that are no text
    script.chmod(0o755)
