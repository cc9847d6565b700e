"""Training text as the target wrote it: token ids kept as sampled, one JSON object a line.

A folder of samples holds samples.jsonl and prepared.json, which says what wrote them. The loss mask is not stored: it
is the generated span, everything from `prompt_length` on.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.models.errors import UserError
from draftsmith.models.target import Target

SAMPLES, PREPARED = "samples.jsonl", "prepared.json"


@dataclass
class Sample:
    token_ids: list[int]  # prompt and answer
    prompt_length: int
    finish_reason: str  # "eos", or "length" where the answer was cut
    temperature: float
    prompt_index: int  # place in the prompts file
    domain: str = ""  # kind of traffic, as the prompt has it


def sample_line(sample: Sample) -> str:
    return json.dumps(asdict(sample), separators=(",", ":")) + "\n"


def read_samples(folder: Path) -> list[Sample]:
    """All samples of a folder written by `prepare`."""
    path = folder / SAMPLES
    if not path.is_file() or not (folder / PREPARED).is_file():
        raise UserError(f"{folder} holds no prepared samples: run `draftsmith prepare --out {folder}` first")
    return [Sample(**json.loads(line)) for line in path.read_text().splitlines()]


def read_prepared(folder: Path) -> dict[str, Any]:
    return json.loads((folder / PREPARED).read_text())


def check_same_target(folder: Path, target: Target) -> None:
    """Refuse samples that another target wrote."""
    prepared = read_prepared(folder)
    if prepared["target_fingerprint"] != target.fingerprint():
        raise UserError(
            f"the samples in {folder} were written by {prepared['target']} "
            f"({prepared['target_fingerprint']}), not by {target.name} ({target.fingerprint()}): prepare them again"
        )


def data_hash(folder: Path) -> str:
    """16 hex digits of the samples file."""
    return hashlib.sha256((folder / SAMPLES).read_bytes()).hexdigest()[:16]


def template_hash(target: Target) -> str | None:
    """16 hex digits of the chat template; None where there is none."""
    template = target.tokenizer.chat_template if target.tokenizer else None
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else None
