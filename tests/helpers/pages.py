"""Pages in headless Chromium, and the functions of their scripts in Node.js."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.pages.rendering import SCRIPTS, page_file

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
    "--disable-web-security",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
]
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


def browse(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run headless Chromium with a profile in a folder; what its pages log as errors is in `stderr`, after CONSOLE."""
    profile = folder / "browser"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def computed(expression: str, scripts: Sequence[str] = SCRIPTS, **values: Any) -> Any:
    """Evaluate an expression of a page's scripts in Node.js, of constants with these values."""
    constants = "".join(f"const {name} = {json.dumps(to_json(value))};\n" for name, value in values.items())
    functions = "\n".join(map(page_file, scripts))
    script = f"{functions}\n{constants}console.log(JSON.stringify({expression}));"
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, timeout=30, check=True)
    return json.loads(done.stdout)
