"""Who a target is beyond its name: what samples, drafters and evaluations have to agree on."""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.models.errors import UserError
from draftsmith.models.target import Target

# Encoded beside the vocabulary, it shows merges, normalisation and the special tokens put before a text.
PROBE = "The smith's  iron:\n\tdef f(x): return 3.14159 # ünï 漢字 🔨 <|im_start|>"
NAMES = {
    "target_fingerprint": "weights or config",
    "tokenizer_fingerprint": "tokenizer",
    "template_hash": "chat template",
}


def identity(target: Target) -> dict[str, str | None]:
    """What tells one target from another, as it is kept in prepared.json and in a drafter's config.json."""
    return {
        "target_fingerprint": target.fingerprint(),
        "tokenizer_fingerprint": tokenizer_fingerprint(target),
        "template_hash": template_hash(target),
    }


def tokenizer_fingerprint(target: Target) -> str | None:
    """16 hex digits of the vocabulary and of how a text is cut into it; None without a tokenizer."""
    if target.tokenizer is None:
        return None
    return _hash(json.dumps([sorted(target.tokenizer.get_vocab().items()), target.encode(PROBE)]))


def template_hash(target: Target) -> str | None:
    """16 hex digits of the chat template; None where there is none."""
    template = target.tokenizer.chat_template if target.tokenizer else None
    return _hash(str(template)) if template else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_identity(
    what: str, recorded: Mapping[str, Any], target: Target, mend: str, keys: Collection[str] = tuple(NAMES)
) -> None:
    """Refuse `what` where it was made with another target; keys that it did not record are passed over."""
    own = identity(target)
    for key in keys:
        if key in recorded and recorded[key] != own[key]:
            raise UserError(
                f"{what} came of another {NAMES[key]} than that of {target.name} "
                f"({key} {recorded[key]}, not {own[key]}): {mend}"
            )
