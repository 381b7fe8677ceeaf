"""Claims as data, and whether they hold here: by the paired 95% interval of results/statistic.py alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from merit_lab.paper.quantities import LOSS, BySeed, Quantity
from merit_lab.paper.records import ENDED, Data
from merit_lab.results.statistic import Difference, paired
from merit_lab.text import count_seeds, join

Outcome = Literal["not run", "does not hold", "not decided", "holds"]
"""The worst first."""
Numbers = Mapping[str, Mapping[str, float]]
"""The paper's, by its model and the series."""

_WORST_FIRST: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a quantity of a series, or of some of its runs."""

    of: Quantity
    series: str = ""
    """Empty: all runs."""
    part: str = ""
    """The name of their setups; empty: any."""
    factor: float | None = None
    """Of the learning rate; None: any."""

    def rows(self, data: Data) -> Data:
        """The runs of this side."""
        return data.where(series=self.series, part=self.part, factor=self.factor)

    def values(self, data: Data) -> BySeed:
        """The quantity by seed, of the rows of this side."""
        return self.of.of(self.rows(data))

    @property
    def words(self) -> list[str]:
        """The side in words: series first, quantity last."""
        rate = "" if self.factor in (None, 1) else f"at {self.factor:g} times its rate"
        return [one for one in (self.series, self.part, rate, self.of.name) if one]


class Pair(NamedTuple):
    """A comparison: the lower side is said to be below the upper one."""

    lower: Side
    upper: Side
    paper: str = ""
    """What the paper has, as text."""


@dataclass(frozen=True)
class Claim:
    """What the paper says, or we, as pairs that must all hold in every model."""

    says: str
    pairs: Sequence[Pair]
    source: str = ""
    """Empty: that of the entry."""
    within: str = "model"
    """The pairs are compared among the runs that agree in this column; empty: among all."""

    def compare(self, data: Data, paper: Numbers) -> tuple[Comparison, ...]:
        """Judge all pairs in an entry's runs."""
        groups = data.groups(self.within) if self.within else [((), data)]
        return tuple(
            _judge(pair, group, str(key[0]) if len(groups) > 1 else "", paper)
            for (key, group), pair in product(groups, self.pairs)
            if not any(side.rows(group).runs.is_empty() for side in pair[:2])  # nothing was planned
        )


@dataclass(frozen=True)
class Comparison:
    """A pair in one model, judged."""

    what: str
    paper: str
    difference: Difference
    outcome: Outcome
    words: str
    """What the seeds allow to say."""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst of several outcomes; "not run" if there are none."""
    return min(outcomes, key=_WORST_FIRST.index, default="not run")


def _judge(pair: Pair, data: Data, where: str, paper: Numbers) -> Comparison:
    sides = pair.lower, pair.upper
    shared = [one for one in pair.lower.words if one in pair.upper.words]
    first, second = (", ".join(one for one in side.words if one not in shared) for side in sides)
    about = ", ".join(filter(None, [where, *shared]))
    known = paper.get(data.runs["model"][0], {})
    numbers = [f"{known[side.series]:.3f}" for side in sides if side.series in known]
    difference = paired(*(side.values(data) for side in sides))
    outcome, words = _decide(difference, first, second)
    if not difference.seeds:
        have_ended = all(side.rows(data).runs["status"].is_in(ENDED).all() for side in sides)
        silence = (pair.lower.of.silent or pair.upper.of.silent) if have_ended else ""
        outcome, words = ("not decided", silence) if silence else ("not run", "not run")
    return Comparison(
        what=f"{about}: {first} below {second}" if about else f"{first} below {second}",
        paper=" against ".join(numbers) if len(numbers) == 2 else pair.paper,
        difference=difference,
        outcome=outcome,
        words=words,
    )


def _decide(difference: Difference, first: str, second: str) -> tuple[Outcome, str]:
    """Whether the interval lies on the claimed side, and what that allows to say."""
    failed = {first: difference.first_diverged, second: difference.second_diverged}
    if lost := [f"{name} at seed {', '.join(map(str, seeds))}" for name, seeds in failed.items() if seeds]:
        seeds = count_seeds(len(difference.seeds))
        return "not decided", f"no interval: diverged or did not get there: {join(lost)} ({seeds})"
    words = difference.words(first, second)
    # Counts and rates of a grid can have equal differences, which would make an interval of no width.
    is_narrow = math.isclose(difference.low, difference.high, rel_tol=1e-9, abs_tol=1e-12)
    if is_narrow and len(difference.seeds) > 1:
        return "not decided", f"{words}: the same difference with every seed, so their spread is not known"
    outcomes: dict[int, Outcome] = {-1: "holds", 0: "not decided", 1: "does not hold"}
    return outcomes[difference.side], words


def below(lower: str, *uppers: str, of: Quantity = LOSS, paper: str = "", **where: Any) -> tuple[Pair, ...]:
    """A series below each of the others; ``where`` are arguments of both sides."""
    return tuple(Pair(Side(of, lower, **where), Side(of, upper, **where), paper) for upper in uppers)


def same(
    series: Sequence[str], lower: str, upper: str, of: Quantity = LOSS, **where: Any
) -> tuple[Pair, ...]:
    """Each series in one part below the same series in another part."""
    return tuple(Pair(Side(of, one, lower, **where), Side(of, one, upper, **where)) for one in series)


def versus(series: str, lower: Quantity, upper: Quantity, paper: str = "") -> tuple[Pair, ...]:
    """One quantity of a series below another one of it."""
    return (Pair(Side(lower, series), Side(upper, series), paper),)
