"""Suggestions for names that are not known; needs no torch."""

import difflib
from collections.abc import Iterable

_SIMILARITY = 0.6  # difflib's default: a slip or two in a word


def did_you_mean(
    name: object, known: Iterable[str], *, otherwise: str = ".", similarity: float = _SIMILARITY
) -> str:
    """The end of a message's clause: a question with the nearest known name, or ``otherwise``.

    Example:
        >>> did_you_mean("mertt", ["adamw", "merit"])
        "; did you mean 'merit'?"
        >>> did_you_mean("xyz", ["adamw", "merit"])
        '.'
    """
    similar = nearest(name, known, similarity=similarity)
    return f"; did you mean {similar[0]!r}?" if similar else otherwise


def nearest(
    name: object, known: Iterable[str], *, num: int = 1, similarity: float = _SIMILARITY
) -> list[str]:
    """At most ``num`` of the known names, the most similar first; upper and lower case are the same.

    Args:
        name: what was given.
        known: the names that there are.
        num: how many to return.
        similarity: from 0 to 1, of the least similar to return.
    """
    by_lower_case = {known_name.lower(): known_name for known_name in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower_case, n=num, cutoff=similarity)
    return [by_lower_case[lower] for lower in found]
