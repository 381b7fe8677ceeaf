"""The scaling curve: the steps that each batch size needs to a loss, fitted to few measurements.

McCandlish et al. (2018, arXiv 1812.06162): with a batch of B sequences the steps to a given loss are

    S(B) = S_min (1 + B_crit / B).

Far below the critical batch B_crit, doubling the batch halves the steps; far above it, doubling changes
nothing. At B_crit a run takes twice the least possible steps, and twice the least possible data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
_FEWEST_BATCHES = 3  # one more than there are parameters
_WIDEST = 100.0  # the largest ratio of an interval's ends at which the value counts as determined


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
        """The predicted steps at a batch size."""
        return self.least_steps.value * (1 + self.critical_batch.value / batch)

    @property
    def is_determined(self) -> bool:
        """Whether the measurements determine the critical batch."""
        return self.critical_batch.high < _WIDEST * self.critical_batch.low


def fit_curve(batches: Sequence[float], steps: Sequence[float]) -> ScalingCurve | None:
    """Fit a curve to measurements, one for each run; None if there are fewer than three batch sizes.

    The fit is by least squares of relative errors, because the scatter of steps is proportional to them. The
    parameters are fitted as logarithms, because both are positive. The intervals come from the covariance of
    the fit and Student's t, so they are wide when there are few measurements or when these do not follow the
    curve.
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
        # Without a visible bend its position is undetermined; the interval shows that.
        warnings.simplefilter("ignore", optimize.OptimizeWarning)
        # A factor of a million either way; beyond these bounds the curve does not change.
        bounds = ([-np.inf, middle - 14.0], [np.inf, middle + 14.0])
        values, covariance = optimize.curve_fit(log_steps, sizes, needed, p0=start, bounds=bounds)
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(sizes) - 2) * np.sqrt(np.diag(covariance))
    least, critical = (
        Estimate(*(float(end) for end in np.exp(np.minimum([value, value - half, value + half], 700.0))))
        for value, half in zip(values, reach, strict=True)
    )
    return ScalingCurve(least, critical)


def steps_to_reach(target: float, losses: Iterable[tuple[int, float]]) -> float | None:
    """The step at which the loss first reached ``target``; None if it never did.

    ``losses`` are (step, loss) pairs in the order of steps. Between two validations the loss is interpolated
    linearly.

    Example:
        >>> steps_to_reach(3.0, [(0, 5.0), (10, 3.5), (20, 2.5)])
        15.0
    """
    before: tuple[int, float] | None = None
    for step, loss in losses:
        if loss <= target:
            if before is None:
                return float(step)
            step_before, loss_before = before
            return step_before + (step - step_before) * (loss_before - target) / (loss_before - loss)
        before = (step, loss) if math.isfinite(loss) else None
    return None
