"""Numbers and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def join(items: Sequence[str]) -> str:
    """Join items as in a sentence: a, b and c."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


def count_seeds(num_seeds: int) -> str:
    """A number of seeds as text."""
    return "one seed" if num_seeds == 1 else f"{num_seeds} seeds"


def amount(number: float) -> str:
    """A large number with three digits and a unit.

    Example:
        >>> amount(12_345_678), amount(999_999)
        ('12.3M', '1M')
    """
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:  # with three digits it is as much
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
