"""How a contestant is tuned: one setting after the other, by factors, as far as its budget goes.

The search is a function of the losses that are known. Where it needs others, it ends and says which; called
again when they are there, it goes the same way and further. So nothing of it has to be kept, and it can be
stopped at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Axis(NamedTuple):
    """A setting, by its dotted name, and the factor between the values that are tried."""

    field: str
    factor: float
    most: float = math.inf


class Point(NamedTuple):
    """A value for every axis, in their order."""

    values: tuple[float, ...]

    def moved(self, place: int, factor: float) -> Point:
        """The point that is so many times as far along one axis; six digits, as a person would write it."""
        value = float(f"{self.values[place] * factor:.6g}")
        return Point((*self.values[:place], value, *self.values[place + 1 :]))


Loss = Callable[[Point], float | None]
"""What a point came to: infinite where its run diverged, None where it has not ended."""


@dataclass(frozen=True)
class Search:
    """How far a search has come."""

    tried: tuple[Point, ...]
    """In the order in which it asked for them."""
    best: Point
    asked: tuple[Point, ...] = ()
    """What it needs to go on; nothing when it is over."""
    at_edge: tuple[str, ...] = ()
    """The settings whose best value has no worse one on both sides, for lack of budget."""


class _Missing(Exception):
    def __init__(self, points: Sequence[Point]) -> None:
        self.points = tuple(points)


def search(start: Point, axes: Sequence[Axis], loss: Loss, budget: int) -> Search:
    """Look for the best point with at most so many trials.

    Along each axis in turn: the value, a factor above and a factor below it, then on in the direction that
    is better, until the best has a worse neighbour on both sides. The first axis comes first because it
    matters most; the later ones have what budget it leaves.
    """
    if budget < 1:
        raise ValueError(f"the budget is {budget}; a contestant needs at least one trial")
    tried: list[Point] = []

    def ask(points: Sequence[Point]) -> None:
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
                ask(line)
                here = [point for point in line if point in tried]
                lowest = min(here, key=lambda point: (known(point), point.values[place]))
                # What is no better is left alone, unless nothing is good at all: then lower values may be.
                if lowest == best or known(lowest) == known(best) < math.inf:
                    break
                best = lowest
            if len(here) < len(line):
                at_edge.append(axis.field)
    except _Missing as missing:
        return Search(tuple(tried), best, asked=missing.points)
    return Search(tuple(tried), best, at_edge=tuple(at_edge))


def _neighbours(point: Point, place: int, axis: Axis) -> list[Point]:
    """The next points along an axis, the higher first."""
    moved = [point.moved(place, axis.factor), point.moved(place, 1 / axis.factor)]
    return [own for own in moved if own.values[place] <= axis.most]
