"""The trust-ratio family for one array, in plain jax.numpy; see ``optim/algorithm.py`` for torch.

A weight w with gradient g, moments m and v, and weight decay wd:

    m <- b1*m + (1-b1)*g                  v <- b2*v + (1-b2)*g*g
    u  = m / (sqrt(v) + eps) + wd*w
    b  = |w| / |u|                        over the whole weight
    r_i = |w_i.| / |u_i.|  per row        c_j = |w_.j| / |u_.j|  per column
    s_ij = max(r_i, c_j, b)
    w <- w - lr * clamp(s*u, -clip, clip)

Arrays keep their shapes: rows and columns are sets of axes, and sizes are reduced over them with the axes
kept. So a sharded array is never reshaped, and XLA moves only those sizes between devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Scalar = float | Array
Norm = Literal["max", "l2"]
NORMS: tuple[Norm, ...] = ("max", "l2")


class Rule(NamedTuple):
    """Which parts of the update are on: the paper's ablations, and LAMB, are values of this."""

    clip: Scalar | None = 1.0
    element_wise: bool = True
    weight_bound: bool = True
    norm: Norm = "max"
    ratio_bounds: tuple[Scalar, Scalar] | None = None
    """The smallest and the largest value of s."""


@dataclass(frozen=True)
class MatrixAxes:
    """The axes of an array that make a matrix's rows, and those that make its columns.

    All other axes stack matrices, each with separate ratios. Without rows or without columns it is a vector,
    which has only a whole-weight ratio. Negative axes count from the last one.

    Examples:
        >>> MatrixAxes(rows=(0, 1), columns=(2,))  # flax's attention output: heads, head size -> width
        MatrixAxes(rows=(0, 1), columns=(2,))
    """

    rows: Sequence[int]
    columns: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            axes = getattr(self, name)
            if not isinstance(axes, Sequence) or not all(isinstance(axis, int | np.integer) for axis in axes):
                raise ValueError(f"{name} is {axes!r}; it must be a sequence of axes, such as (0,) or (0, 1)")

    @property
    def whole(self) -> tuple[int, ...]:
        return (*self.rows, *self.columns)

    @property
    def is_vector(self) -> bool:
        return not self.rows or not self.columns


def matrix_axes(ndim: int, matrix_dims: object = None) -> MatrixAxes:
    """Return the matrix axes of an array with this many dimensions.

    A number is how many trailing axes form one matrix, (the first of them) x (all the rest); None is all.

    Examples:
        >>> matrix_axes(4)
        MatrixAxes(rows=(0,), columns=(1, 2, 3))
        >>> matrix_axes(3, 2)
        MatrixAxes(rows=(1,), columns=(2,))
    """
    if isinstance(matrix_dims, MatrixAxes):
        return _normalized(matrix_dims, ndim)
    if matrix_dims is None:
        matrix_dims = ndim
    elif not isinstance(matrix_dims, int | np.integer) or isinstance(matrix_dims, bool) or matrix_dims < 1:
        raise ValueError(
            f"matrix_dims is {matrix_dims!r}; it must be an integer of at least 1, a MatrixAxes or None. "
            "Under optax.inject_hyperparams, name it in static_args."
        )
    axes = tuple(range(max(0, ndim - int(matrix_dims)), ndim))
    num_row_axes = 1 if len(axes) > 1 else 0
    return MatrixAxes(rows=axes[:num_row_axes], columns=axes[num_row_axes:])


def _normalized(axes: MatrixAxes, ndim: int) -> MatrixAxes:
    """Return the same axes, counted from the first one."""
    if not all(-ndim <= axis < ndim for axis in axes.whole):
        raise ValueError(f"{axes} names an axis that an array of {ndim} dimensions does not have")
    rows, columns = (tuple(axis % ndim for axis in part) for part in (axes.rows, axes.columns))
    if len({*rows, *columns}) < len(rows) + len(columns):
        raise ValueError(f"{axes} names an axis twice in an array of {ndim} dimensions")
    return MatrixAxes(rows, columns)


