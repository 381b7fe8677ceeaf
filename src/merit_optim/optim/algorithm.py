"""The trust-ratio family for one tensor, in plain torch: the definition every engine is held to.

A weight w with gradient g, moments m and v, learning rate lr and weight decay wd:

    m <- b1*m + (1-b1)*g                  v <- b2*v + (1-b2)*g*g
    u  = m / (sqrt(v) + eps) + wd*w
    b  = |w| / |u|                        over the whole weight
    r_i = |w_i.| / |u_i.|  per row        c_j = |w_.j| / |u_.j|  per column
    s_ij = max(r_i, c_j, b)
    w <- w - lr * clamp(s*u, -clip, clip)

|.| is the largest magnitude (``norm="max"``) or the Euclidean length (``norm="l2"``). With every part
on this is MERIT; ``Rule`` switches the parts off one by one, down to LAMB.

Nothing here changes its arguments, so autograd and ``torch.compile`` can follow it. The engines in
``engines/`` do the same in place, in pieces, or in one kernel, and their tests compare with this file.

Shape suffixes: N stacked matrices, R rows, C columns.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Norm = Literal["max", "l2"]
NORMS: tuple[Norm, ...] = ("max", "l2")


class Rule(NamedTuple):
    """Which parts of the update are on: the paper's ablations, and LAMB, are values of this."""

    clip: float | None = 1.0
    element_wise: bool = True
    weight_bound: bool = True
    norm: Norm = "max"


class Matrices(NamedTuple):
    """A parameter seen as ``num`` matrices; a vector has one row and only a whole-weight ratio."""

    num: int
    rows: int
    columns: int
    is_vector: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num, self.rows, self.columns


def matrices_of(shape: torch.Size | tuple[int, ...], matrix_dims: int | None = None) -> Matrices:
    """How a parameter of this shape is seen.

    The last ``matrix_dims`` dimensions make one matrix, (the first of them) x (all the rest), and the
    dimensions before them stack matrices, as experts do; ``None`` takes all dimensions, so nothing is
    stacked.

    Examples:
        >>> matrices_of((768, 3, 16, 16)).shape
        (1, 768, 768)
        >>> matrices_of((8, 1024, 4096), matrix_dims=2).shape
        (8, 1024, 4096)
    """
    num_batch_dims = 0 if matrix_dims is None else max(0, len(shape) - matrix_dims)
    num, matrix = math.prod(shape[:num_batch_dims]), shape[num_batch_dims:]
    if len(matrix) < 2:
        return Matrices(num, 1, math.prod(matrix), is_vector=True)
    return Matrices(num, matrix[0], math.prod(matrix[1:]), is_vector=False)


class Sizes(NamedTuple):
    """The norm of every row, every column and every whole matrix. Vectors have only the last."""

    rows_NR: Tensor | None
    columns_NC: Tensor | None
    whole_N: Tensor


