"""The directions: what an update is made of before any ratio scales it."""

from __future__ import annotations

from typing import Any

from merit_optim.optim.directions.adam import Adam
from merit_optim.optim.directions.direction import Direction
from merit_optim.optim.directions.muon import Muon
from merit_optim.optim.directions.soap import Soap

DIRECTIONS: dict[str, type[Direction]] = {cls.NAME: cls for cls in (Adam, Muon, Soap)}


def direction_of(group: dict[str, Any]) -> Direction:
    """The direction that a parameter group asks for."""
    return DIRECTIONS[group.get("direction", Adam.NAME)].of(group)


__all__ = ["DIRECTIONS", "Adam", "Direction", "Muon", "Soap", "direction_of"]
