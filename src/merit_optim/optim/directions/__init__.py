"""The directions: what gradients become before any ratio scales them."""

from __future__ import annotations

from typing import Any

from merit_optim.optim.directions.adam import Adam
from merit_optim.optim.directions.direction import Direction, Extent, MatrixDirection, Sent, Traffic
from merit_optim.optim.directions.muon import Muon
from merit_optim.optim.directions.soap import Soap

DIRECTIONS: dict[str, type[Direction]] = {cls.NAME: cls for cls in (Adam, Muon, Soap)}

# Computed once: torch.compile cannot trace dataclasses.fields.
_OPTION_NAMES = {name: cls.option_names() for name, cls in DIRECTIONS.items()}


def direction_of(group: dict[str, Any]) -> Direction:
    """The direction that a parameter group's options describe."""
    names = [option for option in option_names(group) if option in group]
    return DIRECTIONS[_name_of(group)](**{option: group[option] for option in names})


def option_names(group: dict[str, Any]) -> tuple[str, ...]:
    """The options that a parameter group must have for its direction."""
    return _OPTION_NAMES[_name_of(group)]


def _name_of(group: dict[str, Any]) -> str:
    name: str = group.get("direction", Adam.NAME)
    return name


__all__ = [
    "DIRECTIONS",
    "Adam",
    "Direction",
    "Extent",
    "MatrixDirection",
    "Muon",
    "Sent",
    "Soap",
    "Traffic",
    "direction_of",
    "option_names",
]
