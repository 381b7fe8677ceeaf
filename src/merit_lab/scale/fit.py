"""The scaling curve: how many steps a batch size needs, from few measurements.

McCandlish et al. (2018, arXiv 1812.06162): with a batch of B sequences the steps to a given loss are

    S(B) = S_min (1 + B_crit / B).

Far below the critical batch, twice the batch halves the steps; far above it, it changes nothing. At B_crit
itself a run takes twice the least possible steps, and twice the least possible data.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
_FEWEST_BATCHES = 3  # two parameters, and something left to judge them by
_WIDEST = 100.0  # an interval whose ends are further apart than this factor tells nothing


@dataclass(frozen=True)
class Estimate:
    """A fitted value and the ends of its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingCurve:
    """A fitted curve."""

    least_steps: Estimate
    critical_batch: Estimate

    def steps(self, batch: float) -> float:
        """The steps it gives a batch."""
        return self.least_steps.value * (1 + self.critical_batch.value / batch)

    @property
    def is_told(self) -> bool:
        """Whether the measurements say where the critical batch is."""
        return self.critical_batch.high < _WIDEST * self.critical_batch.low


def fit_curve(batches: Sequence[float], steps: Sequence[float]) -> ScalingCurve | None:
    """The curve of least squares through measurements, one for each run; None where there are too few.

    Squares are of relative errors, and the parameters are fitted as logarithms: steps scatter by a share
    of themselves, and both parameters are positive. The intervals come from the covariance of the fit and
    Student's t, so they widen when the measurements are few or do not follow the curve.
    """
    if len(set(batches)) < _FEWEST_BATCHES:
        return None
    from scipy import optimize, stats  # type: ignore[import-untyped]

    sizes, needed = np.asarray(batches, dtype=float), np.log(np.asarray(steps, dtype=float))

    def log_steps(batch: Floats, log_least: float, log_critical: float) -> Floats:
        bend: Floats = np.logaddexp(0.0, log_critical - np.log(batch))
        return log_least + bend

    middle = float(np.log(sizes).mean())
    start = (float(needed.mean()) - np.log(2), middle)
    with warnings.catch_warnings():
        # Where the measurements show no bend its place is anywhere: the interval says so.
        warnings.simplefilter("ignore", optimize.OptimizeWarning)
        # Beyond these bounds, a factor of a million either way, the curve does not change.
        bounds = ([-np.inf, middle - 14.0], [np.inf, middle + 14.0])
        values, covariance = optimize.curve_fit(log_steps, sizes, needed, p0=start, bounds=bounds)
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(sizes) - 2) * np.sqrt(np.diag(covariance))
    least, critical = (
        Estimate(*(float(end) for end in np.exp(np.minimum([value, value - half, value + half], 700.0))))
        for value, half in zip(values, reach, strict=True)
    )
    return ScalingCurve(least, critical)
