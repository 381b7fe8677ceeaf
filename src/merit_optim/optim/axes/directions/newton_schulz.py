"""The polar factor of a matrix by Newton-Schulz: U V' of its singular value decomposition U S V'.

    X = N / |N|               so that no singular value is above 1
    A = X X'
    X <- a*X + (b*A + c*A*A) X        a few times; on the transpose of a tall matrix, whose A is smaller

Each pass maps every singular value x to a*x + b*x**3 + c*x**5, which drives it towards 1. This needs only
matrix products, which may be in half precision: each pass corrects the rounding errors of the previous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice, repeat
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

Pass = tuple[float, float, float]


class Coefficients(NamedTuple):
    """(a, b, c) of each pass, with the last repeated; the first pass starts from N / (margin*|N|)."""

    passes: tuple[Pass, ...]
    margin: float = 1.0

    def first(self, num: int) -> list[Pass]:
        """The coefficients of the first ``num`` passes."""
        return list(islice(chain(self.passes, repeat(self.passes[-1])), num))


COEFFICIENTS: dict[str, Coefficients] = {
    # Steep at zero, but does not converge: singular values end between 0.7 and 1.2 (Jordan et al.,
    # https://kellerjordan.github.io/posts/muon; torch.optim.Muon).
    "quintic": Coefficients(((3.4445, -4.7750, 2.0315),)),
    # Optimal polynomials for each of five passes, with a safety factor of 1.02 (Amsel et al.,
    # https://arxiv.org/abs/2505.16932; the numbers are from microsoft/dion).
    "polar-express": Coefficients(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        margin=1.02,
    ),
    # Five different polynomials too, flatter at the end than the quintic (microsoft/dion, optax).
    "dion": Coefficients(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
}


NSCoefficients = str | Sequence[float] | Sequence[Pass]
"""The name of coefficients, (a, b, c), or one such triple per pass."""


def coefficients_of(value: NSCoefficients) -> Coefficients:
    """Coefficients from their name, from (a, b, c), or from one such triple per pass."""
    if isinstance(value, str):
        return COEFFICIENTS[value]
    numbers: Any = value
    triples = (numbers,) if isinstance(numbers[0], Real) else numbers
    return Coefficients(tuple((float(a), float(b), float(c)) for a, b, c in triples))


def num_products(rows: int, columns: int, num_passes: int) -> int:
    """The operations of the products of a matrix of this size."""
    small, large = sorted((rows, columns))
    return num_passes * (4 * small**2 * large + 2 * small**3)


def polar(
    x_NRC: Tensor, coefficients: Coefficients, num_passes: int, dtype: torch.dtype, eps: float
) -> Tensor:
    """The polar factor of each matrix, in ``dtype``, the dtype of the products; they are summed in float32.

    Zero stays zero, and a NaN or infinity becomes NaN everywhere. Matrices go one by one, each in memory of
    its own, because a matrix must give the same bits wherever it is processed: the rounding of products
    depends on how many are multiplied at once, on their layout, and on where in memory they begin.
    """
    passes = coefficients.first(num_passes)
    normal_RC = (_normalized(x_RC, coefficients.margin, eps).to(dtype) for x_RC in x_NRC)
    return torch.stack([_iterate(x_RC, passes) for x_RC in normal_RC])


def _normalized(x_RC: Tensor, margin: float, eps: float) -> Tensor:
    """X / (margin*|X|), in new memory; in float64 where the device has it."""
    x_RC = x_RC.clone(memory_format=torch.contiguous_format)  # the rounding of sums depends on the layout
    # In float64, the norm of float32 numbers cannot overflow or underflow.
    wide_RC = x_RC if x_RC.device.type == "mps" else x_RC.double()
    size: Tensor = torch.linalg.vector_norm(wide_RC)
    return wide_RC / (size * margin).clamp(min=eps)


def factor_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which matrices of ``dtype`` are multiplied.

    On a CPU without instructions for narrow products torch loops over them, hundreds of times slower. In
    float32 they are exact, and only their sums are rounded, as everywhere.
    """
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


def _iterate(x_RC: Tensor, passes: Sequence[Pass]) -> Tensor:
    dtype, is_tall = x_RC.dtype, x_RC.shape[0] > x_RC.shape[1]
    wide = factor_dtype(dtype, x_RC.device)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    x = (x_RC.T if is_tall else x_RC).to(wide)
    for a, b, c in passes:
        gram = rounded(x @ x.T)
        polynomial = rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        x = rounded(torch.addmm(x, polynomial, x, beta=a))
    return (x.T if is_tall else x).to(dtype)
