"""evaluation.json: what was measured on a drafter, on what, and with what."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftsmith.models import Target

PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "triton", "numpy")


def environment(target: Target) -> dict[str, Any]:
    """What a figure depends on besides the drafter."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "device": device_name(target),
        "num_threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_fingerprint": target.fingerprint(),
        "git_commit": git_commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def evaluation(target: Target, name: str, kind: str, results: list[dict[str, Any]], env: dict[str, Any]) -> dict:
    """The object that evaluation.json holds."""
    return {"target": target.name, "drafter": name, "drafter_kind": kind, "environment": env, "results": results}


def git_commit() -> str | None:
    """Commit of the checkout that draftsmith runs from, "+" where it has changes; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    commands = (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changes else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_name(target: Target) -> str:
    """The GPU or the CPU that a target computes on."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
