"""A run small enough to be kept beside code: numbers rounded, lines left out, no checkpoints, no paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from merit_optim.lab.record.metrics import MetricsWriter, read_metrics
from merit_optim.lab.record.run import Run

_DIGITS = 5
_MOST_LINES = {"train": 50, "update": 8}  # all lines of other kinds are kept
_OF_ITS_MACHINE = ("command", "folder", "host")


def write_excerpt(run: Run, folder: Path) -> Run:
    """Write a run's configuration, environment and measurements into another folder, as a run directory.

    Of the long kinds of measurements lines are left out evenly, never the first and the last. The
    environment says how many there were.
    """
    lines = list(read_metrics(run.metrics_path))
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in _MOST_LINES}
    kept = {id(line) for kind, own in by_kind.items() for line in _spread(own, _MOST_LINES[kind])}
    numbers = {"digits": _DIGITS, **{kind: len(own) for kind, own in by_kind.items()}}
    config = {**run.config, "data": Path(run.config["data"]).name}
    environment = {key: value for key, value in run.environment.items() if key not in _OF_ITS_MACHINE}
    if "folder" in environment.get("data", {}):
        environment["data"] = {**environment["data"], "folder": Path(environment["data"]["folder"]).name}
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsWriter(folder / run.metrics_path.name, offset=0) as writer:
        for line in lines:
            if line["kind"] not in _MOST_LINES or id(line) in kept:
                writer.write(_rounded(line))
    # Last, for only then is the folder a run: one that was stopped before is written again.
    return Run.create(folder, config, {**environment, "excerpt_of": numbers})


def _spread(lines: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many, the first and the last among them, the others evenly between."""
    if len(lines) <= most:
        return lines
    return [lines[round(place * (len(lines) - 1) / (most - 1))] for place in range(most)]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
