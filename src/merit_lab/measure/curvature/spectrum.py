"""What is measured of a Hessian: its largest eigenvalues, its trace, and its spectral density."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from merit_lab.measure.curvature.hessian import Hessian, dot

Vector = NDArray[np.float64]

_MOST_RESTARTS = 1000
_LARGEST_INDEX = 2**31 - 1
_REACH = 5.0  # of the Gaussian, in its widths: all but 6e-7 of it
_POINTS = 10  # of the grid per width
_ROUNDINGS = 100  # a Lanczos vector shorter than this many rounding errors is only rounding


def top_eigenvalues(
    hessian: Hessian, top: int, *, tolerance: float = 1e-3, seed: int = 0
) -> dict[str, list[float]]:
    """Return the ``top`` algebraically largest eigenvalues, by ARPACK's implicitly restarted Lanczos method.

    The result has ``values``, the largest first, and ``residuals``, the norms ``|H v - value v|``: within
    that distance of each value there is an eigenvalue of the Hessian.

    ARPACK's vectors are float64 in the host's memory for any dtype and device of the model: it needs about
    twenty orthogonal vectors, and so the only rounding is that of the float32 products.

    Args:
        hessian: the operator.
        top: how many.
        tolerance: residual at which an eigenvalue has converged, relative to it. The error of a value that
            is well separated from the others is about its square.
        seed: determines the first vector.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh  # type: ignore[import-untyped]

    def product(vector: Vector) -> Vector:
        tensor = torch.from_numpy(vector.reshape(-1)).to(hessian.device, hessian.dtype)
        result: Vector = (hessian @ tensor).double().cpu().numpy()
        return result

    try:
        values, vectors = eigsh(
            LinearOperator((hessian.size, hessian.size), matvec=product, dtype=np.float64),
            k=top,
            which="LA",
            v0=np.random.default_rng(seed).standard_normal(hessian.size),
            ncv=num_vectors(hessian.size, top),
            maxiter=_MOST_RESTARTS,  # scipy's default overflows its 32 bits for large models
            tol=tolerance,
        )
    except ArpackNoConvergence as error:
        raise RuntimeError(
            f"{len(error.eigenvalues)} of {top} eigenvalues converged to a tolerance of {tolerance:g} in "
            f"{hessian.num_products} products; request fewer, or a larger tolerance"
        ) from None
    order = np.argsort(values)[::-1]
    residuals = [np.linalg.norm(product(vectors[:, i]) - values[i] * vectors[:, i]) for i in order]
    return {"values": values[order].tolist(), "residuals": [float(norm) for norm in residuals]}


def num_vectors(size: int, top: int) -> int:
    """Return how many vectors ARPACK may store: the more, the fewer restarts.

    scipy's ARPACK indexes the elements of all its vectors together by 32-bit integers and silently overflows:
    its default, 20 vectors, is already too many for GPT-2 small.
    """
    most = _LARGEST_INDEX // size
    if top >= size or most < min(top + 2, size):
        raise ValueError(
            f"{top} eigenvalues of a Hessian of {size} parameters cannot be computed by ARPACK, which can "
            f"index the elements of {most} vectors; request at most {max(0, min(most - 2, size - 1))}"
        )
    return min(max(2 * top + 1, 20), most, size)


def hutchinson_trace(hessian: Hessian, probes: int, *, seed: int = 0) -> dict[str, Any]:
    """Estimate the trace as the mean of ``v . H v`` over random sign vectors v.

    The result has the mean as its ``value``, the ``standard_error``, and the ``samples``. Signs have the
    least variance of all independent elements: the diagonal contributes none.

    Args:
        hessian: the operator.
        probes: how many vectors; at least 2, for the error.
        seed: determines the vectors, which are drawn on the host and so the same on any device.

    Reference:
        Hutchinson, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing
        splines", 1989
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(probes):
        signs = torch.randint(0, 2, (hessian.size,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        probe = signs.to(hessian.device).to(hessian.dtype)
        samples.append(dot(probe, hessian @ probe))
    error = statistics.stdev(samples) / math.sqrt(probes)
    return {"value": statistics.fmean(samples), "standard_error": error, "samples": samples}


def spectral_density(hessian: Hessian, probes: int, *, steps: int, seed: int = 0) -> dict[str, Any]:
    """Return the spectrum as seen by ``probes`` random vectors, each with ``steps`` products.

    From a random vector, the Lanczos method computes a small tridiagonal matrix. Its eigenvalues, each
    weighted by the square of its eigenvector's first element, are a Gauss quadrature of the Hessian's
    spectrum as seen by the vector; the mean over random vectors is a quadrature of the spectrum itself.

    The result has the ``nodes`` and ``weights`` of the quadratures, a list for each vector whose weights sum
    to 1; what they say of the spectrum, the ``smallest`` node and the weight ``below_zero``; and the
    ``density`` at the points of a ``grid``.

    Args:
        hessian: the operator.
        probes: how many vectors.
        steps: nodes for each vector. The ends of the spectrum and its first ``2 steps`` moments are right.
        seed: determines the vectors, which are drawn on the host and so the same on any device.

    Reference:
        Ghorbani et al., "An investigation into neural net optimization via Hessian eigenvalue density",
        2019, https://arxiv.org/abs/1901.10159
    """
    from scipy.linalg import eigh_tridiagonal  # type: ignore[import-untyped]

    generator = torch.Generator().manual_seed(seed)
    nodes, weights = [], []
    for _ in range(probes):
        probe = torch.randn(hessian.size, generator=generator).to(hessian.device, hessian.dtype)
        values, vectors = eigh_tridiagonal(*_lanczos(hessian, probe, min(steps, hessian.size)))
        nodes.append(values)
        weights.append(vectors[0] ** 2)
    every, shares = np.concatenate(nodes), np.concatenate(weights) / probes
    grid, density = _smooth(every, shares)
    return {
        "smallest": every.min().item(),
        "below_zero": shares[every < 0].sum().item(),
        "grid": grid.tolist(),
        "density": density.tolist(),
        "nodes": [of_probe.tolist() for of_probe in nodes],
        "weights": [of_probe.tolist() for of_probe in weights],
    }


def _smooth(nodes: Vector, weights: Vector) -> tuple[Vector, Vector]:
    """Return a grid of eigenvalues and the spectral density there.

    Each node is smoothed to a Gaussian, whose standard deviation is a hundredth of the spectrum's width.
    """
    smallest, largest = nodes.min(), nodes.max()
    width = max((largest - smallest) / 100, 1e-6 * np.abs(nodes).max()) or 1.0
    points = int(_POINTS * ((largest - smallest) / width + 2 * _REACH)) + 1
    grid = np.linspace(smallest - _REACH * width, largest + _REACH * width, points)
    bells = np.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    return grid, bells @ weights


def _lanczos(hessian: Hessian, start: torch.Tensor, steps: int) -> tuple[list[float], list[float]]:
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
