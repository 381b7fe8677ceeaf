"""The largest eigenvalues of a Hessian, with ARPACK's implicitly restarted Lanczos method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from merit_lab.measure.curvature.hessian import Hessian

_MOST_RESTARTS = 1000
_LARGEST_INDEX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Eigenvalues:
    """The largest eigenvalues, the largest first.

    ``residuals`` are the norms ``|H v - value v|``: within that distance of each value there is an
    eigenvalue of the Hessian.
    """

    values: list[float]
    residuals: list[float]


def top_eigenvalues(hessian: Hessian, top: int, *, tolerance: float = 1e-3, seed: int = 0) -> Eigenvalues:
    """Return the ``top`` algebraically largest eigenvalues.

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

    if not 1 <= top < hessian.size:
        raise ValueError(f"top is {top}; it must be from 1 to below the {hessian.size} parameters")

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        tensor = torch.from_numpy(vector.reshape(-1)).to(hessian.device, hessian.dtype)
        result: NDArray[np.float64] = (hessian @ tensor).double().cpu().numpy()
        return result

    operator = LinearOperator((hessian.size, hessian.size), matvec=product, dtype=np.float64)
    generator = np.random.default_rng(seed)
    try:
        values, vectors = eigsh(
            operator,
            k=top,
            which="LA",
            v0=generator.standard_normal(hessian.size),
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
    return Eigenvalues(values=values[order].tolist(), residuals=[float(norm) for norm in residuals])


def num_vectors(size: int, top: int) -> int:
    """Return how many vectors ARPACK may store: the more, the fewer restarts.

    scipy's ARPACK indexes the elements of all its vectors together by 32-bit integers and silently overflows:
    its default, 20 vectors, is already too many for GPT-2 small.
    """
    most = _LARGEST_INDEX // size
    if most < top + 2 and most < size:
        raise ValueError(
            f"{top} eigenvalues of a Hessian of {size} parameters need at least {top + 2} vectors, but "
            f"ARPACK can index the elements of only {most}; request at most {max(0, most - 2)}"
        )
    return min(max(2 * top + 1, 20), most, size)
