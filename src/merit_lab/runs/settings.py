"""Settings of runs by their dotted names: flat, and formatted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested settings as one mapping from dotted path to value."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value != []:  # the default; older records lack the setting
            flat[f"{prefix}{key}"] = _hashable(value)
    return flat


def _hashable(value: object) -> object:
    if isinstance(value, Mapping):
        return tuple((key, _hashable(one)) for key, one in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def show(value: object) -> str:
    """A setting's value, formatted for readers."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(show(item) for item in value) or "none"
    return str(value)
