"""The difference between the settings that a folder was made with and those that are asked for now."""

from typing import Any

SHOWN = 4  # changes in a line; of another drafter's settings there are dozens
UNKNOWN = "unknown"  # what an absent setting is called


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def setting_changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Return dotted key -> "key old -> new" of the settings that differ, those that only one side has included."""
    old, new = flatten(before), flatten(now)
    pairs = {key: (old.get(key, UNKNOWN), new.get(key, UNKNOWN)) for key in {**old, **new}}
    return {key: f"{key} {old} -> {new}" for key, (old, new) in pairs.items() if old != new}


def changes_text(changed: dict[str, str]) -> str:
    """Return the first changes, and how many more there are."""
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return ", ".join(list(changed.values())[:SHOWN]) + more
