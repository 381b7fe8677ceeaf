"""Where the loss is lowest between the settings that were tried."""

from __future__ import annotations

from typing import NamedTuple


class Valley(NamedTuple):
    """The lowest point of a parabola, and half its second derivative."""

    place: float
    curvature: float

    @classmethod
    def through(cls, *points: tuple[float, float]) -> Valley | None:
        """Return the valley of the parabola through three points (x, y); None if it has no lowest point.

        Example:
            >>> Valley.through((0.0, 4.0), (1.0, 1.0), (3.0, 1.0))
            Valley(place=2.0, curvature=1.0)
        """
        (x0, y0), (x1, y1), (x2, y2) = points
        rise, next_rise = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
        curvature = (next_rise - rise) / (x2 - x0)
        if not curvature > 0:
            return None
        return cls((x0 + x1) / 2 - rise / (2 * curvature), curvature)
