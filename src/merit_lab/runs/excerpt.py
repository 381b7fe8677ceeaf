"""Excerpts of runs for version control: rounded numbers, fewer lines, no checkpoints, no paths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from merit_lab.runs.run import Run

_DIGITS = 5
_MOST_LINES = {"train": 50, "update": 64}  # all lines of other kinds are kept
_OF_ITS_MACHINE = ("command", "folder", "host")


@dataclass(frozen=True)
class Excerpt:
    """The kept part of a run: its name, configuration and environment, and lines of its metrics."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    lines: Sequence[dict[str, Any]]


def excerpt(run: Run) -> Excerpt:
    """Return the excerpt of a run.

    Numbers have five digits. At most 50 "train" lines and 64 "update" lines are kept, spread over the run,
    including the first and the last, and all lines of other kinds. The environment says how many the run had,
    also in an excerpt of an excerpt.
    """
    lines = list(run.lines())
    places: dict[str, list[int]] = {kind: [] for kind in _MOST_LINES}
    for place, line in enumerate(lines):
        places.setdefault(line["kind"], []).append(place)
    kept = [
        place for kind, found in places.items() for place in _spread(found, _MOST_LINES.get(kind, len(found)))
    ]
    config = dict(run.config)
    if "data" in config:  # an edited record may be without it, which reports and lists do not mind
        config["data"] = Path(config["data"]).name
    environment = without_paths(run.environment)
    environment.setdefault(
        "excerpt_of", {"digits": _DIGITS, **{kind: len(places[kind]) for kind in _MOST_LINES}}
    )
    return Excerpt(run.name, config, environment, [_rounded(lines[place]) for place in sorted(kept)])


def without_paths(environment: dict[str, Any]) -> dict[str, Any]:
    """An environment without what is of its machine alone."""
    kept = {key: value for key, value in environment.items() if key not in _OF_ITS_MACHINE}
    if "folder" in kept.get("data", {}):
        kept["data"] = {**kept["data"], "folder": Path(kept["data"]["folder"]).name}
    return kept


def _spread(places: list[int], most: int) -> list[int]:
    """Return at most ``most`` places: the first, the last, and one from each of equal stretches between.

    The place within its stretch is random, since an even stride may select exactly the monitored steps, which
    are slower. The random numbers are the same each time, so that seeds of one setting keep the same steps.
    """
    if len(places) <= most:
        return places
    lots = random.Random(0)
    first, *between, last = places
    borders = [number * len(between) // (most - 2) for number in range(most - 1)]
    drawn = [between[begin + int(lots.random() * (end - begin))] for begin, end in pairwise(borders)]
    return [first, *drawn, last]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
