"""The one statistic: differences of two series, paired over seeds, with their 95% interval.

A seed gives both series the same weights and the same order of the text, so the difference within a seed has
less noise than either of its losses. The interval is that of Student's t over these differences. What a seed
alone cannot show is not shown: the interval of one seed is infinite.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from merit_lab.results.series import with_series
from merit_lab.text import count_seeds, join

CONFIDENCE = 0.95
_COLUMNS: Mapping[str, Any] = {
    **dict.fromkeys(("conditions", "first", "second"), pl.String),
    **dict.fromkeys(("mean", "low", "high"), pl.Float64),
    "seeds": pl.Int64,
    "words": pl.String,
}
_DRAWS, _FEWEST_DRAWS, _MOST_WORK = 20_000, 2_000, 4_000_000


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first minus the second, over the seeds that both have, with an interval that holds it.

    A run that diverged counts as infinite, and then so does the difference; if both diverged at one seed, it
    is NaN. Without an interval, ``low`` and ``high`` are infinite.
    """

    mean: float
    low: float
    high: float
    seeds: tuple[int, ...]
    without_partner: tuple[int, ...] = ()
    """Seeds that only one of the two has; they do not count."""
    first_diverged: tuple[int, ...] = ()
    second_diverged: tuple[int, ...] = ()

    @property
    def side(self) -> int:
        """-1 if the first is below the second, 1 if it is above, and 0 if the interval allows both."""
        return -1 if self.high < 0 else 1 if self.low > 0 else 0

    def words(self, first: str = "the first", second: str = "the second") -> str:
        """What these seeds allow to say.

        Example:
            >>> paired({0: 3.0, 1: 3.1}, {0: 3.2, 1: 3.31}).words("MERIT", "LAMB")
            'MERIT below LAMB by 0.205 (0.141 to 0.269, 2 seeds)'
            >>> paired({0: 3.0}, {0: 3.2, 1: 3.3}).words("MERIT", "LAMB")
            'MERIT below LAMB by 0.2 (one seed: no interval; no pair at seed 1)'
            >>> paired({0: 3.0, 1: math.inf}, {0: 3.2, 1: 3.3}).words("MERIT", "LAMB")
            'MERIT diverged at seed 1 (2 seeds)'
        """
        unpaired = f"; no pair at {_seeds(self.without_partner)}" if self.without_partner else ""
        if not self.seeds:
            return f"{first} and {second} have no seed in common"
        if self.first_diverged or self.second_diverged:
            diverged = ((first, self.first_diverged), (second, self.second_diverged))
            failed = join([f"{name} diverged at {_seeds(seeds)}" for name, seeds in diverged if seeds])
            return f"{failed} ({count_seeds(len(self.seeds))}{unpaired})"
        if self.mean == 0 and self.low in (0, -math.inf):
            return f"{first} equal to {second} ({count_seeds(len(self.seeds))}{unpaired})"
        relation = "below" if self.mean < 0 else "above"
        if len(self.seeds) == 1:
            return f"{first} {relation} {second} by {abs(self.mean):.3g} (one seed: no interval{unpaired})"
        ends = (self.low, self.high) if self.side >= 0 else (-self.high, -self.low)
        low, mean, high = _alike(ends[0], abs(self.mean), ends[1])
        seeds = f"{count_seeds(len(self.seeds))}{unpaired}"
        if self.side:
            return f"{first} {relation} {second} by {mean} ({low} to {high}, {seeds})"
        return f"{first} level with {second} ({low} to {high}, {seeds})"


def paired(
    first: Mapping[int, float], second: Mapping[int, float], *, confidence: float = CONFIDENCE
) -> Difference:
    """The difference between two series, given their values by seed.

    Example:
        >>> difference = paired({0: 3.0, 1: 3.1, 2: 3.0}, {0: 3.2, 1: 3.3, 2: 3.3})
        >>> difference.seeds, round(difference.mean, 3), round(difference.low, 3), round(difference.high, 3)
        ((0, 1, 2), -0.233, -0.377, -0.09)
    """
    seeds = tuple(sorted(first.keys() & second.keys()))
    differences = [_or_infinite(first[seed]) - _or_infinite(second[seed]) for seed in seeds]
    mean = _mean(differences)
    half = math.inf
    if len(seeds) > 1 and math.isfinite(mean):
        error = float(np.std(differences, ddof=1)) / math.sqrt(len(seeds))
        half = _quantile(confidence, len(seeds) - 1) * error
    return Difference(
        mean=mean,
        low=mean - half if math.isfinite(half) else -math.inf,
        high=mean + half if math.isfinite(half) else math.inf,
        seeds=seeds,
        without_partner=tuple(sorted(first.keys() ^ second.keys())),
        first_diverged=tuple(seed for seed in seeds if not math.isfinite(first[seed])),
        second_diverged=tuple(seed for seed in seeds if not math.isfinite(second[seed])),
    )


