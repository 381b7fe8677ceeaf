"""Parameter trees: arithmetic in float32, and functions and options for each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array

from merit_optim.jax.view import matrices_of

Scalar = float | Array
ScalarOrSchedule = Scalar | Callable[[Array], Scalar]
Mask = bool | None | Any
"""A bool for all parameters, a tree of them or a prefix of one, or a function to such a tree."""
Views = Any
"""A ``View``, a number of trailing axes or None, in the same forms as a mask."""


def in_float32(inner: optax.GradientTransformation, *, needs_params: bool = True) -> Any:
    """Compute a transformation in float32, with its state; the updates keep their dtype."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        jax.tree.map_with_path(_check_parameter, params)
        return inner.init(widened(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None and needs_params:
            raise ValueError(
                "params is None, but ratios and holds need the weights; call update(grads, state, params)"
            )
        changed, state = inner.update(widened(updates), state, widened(params), **extra_args)
        return optax.tree.cast_like(changed, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def widened(tree: Any) -> Any:
    """Convert to float32 for arithmetic; float64 arrays keep their precision."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32)), tree)


def resolved(value: Any, params: Any) -> Any:
    """Return ``value`` if it is a tree, or the tree that it makes from the parameters if it is a function.

    A tree with callable nodes, such as an Equinox module, is not a function.
    """
    leaves = jax.tree.leaves(value)
    return value(params) if leaves and all(map(callable, leaves)) else value


def for_each(value: Any, params: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return ``function`` of what an option in any of these forms says of a parameter, and of it."""
    if not jax.tree.leaves(params):  # also the placeholder for all parameters in optax.tree.map_params
        return params
    return jax.tree.map(
        lambda value, part: jax.tree.map(lambda param: function(value, param), part),
        resolved(value, params),
        params,
        is_leaf=lambda value: value is None,
    )


def map_matrices(function: Callable[..., Any], views: Views, tree: Any, *others: Any) -> Any:
    """Map ``function`` of ``Matrices`` and arrays over trees of arrays, each matrix by itself."""
    matrices = for_each(views, tree, lambda view, x: matrices_of(x.shape, view))
    return jax.tree.map(lambda m, *arrays: m.each(function, *arrays), matrices, tree, *others)


def unzipped(pairs: Any, like: Any) -> tuple[Any, Any]:
    """Return two trees for a tree of pairs."""
    structure: Any = jax.tree.structure(like)
    flat = structure.flatten_up_to(pairs)
    return structure.unflatten(pair[0] for pair in flat), structure.unflatten(pair[1] for pair in flat)


def _check_parameter(path: tuple[Any, ...], param: Any) -> None:
    dtype = jnp.result_type(param)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"the parameter {jax.tree_util.keystr(path)} is {dtype}; parameters must be real "
            "floating-point arrays. Leave others out with optax.masked or optax.partition."
        )
