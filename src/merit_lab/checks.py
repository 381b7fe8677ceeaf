"""Checks of values that users give."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection

from merit_optim.spelling import did_you_mean

LARGEST_WRITTEN = 2**63 - 1  # what JSON's readers here accept
LARGEST_SIZE = 2**31  # larger sizes are certainly typos: arithmetic with them would overflow, or never end


def check_choice(name: str, value: str, allowed: Collection[str], *others: str) -> None:
    """Raise ValueError unless a value is one of ``allowed``; ``others`` describe what is allowed besides."""
    if value not in allowed:
        hint = did_you_mean(value, allowed, otherwise=";")
        known = ", or ".join([", ".join(allowed), *others])
        raise ValueError(f"{name} is {value!r}{hint} it must be one of {known}")


def check_at_least(name: str, value: object, least: float, most: int = LARGEST_WRITTEN) -> None:
    """Raise ValueError unless a value is finite and at least ``least``.

    If that is an integer, the value must be one, and at most ``most``.
    """
    if not is_number(value, least):
        required = "a whole number" if isinstance(least, int) else "a finite number"
        raise ValueError(f"{name} is {value!r}; it must be {required} of at least {least:g}")
    if isinstance(value, int) and value > most:
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be at most {most}")


def check_size(name: str, value: object, most: int = LARGEST_SIZE) -> None:
    """Raise ValueError unless a value is an integer from 1 to ``most``."""
    check_at_least(name, value, 1, most)


def is_number(value: object, least: float) -> bool:
    """Whether a value is finite and at least ``least``, and an integer if that is one."""
    if isinstance(value, bool) or not isinstance(value, int if isinstance(least, int) else int | float):
        return False
    return least <= value < math.inf