def moments(
    exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """Adam's moving averages of the gradient and of its square."""
    return (
        torch.lerp(exp_avg, grad, 1 - beta1),
        (exp_avg_sq * beta2).addcmul(grad, grad, value=1 - beta2),
    )


class BiasCorrection(NamedTuple):
    """1 - beta1**t, and the square root of 1 - beta2**t: what the moments and denominator divide by."""

    first: float | Tensor
    second_sqrt: float | Tensor


def bias_correction(step: float | Tensor, beta1: float, beta2: float) -> BiasCorrection:
    """Adam's correction for moments that began at zero, after ``step`` steps.

    In double precision: 1 - beta**t has few correct digits left in float32 when beta is near 1.
    """
    if isinstance(step, Tensor):
        step = step.double()
    return BiasCorrection(1 - beta1**step, (1 - beta2**step) ** 0.5)


def direction(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor,
    eps: float,
    weight_decay: float,
    correction: BiasCorrection | None = None,
) -> Tensor:
    """u: the update before any trust ratio."""
    denominator = exp_avg_sq.sqrt()
    if correction is not None:
        denominator = denominator / correction.second_sqrt
    update = exp_avg / (denominator + eps)
    if correction is not None:
        update = update / correction.first
    # A product and a sum rather than add(alpha=...): their rounding never depends on where an element
    # stands in memory, which the equality of sharded and whole tensors rests on.
    return update + weight * weight_decay


def sizes(x_NRC: Tensor, rule: Rule, *, is_vector: bool) -> Sizes:
    """The norms that the ratios are made of; rows and columns only where the rule uses them."""

    def size(*dims: int) -> Tensor:
        return x_NRC.abs().amax(dims) if rule.norm == "max" else x_NRC.square().sum(dims).sqrt()

    whole_N = size(1, 2)
    if is_vector or not rule.element_wise:
        return Sizes(None, None, whole_N)
    return Sizes(size(2), size(1), whole_N)


def undefined(weight_size: Tensor, update_size: Tensor) -> Tensor:
    """Where a ratio has no meaning: a weight of size zero, or nothing to scale."""
    return (weight_size == 0) | (update_size == 0)


def ratio(weight_size: Tensor, update_size: Tensor) -> Tensor:
    """|w| / |u|, 1 where it is undefined, and never infinite, for inf * 0 would make a NaN."""
    no_ratio = undefined(weight_size, update_size)
    quotient = weight_size / update_size.masked_fill(no_ratio, 1)
    return quotient.masked_fill(no_ratio, 1).clamp(max=torch.finfo(quotient.dtype).max)


def element_ratio(weight: Sizes, update: Sizes, rule: Rule) -> Tensor:
    """s, of a shape that broadcasts to (N, R, C).

    Elements of a row or column whose own ratio is undefined are not scaled (s = 1): a zero-initialised
    row would otherwise be held at the size of its neighbours' updates, or at nothing.
    """
    whole = ratio(weight.whole_N, update.whole_N)[:, None, None]
    if weight.rows_NR is None or weight.columns_NC is None:
        return whole
    assert update.rows_NR is not None and update.columns_NC is not None
    rows = ratio(weight.rows_NR, update.rows_NR)[:, :, None]
    columns = ratio(weight.columns_NC, update.columns_NC)[:, None, :]
    scale = torch.maximum(rows, columns)
    if rule.weight_bound:
        scale = torch.maximum(scale, whole)
    unscaled_rows = undefined(weight.rows_NR, update.rows_NR)[:, :, None]
    unscaled_columns = undefined(weight.columns_NC, update.columns_NC)[:, None, :]
    return scale.masked_fill(unscaled_rows | unscaled_columns, 1)


def apply(weight: Tensor, update: Tensor, scale: Tensor, lr: float | Tensor, clip: float | None) -> Tensor:
    """w - lr * clamp(s*u): the last line of the definition."""
    scaled = update * scale
    if clip is not None:
        scaled = scaled.clamp(-clip, clip)
    return weight - scaled * lr


class Result(NamedTuple):
    """A weight and its state after a step."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def step(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    rule: Rule,
    matrix_dims: int | None = None,
    correction: BiasCorrection | None = None,
) -> Result:
    """One step for one tensor.

    Computed in float32 (in float64 for float64 weights). The state keeps the dtype it has, and u is
    formed from the state as it is stored.
    """
    dtype = compute_dtype(weight)
    matrices = matrices_of(weight.shape, matrix_dims)
    stored = tuple(
        new.to(old.dtype)
        for new, old in zip(
            moments(exp_avg.to(dtype), exp_avg_sq.to(dtype), grad.to(dtype), *betas),
            (exp_avg, exp_avg_sq),
            strict=True,
        )
    )
    if weight.numel() == 0:
        return Result(weight, *stored)
    weight_NRC = weight.to(dtype).reshape(matrices.shape)
    exp_avg_NRC, exp_avg_sq_NRC = (x.to(dtype).reshape(matrices.shape) for x in stored)
    update_NRC = direction(exp_avg_NRC, exp_avg_sq_NRC, weight_NRC, eps, weight_decay, correction)
    scale = element_ratio(
        sizes(weight_NRC, rule, is_vector=matrices.is_vector),
        sizes(update_NRC, rule, is_vector=matrices.is_vector),
        rule,
    )
    changed = apply(weight_NRC, update_NRC, scale, lr, rule.clip)
    return Result(changed.reshape(weight.shape).to(weight.dtype), *stored)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Arithmetic is float32 whatever the weight's dtype; float64 weights keep their precision."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
