"""What was measured at a checkpoint of a run, part by part: evaluations, curvature, noise.

    RUN/evaluate/step-00001000.json     parts: the sets (lambada; of its first 100 items: lambada-first-100)
    RUN/curvature/step-00001000.json    parts: loss, eigenvalues, trace, density
    RUN/noise/step-00001000.json        parts: scale

Each part has its ``result``, the ``settings`` it follows from, so that it is measured again only with others,
and its environment, since parts may come from several machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merit_lab.json_values import convert, decode, encode, read_object, with_nan
from merit_lab.runs import durable
from merit_lab.runs.lock import lock

KINDS = ("evaluate", "curvature", "noise")
"""The folders of measurements in a run."""

_FORMAT = 1
_PATIENCE = 60.0  # seconds; another process writes for an instant, or for some seconds on a slow disk


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
        if known is None or known["settings"] != decode(encode(settings)):
            return None
        result: dict[str, Any] = known["result"]
        return result

    def put(self, part: str, settings: Mapping[str, Any], result: Mapping[str, Any], **about: Any) -> None:
        """Store a part, replacing its result with other settings; keep the parts of other processes."""
        with lock(self.path.parent, patience=_PATIENCE):
            self.parts = _read(self.path)
            self.parts[part] = {"settings": settings, "result": result, **about}
            durable.write(self.path, encode({"format": _FORMAT, **self.parts}, indent=2) + "\n")
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
    parts = read_object(path, "move it elsewhere")
    try:
        if (version := parts.pop("format", None)) != _FORMAT:
            raise ValueError(f"its format is {version!r}, and this version reads format {_FORMAT}")
        for name, part in convert(parts, dict[str, dict[str, Any]], "the file").items():
            for key in ("settings", "result"):
                convert(part.get(key), dict[str, Any], f"{name}.{key}")
            parts[name]["result"] = with_nan(part["result"])
    except ValueError as error:
        raise ValueError(f"{path} is not a file of measurements ({error}); move it elsewhere") from None
    return parts
