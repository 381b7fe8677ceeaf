"""Convert nested values to flat fields, named as in jq or JavaScript, and back.

    {"loss": 2.5, "max_logits": [[7.0]], "parameters": {"head.weight": {"clipped": 0.0}}}

has the fields ``loss``, ``max_logits[0][0]`` and ``parameters["head.weight"].clipped``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, islice
from typing import Any

Path = tuple[str | int, ...]
"""The dict keys and list indices that lead to a value."""

Maker = Callable[[Iterator[Any]], Any]

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PART = re.compile(rf'\.?(?P<plain>{_PLAIN.pattern})|\[(?P<place>\d+)\]|\[(?P<quoted>"(?:[^"\\]|\\.)*")\]')


def fields_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a value, in order. Empty lists and dicts are fields themselves.

    Example:
        >>> dict(fields_of({"a": {"b c": [1, 2]}, "d": []}))
        {'a["b c"][0]': 1, 'a["b c"][1]': 2, 'd': []}
    """
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from fields_of(item, (name + _written(key)).removeprefix("."))
    elif isinstance(value, list | tuple) and value:
        for place, item in enumerate(value):
            yield from fields_of(item, f"{name}[{place}]")
    else:
        yield name, value


def path_of(name: str) -> Path:
    """Return the path of a field.

    Example:
        >>> path_of('parameters["head.weight"].clipped')
        ('parameters', 'head.weight', 'clipped')
    """
    return tuple(map(_read, _PART.finditer(name)))


def maker_of(paths: Sequence[Path]) -> Maker:
    """Return a function that builds the nested value from the values of fields at these paths, in order.

    It is made once for all lines with the same fields, usually all lines of a kind.

    Example:
        >>> make = maker_of([("a", "b", 0), ("a", "b", 1), ("c",)])
        >>> make(iter([1, 2, 3]))
        {'a': {'b': [1, 2]}, 'c': 3}
    """
    if paths[0] == ():
        return next
    parts = {
        key: maker_of([path[1:] for path in group]) for key, group in groupby(paths, key=lambda path: path[0])
    }
    if isinstance(next(iter(parts)), int):
        return _list_maker(list(parts.values()))
    return _dict_maker(parts)


def _list_maker(makers: Sequence[Maker]) -> Maker:
    if all(make is next for make in makers):
        return lambda values: list(islice(values, len(makers)))
    return lambda values: [make(values) for make in makers]


def _dict_maker(makers: Mapping[str | int, Maker]) -> Maker:
    if all(make is next for make in makers.values()):
        return lambda values: dict(zip(makers, values, strict=False))  # as many values as there are keys
    return lambda values: {key: make(values) for key, make in makers.items()}


@lru_cache(maxsize=4096)
def _written(key: str) -> str:
    return f".{key}" if _PLAIN.fullmatch(key) else f"[{json.dumps(key)}]"


def _read(part: re.Match[str]) -> str | int:
    if part["plain"] is not None:
        return part["plain"]
    return int(part["place"]) if part["place"] is not None else str(json.loads(part["quoted"]))
