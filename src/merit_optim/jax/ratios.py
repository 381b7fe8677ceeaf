"""Ratios: how the sizes of a weight and of its update scale the update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax import Array

from merit_optim.jax import validate
from merit_optim.jax.trees import Scalar, Views, in_float32, map_matrices
from merit_optim.jax.view import Axes, Matrices

# The axes over which lines are measured that have ratios of their own.
_LINES = {
    "merit": ("columns", "rows"),
    "row": ("columns",),
    "column": ("rows",),
    "output": ("inputs",),
    "weight": (),
}


def scale_by_ratio(
    of: str = "merit",
    *,
    norm: str = "max",
    clip: Scalar | None = None,
    weight_bound: bool | None = None,
    ratio_bounds: tuple[Scalar, Scalar] | None = None,
    view: Views = None,
) -> optax.GradientTransformationExtraArgs:
    """Scale updates u by ratios of |w| and |u|: the counterpart of ``optax.scale_by_trust_ratio``.

        b  = |w| / |u|                        over the whole weight
        r_i = |w_i.| / |u_i.|  per row        c_j = |w_.j| / |u_.j|  per column
        s_ij = max(r_i, c_j, b)               for "merit"; r_i for "row", c_j for "column", b for "weight"
        u  <- clamp(s*u, -clip, clip)

    A row or column in which w or u is all zero is not scaled (s = 1). Vectors have b alone. With the max
    norm, parameters sharded over a mesh get the same bits as on one device.

    Args:
        of: "merit", "row", "column", "output" (either, as the view says), "weight", or "none": s = 1.
        norm: "max", the largest magnitude, or "l2".
        clip: bound on each element of ``s*u``, 1.0 in MERIT; None for none.
        weight_bound: let b bound the other ratios from below; None: in "merit" alone.
        ratio_bounds: the smallest and the largest s. Rows and columns of zeros have no bounds.
        view: how arrays are seen as matrices; see ``View``.

    Reference:
        Luo et al., https://arxiv.org/abs/2508.20577
    """
    validate.one_of("ratio", of, (*_LINES, "none"))
    validate.one_of("norm", norm, ("max", "l2"))
    validate.bounds("ratio_bounds", ratio_bounds)
    if clip is not None:
        validate.positive("clip", clip, ", or None for no clip")
    has_bound = of == "merit" if weight_bound is None else weight_bound

    def bounded(scale: Array) -> Array:
        return scale if ratio_bounds is None else jnp.clip(scale, *ratio_bounds)

    def scaled(m: Matrices, u: Array, w: Array) -> Array:
        lines = [(size(w, axes, norm), size(u, axes, norm)) for axes in lines_of(m, of)]
        whole = size(w, m.whole, norm), size(u, m.whole, norm)
        if not lines:
            return u * bounded(quotient(*whole))
        ratios = [quotient(*line) for line in [*lines, whole][: len(lines) + has_bound]]
        # Where a line's ratio is undefined, a zero-initialized row would otherwise get the scale of its
        # neighbours' updates, or zero.
        is_undefined = reduce(jnp.logical_or, [_undefined(*line) for line in lines])
        return u * jnp.where(is_undefined, 1, bounded(reduce(jnp.maximum, ratios)))

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return map_matrices(scaled, view, updates, params), state

    return in_float32(
        optax.chain(
            optax.identity()
            if of == "none"
            else optax.GradientTransformation(optax.init_empty_state, update),
            optax.identity() if clip is None else optax.clip(clip),
        )
    )


def lines_of(m: Matrices, of: str) -> list[Axes]:
    """The axes over which lines are measured that have ratios of their own; a vector has none."""
    return [] if m.is_vector else [getattr(m, axes) for axes in _LINES[of]]


def quotient(weight_size: Array, update_size: Array) -> Array:
    """|w| / |u|, 1 where it is undefined, and never infinite, because inf * 0 is NaN."""
    no_ratio = _undefined(weight_size, update_size)
    result = weight_size / jnp.where(no_ratio, 1, update_size)
    return jnp.where(no_ratio, 1, jnp.minimum(result, np.finfo(result.dtype).max))


def _undefined(weight_size: Array, update_size: Array) -> Array:
    """Where a ratio is undefined: a weight of size zero, or nothing to scale."""
    return (weight_size == 0) | (update_size == 0)


def size(x: Array, axes: Axes, norm: str) -> Array:
    """The norm over some axes, which are kept."""
    if norm == "max":
        return _largest(x, axes)
    sum_sq = jnp.sum(x * x, axes, keepdims=True)
    is_zero = sum_sq == 0  # there the root has no derivative
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, sum_sq)))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest(x: Array, axes: Axes) -> Array:
    """max|x| over some axes, which are kept; NaN if there is one, 0 if x is empty.

    Magnitudes are compared by their bits, as integers: XLA's float maximum keeps a NaN, but the collectives
    of some backends drop it across devices.
    """
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    magnitude = jax.lax.bitcast_convert_type(x, integer) & np.iinfo(integer).max  # without the sign
    return jax.lax.bitcast_convert_type(jnp.max(magnitude, axes, keepdims=True, initial=0), x.dtype)


@_largest.defjvp
def _largest_jvp(axes: Axes, x: tuple[Array], tangent: tuple[Array]) -> tuple[Array, Array]:
    return jax.jvp(lambda x: jnp.max(jnp.abs(x), axes, keepdims=True, initial=0), x, tangent)


RATIOS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "merit": partial(scale_by_ratio, "merit", clip=1.0),
    "weight": partial(scale_by_ratio, "weight", norm="l2"),
    "row": partial(scale_by_ratio, "row", norm="l2"),
    "column": partial(scale_by_ratio, "column", norm="l2"),
    "none": partial(scale_by_ratio, "none"),
}
"""By the names of ``compose``."""
