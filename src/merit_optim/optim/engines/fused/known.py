"""The choices that the kernels compute. Needs no Triton."""

from __future__ import annotations

from typing import TypeGuard

from merit_optim.optim.axes.directions import Adam, Direction, Muon
from merit_optim.optim.axes.holds import Ball, Cautious, Corrected, Decay, Decoupled, Hold, Sphere
from merit_optim.optim.axes.ratios import Merit, Unscaled, Weight
from merit_optim.optim.spec import Spec

# Exactly these classes: a subclass of a user may compute something else.
_DIRECTIONS, _RATIOS = (Adam, Muon), (Merit, Weight, Unscaled)
_HOLDS: dict[type[Hold], str | None] = {
    Decay: None,
    Decoupled: "shares",
    Corrected: "shares",
    Ball: "shares",
    Cautious: "cautious",
    Sphere: "sphere",
}


def has_kernels(direction: Direction) -> bool:
    """Whether weights with this direction are given to the fused engine at all."""
    return type(direction) in _DIRECTIONS


def is_muon(direction: Direction) -> TypeGuard[Muon]:
    """Whether a direction is held by the kernels, and formed by Newton-Schulz."""
    return type(direction) is Muon


def branch_of(hold: Hold) -> str | None:
    """``HOLD`` of the kernels: how they change w; None for decay inside."""
    return _HOLDS[type(hold)]


def is_sphere(hold: Hold) -> TypeGuard[Sphere]:
    """Whether a and b of each matrix follow from its products with its change."""
    return type(hold) is Sphere


def unknown_choice(spec: Spec) -> str | None:
    """A choice that no kernel computes, or None."""
    for choice, known in zip(spec.choices, (_DIRECTIONS, _RATIOS, _HOLDS), strict=True):
        if type(choice) not in known:
            return f"{choice.AXIS}={choice.NAME!r}"
    return "calibrated=True" if spec.ratio.keys else None
