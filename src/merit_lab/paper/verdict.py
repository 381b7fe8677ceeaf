"""Verdicts: whether a claim held, computed from the values of all seeds by a stated test.

A claim is a set of comparisons. Each has a margin for every seed, and the claim says that the margins are
above zero: for example, the loss of one optimizer less that of another with the same seed. A one-sided paired
t-test judges their mean. The sign test replaces it if a run diverged, because its margin is infinite, or if
all margins are equal, as counts can be, because a spread of zero would make any mean certain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["held", "contradicted", "undecided", "no test", "not run"]

SIGNIFICANCE = 0.05
ALL_DIVERGED = "it diverged, with every seed"  # for a run compared with itself
_SMALLEST_P = 1e-12  # below it, rounding leaves few digits of a t-test's tail
_ROUNDING = 1e-9  # margins are equal if they differ by less, relatively
# A claim is as good as the worst of its comparisons.
_WORST_FIRST: tuple[Outcome, ...] = ("not run", "contradicted", "undecided", "no test", "held")


@dataclass(frozen=True, kw_only=True)
class ClaimComparison:
    """One comparison of a claim, as margins that are above zero if it holds."""

    label: str
    paper: str
    """The paper's values, as text; empty if it gives none."""
    margins: tuple[float, ...]
    unit: str = ""
    empty_reason: str = ""
    """Why there are no margins although there are runs."""

    @property
    def num_seeds(self) -> int:
        return len(self.margins)

    @property
    def test(self) -> str:
        """The test's name; empty if no test is possible."""
        if self.num_seeds < 2:
            return ""
        return "paired t-test" if _have_spread(self.margins) else "sign test"

    @property
    def p_value(self) -> float | None:
        """The one-sided p-value for margins above zero; None if no test is possible."""
        return _p_value(self.margins, self.test)

    @property
    def opposite_p_value(self) -> float | None:
        """The one-sided p-value for margins below zero; None if no test is possible."""
        return _p_value([-margin for margin in self.margins], self.test)

    def outcome(self, num_comparisons: int = 1) -> Outcome:
        """The outcome of the test.

        A claim holds only if all of its comparisons do, so each is tested at the full significance level.
        One contradicted comparison is enough to contradict it, so that level is divided by their number.
        """
        if not self.margins:
            return "undecided" if self.empty_reason else "not run"
        if self.p_value is None or self.opposite_p_value is None:
            return "no test"
        if self.p_value <= SIGNIFICANCE:
            return "held"
        return "contradicted" if self.opposite_p_value <= SIGNIFICANCE / num_comparisons else "undecided"

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
        """The test and its p-value, as text."""
        seeds = "one seed" if self.num_seeds == 1 else f"{self.num_seeds} seeds"
        if not self.margins:
            return self.empty_reason or "not run"
        if self.p_value is None or self.opposite_p_value is None:
            way = "points the claimed way" if self.margins[0] > 0 else "does not point the claimed way"
            return f"{seeds}, so no test is possible; it {way}"
        if self.opposite_p_value < self.p_value:
            return f"{seeds}, {self.test}, {_p_text(self.opposite_p_value)} of the opposite"
        return f"{seeds}, {self.test}, {_p_text(self.p_value)}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim, where it was made, and its comparisons."""

    claim: str
    source: str
    comparisons: tuple[ClaimComparison, ...]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Each comparison's outcome."""
        return tuple(comparison.outcome(len(self.comparisons)) for comparison in self.comparisons)

    @property
    def outcome(self) -> Outcome:
        """The worst of the comparisons' outcomes."""
        return worst(self.outcomes)


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst of several outcomes; "not run" if there are none."""
    return min(outcomes, key=_WORST_FIRST.index, default="not run")


def paired(
    label: str,
    lower: Mapping[int, float],
    higher: Mapping[int, float],
    *,
    paper: str = "",
    unit: str = "",
    relative: bool = False,
    empty_reason: str = "both diverged, with every seed",
) -> ClaimComparison:
    """The comparison that says ``lower`` is below ``higher``, both given by seed.

    Infinity stands for a run that diverged. Seeds are left out if both of their runs diverged, or if a
    value is NaN.

    Args:
        label: the comparison in words.
        lower: the values that are claimed to be lower.
        higher: the values that are claimed to be higher.
        paper: the paper's values.
        unit: unit of the margins.
        relative: whether margins are fractions of the higher value.
        empty_reason: the reason to give if all seeds were left out.
    """
    margins = []
    seeds = sorted(lower.keys() & higher.keys())
    for seed in seeds:
        margin = higher[seed] - lower[seed]
        if relative and math.isfinite(margin) and higher[seed]:
            margin /= abs(higher[seed])
        if not math.isnan(margin):
            margins.append(margin)
    is_empty = bool(seeds) and not margins
    return ClaimComparison(
        label=label,
        paper=paper,
        margins=tuple(margins),
        unit=unit,
        empty_reason=empty_reason if is_empty else "",
    )


def _p_value(margins: Sequence[float], test: str) -> float | None:
    from scipy import stats  # type: ignore[import-untyped]

    num = len(margins)
    if not test:
        return None
    if test == "sign test":
        wins = sum(margin > 0 for margin in margins)
        return float(stats.binom.sf(wins - 1, num, 0.5))
    mean, deviation = statistics.fmean(margins), statistics.stdev(margins)
    return float(stats.t.sf(mean / (deviation / math.sqrt(num)), num - 1))


def _p_text(p_value: float) -> str:
    return f"p < {_SMALLEST_P:g}" if p_value < _SMALLEST_P else f"p = {p_value:.2g}"


def _have_spread(margins: Sequence[float]) -> bool:
    """Whether the margins are finite and differ by more than rounding."""
    lowest, highest = min(margins), max(margins)
    return math.isfinite(highest - lowest) and not math.isclose(lowest, highest, rel_tol=_ROUNDING)


def _spread(values: Sequence[float], unit: str) -> str:
    text = f"{statistics.fmean(values):+.3g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2g}"
    return f"{text} {unit}".rstrip()
