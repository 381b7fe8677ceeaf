"""metrics.jsonl: everything a run measured, one JSON object per line.

Each line has a "kind" and a "step", the number of steps done (0: before training):

    train        loss, grad_norm, weight_norm (of the weights before the step), lr, tokens, seconds,
                 tokens_per_second, optimizer_share, mfu, memory_gib
    validation   tokens, loss, loss_error (its standard error over the sequences)
    attention    max_logits, entropy: for each layer a list with one number per head
    update       parameters: {name: {clipped, bounded, smallest_ratio, largest_ratio, relative_change}}
    event        what, message
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from merit_lab.json_values import convert, decode, encode, with_nan

LOGGED = (
    *("loss", "lr", "grad_norm", "weight_norm", "seconds", "tokens_per_second"),
    *("optimizer_share", "mfu", "memory_gib"),
)
"""The numbers in the lines of training."""

_PERHAPS = float | None
_LINES: Mapping[str, Mapping[str, Any]] = {
    "train": {"tokens": int | None, **dict.fromkeys(LOGGED, _PERHAPS)},
    "validation": {"tokens": int | None, "loss": float, "loss_error": _PERHAPS},
    "attention": {"max_logits": list[list[float]], "entropy": list[list[float]] | None},
    "update": {"parameters": dict[str, dict[str, float]]},
    "event": {"what": str, "message": str | None},
}
"""What stands in a line of each kind; what may be None may be missing."""

Mark = tuple[int, str]
"""A place in the file: the length up to there, and the sha256 of that part."""
BEGINNING: Mark = 0, hashlib.sha256().hexdigest()


class MetricsWriter:
    """Appends lines and flushes each to the operating system: a killed process loses none.

    Args:
        path: the file, created if needed.
        mark: where to truncate the file, to resume from a checkpoint; None keeps all of it.
    """

    def __init__(self, path: Path, mark: Mark | None = None) -> None:
        content = b""
        if path.exists():
            with path.open("rb") as file:
                content = file.read(-1 if mark is None else mark[0])
        self._hash = hashlib.sha256(content)
        if mark is not None and mark != (len(content), self._hash.hexdigest()):
            raise ValueError(
                f"{path} has changed in its first {mark[0]} bytes since the checkpoint was made. Restore the "
                "file, or start a new run."
            )
        self._file = path.open("ab")
        self._file.truncate(len(content))
        self._file.seek(0, os.SEEK_END)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line."""
        content = encode(line).encode() + b"\n"
        self._file.write(content)
        self._file.flush()
        self._hash.update(content)

    def sync(self) -> Mark:
        """Flush the lines to disk, and return the end of the file."""
        os.fsync(self._file.fileno())
        return self._file.tell(), self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


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
                yield _measurement(decode(line))
            except ValueError as error:
                raise ValueError(
                    f"line {number} of {path} is not a measurement ({error}). Only the run writes this file; "
                    "remove the line if you do not need its numbers."
                ) from None


def _measurement(line: Any) -> dict[str, Any]:
    kind = line.get("kind") if isinstance(line, dict) else None
    if not isinstance(kind, str) or kind not in _LINES:
        raise ValueError(f"its kind is none of {', '.join(_LINES)}")
    found: dict[str, Any] = line if kind == "event" else with_nan(line)
    for name, hint in {"step": int, **_LINES[kind]}.items():
        if type(value := found.get(name)) is not float or hint is not _PERHAPS:  # which is most often
            convert(value, hint, f"its {name}")
    if found["step"] < 0:
        raise ValueError(f"its step is {found['step']}")
    return found
