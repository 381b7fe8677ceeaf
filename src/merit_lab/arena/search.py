"""Tune a contestant one setting after the other, by factors, within its budget.

The search is a function of the known losses. When it needs others, it stops and returns the missing points.
Called again with their losses, it repeats the same path and continues. So it has no state to save, and can be
stopped at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class SearchAxis(NamedTuple):
    """A setting by its dotted name, the factor between the values to try, and the range of the values."""

    field: str
    factor: float
    least: float = 0.0
    most: float = math.inf


class Point(NamedTuple):
    """A value for each axis, in order."""

    values: tuple[float, ...]

    def moved(self, place: int, factor: float) -> Point:
        """Return the point with one value multiplied by a factor."""
        value = rounded(self.values[place] * factor)
        return Point((*self.values[:place], value, *self.values[place + 1 :]))


def rounded(value: float) -> float:
    """A value with six digits, as many as names of runs have.

    Example:
        >>> 1 - 0.95, rounded(1 - 0.95)
        (0.050000000000000044, 0.05)
    """
    return float(f"{value:.6g}")


Loss = Callable[[Point], float | None]
"""The loss of a point: infinite if its run diverged, None if it is not done."""


@dataclass(frozen=True)
class Search:
    """The state of a search."""

    tried: tuple[Point, ...]
    """In the order of the search."""
    best: Point
    missing: tuple[Point, ...] = ()
    """The points whose losses it needs to continue; empty when it is complete."""
    at_edge: tuple[str, ...] = ()
    """The settings whose best value lacks a worse neighbour on one side, because the budget ran out."""


class _Missing(Exception):
    def __init__(self, points: Sequence[Point]) -> None:
        self.points = tuple(points)


def search(start: Point, axes: Sequence[SearchAxis], loss: Loss, budget: int) -> Search:
    """Search for the best point with at most ``budget`` trials.

    Along each axis in turn: try the value, one factor above and one below, then continue in the better
    direction until the best value has a worse neighbour on both sides. Earlier axes matter more; later ones
    get the budget that is left.
    """
    if budget < 1:
        raise ValueError(f"the budget is {budget}; a contestant needs at least one trial")
    tried: list[Point] = []

    def require(points: Sequence[Point]) -> None:
        new = [point for point in dict.fromkeys(points) if point not in tried][: budget - len(tried)]
        tried.extend(new)
        if missing := [point for point in new if loss(point) is None]:
            raise _Missing(missing)

    def known(point: Point) -> float:
        value = loss(point)
        assert value is not None
        return value

    best, at_edge = start, []
    try:
        for place, axis in enumerate(axes):
            while True:
                line = [best, *_neighbours(best, place, axis)]
                require(line)
                here = [point for point in line if point in tried]
                lowest = min(here, key=lambda point: (known(point), point.values[place]))
                # Move only to a lower loss. If all losses are infinite, move to lower values.
                if lowest == best or known(lowest) == known(best) < math.inf:
                    break
                best = lowest
            if len(here) < len(line):
                at_edge.append(axis.field)
    except _Missing as missing:
        return Search(tuple(tried), best, missing=missing.points)
    return Search(tuple(tried), best, at_edge=tuple(at_edge))


def _neighbours(point: Point, place: int, axis: SearchAxis) -> list[Point]:
    """The next points along an axis, the higher one first."""
    points = [point.moved(place, axis.factor), point.moved(place, 1 / axis.factor)]
    return [neighbour for neighbour in points if axis.least <= neighbour.values[place] <= axis.most]
