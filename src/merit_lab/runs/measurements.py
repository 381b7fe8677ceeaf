"""What was measured at a checkpoint of a run, part by part: evaluations, curvature, noise.

    RUN/evaluate/step-00001000.json     parts: the sets (lambada; of its first 100 items: lambada-first-100)
    RUN/curvature/step-00001000.json    parts: loss, eigenvalues, trace, density
    RUN/noise/step-00001000.json        parts: scale

Each part has its ``result``, the ``settings`` it follows from, so that it is measured again only with others,
and its environment, since parts may come from several machines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merit_lab.runs import durable
from merit_lab.runs.lock import lock

KINDS = ("evaluate", "curvature", "noise")
"""The folders of measurements in a run."""

_FORMAT = 1
_PATIENCE = 60.0  # seconds; another process writes for an instant, or for some seconds on a slow disk
_NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Measurements:
    """The parts in a file, which is rewritten after each part.

    Example:
        >>> trace = Measurements(Path("run/curvature/step-00000100.json")).find("trace", {"probes": 8})
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = _read(path)

    def find(self, part: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result of a part with these settings; None if it was not measured with them."""
        known = self.parts.get(part)
        if known is None or known["settings"] != json.loads(json.dumps(settings)):
            return None
        result: dict[str, Any] = known["result"]
        return result

    def put(self, part: str, settings: Mapping[str, Any], result: Mapping[str, Any], **about: Any) -> None:
        """Store a part, replacing its result with other settings; keep the parts of other processes."""
        with lock(self.path.parent, patience=_PATIENCE):
            self.parts = _read(self.path)
            self.parts[part] = {"settings": settings, "result": result, **about}
            content = _numbers({"format": _FORMAT, **self.parts}, to_json=True)
            content = json.dumps(content, indent=2, allow_nan=False)
            durable.write(self.path, content + "\n")
        self.parts = _read(self.path)


def columns(run: Path) -> dict[str, Any]:
    """Return the results at a run's last measured checkpoints by name, as a row of a table has them.

    ``curvature.trace.standard_error`` is that key of the result of the part ``trace``, ``curvature.trace``
    its key "value", ``curvature.step`` the step of the checkpoint. Lists of lists are left out.

    Example:
        >>> columns(Path("a folder without measurements"))
        {}
    """
    found: dict[str, Any] = {}
    for kind in KINDS:
        paths = sorted((run / kind).glob("step-*.json"))
        if not paths:
            continue
        found[f"{kind}.step"] = int(paths[-1].stem.removeprefix("step-"))
        for part, content in Measurements(paths[-1]).parts.items():
            for key, value in content["result"].items():
                if not (isinstance(value, list) and any(isinstance(one, list) for one in value)):
                    found[f"{kind}.{part}" if key == "value" else f"{kind}.{part}.{key}"] = value
    return found


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        parts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = parts.pop("format")
        for part in parts.values():
            part["settings"], part["result"] = dict(part["settings"]), _numbers(dict(part["result"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of measurements ({error!r}); move it elsewhere") from None
    if version != _FORMAT:
        raise ValueError(
            f"{path} has format {version!r}; this version reads format {_FORMAT}; move it elsewhere"
        )
    return parts


def _numbers(content: Any, *, to_json: bool = False) -> Any:
    """The content with NaN and infinities, which JSON lacks, from their names or to them."""
    if isinstance(content, Mapping):
        return {key: _numbers(value, to_json=to_json) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_numbers(value, to_json=to_json) for value in content]
    if to_json:
        return str(content) if isinstance(content, float) and not math.isfinite(content) else content
    return _NOT_IN_JSON.get(content, content) if isinstance(content, str) else content
