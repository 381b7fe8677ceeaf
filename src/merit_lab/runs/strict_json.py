"""JSON that a program wrote: whatever else stands in a file is a ValueError, never a traceback or a guess."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

_DEEPEST = 64  # levels of lists and objects; what runs write has six
_LARGEST = 2**63  # of whole numbers, as tables hold them


def decode(content: bytes) -> Any:
    """Return the value that JSON text stands for.

    Raises ValueError, with the reason alone, if it is no JSON, is nested deeper than anything that is written
    here, or has a number that no table holds.
    """
    try:
        value = msgspec.json.decode(content)
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep") from None
    except ValueError as error:
        raise ValueError(str(error)) from None
    _check(value, _DEEPEST)
    return value


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


def _check(value: Any, room: int) -> None:
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    elif isinstance(value, int) and abs(value) >= _LARGEST:
        raise ValueError("it has a whole number of more than 64 bits")
    for one in inner:
        if not room:
            raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
        _check(one, room - 1)
