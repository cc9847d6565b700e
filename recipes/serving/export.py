"""Checkpoints in the form that a serving engine, or the project that a family comes from, loads.

A checkpoint already has the engines' layout. Exporting adapts what differs from engine to engine, holds the result
against the engine's loader rules, writes it, and reads it back.
"""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.data.processes import locked
from draftsmith.models import (
    CHANGED_TARGET,
    Checkpoint,
    Drafter,
    Target,
    build_drafter,
    checkpoint_of,
    read_checkpoint,
)
from draftsmith.models.checkpoints import check_reads_same
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import PARTIAL, finish_moving, real_path, whole_folder, write_json, write_whole
from draftsmith.models.storage.model_files import target_config_file
from draftsmith.models.storage.reading import read_json_object
from draftsmith.recipes.engine_rules.engine_key_names import DTYPES
from draftsmith.recipes.engine_rules.layout_check import check_files, engines_that_serve
from draftsmith.recipes.engine_rules.loader_rules import LOADER_RULES, ONE_LAYOUT, TRAINING_FREE, check_name, rules_for
from draftsmith.recipes.engine_rules.project_layouts import in_project_layout
from draftsmith.recipes.serving import assisted_generation, vllm_medusa

ENGINES = (*ONE_LAYOUT, "transformers", "llama_cpp", "tensorrt_llm")
WEIGHT_FILES = {"safeailab": "pytorch_model.bin", "fasterdecoding": "medusa_lm_head.pt"}  # else model.safetensors
ASSISTED = Path(assisted_generation.__file__)  # lies beside what transformers serves
PLUGIN = Path(vllm_medusa.__file__)  # lies beside Medusa heads, for a vLLM that has none of its own


@dataclass(frozen=True)
class Exported:
    """An exported drafter."""

    directory: Path  # in which it lies now
    engine: str
    kind: str
    target: str
    target_fingerprint: str | None  # of the one that it was trained for; None: not known
    max_draft_length: int | None
    served_by: tuple[str, ...]  # the engines
    in_target: bool = False  # it lies in a copy of the target, which is served in the target's place
    target_dtype: str | None = None  # half precision that the target's config.json names; None: another one or none
    whole_blocks: bool = False  # a shorter draft is one of other tokens, in vLLM, which cuts the block


def export_checkpoint(
    checkpoint: str | Path, engine: str, target: Target, out: Path, hub_name: str | None = None
) -> Exported:
    """Write the drafter of a checkpoint (a directory or a Hub name) to `out`, for an engine or in a project's layout.

    It is written whole or not at all. The target's embedding, head and sizes are enough, as
    `Target.head_from_pretrained` loads them. `hub_name`: what it will be served under, where that is not `out`. Raises
    `UserError` where that engine cannot serve it as it was trained.
    """
    with export_folder(checkpoint, target, out) as folder:
        exported = write_drafter(checkpoint, engine, target, served_names(out, hub_name), folder)
    return replace(exported, directory=out)