def widened(x: Array) -> Array:
    """Convert to float32 for arithmetic; float64 arrays keep their precision."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def moving_average(average: Array, new: Array, beta: Scalar) -> Array:
    """b*m + (1-b)*g."""
    return beta * average + (1 - beta) * new


def bias_correction(count: Array, beta: Scalar) -> Array:
    """1 - beta**count, accurate if beta is near 1."""
    log_beta = math.log(beta) if isinstance(beta, float) and beta > 0 else jnp.log(beta)
    return -jnp.expm1(count * log_beta)


def adam_direction(
    mu: Array, nu: Array, count: Array, *, b1: Scalar, b2: Scalar, eps: Scalar, corrected: bool
) -> Array:
    """m / (sqrt(v) + eps): u before weight decay is added."""
    if not corrected:
        return mu / (jnp.sqrt(nu) + eps)
    # XLA may contract a product and a sum, and turn a/b/c into a/(b*c), in one program and not in another.
    # This avoids both: no two divisions in a row, and no product as the last step, to which the decayed
    # weights, also a product, would be added.
    first, second_sqrt = 1 / bias_correction(count, b1), 1 / jnp.sqrt(bias_correction(count, b2))
    return mu * first / (jnp.sqrt(nu) * second_sqrt + eps)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest(x: Array, axes: tuple[int, ...]) -> Array:
    """max|x| over some axes, which are kept; NaN if there is one, 0 if x is empty.

    Magnitudes are compared by their bits, as integers: XLA's float maximum keeps a NaN, but the collectives
    of some backends drop it across devices.
    """
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    magnitude = jax.lax.bitcast_convert_type(x, integer) & np.iinfo(integer).max  # without the sign
    return jax.lax.bitcast_convert_type(jnp.max(magnitude, axes, keepdims=True, initial=0), x.dtype)


@largest.defjvp
def _largest_jvp(axes: tuple[int, ...], x: tuple[Array], tangent: tuple[Array]) -> tuple[Array, Array]:
    return jax.jvp(lambda x: jnp.max(jnp.abs(x), axes, keepdims=True, initial=0), x, tangent)


def size(x: Array, axes: Sequence[int], norm: Norm) -> Array:
    """The norm over some axes, which are kept."""
    if norm == "max":
        return largest(x, tuple(axes))
    return jnp.sqrt(jnp.sum(x * x, tuple(axes), keepdims=True))


def undefined(weight_size: Array, update_size: Array) -> Array:
    """Where a ratio is undefined: a weight of size zero, or nothing to scale."""
    return (weight_size == 0) | (update_size == 0)


def ratio(weight_size: Array, update_size: Array) -> Array:
    """|w| / |u|, 1 where it is undefined, and never infinite, because inf * 0 is NaN."""
    no_ratio = undefined(weight_size, update_size)
    quotient = weight_size / jnp.where(no_ratio, 1, update_size)
    return jnp.where(no_ratio, 1, jnp.minimum(quotient, np.finfo(quotient.dtype).max))


def element_ratio(weight: Array, update: Array, axes: MatrixAxes, rule: Rule) -> Array:
    """s, in a shape that broadcasts to the weight's.

    Elements of a row or column whose ratio is undefined are not scaled (s = 1): a zero-initialized row would
    otherwise get the scale of its neighbours' updates, or zero.
    """

    def sizes(reduced: Sequence[int]) -> tuple[Array, Array]:
        return size(weight, reduced, rule.norm), size(update, reduced, rule.norm)

    whole = sizes(axes.whole)
    if axes.is_vector or not rule.element_wise:
        return bounded(ratio(*whole), rule)
    rows, columns = sizes(axes.columns), sizes(axes.rows)
    scale = jnp.maximum(ratio(*rows), ratio(*columns))
    if rule.weight_bound:
        scale = jnp.maximum(scale, ratio(*whole))
    return jnp.where(undefined(*rows) | undefined(*columns), 1, bounded(scale, rule))


def bounded(scale: Array, rule: Rule) -> Array:
    """Clamp s to the rule's bounds."""
    return scale if rule.ratio_bounds is None else jnp.clip(scale, *rule.ratio_bounds)


def scaled(weight: Array, update: Array, axes: MatrixAxes, rule: Rule) -> Array:
    """clamp(s*u): what the learning rate multiplies."""
    result = update * element_ratio(weight, update, axes, rule)
    return result if rule.clip is None else jnp.clip(result, -rule.clip, rule.clip)
