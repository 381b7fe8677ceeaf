"""Dataclasses from JSON objects, by msgspec; what it does not do: unknown keys are errors."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from typing import Any, TypeVar, cast, get_args, get_type_hints

import msgspec

from merit_optim.spelling import nearest

_T = TypeVar("_T")


def build(kind: type[_T], values: Any, prefix: str = "") -> _T:
    """Return a dataclass from a JSON object of its fields, including nested ones."""
    if not isinstance(values, dict):
        raise ValueError(
            f"the configuration has {reprlib.repr(values)} as {prefix[:-1]}; it must be an object"
        )
    hints = _hints(cast(Any, kind))
    for key in values:
        if key not in hints:
            similar = nearest(key, hints)
            hint = f"; the nearest is {prefix}{similar[0]}" if similar else ""
            raise ValueError(f"the configuration has {prefix}{key}, which does not exist{hint}")
    for spec in dataclasses.fields(cast(Any, kind)):
        if spec.name not in values and spec.default is spec.default_factory is dataclasses.MISSING:
            raise ValueError(f"the configuration has no {prefix}{spec.name}, which it needs")
    built = {}
    for key, value in values.items():
        if members := dataclasses_of(hints[key]):
            # Of several, the one with these fields; if there is none, the first reports the unknown field.
            keys = value.keys() if isinstance(value, dict) else ()
            built[key] = build(
                next((cls for cls in members if _hints(cls).keys() >= set(keys)), members[0]),
                value,
                f"{prefix}{key}.",
            )
            continue
        try:
            built[key] = msgspec.convert(value, hints[key], dec_hook=lambda hint, text: hint(text))
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(
                f"the configuration has {reprlib.repr(value)} as {prefix}{key}: {error}"
            ) from None
    return kind(**built)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields. Evaluating them takes longer than all else of ``build``."""
    return get_type_hints(kind)


def dataclasses_of(hint: Any) -> list[Any]:
    """Return the dataclasses in a type hint, which may be a union."""
    return [cls for cls in get_args(hint) or [hint] if dataclasses.is_dataclass(cls)]
