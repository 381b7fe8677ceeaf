"""JSON as programs wrote it: whatever else stands in a file is a ValueError, never a traceback or a guess.

Written by hand although libraries read JSON into dataclasses: a machine that only trains often has torch and
numpy but not those. JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from merit_optim.spelling import nearest

_T = TypeVar("_T")

_DEEPEST = 64  # levels of lists and objects; what the lab writes has six
_NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "a string",
    types.NoneType: "null",
}


def decode(content: bytes | str) -> Any:
    """Return the value that JSON text stands for.

    Raises ValueError, with the reason alone, if it is no JSON, is nested deeper than anything that is written
    here, or has what no table holds: a number of more than 64 bits, or a string that is no text.
    """
    text = content if isinstance(content, str) else content.decode()
    too_deep = ValueError(f"it is nested more than {_DEEPEST} levels deep")
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise too_deep from None
    if text.count("[") + text.count("{") > _DEEPEST and not _is_within(value, _DEEPEST):
        raise too_deep
    if "\\ud" in text.lower():  # a half of a pair is no character
        json.dumps(value, ensure_ascii=False).encode()
    return value


def encode(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON; on one line without ``indent``."""
    return json.dumps(_named(value), allow_nan=False, indent=indent)


def read_object(path: Path, way_out: str = "restore the file that the run wrote") -> dict[str, Any]:
    """Return the JSON object in a file, or raise ValueError with the file, the reason and the way out."""
    try:
        value = decode(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {way_out}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not the JSON that was written ({error}); {way_out}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; {way_out}")
    return value


def with_nan(value: Any) -> Any:
    """Return a decoded value with NaN and infinities in place of their names."""
    if isinstance(value, dict):
        return {key: with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    return _NOT_IN_JSON.get(value, value) if isinstance(value, str) else value


def convert(value: Any, hint: Any, name: str) -> Any:
    """Return a decoded value as a type, which may be a dataclass or contain some.

    Raises ValueError, with the name, if it does not have that type.

    Example:
        >>> convert([1, 2.5], tuple[float, float] | None, "betas")
        (1.0, 2.5)
        >>> convert("no", bool | None, "tied")
        Traceback (most recent call last):
        ValueError: tied is 'no'; it must be true or false, or null
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if members := dataclasses_of(hint):
        return _built(members, value, name)
    if kind in (Union, types.UnionType):
        for member in inner:
            try:
                return convert(value, member, name)
            except ValueError:
                continue
    elif kind in (list, tuple) and isinstance(value, list):
        is_counted = kind is tuple and inner[-1] is not Ellipsis
        if not is_counted or len(value) == len(inner):
            hints = inner if is_counted else inner[:1] * len(value)
            items = zip(value, hints, strict=True)
            return kind(convert(item, one, f"{name}[{place}]") for place, (item, one) in enumerate(items))
    elif kind in (dict, Mapping) and isinstance(value, dict):
        return {key: convert(item, inner[1], f"{name}.{key}") for key, item in value.items()}
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif kind is float and type(value) is int:
        return float(value)
    elif kind is Any or type(value) is kind or (kind is Literal and value in inner):
        return value
    raise ValueError(f"{name} is {reprlib.repr(value)}; it must be {_in_words(hint)}")


def build(kind: type[_T], values: Any, name: str = "") -> _T:
    """Return a dataclass from the object of its fields; ``name`` is that of the object."""
    return cast(_T, _built([kind], values, name))


def dataclasses_of(hint: Any) -> list[Any]:
    """Return the dataclasses in a type hint, which may be a union."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else [hint]
    return [cls for cls in members if dataclasses.is_dataclass(cls)]


def _built(members: list[Any], values: Any, name: str) -> Any:
    """Of several dataclasses, the one with these fields; if there is none, the first reports the unknown."""
    if not isinstance(values, dict):
        raise ValueError(f"{name or 'it'} is {reprlib.repr(values)}; it must be an object")
    kind = next((cls for cls in members if _hints(cls).keys() >= values.keys()), members[0])
    hints, prefix = _hints(kind), f"{name}." if name else ""
    for key in values:
        if key not in hints:
            similar = nearest(key, hints)
            hint = f"; the nearest is {prefix}{similar[0]}" if similar else ""
            raise ValueError(f"there is no {prefix}{key}{hint}")
    for field in dataclasses.fields(kind):
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{field.name} is missing")
    return kind(**{key: convert(value, hints[key], f"{prefix}{key}") for key, value in values.items()})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields. Evaluating them takes longer than all else."""
    return get_type_hints(kind)


def _in_words(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return ", or ".join(dict.fromkeys(map(_in_words, inner)))
    if kind is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if kind in (list, tuple):
        is_counted = kind is tuple and inner[-1] is not Ellipsis
        return f"a list{f' of {len(inner)}' if is_counted else ''}, each {_in_words(inner[0])}"
    return _WORDS.get(kind, "an object")


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_within(value: Any, room: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return room > 0 and all(_is_within(item, room - 1) for item in items)


def _whole(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError("it has a whole number of more than 64 bits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("it has a number that is too large")
    return number


def _refuse(name: str) -> None:
    raise ValueError(f"it has {name}, which JSON has not")


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
