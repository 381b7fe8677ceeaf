"""Claims as data, and whether they hold here: by the paired 95% interval of results/statistic.py alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from merit_lab.paper.plan import ENDED, Data
from merit_lab.paper.quantities import LOSS, BySeed, Quantity
from merit_lab.results.statistic import Difference, paired
from merit_lab.text import count_seeds

Outcome = Literal["holds", "does not hold", "not decided", "not run"]
Numbers = Mapping[str, Mapping[str, float]]
"""The paper's, by the size of its model and the series."""

# A claim is as good as the worst of its comparisons, an entry as the worst of its claims.
_WORST_FIRST: tuple[Outcome, ...] = ("not run", "does not hold", "not decided", "holds")


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a quantity of a series, or of some of its runs."""

    of: Quantity
    series: str = ""
    """Empty: all runs."""
    part: str = ""
    factor: float | None = None
    """Of the learning rate; None: any."""
    times: float = 1.0
    """What the quantity is multiplied by."""

    def rows(self, data: Data) -> Data:
        """The runs of this side."""
        return data.where(series=self.series, part=self.part, factor=self.factor)

    def values(self, data: Data) -> BySeed:
        """The quantity by seed, of the rows of this side."""
        return {seed: self.times * value for seed, value in self.of.of(self.rows(data)).items()}

    @property
    def words(self) -> list[str]:
        """The side in words: series first, quantity last."""
        rate = "" if self.factor in (None, 1) else f"at {self.factor:g} times its rate"
        times = "" if self.times == 1 else f"times {self.times:g}"
        return [one for one in (self.series, self.part, rate, times, self.of.name) if one]


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
    """Empty: the paper's figure or table that the entry is about."""
    within: str = "model"
    """The pairs are compared among the runs that agree in this column; empty: among all."""

    def verdict(self, data: Data, paper: Numbers | None = None) -> Verdict:
        """Whether it holds in an entry's runs; with the paper's numbers, if it has some."""
        groups = data.groups(self.within) if self.within else [((), data)]
        judged = [
            _judge(pair, group, str(key[0]) if len(groups) > 1 else "", paper or {})
            for key, group in groups
            for pair in self.pairs
            if not any(side.rows(group).runs.is_empty() for side in pair[:2])  # nothing was planned
        ]
        return Verdict(self, judged)


class Comparison(NamedTuple):
    """A pair in one model, judged."""

    what: str
    paper: str
    difference: Difference
    outcome: Outcome
    words: str
    """What the seeds allow to say."""


class Verdict(NamedTuple):
    """A claim and its comparisons."""

    claim: Claim
    comparisons: Sequence[Comparison]

    @property
    def outcome(self) -> Outcome:
        """The worst of the comparisons' outcomes."""
        return worst(one.outcome for one in self.comparisons)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst of several outcomes; "not run" if there are none."""
    return min(outcomes, key=_WORST_FIRST.index, default="not run")


def _judge(pair: Pair, data: Data, where: str, paper: Numbers) -> Comparison:
    sides = pair.lower, pair.upper
    difference = paired(*(side.values(data) for side in sides))
    shared = [one for one in pair.lower.words if one in pair.upper.words]
    first, second = (", ".join(one for one in side.words if one not in shared) for side in sides)
    known = paper.get(data.runs["paper"][0], {})
    numbers = [f"{known[side.series]:.3f}" for side in sides if side.series in known]
    about = ", ".join(filter(None, [where, *shared]))
    have_ended = all(side.rows(data).runs["status"].is_in(ENDED).all() for side in sides)
    outcome, words = _outcome(difference), _words(difference, first, second)
    if not difference.seeds:
        silence = (pair.lower.of.silent or pair.upper.of.silent) if have_ended else ""
        outcome, words = ("not decided", silence) if silence else ("not run", "not run")
    return Comparison(
        what=f"{about}: {first} below {second}" if about else f"{first} below {second}",
        paper=" against ".join(numbers) if len(numbers) == 2 else pair.paper,
        difference=difference,
        outcome=outcome,
        words=words,
    )


def _outcome(difference: Difference) -> Outcome:
    """Whether the interval lies on the claimed side."""
    if _has_no_spread(difference) or not difference.side:  # one seed has no interval
        return "not decided"
    return "holds" if difference.side < 0 else "does not hold"


def _words(difference: Difference, first: str, second: str) -> str:
    failed = {first: difference.first_diverged, second: difference.second_diverged}
    lost = [f"{name} at seed {', '.join(map(str, seeds))}" for name, seeds in failed.items() if seeds]
    if lost:
        seeds = count_seeds(len(difference.seeds))
        return f"no interval: diverged or did not get there: {' and '.join(lost)} ({seeds})"
    words = difference.words(first, second)
    if _has_no_spread(difference):
        return f"{words}: the same difference with every seed, so their spread is not known"
    return words


def _has_no_spread(difference: Difference) -> bool:
    """Equal differences, as counts and rates of a grid can have, would make an interval of no width."""
    is_narrow = math.isclose(difference.low, difference.high, rel_tol=1e-9, abs_tol=1e-12)
    return len(difference.seeds) > 1 and is_narrow


def below(lower: str, *uppers: str, of: Quantity = LOSS, paper: str = "", **where: Any) -> tuple[Pair, ...]:
    """A series below each of the others; ``where`` are arguments of both sides."""
    return tuple(Pair(Side(of, lower, **where), Side(of, upper, **where), paper) for upper in uppers)


def in_order(*series: str) -> tuple[Pair, ...]:
    """Each series below the next, by validation loss."""
    return tuple(pair for lower, upper in pairwise(series) for pair in below(lower, upper))


def same(
    series: Sequence[str], lower: str, upper: str, of: Quantity = LOSS, **where: Any
) -> tuple[Pair, ...]:
    """Each series in one part below the same series in another part."""
    return tuple(Pair(Side(of, one, lower, **where), Side(of, one, upper, **where)) for one in series)


def versus(series: str, lower: Quantity, upper: Quantity, paper: str = "") -> tuple[Pair, ...]:
    """One quantity of a series below another one of it."""
    return (Pair(Side(lower, series), Side(upper, series), paper),)
