"""The trace of a Hessian with Hutchinson's estimator."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch

from merit_lab.measure.curvature.hessian import Hessian, dot


@dataclass(frozen=True, kw_only=True)
class Trace:
    """An unbiased estimate of the trace, from independent samples of it."""

    samples: list[float]

    @property
    def value(self) -> float:
        """The mean of the samples."""
        return statistics.fmean(self.samples)

    @property
    def standard_error(self) -> float:
        """The standard error of the mean."""
        return statistics.stdev(self.samples) / math.sqrt(len(self.samples))


def hutchinson_trace(hessian: Hessian, probes: int, *, seed: int = 0) -> Trace:
    """Estimate the trace as the mean of ``v . H v`` over random sign vectors v.

    Signs have the least variance of all independent elements: the diagonal contributes none.

    Args:
        hessian: the operator.
        probes: how many vectors; at least 2, for the error.
        seed: determines the vectors, which are drawn on the host and so the same on any device.

    Reference:
        Hutchinson, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing
        splines", 1989
    """
    if probes < 2:
        raise ValueError(f"probes is {probes}; the error of the trace needs at least 2")
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(probes):
        signs = torch.randint(0, 2, (hessian.size,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        probe = signs.to(hessian.device).to(hessian.dtype)
        samples.append(dot(probe, hessian @ probe))
    return Trace(samples=samples)
