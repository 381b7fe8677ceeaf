"""Claims as data, and whether they hold here: by the paired 95% interval of results/statistic.py alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from merit_lab.paper.plan import Data
from merit_lab.paper.quantities import LOSS, BySeed, Quantity
from merit_lab.results.statistic import Difference, paired
from merit_lab.text import count_seeds

Outcome = Literal["holds", "does not hold", "not decided", "not run"]

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


@dataclass(frozen=True)
class Pair:
    """A comparison: the lower side is said to be below the upper one."""

    lower: Side
    upper: Side
    paper: str = ""
    """What the paper has, as text."""

    @property
    def about(self) -> str:
        """What both sides have in common."""
        return ", ".join(one for one in _words(self.lower) if one in _words(self.upper))

    @property
    def names(self) -> tuple[str, str]:
        """What tells the two sides apart."""
        lower, upper = _words(self.lower), _words(self.upper)
        first, second = (
            ", ".join(one for one in a if one not in b) for a, b in ((lower, upper), (upper, lower))
        )
        return first, second


def _words(side: Side) -> list[str]:
    """A side in words: series first, quantity last."""
    rate = "" if side.factor in (None, 1) else f"at {side.factor:g} times its rate"
    times = "" if side.times == 1 else f"times {side.times:g}"
    return [one for one in (side.series, side.part, rate, times, side.of.name) if one]


@dataclass(frozen=True)
class Claim:
    """What the paper says, or we, as pairs that must all hold in every model."""

    says: str
    source: str
    pairs: Sequence[Pair]
    within: str = "model"
    """The pairs are compared among the runs that agree in this column; empty: among all."""
    paper: Mapping[str, Mapping[str, float]] | None = None
    """The paper's values by the size of its model and the series."""

    def verdict(self, data: Data) -> Verdict:
        """Whether it holds in an entry's runs."""
        groups = data.groups(self.within) if self.within else [((), data)]
        several = len(groups) > 1
        judged = [
            self._judge(pair, group, str(key[0]) if several else "")
            for key, group in groups
            for pair in self.pairs
            if not _nothing_planned(pair, group)
        ]
        return Verdict(claim=self, comparisons=tuple(judged))

    def _judge(self, pair: Pair, data: Data, where: str) -> Comparison:
        lower, upper = pair.lower.values(data), pair.upper.values(data)
        values = (self.paper or {}).get(data.runs["paper"][0], {})
        both = [values[side.series] for side in (pair.lower, pair.upper) if side.series in values]
        ended = all(_have_ended(side.rows(data)) for side in (pair.lower, pair.upper))
        return Comparison(
            pair=pair,
            where=where,
            paper=f"{both[0]:.3f} against {both[1]:.3f}" if len(both) == 2 else pair.paper,
            difference=paired(lower, upper),
            has_ended=ended,
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A pair in one model, judged."""

    pair: Pair
    where: str
    paper: str
    difference: Difference
    has_ended: bool
    """Whether all runs of both sides have ended."""

    @property
    def label(self) -> str:
        """The comparison in words."""
        first, second = self.pair.names
        about = ", ".join(filter(None, (self.where, self.pair.about)))
        return f"{about}: {first} below {second}" if about else f"{first} below {second}"

    @property
    def _has_no_spread(self) -> bool:
        """Equal differences, as counts and rates of a grid can have, would make an interval of no width."""
        one = self.difference
        return len(one.seeds) > 1 and math.isclose(one.low, one.high, rel_tol=1e-9, abs_tol=1e-12)

    @property
    def outcome(self) -> Outcome:
        """Whether the interval lies on the claimed side. One seed has none."""
        if not self.difference.seeds:
            return "not decided" if self._silence else "not run"
        if self._has_no_spread or not self.difference.side:
            return "not decided"
        return "holds" if self.difference.side < 0 else "does not hold"

    @property
    def _silence(self) -> str:
        """Why runs that have all ended say nothing."""
        return (self.pair.lower.of.silent or self.pair.upper.of.silent) if self.has_ended else ""

    @property
    def words(self) -> str:
        """What the seeds allow to say."""
        one, (first, second) = self.difference, self.pair.names
        if not one.seeds:
            return self._silence or "not run"
        failed = [(first, one.first_diverged), (second, one.second_diverged)]
        if any(seeds for _, seeds in failed):
            who = " and ".join(
                f"{name} at seed {', '.join(map(str, seeds))}" for name, seeds in failed if seeds
            )
            return f"no interval: diverged or did not get there: {who} ({count_seeds(len(one.seeds))})"
        words = one.words(first, second)
        if self._has_no_spread:
            return f"{words}: the same difference with every seed, so their spread is not known"
        return words


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim and its comparisons."""

    claim: Claim
    comparisons: tuple[Comparison, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst of the comparisons' outcomes."""
        return worst(comparison.outcome for comparison in self.comparisons)

    def as_json(self) -> dict[str, Any]:
        """The part of verdict.json about this claim."""
        return {
            "claim": self.claim.says,
            "source": self.claim.source,
            "outcome": self.outcome,
            "comparisons": [
                {
                    "what": one.label,
                    "paper": one.paper,
                    "unit": one.pair.lower.of.unit,
                    "outcome": one.outcome,
                    "words": one.words,
                    "seeds": list(one.difference.seeds),
                    **{name: _number(getattr(one.difference, name)) for name in ("mean", "low", "high")},
                }
                for one in self.comparisons
            ],
        }


def worst(outcomes: Iterator[Outcome] | Sequence[Outcome]) -> Outcome:
    """The worst of several outcomes; "not run" if there are none."""
    return min(outcomes, key=_WORST_FIRST.index, default="not run")


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


def versus(series: str, lower: Quantity, upper: Quantity, paper: str = "") -> Pair:
    """One quantity of a series below another one of it."""
    return Pair(Side(lower, series), Side(upper, series), paper)


def _nothing_planned(pair: Pair, data: Data) -> bool:
    return any(side.rows(data).runs.is_empty() for side in (pair.lower, pair.upper))


def _have_ended(data: Data) -> bool:
    return data.runs["status"].is_in(["finished", "diverged"]).all()


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
