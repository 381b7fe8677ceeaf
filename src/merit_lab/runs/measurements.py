"""RUN/curvature/step-00000100.json and RUN/noise/...: the measurements at a checkpoint, part by part.

Each part has its settings, so that it is measured again only with others, and its environment, since parts
may come from several machines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from merit_lab.runs import durable
from merit_lab.runs.lock import lock

FORMAT = 1

_PATIENCE = 60.0  # seconds; another process writes for an instant, or for some seconds on a slow disk


class Measurements:
    """The parts in a file, which is rewritten after each part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = _read(path)

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """The parts measured so far, each with its ``settings`` and its ``result``."""
        return self._parts

    def find(self, part: str, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Return the result of a part with these settings; None if it was not measured with them."""
        known: dict[str, Any] | None = self._parts.get(part)
        return known["result"] if known is not None and known["settings"] == settings else None

    def put(self, part: str, settings: dict[str, Any], result: dict[str, Any], **about: Any) -> None:
        """Store a part, replacing its result with other settings; keep the parts of other processes."""
        with lock(self.path.parent, patience=_PATIENCE):
            self._parts = _read(self.path)
            self._parts[part] = {"settings": settings, "result": result, **about}
            content = json.dumps({"format": FORMAT, **self._parts}, indent=2, allow_nan=False)
            durable.write(self.path, content + "\n")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of this command ({error!r}); move it elsewhere") from None
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version}; this version reads format {FORMAT}; move it elsewhere"
        )
    parts: dict[str, Any] = content
    return parts
