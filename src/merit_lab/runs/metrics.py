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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NotRequired, Self, TypedDict

import msgspec

_NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Number = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)] | float


class _Line(TypedDict):
    step: Count


class _Train(_Line, total=False):
    tokens: Count | None
    loss: Number | None
    grad_norm: Number | None
    weight_norm: Number | None
    lr: Number | None
    seconds: Number | None
    tokens_per_second: Number | None
    optimizer_share: Number | None
    mfu: Number | None
    memory_gib: Number | None


class _Validation(_Line):
    loss: Number
    loss_error: NotRequired[Number | None]
    tokens: NotRequired[Count | None]


class _Attention(_Line):
    max_logits: list[list[Number]]
    entropy: NotRequired[list[list[Number]] | None]


class _Update(_Line):
    parameters: dict[str, dict[str, Number]]


class _Event(_Line):
    what: str
    message: NotRequired[str | None]


_LINES: Mapping[str, Any] = {
    "train": _Train,
    "validation": _Validation,
    "attention": _Attention,
    "update": _Update,
    "event": _Event,
}


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


def as_json(value: Any) -> str:
    """Return a value as JSON on one line, with NaN and infinities as text."""
    return json.dumps(_to_json(value), allow_nan=False)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file, without an incomplete last one.

    Raises ValueError, with the line's number, where one is no measurement of those above.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _measurement(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"line {number} of {path} is not a measurement ({error}). Only the run writes this file; "
                    "remove the line if you do not need its numbers."
                ) from None


def _measurement(line: bytes) -> dict[str, Any]:
    value = msgspec.json.decode(line)
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _LINES:
        raise ValueError(f"its kind is none of {', '.join(_LINES)}")
    if kind != "event" and (b'nan"' in line or b'inf"' in line):
        value = with_nan(value)
    msgspec.convert(value, _LINES[kind])
    measurement: dict[str, Any] = value
    return measurement


def keep_nan(choose: Callable[[Sequence[float]], float], numbers: Sequence[float]) -> float:
    """Return ``max`` or ``min`` of numbers, or NaN if there is one, which Python's functions may drop.

    Example:
        >>> max(2.0, math.nan), keep_nan(max, [2.0, math.nan])
        (2.0, nan)
    """
    return math.nan if any(map(math.isnan, numbers)) else choose(numbers)


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def with_nan(value: Any) -> Any:
    """Return a value that was JSON with NaN and infinities in place of their names."""
    if isinstance(value, dict):
        return {key: with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    if isinstance(value, str):
        return _NOT_IN_JSON.get(value, value)
    return value
