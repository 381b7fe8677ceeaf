"""The gradient noise scale: the batch size at which signal and noise of its gradient are equal.

With G the gradient of the whole loss and S the trace of the covariance of one sequence's gradient, a batch
of B sequences has a gradient whose expected squared norm is ``|G|^2 + S / B``. Two batch sizes therefore
give both, and the simple noise scale is ``S / |G|^2``.

Training with batches of B takes about ``1 + scale / B`` times the fewest possible steps and ``1 + B / scale``
times the fewest possible tokens: below the scale a larger batch saves steps at little cost, above it hardly
any. This holds for steps along the gradient in a loss that is curved equally in all directions; for an
optimizer that preconditions it is a guide, not a law.

Reference:
    McCandlish et al., "An empirical model of large-batch training", 2018, https://arxiv.org/abs/1812.06162
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientNorms:
    """Squared gradient norms of one batch: of its micro-batches, and of their mean."""

    micro_batches: Sequence[float]
    mean: float


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The noise scale in the units of ``micro_batch``, with its error."""

    noise: float
    """S, the trace of the covariance of one sequence's gradient."""
    signal: float
    """The squared norm of the gradient without noise; an unbiased estimate, which can be negative."""
    ratio_error: float
    """The standard error of signal / noise."""

    @property
    def value(self) -> float:
        """noise / signal; infinite if the estimated signal is not positive."""
        return _inverse(self.signal / self.noise)

    @property
    def interval(self) -> tuple[float, float]:
        """The range of two standard errors; infinite ends where the signal may be zero."""
        ratio = self.signal / self.noise
        return _inverse(ratio + 2 * self.ratio_error), _inverse(ratio - 2 * self.ratio_error)


def noise_scale(batches: Iterable[GradientNorms], *, micro_batch: int) -> NoiseScale:
    """Estimate the noise scale from gradient norms of several independent batches.

    The unbiased estimates of noise and signal are averaged over the batches before their ratio is taken.
    The error is that of signal / noise, by a jackknife over the batches. The noise is always well determined,
    so this ratio is nearly a mean, and there is no division by a signal that may be zero.

    Args:
        batches: at least two batches, each of at least two micro-batches.
        micro_batch: sequences in a micro-batch.

    Example:
        >>> batches = [GradientNorms([5.0, 7.0], 4.0), GradientNorms([6.0, 6.0], 4.2)]
        >>> scale = noise_scale(batches, micro_batch=8)
        >>> round(scale.noise, 1), round(scale.signal, 1), round(scale.value, 1)
        (30.4, 2.2, 13.8)
    """
    pairs = [_estimate(batch, micro_batch) for batch in batches]
    if len(pairs) < 2:
        raise ValueError(
            f"there are gradients of {len(pairs)} batches; at least 2 are needed to estimate the error"
        )
    noises, signals = zip(*pairs, strict=True)
    noise, signal = statistics.fmean(noises), statistics.fmean(signals)
    if not noise > 0:
        raise ValueError(
            f"the noise of the gradients is estimated as {noise:g}; it must be above 0: are the "
            "micro-batches all the same, or their norms not squared?"
        )
    count = len(pairs)
    # The ratios with one batch left out.
    without = [(sum(signals) - pair[1]) / (sum(noises) - pair[0]) for pair in pairs]
    error = math.sqrt((count - 1) * statistics.pvariance(without))
    return NoiseScale(noise=noise, signal=signal, ratio_error=error)


def relative_steps(batch: float, scale: float) -> float:
    """Steps with batches of this size, relative to the fewest possible; infinite for an infinite scale."""
    return 1 + scale / batch


def relative_tokens(batch: float, scale: float) -> float:
    """Tokens with batches of this size, relative to the fewest possible."""
    return 1 + batch / scale


def _estimate(batch: GradientNorms, micro_batch: int) -> tuple[float, float]:
    """Unbiased estimates of noise and signal from one batch."""
    count = len(batch.micro_batches)
    if count < 2:
        raise ValueError(f"a batch of {count} micro-batches has only one batch size; two are needed")
    small, large = micro_batch, micro_batch * count
    at_small, at_large = statistics.fmean(batch.micro_batches), batch.mean
    if not math.isfinite(at_small + at_large):
        raise FloatingPointError(
            f"the squared gradient norms are {at_small} in micro-batches and {at_large} in the batch; a "
            "diverged run has no noise scale: use an earlier checkpoint"
        )
    noise = (at_small - at_large) / (1 / small - 1 / large)
    signal = (large * at_large - small * at_small) / (large - small)
    return noise, signal


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio > 0 else math.inf
