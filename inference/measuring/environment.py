"""The environment that a measurement depends on: versions, device, commit, command."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from draftsmith.inference.measuring.results import Environment
from draftsmith.models import Target

PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "triton", "numpy")


def environment(target: Target) -> Environment:
    """Return what a figure depends on besides the drafter."""
    return Environment(
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        device=device_name(target),
        num_threads=torch.get_num_threads(),
        dtype=str(target.dtype).removeprefix("torch."),
        target_fingerprint=target.fingerprint(),
        git_commit=git_commit(),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        quantisation=target.quantisation,
    )


def git_commit() -> str | None:
    """Return the commit of the checkout that draftsmith runs from, with "+" where it has changes; None outside one."""
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
    """Return the name of the GPU or CPU that a target computes on."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