def by_seed(runs: pl.DataFrame, value: str = "validation_loss") -> dict[tuple[str, str], dict[int, float]]:
    """The values of each series by seed, under (conditions, series); infinite where a run diverged.

    Runs that are left out (see ``with_series``) or have no value have no entry.
    """
    runs = runs if "left_out" in runs.columns else with_series(runs)
    number = (
        pl.when(pl.col("status") == "diverged").then(math.inf).otherwise(pl.col(value).fill_nan(math.inf))
    )
    counted = runs.filter(pl.col("left_out").is_null()).with_columns(number=number).drop_nulls("number")
    values: dict[tuple[str, str], dict[int, float]] = {}
    for *series, seed, found in counted.select("conditions", "series", "seed", "number").iter_rows():
        values.setdefault((series[0], series[1]), {})[seed] = found
    return values


def differences(runs: pl.DataFrame, value: str = "validation_loss") -> pl.DataFrame:
    """All pairs of series with equal conditions, the lower one of a pair first.

    The intervals hold all at once with 95% confidence, over the pairs of one table of conditions.
    """
    by_conditions: dict[str, dict[str, dict[int, float]]] = {}
    for (conditions, series), values in by_seed(runs, value).items():
        by_conditions.setdefault(conditions, {})[series] = values
    rows = [
        (conditions, *pair, one.mean, one.low, one.high, len(one.seeds), one.words(*pair))
        for conditions, alike in by_conditions.items()
        for pair, one in simultaneous(alike).items()
    ]
    return pl.DataFrame(rows, schema=dict(_COLUMNS), orient="row")


def simultaneous(values: Mapping[str, Mapping[int, float]]) -> dict[tuple[str, str], Difference]:
    """The differences of all pairs of series, with intervals that hold all at once; the lower one first."""
    lowest_first = sorted(values, key=lambda name: _mean(list(map(_or_infinite, values[name].values()))))
    pairs = list(itertools.combinations(lowest_first, 2))
    alone = {pair: paired(values[pair[0]], values[pair[1]]) for pair in pairs}
    confidence = confidence_of_each(
        tuple(
            (lowest_first.index(first), lowest_first.index(second), one.seeds)
            for (first, second), one in alone.items()
            if math.isfinite(one.high)
        )
    )
    return {pair: paired(values[pair[0]], values[pair[1]], confidence=confidence) for pair in pairs}


@functools.cache
def confidence_of_each(pairs: Sequence[tuple[int, int, tuple[int, ...]]]) -> float:
    """The confidence of each interval that makes 95% for all pairs (first, second, seeds) at once.

    By simulation from a fixed seed: the largest |t| over the pairs, for series that do not differ and have
    equal, independent noise at each seed. Where pairs have different numbers of seeds, the smallest p-value.
    """
    # Each pair keeps its own standard deviation, as in ``paired``. Tukey's and Dunnett's tests share one over
    # all series, which would be narrower (3.4 instead of 8.3 standard errors for ten series with five seeds)
    # and false: in the records, series with the same conditions differ in their noise by 3 to 10 times.
    if len(pairs) < 2:
        return CONFIDENCE
    from scipy import special  # type: ignore[import-untyped]  # scipy.stats takes seconds to import

    seeds = sorted({seed for _, _, of_pair in pairs for seed in of_pair})
    num_series = 1 + max(place for first, second, _ in pairs for place in (first, second))
    num_draws = max(_FEWEST_DRAWS, min(_DRAWS, _MOST_WORK // len(pairs)))
    noise = np.random.default_rng(0).standard_normal((num_series, len(seeds), num_draws), dtype=np.float32)
    largest: dict[int, np.ndarray] = {}  # |t| of each draw, by the number of seeds
    for first, second, of_pair in pairs:
        places = [seeds.index(seed) for seed in of_pair]
        difference = noise[first, places] - noise[second, places]
        count = len(places)
        t = np.abs(difference.mean(0)) / (difference.std(0, ddof=1) / math.sqrt(count))
        largest[count] = np.maximum(largest.get(count, 0.0), t)
    smallest = np.min([2 * special.stdtr(count - 1, -t) for count, t in largest.items()], axis=0)
    return 1 - float(np.quantile(smallest, 1 - CONFIDENCE))


def with_error(value: float, error: float) -> str:
    """A value with its error: two digits of the error, and as many decimals of the value.

    Examples:
        >>> with_error(415.704, 19.58), with_error(0.126722, 0.004635), with_error(1.5, math.inf)
        ('416 ± 20', '0.1267 ± 0.0046', '1.5 ± inf')
    """
    if not 0 < error < math.inf:
        return f"{value:.4g} ± {error:g}"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


@functools.cache
def _quantile(confidence: float, degrees: int) -> float:
    from scipy import special

    return float(special.stdtrit(degrees, (1 + confidence) / 2))


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _mean(values: Sequence[float]) -> float:
    """The mean; NaN of none, and of infinities of both signs: neither is below."""
    return sum(values) / len(values) if values else math.nan


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {join([str(seed) for seed in seeds])}"


def _alike(*values: float) -> list[str]:
    """Numbers with the same decimals: two digits of the distance between the smallest and the largest."""
    width = max(values) - min(values)
    decimals = 3 if width <= 0 else min(6, max(0, 2 - math.floor(math.log10(width))))
    return [f"{value:.{decimals}f}" for value in values]
