"""What differs between the settings that a folder was made with and those that are asked for now."""

from typing import Any

SHOWN = 4  # changes in a line; of another drafter's settings there are dozens


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts -> one dict by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Dotted key -> "key old -> new", of the keys that differ; of one that only one side has, too."""
    old, new, none = flatten(before), flatten(now), "unknown"
    return {
        key: f"{key} {old.get(key, none)} -> {new.get(key, none)}"
        for key in {**old, **new}
        if old.get(key, none) != new.get(key, none)
    }


def in_words(changed: dict[str, str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return ", ".join(list(changed.values())[:SHOWN]) + more
