"""metrics.jsonl: everything a run measured, one JSON object per line.

Each line has a "kind" and a "step", the number of steps done (0: before training):

    train        loss, grad_norm, weight_norm (of the weights before the step), lr, tokens, seconds,
                 tokens_per_second, optimizer_share, mfu, memory_gib
    validation   tokens, loss, loss_error (its standard error over the sequences)
    attention    max_logits, entropy: for each layer a list with one number per head
    update       parameters: {name: {clipped, bounded, smallest_ratio, largest_ratio, relative_change}}
    event        what, message

JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_BLOCK = 1 << 16  # bytes of lines read together
_REQUIRED = {"validation": "loss", "event": "what"}  # by kind, what every reader relies on
_NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsWriter:
    """Appends lines and flushes each to the operating system: a killed process loses none.

    Args:
        path: the file, created if needed.
        offset: where to truncate the file, to resume from a checkpoint; None keeps all of it.
    """

    def __init__(self, path: Path, offset: int | None = None) -> None:
        size = path.stat().st_size if path.exists() else 0
        if offset is not None and not 0 <= offset <= size:
            raise ValueError(
                f"{path} has {size} bytes, but had {offset} when the checkpoint was made; the file was "
                "truncated or replaced. Restore the old one, or start a new run."
            )
        if offset and not _ends_a_line(path, offset):
            raise ValueError(
                f"{path} has no line that ends at byte {offset}, where it ended with the checkpoint; "
                "one of the two has changed. Restore the old one, or start a new run."
            )
        self._file = path.open("ab")
        if offset is not None:
            self._file.truncate(offset)
            self._file.seek(0, os.SEEK_END)

    @property
    def offset(self) -> int:
        """The size of the file, where the next line will begin."""
        return self._file.tell()

    def write(self, line: dict[str, Any]) -> None:
        """Append one line."""
        self._file.write(as_json(line).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush the lines to disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _ends_a_line(path: Path, offset: int) -> bool:
    with path.open("rb") as file:
        file.seek(offset - 1)
        return file.read(1) == b"\n"


def as_json(line: dict[str, Any]) -> str:
    """Return a line as JSON."""
    return json.dumps(_to_json(line), allow_nan=False)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file, without an incomplete last one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        number = 1
        while lines := file.readlines(_BLOCK):
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            yield from _measurements(lines, number, path)
            number += len(lines)


def _measurements(lines: list[bytes], first: int, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the measurements of some lines; ``first`` is the number of the first one.

    Parsing them together takes a third of the time; if one is invalid, each is parsed alone to find it.
    """
    together = _read_together(lines)
    if together is not None:
        yield from together
        return
    for number, line in enumerate(lines, start=first):
        try:
            yield _measurement(line)
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} is not a measurement ({error}). Only the run writes this file; "
                "remove the line if you do not need its numbers."
            ) from None


def _read_together(lines: list[bytes]) -> list[dict[str, Any]] | None:
    block = b",".join(lines)
    try:
        values = json.loads(b"[" + block + b"]")
    except ValueError:
        return None
    if b'nan"' in block or b'inf"' in block:
        values = _from_json(values)
    return values if len(values) == len(lines) and all(map(_is_measurement, values)) else None


def keep_nan(choose: Callable[[Sequence[float]], float], numbers: Sequence[float]) -> float:
    """Return ``max`` or ``min`` of numbers, or NaN if there is one, which Python's functions may drop.

    Example:
        >>> max(2.0, math.nan), keep_nan(max, [2.0, math.nan])
        (2.0, nan)
    """
    return math.nan if any(map(math.isnan, numbers)) else choose(numbers)


def _measurement(line: bytes) -> dict[str, Any]:
    value = _from_json(json.loads(line))
    if not _is_measurement(value):
        raise ValueError("it has no kind, no step, or not what its kind has")
    measurement: dict[str, Any] = value
    return measurement


def _is_measurement(value: Any) -> bool:
    if not (isinstance(value, dict) and "kind" in value and isinstance(value.get("step"), int)):
        return False
    return _REQUIRED.get(value["kind"], "kind") in value


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, str):
        return _NOT_IN_JSON.get(value, value)
    return value
