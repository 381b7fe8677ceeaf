"""The spectral density of a Hessian by stochastic Lanczos quadrature.

From a random vector, the Lanczos method computes a small tridiagonal matrix. Its eigenvalues, each weighted
by the square of its eigenvector's first element, are a Gauss quadrature of the Hessian's spectrum as seen by
the vector; the mean over random vectors is a quadrature of the spectrum itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from merit_lab.checks import check_at_least
from merit_lab.measure.curvature.hessian import Hessian, dot

_REACH = 5.0  # of the Gaussian, in its widths: all but 6e-7 of it
_POINTS = 10  # of the grid per width
_ROUNDINGS = 100  # a Lanczos vector shorter than this many rounding errors is only rounding


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Nodes and weights of a quadrature of the spectrum, a list for each probe, whose weights sum to 1."""

    nodes: list[list[float]]
    weights: list[list[float]]

    def density(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return a grid of eigenvalues and the density there.

        Each node is smoothed to a Gaussian, whose standard deviation is a hundredth of the spectrum's width.
        """
        nodes = np.concatenate([np.asarray(nodes) for nodes in self.nodes])
        weights = np.concatenate([np.asarray(weights) for weights in self.weights]) / len(self.nodes)
        smallest, largest = nodes.min(), nodes.max()
        width = max((largest - smallest) / 100, 1e-6 * np.abs(nodes).max()) or 1.0
        points = int(_POINTS * ((largest - smallest) / width + 2 * _REACH)) + 1
        grid = np.linspace(smallest - _REACH * width, largest + _REACH * width, points)
        bells = np.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2) / (width * np.sqrt(2 * np.pi))
        return grid, bells @ weights


def spectral_density(hessian: Hessian, probes: int, *, steps: int, seed: int = 0) -> Spectrum:
    """Return the spectrum as seen by ``probes`` random vectors, each with ``steps`` products.

    Args:
        hessian: the operator.
        probes: how many vectors.
        steps: nodes for each vector. The ends of the spectrum and its first ``2 steps`` moments are right.
        seed: determines the vectors, which are drawn on the host and so the same on any device.

    Reference:
        Ghorbani et al., "An investigation into neural net optimization via Hessian eigenvalue density",
        2019, https://arxiv.org/abs/1901.10159
    """
    for name, value in (("probes", probes), ("steps", steps)):
        check_at_least(name, value, 1)
    generator = torch.Generator().manual_seed(seed)
    nodes, weights = [], []
    for _ in range(probes):
        probe = torch.randn(hessian.size, generator=generator).to(hessian.device, hessian.dtype)
        diagonal, beside = lanczos(hessian, probe, min(steps, hessian.size))
        values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
        nodes.append(values.tolist())
        weights.append((vectors[0] ** 2).tolist())
    return Spectrum(nodes=nodes, weights=weights)


def lanczos(hessian: Hessian, start: torch.Tensor, steps: int) -> tuple[list[float], list[float]]:
    """Return the diagonal and off-diagonal of the Lanczos matrix; shorter than ``steps`` if it ends early.

    Three vectors are stored, in the model's dtype and on its device, and not orthogonalized against earlier
    ones: a hundred of them would be fifty gigabytes for GPT-2 small. With rounding, outer eigenvalues then
    appear several times, but the copies share the weight of one, so the quadrature stays right (Knizhnerman,
    "The simple Lanczos procedure", 1996).
    """
    current = start / dot(start, start) ** 0.5
    previous = torch.zeros_like(current)
    rounding = _ROUNDINGS * torch.finfo(current.dtype).eps
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        residual = hessian @ current
        diagonal.append(dot(current, residual))
        if len(diagonal) == steps:
            return diagonal, beside
        residual = residual.sub_(current, alpha=diagonal[-1])
        if beside:
            residual = residual.sub_(previous, alpha=beside[-1])
        norm = dot(residual, residual) ** 0.5
        if norm <= rounding * max(map(abs, [*diagonal, *beside])):
            return diagonal, beside  # the vectors so far span the whole Krylov space
        beside.append(norm)
        previous, current = current, residual.div_(norm)
