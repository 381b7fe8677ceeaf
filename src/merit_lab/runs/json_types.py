"""Check the types of values read from JSON, and describe types for messages."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_NO_FLOAT = 2**1023  # larger integers may not be representable as floats
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "a string",
    Literal: "a string",
    types.NoneType: "null",
}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type, including nested values; for a dataclass, whether it is a dictionary.

    Example:
        >>> fits(1, float), fits(True, float), fits([1, 2.5], tuple[float, float] | None)
        (True, False, True)
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind in (Union, types.UnionType):
        return any(fits(value, member) for member in inner)
    if kind is float:
        return type(value) is float or (type(value) is int and abs(value) < _NO_FLOAT)
    if kind in (str, Path, Literal):
        return type(value) is str
    if kind in (list, tuple):
        return isinstance(value, list | tuple) and _all_fit(value, kind, inner)
    if kind in (dict, Mapping):
        return isinstance(value, dict) and all(fits(item, inner[1]) for item in value.values())
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    return type(value) is kind


def in_words(hint: Any) -> str:
    """Describe a type to somebody who edits JSON.

    Example:
        >>> in_words(tuple[float, float] | None)
        'a list of 2, each a number, or null'
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return ", or ".join(dict.fromkeys(in_words(member) for member in inner))
    if kind in (list, tuple):
        number = f" of {len(inner)}" if _is_counted(kind, inner) else ""
        return f"a list{number}, each {in_words(inner[0])}"
    return _WORDS.get(kind, "an object")


def _all_fit(values: Any, kind: Any, inner: tuple[Any, ...]) -> bool:
    if _is_counted(kind, inner):
        return len(values) == len(inner) and all(map(fits, values, inner))
    return all(fits(item, inner[0]) for item in values)


def _is_counted(kind: Any, inner: tuple[Any, ...]) -> bool:
    """Whether a type has a fixed length, as a pair does."""
    return kind is tuple and inner[-1] is not Ellipsis
