"""Whether a claim held: computed from the seeds' values by a stated test, never written by hand.

Every claim comes down to margins, one for each seed, that it says are above zero: the loss of one optimizer
less that of another with the same seed, say. The margins' mean is judged by a one-sided paired t-test. A
run that diverged makes a margin infinite, of which there is no mean: then the sign test judges. So it does
where all margins are the same, as counts can be: a spread of zero would make any mean certain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["held", "contradicted", "undecided", "no test", "not run"]

LIKELY_CHANCE = 0.05
ALL_DIVERGED = "it diverged, with every seed"  # why there are no margins where a run is compared with itself
_LEAST_CHANCE = 1e-12  # below it, rounding leaves few digits of a t-test's tail
_ROUNDING = 1e-9  # relative: margins that differ by less are the same
# The worst first: a claim of several comparisons is as good as the worst of them.
_WORST_FIRST: tuple[Outcome, ...] = ("not run", "contradicted", "undecided", "no test", "held")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One thing that a claim says, as margins that are above zero if it is so."""

    what: str
    paper: str
    """The paper's values, as text; empty where it gives none."""
    margins: tuple[float, ...]
    unit: str = ""
    silence: str = ""
    """Why there are no margins although there are runs, as text."""

    @property
    def num_seeds(self) -> int:
        return len(self.margins)

    @property
    def test(self) -> str:
        """The test's name; empty where none is possible."""
        if self.num_seeds < 2:
            return ""
        return "paired t-test" if _have_spread(self.margins) else "sign test"

    @property
    def chance(self) -> float | None:
        """How likely margins like these, or higher, are if there is nothing above zero; None for one seed."""
        return _chance(self.margins, self.test)

    @property
    def chance_of_opposite(self) -> float | None:
        """The same for what is below zero."""
        return _chance([-margin for margin in self.margins], self.test)

    def outcome(self, num_comparisons: int = 1) -> Outcome:
        """What the margins say.

        All comparisons of a claim must hold for it to hold, so each is judged by itself. That any one of
        several goes the other way by chance is likelier, so for that the bar is as many times higher.
        """
        if not self.margins:
            return "undecided" if self.silence else "not run"
        if self.chance is None or self.chance_of_opposite is None:
            return "no test"
        if self.chance <= LIKELY_CHANCE:
            return "held"
        return "contradicted" if self.chance_of_opposite <= LIKELY_CHANCE / num_comparisons else "undecided"

    @property
    def ours(self) -> str:
        """The margins as text: mean and spread."""
        finite = [margin for margin in self.margins if math.isfinite(margin)]
        won = sum(margin == math.inf for margin in self.margins)
        lost = sum(margin == -math.inf for margin in self.margins)
        parts = [_spread(finite, self.unit)] if finite else []
        if won:
            parts.append(f"{won} against a run that diverged or did not get there")
        if lost:
            parts.append(f"{lost} diverged or did not get there")
        return "; ".join(parts) or "nothing"

    @property
    def judgement(self) -> str:
        """The test and what it says, as text."""
        seeds = "one seed" if self.num_seeds == 1 else f"{self.num_seeds} seeds"
        if not self.margins:
            return self.silence or "not run"
        if self.chance is None or self.chance_of_opposite is None:
            way = "points the claimed way" if self.margins[0] > 0 else "does not point the claimed way"
            return f"{seeds}, so no test is possible; it {way}"
        if self.chance_of_opposite < self.chance:
            return f"{seeds}, {self.test}, {_in_words(self.chance_of_opposite)} of the opposite"
        return f"{seeds}, {self.test}, {_in_words(self.chance)}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim of the paper, in other words, and how its comparisons came out."""

    claim: str
    source: str
    comparisons: tuple[Comparison, ...]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Each comparison's outcome."""
        return tuple(own.outcome(len(self.comparisons)) for own in self.comparisons)

    @property
    def outcome(self) -> Outcome:
        """The worst of the comparisons' outcomes."""
        return worst(self.outcomes)


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst of several outcomes; of none, that nothing was run."""
    return min(outcomes, key=_WORST_FIRST.index, default="not run")


def paired(
    what: str,
    lower: Mapping[int, float],
    higher: Mapping[int, float],
    *,
    paper: str = "",
    unit: str = "",
    relative: bool = False,
    silence: str = "both diverged, with every seed",
) -> Comparison:
    """The comparison that says ``lower`` is below ``higher``, both values by seed.

    Infinity is a run that diverged. A seed whose two runs both diverged says nothing and is left out, and
    so is one with NaN for a value.

    Args:
        what: the comparison in words.
        lower: what is claimed to be lower.
        higher: what is claimed to be higher.
        paper: the paper's values.
        unit: of the margins.
        relative: margins as shares of the higher value.
        silence: what to say where all seeds were left out.
    """
    margins = []
    seeds = sorted(lower.keys() & higher.keys())
    for seed in seeds:
        margin = higher[seed] - lower[seed]
        if relative and math.isfinite(margin) and higher[seed]:
            margin /= abs(higher[seed])
        if not math.isnan(margin):
            margins.append(margin)
    is_silent = bool(seeds) and not margins
    return Comparison(
        what=what,
        paper=paper,
        margins=tuple(margins),
        unit=unit,
        silence=silence if is_silent else "",
    )


def _chance(margins: Sequence[float], test: str) -> float | None:
    from scipy import stats  # type: ignore[import-untyped]

    num = len(margins)
    if not test:
        return None
    if test == "sign test":
        wins = sum(margin > 0 for margin in margins)
        return float(stats.binom.sf(wins - 1, num, 0.5))
    mean, deviation = statistics.fmean(margins), statistics.stdev(margins)
    return float(stats.t.sf(mean / (deviation / math.sqrt(num)), num - 1))


def _in_words(chance: float) -> str:
    return f"p < {_LEAST_CHANCE:g}" if chance < _LEAST_CHANCE else f"p = {chance:.2g}"


def _have_spread(margins: Sequence[float]) -> bool:
    """Whether the margins are finite and differ by more than rounding."""
    lowest, highest = min(margins), max(margins)
    return math.isfinite(highest - lowest) and not math.isclose(lowest, highest, rel_tol=_ROUNDING)


def _spread(values: Sequence[float], unit: str) -> str:
    text = f"{statistics.fmean(values):+.3g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2g}"
    return f"{text} {unit}".rstrip()
