"""Configurations as JSON values: dataclasses from dictionaries, and what in them is not the default."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from merit_lab.runs.json_types import fits, in_words
from merit_optim.spelling import nearest

_T = TypeVar("_T")


def unusual(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass without their default value, including nested ones, as JSON values."""
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            values[spec.name] = unusual(value)
        elif value != spec.default:
            values[spec.name] = str(value) if isinstance(value, Path) else value
    return values


def build(kind: type[_T], values: dict[str, Any], prefix: str = "") -> _T:
    """Build a dataclass from a dictionary of its fields, including nested ones."""
    hints = _hints(cast(Any, kind))
    for key in values:
        if key not in hints:
            similar = nearest(key, hints)
            hint = f" (the nearest is {prefix}{similar[0]})" if similar else ""
            raise ValueError(
                f"the configuration has {prefix}{key}, which this version of merit-optim does not know"
                f"{hint}; another version wrote it, or it was edited. Use the version that wrote it, or "
                "start a new run."
            )
    for spec in dataclasses.fields(cast(Any, kind)):
        if spec.name not in values and spec.default is spec.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"the configuration has no {prefix}{spec.name}; restore the file that the run wrote"
            )
    built = {}
    for key, value in values.items():
        if not fits(value, hints[key]):
            raise ValueError(
                f"the configuration has {reprlib.repr(value)} as {prefix}{key}; it must be "
                f"{in_words(hints[key])}. Restore the file that the run wrote, or start a new run."
            )
        if members := dataclasses_of(hints[key]):
            # Of several, the one with these fields; if there is none, the first reports the unknown field.
            fitting = (
                cls for cls in members if set(value) <= {field.name for field in dataclasses.fields(cls)}
            )
            value = build(next(fitting, members[0]), value, f"{prefix}{key}.")
        elif hints[key] is Path:
            value = Path(value)
        elif isinstance(value, list):
            value = tuple(value)
        built[key] = value
    return kind(**built)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields. Evaluating them takes longer than all else of ``build``."""
    return get_type_hints(kind)


def dataclasses_of(hint: Any) -> list[Any]:
    """Return the dataclasses in a type hint, which may be a union."""
    return [cls for cls in get_args(hint) or [hint] if dataclasses.is_dataclass(cls)]
