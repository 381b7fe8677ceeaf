"""Validate options when a transformation is created."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
from jax import Array


def number(name: str, value: Any, allowed: str, holds: Callable[[Any], bool]) -> None:
    """Refuse a wrong number. Arrays pass: under ``optax.inject_hyperparams`` their value is not known yet."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (isinstance(value, Array | np.ndarray) or (is_number and holds(value))):
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def rate(name: str, value: Any) -> None:
    """Check a learning rate or weight decay."""
    if not callable(value):
        number(
            name, value, "a finite number of at least 0, or a schedule", lambda value: 0 <= value < math.inf
        )


def decay(name: str, value: Any, alternative: str = "") -> None:
    """Check the decay of a moving average."""
    number(
        name, value, f"a number that is at least 0 and less than 1{alternative}", lambda value: 0 <= value < 1
    )


def positive(name: str, value: Any, alternative: str = "") -> None:
    number(name, value, f"a number greater than 0{alternative}", lambda value: value > 0)


def bounds(name: str, value: Any) -> None:
    """Check the smallest and the largest ratio, or None. Arrays pass, as in ``number``."""
    pair = tuple(value) if isinstance(value, Sequence) else ()
    known = [bound for bound in pair if not isinstance(bound, Array | np.ndarray)]
    are_numbers = all(isinstance(bound, Real) and float(bound) >= 0 for bound in known)
    if value is not None and not (len(pair) == 2 and are_numbers and known == sorted(known)):
        raise ValueError(
            f"{name} is {value!r}; it must be the smallest and the largest ratio, such as (0.0, 0.1), or None"
        )


def one_of(name: str, value: Any, allowed: Iterable[str], alternative: str = "") -> None:
    if value not in (names := tuple(allowed)):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, names))}{alternative}")
