"""Who a target is beyond its name: what samples, drafters and evaluations have to agree on."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from draftsmith.models.errors import UserError
from draftsmith.models.target.target import Target

# Encoded beside the vocabulary, it shows merges, normalisation and the special tokens put before a text.
PROBE = "The smith's  iron:\n\tdef f(x): return 3.14159 # ünï 漢字 🔨 <|im_start|>"


def identity(target: Target) -> dict[str, str | None]:
    """Return what tells one target from another, as it is kept in prepared.json and in a drafter's config.json.

    Of a target without its layers, not its weights.
    """
    known = [key for key in PARTS if target.has_layers or key != "target_fingerprint"]
    return {key: PARTS[key][1](target) for key in known}


def tokenizer_fingerprint(target: Target) -> str | None:
    """Return 16 hex digits of the vocabulary and of how a text is cut into it; None without a tokenizer."""
    if target.tokenizer is None:
        return None
    return _hash(json.dumps([sorted(target.tokenizer.get_vocab().items()), target.encode(PROBE)]))


def template_hash(target: Target) -> str | None:
    """Return 16 hex digits of the chat template; None where there is none."""
    template = target.tokenizer.chat_template if target.tokenizer else None
    return _hash(str(template)) if template else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Key on disk -> what a difference is called, and how it is found.
PARTS: dict[str, tuple[str, Callable[[Target], str | None]]] = {
    "target_fingerprint": ("other weights or another config", Target.fingerprint),
    "tokenizer_fingerprint": ("another tokenizer", tokenizer_fingerprint),
    "template_hash": ("another chat template", template_hash),
}


def check_identity(what: str, recorded: Mapping[str, Any], target: Target, keys: Collection[str], mend: str) -> None:
    """Refuse `what` where it was made with another target, by some of the keys; those not recorded are passed over."""
    for difference in differences(recorded, target, keys):
        raise UserError(f"{what} was made with {difference}: {mend}")


def differences(recorded: Mapping[str, Any], target: Target, keys: Collection[str]) -> Iterator[str]:
    """Yield the differences between the recorded target and this one, by some of the keys, in words."""
    for key in keys:
        name, fingerprint = PARTS[key]
        if key in recorded and recorded[key] != (own := fingerprint(target)):
            yield f"{name} than {target.name} has ({key} {recorded[key]}, not {own})"
