"""SOAP's direction: Adam in the eigenbasis of the averages of g g' and g' g.

    G = QL' g QR
    m <- b1*m + (1-b1)*G            v <- b2*v + (1-b2)*G*G           both kept in the basis
    d  = QL (m / (sqrt(v) + eps)) QR'                                with m and v bias-corrected
    L <- b*L + (1-b)*g g'           R <- b*R + (1-b)*g' g
    QL, QR: eigenvectors of L and R, computed in the first step and improved every few steps by one product
    and a QR decomposition; then m is rotated into the new basis, and v is sorted like the eigenvalues

The first step only computes the basis, so that no gradient is projected onto a basis made from itself. A side
longer than ``max_precond_dim`` is not rotated. The bases of a matrix are improved once per cycle of
``precondition_frequency`` steps; the step of the cycle is the matrix's phase (``refresh.py``).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.directions.adam import bias_correction, moments, quotient
from merit_optim.optim.axes.directions.direction import MatrixDirection, Sent, Traffic
from merit_optim.optim.axes.registered import register
from merit_optim.optim.matrices import Extent, Matrices, View


@register("soap")
@dataclass(frozen=True, kw_only=True)
class Soap(MatrixDirection):
    """SOAP's direction, with the names and values of its authors' implementation."""

    READS_STEP: ClassVar[bool] = True
    NEEDS_MATRICES: ClassVar[bool] = True
    SCHEDULED: ClassVar[tuple[str, ...]] = ("betas",)

    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    bias_correction: bool = True
    shampoo_beta: float | None = None
    precondition_frequency: int = 10
    max_precond_dim: int = 10000
    refresh_phase: int | None = None
    """None in a group lets its matrices take turns. Here None means phase 0, the authors' schedule."""

    @property
    def keys(self) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq", "row_average", "column_average", "row_basis", "column_basis"

    def check(self) -> None:
        validate.betas(self.betas)
        validate.epsilon(self.eps, "1e-8")
        validate.flag("bias_correction", self.bias_correction)
        if self.shampoo_beta is not None:
            validate.fraction("shampoo_beta", self.shampoo_beta, ", or None for the second of betas")
        validate.count("precondition_frequency", self.precondition_frequency)
        validate.count("max_precond_dim", self.max_precond_dim)
        if self.refresh_phase is not None:
            validate.phase("refresh_phase", self.refresh_phase, self.precondition_frequency)

    def refusal(self, view: View, shape: torch.Size) -> str | None:
        if view.matrices(shape).is_vector:
            return (
                f"direction='soap' rotates matrices, and with matrix_dims={view.matrix_dims} this is a "
                "vector: use direction='adam' for it"
            )
        if view.split is not None:
            return "direction='soap' does not support split, it has one basis per matrix: use split=None"
        return None

    def refused_options(self, group: dict[str, Any]) -> str | None:
        if group["state_dtype"] == torch.bfloat16:
            return "direction='soap' decomposes its state, and bfloat16 is too coarse: use torch.float32"
        for option in ("capturable", "differentiable"):
            if group[option]:
                return f"direction='soap' counts its steps on the host: use {option}=False"
        return None

    def shapes(self, matrices: Matrices, view: View) -> tuple[tuple[int, ...] | None, ...]:
        # A side that is not rotated has empty state, so that all parameters have the same keys.
        sides = self._rotated(matrices.rows, matrices.columns)
        rows, columns = ((matrices.num, side, side) for side in sides)
        return None, None, rows, columns, rows, columns

    @property
    def keys_by_rows(self) -> tuple[str, ...]:
        return self.keys[2:]

    def refresh_cost(self, matrices: Matrices) -> int:
        """The cost of improving the bases, up to a factor: a product and a QR of each rotated side.

        Operations grow with side**3, but the time of a QR on an H200 with side**1.4, because it is many short
        kernels. Phases balanced by side**2 are balanced by both.
        """
        return matrices.num * sum(side**2 for side in self._rotated(matrices.rows, matrices.columns))

    def _rotated(self, rows: int, columns: int) -> list[int]:
        """The lengths of the sides; 0 for a side that is not rotated."""
        return [side if side <= self.max_precond_dim else 0 for side in (rows, columns)]

    def before(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The gradient and all state: each element of the rotated moments depends on the whole matrix."""
        # Contiguous, because the rounding of products depends on the layout.
        return tuple(x.to(grad_NRC.dtype).contiguous() for x in (grad_NRC, *state)), state

    def whole(self, gathered: tuple[Tensor, ...], step: float | Tensor) -> tuple[Tensor | None, ...]:
        """d and the new state.

        Matrices go one by one, so that each has the same bits in a stack and alone.
        """
        of_each = zip(*(x_NRC.split(1) for x_NRC in gathered), strict=True)
        results = [self._whole_of_one(tuple(map(_at_beginning, of_one)), step) for of_one in of_each]
        if len(results) == 1:
            return results[0]
        return tuple(
            None if of_all[0] is None else torch.cat(of_all) for of_all in zip(*results, strict=True)
        )

    def _whole_of_one(self, gathered: tuple[Tensor, ...], step: float | Tensor) -> tuple[Tensor | None, ...]:
        taken = _num_taken(step)
        grad_NRC, exp_avg, exp_avg_sq, *averages_and_bases = gathered
        averages, bases = tuple(averages_and_bases[:2]), tuple(averages_and_bases[2:])
        d = None
        if taken:
            rotated = _into(grad_NRC, bases)
            exp_avg, exp_avg_sq = moments(exp_avg, exp_avg_sq, rotated, *self.betas)
            d = _out_of(quotient(exp_avg, exp_avg_sq, self.eps), bases)
            if self.bias_correction:  # eps is not corrected, as in the authors' code
                first, second_sqrt = bias_correction(taken, *self.betas)
                d = d * (second_sqrt / first)
        averages = self._averaged(averages, grad_NRC)
        if not taken:
            bases = tuple(map(_eigenvectors, averages))
        elif taken % self.precondition_frequency == (self.refresh_phase or 0):
            exp_avg = _out_of(exp_avg, bases)
            bases, exp_avg_sq = _improved(averages, bases, exp_avg_sq)
            exp_avg = _into(exp_avg, bases)
        return d, exp_avg, exp_avg_sq, *averages, *bases

    def after(
        self,
        formed: tuple[Tensor | None, ...],
        state: tuple[Tensor, ...],
        dtype: torch.dtype,
        extent: Extent,
        step: float | Tensor = 1,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """d and the new state in its stored dtypes; no d in the first step."""
        d, *new = formed
        stored = (now.to(before.dtype) for now, before in zip(new, state, strict=True) if now is not None)
        return d if _num_taken(step) else None, tuple(stored)

    def traffic(self, rows: int, columns: int, dtype: torch.dtype) -> Traffic:
        """Everything is sent and comes back. That is a lot, but products and decompositions take longer."""
        sides = [Sent(dtype, (side, side), by_rows=True) for side in self._rotated(rows, columns)]
        tensors = (Sent(dtype),) * 3 + (*sides, *sides)  # the gradient or d, and the moments
        return Traffic(tensors, tensors)

    def num_operations(self, rows: int, columns: int) -> int:
        """Products with the bases and of the gradient, and the mean per step of a cycle's product and QR."""
        sides = self._rotated(rows, columns)
        products = 6 * rows * columns * sum(sides)
        return products + sum(10 * side**3 // 3 for side in sides) // self.precondition_frequency

    def _averaged(self, averages: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, Tensor]:
        """L and R, with the products of the gradient averaged in."""
        beta = self.betas[1] if self.shampoo_beta is None else self.shampoo_beta
        rows, columns = averages
        if rows.numel():
            rows = torch.lerp(rows, torch.bmm(grad, grad.mT), 1 - beta)
        if columns.numel():
            columns = torch.lerp(columns, torch.bmm(grad.mT, grad), 1 - beta)
        return rows, columns


def _num_taken(step: float | Tensor) -> int:
    """Number of steps that changed the weight, including this one: all but the first, or 0 if skipped."""
    return max(int(step) - 1, 0)


def _at_beginning(x: Tensor) -> Tensor:
    """x at the beginning of its memory. The rounding of products depends on where in memory factors begin."""
    return x.clone() if x.storage_offset() else x


# torch.bmm gives the same bits as the operator @ and costs much less host time.


def _into(x: Tensor, bases: tuple[Tensor, ...]) -> Tensor:
    """QL' x QR."""
    rows, columns = bases
    x = torch.bmm(rows.mT, x) if rows.numel() else x
    return torch.bmm(x, columns) if columns.numel() else x


def _out_of(x: Tensor, bases: tuple[Tensor, ...]) -> Tensor:
    """QL x QR'."""
    rows, columns = bases
    x = torch.bmm(rows, x) if rows.numel() else x
    return torch.bmm(x, columns.mT) if columns.numel() else x


def _eigenvectors(average: Tensor) -> Tensor:
    """The eigenvectors as columns, in descending order of eigenvalues; NaN if a matrix is not finite."""
    if not average.numel():
        return average
    finite_N11 = average.isfinite().all(-1).all(-1)[:, None, None]
    vectors = _eigh(torch.where(finite_N11, average, 0))
    return torch.where(finite_N11, vectors.flip(-1), torch.nan)


def _eigh(x: Tensor) -> Tensor:
    """The eigenvectors in ascending order of eigenvalues.

    The algorithm may fail to converge, and an error here would leave a step half taken. So it is repeated in
    float64, as in the authors' code. If that fails too, nothing is rotated until the basis is improved.
    """
    for dtype in (x.dtype, torch.float64):
        with contextlib.suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            vectors: Tensor = torch.linalg.eigh(x.to(dtype))[1]
            return vectors.to(x.dtype)
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).flip(-1).expand_as(x)


def _improved(
    averages: tuple[Tensor, ...], bases: tuple[Tensor, ...], exp_avg_sq: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Improve the bases by one power iteration, and sort v like the eigenvalues."""
    improved = []
    for dim, (average, basis) in enumerate(zip(averages, bases, strict=True), start=1):
        if basis.numel():
            product = torch.bmm(average, basis)
            order = (basis * product).sum(1).argsort(dim=1, descending=True)
            index = order[:, :, None] if dim == 1 else order[:, None, :]
            exp_avg_sq = exp_avg_sq.gather(dim, index.expand_as(exp_avg_sq))
            basis = _orthogonal(product.gather(2, order[:, None, :].expand_as(product)))
        improved.append(basis)
    return tuple(improved), exp_avg_sq


def _orthogonal(x: Tensor) -> Tensor:
    """The first factor of a QR decomposition; NaN for a matrix that is not finite."""
    finite_N11 = x.isfinite().all(-1).all(-1)[:, None, None]
    factor, _ = torch.linalg.qr(torch.where(finite_N11, x, 0))
    return torch.where(finite_N11, factor, torch.nan)