@contextlib.contextmanager
def export_folder(checkpoint: str | Path, target: Target, out: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `out` when all is written into it; `UserError` where `out` is not free."""
    with locked(out):
        finish_moving(out)
        check_places(checkpoint, target, out)
        with whole_folder(out) as folder:
            yield folder


def write_drafter(checkpoint: str | Path, engine: str, target: Target, names: dict[str, str], folder: Path) -> Exported:
    """Write weights and config of a checkpoint's drafter into an empty folder, for an engine or in a project's layout.

    `names`: what it will be served under, by the option that says so.
    """
    if is_training_free(checkpoint):
        return training_free(str(checkpoint), engine, target, folder)
    source = read_checkpoint(checkpoint, target)
    drafter = build_drafter(source, target)  # also shows that it is whole and fits the target
    check_reads_same(drafter, checkpoint, target)
    trained = checkpoint_of(drafter, dtype_of(source.tensors))
    trained_for = drafter.trained_for or trained.config["draftsmith"]["trained_for"]
    fingerprint = trained_for.get("target_fingerprint")
    if drafter.served_in_target:
        method = rules_for(engine, drafter.kind).method
        for option, name in names.items():
            check_name(method, option, name)
        drafter.write_in_target(folder)
        return Exported(folder, engine, drafter.kind, target.name, fingerprint, None, (engine,), in_target=True)
    trained.config["draftsmith"]["trained_for"] = trained_for
    files = adapt(trained, engine, target)
    served_by: tuple[str, ...] = ()
    if engine in ENGINES:
        check_files(engine, files, target)
        shared = ONE_LAYOUT if engine in ONE_LAYOUT else (engine,)
        served_by = engines_that_serve(files, target, shared)
    elif engine == "speculators":  # vLLM loads that format, too
        check_files("vllm", adapt(trained, "vllm", target), target)
        served_by = ("vllm",)
    vllm = LOADER_RULES.get(("vllm", files.kind))
    if vllm is not None and ("vllm" in served_by or engine not in ENGINES or files.kind != "draft_model"):
        for option, name in names.items():
            check_name(vllm.method, option, name)
    write_files(files, engine, folder, target)
    check_round_trip(source, folder, target)
    both_ways = files.kind in ("dflash", "dflash2", "dspark") and not files.config.get("is_causal")
    return Exported(
        folder,
        engine,
        files.kind,
        target.name,
        fingerprint,
        drafter.max_draft_length,
        served_by,
        target_dtype=stored_dtype(target.name),
        whole_blocks=both_ways and engine == "vllm",
    )


def stored_dtype(target: str) -> str | None:
    """Return the half precision that a target's config.json names; None where it names another one or none."""
    config = read_json_object(target_config_file(target))
    config = config.get("text_config") or config
    name = str(config.get("dtype") or config.get("torch_dtype"))
    return name if name in ("bfloat16", "float16") else None


def why_not_served(drafter: Drafter, engine: str) -> str | None:
    """Return why an engine would not serve a trained drafter for its target as it is exported; None where it would."""
    try:
        rules_for(engine, drafter.kind)
        if drafter.served_in_target:
            drafter.check_in_target()
        else:
            files = checkpoint_of(drafter, torch.bfloat16)
            check_files(engine, adapt(files, engine, drafter.target), drafter.target)
    except UserError as error:
        return str(error)
    return None


def is_training_free(checkpoint: str | Path) -> bool:
    """Return whether this names a drafter that engines have themselves, and no folder."""
    return str(checkpoint) in TRAINING_FREE and not Path(checkpoint).is_dir()


def training_free(kind: str, engine: str, target: Target, folder: Path) -> Exported:
    """Return the export of a drafter without weights: nothing but commands.

    Raises `UserError` for an engine that has none like it.
    """
    if engine not in TRAINING_FREE[kind]:
        raise UserError(f"--engine {engine} has no drafter like {kind}: give --engine {TRAINING_FREE[kind][0]}")
    shared = ONE_LAYOUT if engine in ONE_LAYOUT else (engine,)
    served_by = tuple(name for name in TRAINING_FREE[kind] if name in shared)
    if engine == "transformers":
        (folder / ASSISTED.name).write_text(ASSISTED.read_text())
    return Exported(folder, engine, kind, target.name, None, None, served_by)


def served_names(out: Path, hub_name: str | None) -> dict[str, str]:
    """Return the names that an export is served under, by the option that says so."""
    return {"--out": str(real_path(out)), **({"--push": hub_name} if hub_name is not None else {})}


def check_places(checkpoint: str | Path, target: Target, out: Path) -> None:
    """Raise `UserError` for a source that has no weights, an `out` that is not free, and another target than needed."""
    if str(checkpoint) in ("lookahead", "none") and not Path(checkpoint).is_dir():
        raise UserError(
            f"{checkpoint} is no trained drafter, and no engine has one like it: give a checkpoint, such as "
            f"runs/NAME/best, or {' or '.join(TRAINING_FREE)}"
        )
    if real_path(out) == real_path(Path(checkpoint)):
        raise UserError(f"{out} is the checkpoint itself: give another --out")
    if out.is_dir() and any(path.name != PARTIAL for path in out.iterdir()):
        raise UserError(
            f"{out} is not empty, and all that lies there would be served and pushed: give another --out, or remove it"
        )
    changed = Path(checkpoint) / CHANGED_TARGET
    if changed.is_dir() and real_path(Path(target.name)) != real_path(changed):
        raise UserError(f"this drafter was trained along with its target: give --target {changed}")


def dtype_of(tensors: dict[str, Tensor]) -> torch.dtype:
    """Return the floating-point type of the weights; fp32, in which all are exact, where they have several."""
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in DTYPES}
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        raise UserError("the checkpoint's weights are not plain floating-point ones: export it before quantising it")
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def adapt(files: Checkpoint, engine: str, target: Target) -> Checkpoint:
    """Return a checkpoint, which has the layout that engines share, in that of one engine or project."""
    if engine not in ENGINES:
        return in_project_layout(engine, files, target)
    architecture = rules_for(engine, files.kind).architecture
    config = {key: value for key, value in files.config.items() if key != "quantization_config"}  # weights are plain
    if architecture is not None:
        config = {key: value for key, value in config.items() if value is not None}  # typed fields refuse null
        config["architectures"] = [architecture]
    return replace(files, config=config)


def write_files(files: Checkpoint, engine: str, out: Path, target: Target) -> None:
    """Write config.json and weights, and what a kind needs beside them."""
    write_json(out / "config.json", files.config)
    if engine in WEIGHT_FILES:
        content = io.BytesIO()  # for torch's own writing to a file does not say why it fails
        torch.save(files.tensors, content)
        write_whole(out / WEIGHT_FILES[engine], content.getvalue())
    else:
        save_file(files.tensors, out / "model.safetensors", metadata={"format": "pt"})
    if files.kind == "medusa" and engine == "vllm":
        (out / PLUGIN.name).write_text(PLUGIN.read_text())
    if engine == "transformers":
        (out / ASSISTED.name).write_text(ASSISTED.read_text())
    if files.kind == "draft_model":
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(out)
        target.model.generation_config.save_pretrained(out)


def check_round_trip(source: Checkpoint, out: Path, target: Target) -> None:
    """Raise `UserError`, naming what differs, unless the directory is read back as the same drafter to the bit."""
    trained, written = (build_drafter(files, target) for files in (source, read_checkpoint(out, target)))
    wrong = [] if written.kind == trained.kind else [f"kind {written.kind}"]
    for expected, actual in (
        (trained.engine_tensors(), written.engine_tensors()),
        (trained.engine_config(), written.engine_config()),
    ):
        wrong += [name for name in expected.keys() | actual.keys() if not same(expected.get(name), actual.get(name))]
    if wrong:
        raise UserError(
            f"what is written is read back as another drafter ({', '.join(sorted(wrong)[:4])}): this is a fault of "
            "draftsmith, so nothing is exported"
        )


def same(a: Any, b: Any) -> bool:
    """Return whether two tensors, or two values of a config, are equal."""
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
