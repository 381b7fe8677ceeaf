"""RUN/curvature/step-00000100.json: what was measured at a checkpoint, part by part.

Each part has the settings it was measured with, so that it is measured again only with others, and the
environment, since parts may come from several machines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from merit_lab.record import durable, lock

FORMAT = 1

_PATIENCE = 60.0  # seconds; another process that writes here is done in an instant, on a slow disk in some


class Results:
    """The parts in a file, which is written anew after each; a part that is there stays if it fits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = _read(path)

    def find(self, part: str, settings: dict[str, Any]) -> dict[str, Any] | None:
        """What a part gave with these very settings; None if it has not been measured with them."""
        found: dict[str, Any] | None = self._parts.get(part)
        return found["result"] if found is not None and found["settings"] == settings else None

    def put(self, part: str, settings: dict[str, Any], result: dict[str, Any], **about: Any) -> None:
        """Keep a part, in place of what it gave with other settings, beside those of other processes."""
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
        raise ValueError(f"{path} is no result of this command ({error!r}); move it away") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}; this version reads format {FORMAT}; move it away")
    parts: dict[str, Any] = content
    return parts
