"""Holds: what keeps a weight's size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array

from merit_optim.jax import validate
from merit_optim.jax.ratios import lines_of, quotient, scale_by_ratio, size
from merit_optim.jax.trees import Mask, ScalarOrSchedule, Views, in_float32, map_matrices, unzipped
from merit_optim.jax.view import Axes, Matrices

_RATIO_OF = {"matrix": "weight", "output": "output"}
"""The ratio whose sizes are those that a sphere holds."""


class Hold(NamedTuple):
    """What keeps a weight's size: transformations before the ratio, after it, and after the learning rate."""

    inside: optax.GradientTransformation = optax.identity()
    outside: optax.GradientTransformation = optax.identity()
    last: optax.GradientTransformation = optax.identity()


def add_cautious_decay(
    weight_decay: ScalarOrSchedule, mask: Mask = None
) -> optax.GradientTransformationExtraArgs:
    """Add ``weight_decay * w`` to updates c where they make w smaller: where c*w > 0.

    Otherwise like ``optax.add_decayed_weights`` (Chen et al., https://arxiv.org/abs/2510.12402).
    """
    validate.rate("weight_decay", weight_decay)
    decay = optax.add_decayed_weights(weight_decay, mask)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        decayed, state = decay.update(updates, state, params)
        return jax.tree.map(lambda c, w, new: jnp.where(c * w > 0, new, c), updates, params, decayed), state

    return in_float32(optax.GradientTransformation(decay.init, update))


class SphereState(NamedTuple):
    """The norm of each matrix or output at the start."""

    radius: Any


def hold_sphere(sphere_of: str = "matrix", *, view: Views = None) -> optax.GradientTransformationExtraArgs:
    """Put what updates make of a weight back on its sphere; the last transformation of a chain.

        w1 = w + update
        w <- R w1/|w1|

    R is the norm that w had in ``init``, and is state. An update of zero leaves w as it is, bit for bit. With
    ``scale_by_ratio("weight", norm="l2")`` before the learning rate, that is the angle of a step; others call
    this Hyperball, or MuonH with Muon's direction. A weight that is zero in ``init`` gets the sphere on which
    its first update puts it.

    Args:
        sphere_of: "matrix", or "output" for a sphere for each output, as ``view`` says.
        view: how arrays are seen as matrices; see ``View``.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from merit_optim.jax import hold_sphere, scale_by_muon, scale_by_ratio
        >>> optimizer = optax.chain(
        ...     scale_by_muon(),
        ...     scale_by_ratio("weight", norm="l2"),
        ...     optax.scale_by_learning_rate(0.1),
        ...     hold_sphere(),
        ... )
        >>> params = jnp.eye(4)
        >>> updates, _ = jax.jit(optimizer.update)(jnp.ones((4, 4)), optimizer.init(params), params)
        >>> round(float(jnp.linalg.norm(optax.apply_updates(params, updates))), 5)
        2.0
    """
    validate.one_of("sphere_of", sphere_of, _RATIO_OF)

    def axes_of(m: Matrices) -> Axes:
        return next(iter(lines_of(m, _RATIO_OF[sphere_of])), m.whole)

    def norm(m: Matrices, w: Array) -> Array:
        return size(w, axes_of(m), "l2")

    def held(m: Matrices, change: Array, w: Array, radius: Array) -> tuple[Array, Array]:
        known = jnp.where(radius == 0, norm(m, w), radius)
        moved = w + change
        rests = jnp.all(change == 0, axes_of(m), keepdims=True)
        change = jnp.where(rests, change, moved * quotient(known, norm(m, moved)) - w)
        return change, jnp.where(rests, radius, known)

    def update(updates: Any, state: SphereState, params: Any) -> tuple[Any, SphereState]:
        changes, radius = unzipped(map_matrices(held, view, updates, params, state.radius), updates)
        return changes, SphereState(radius)

    def init(params: Any) -> SphereState:
        return SphereState(map_matrices(norm, view, params))

    return in_float32(optax.GradientTransformation(init, update))


def _decay(weight_decay: ScalarOrSchedule, mask: Mask) -> Hold:
    """u = d + weight_decay*w: decay is scaled and clipped with the update, as in MERIT."""
    return Hold(inside=optax.add_decayed_weights(weight_decay, mask))


def _decoupled(weight_decay: ScalarOrSchedule, mask: Mask) -> Hold:
    """w <- w - lr*(c + weight_decay*w): decay is neither scaled nor clipped, as in AdamW."""
    return Hold(outside=optax.add_decayed_weights(weight_decay, mask))


def _cautious(weight_decay: ScalarOrSchedule, mask: Mask) -> Hold:
    return Hold(outside=add_cautious_decay(weight_decay, mask))


def _sphere(sphere_of: str = "matrix", view: Views = None) -> Hold:
    """w1 = w - lr*|w|*c/|c|, put back on the sphere."""
    last = hold_sphere(sphere_of, view=view)
    return Hold(outside=scale_by_ratio(_RATIO_OF[sphere_of], norm="l2", view=view), last=last)


HOLDS: dict[str, Callable[..., Hold]] = {
    "decay": _decay,
    "decoupled": _decoupled,
    "cautious": _cautious,
    "sphere": _sphere,
}
"""By the names of ``compose``."""
