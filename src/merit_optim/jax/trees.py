"""Parameter trees: arithmetic in float32, and options for each parameter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from merit_optim.jax import algorithm
from merit_optim.jax.algorithm import MatrixAxes

# Each a value for all parameters, a tree of them, or a function from the parameters to such a tree.
Mask = bool | None | Any
MatrixDims = int | MatrixAxes | None | Any


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Compute a transformation in float32; the updates keep their dtype."""
    inner = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "params is None, but trust ratios need the weights; call update(grads, state, params)"
            )
        scaled, state = inner.update(widened(updates), state, widened(params), **extra_args)
        return optax.tree.cast_like(scaled, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def widened(tree: Any) -> Any:
    return jax.tree.map(algorithm.widened, tree)


def resolved(value: Any, params: Any) -> Any:
    """Return ``value`` if it is a tree, or the tree that it makes from the parameters if it is a function.

    A tree with callable nodes, such as an Equinox module, is not a function.
    """
    leaves = jax.tree.leaves(value)
    return value(params) if leaves and all(map(callable, leaves)) else value


def spread(matrix_dims: MatrixDims, params: Any) -> Any:
    """Return a ``MatrixAxes`` for every parameter."""
    return jax.tree.map(
        lambda dims, part: jax.tree.map(lambda w: algorithm.matrix_axes(w.ndim, dims), part),
        resolved(matrix_dims, params),
        params,
        is_leaf=lambda dims: dims is None,
    )


def check_parameters(params: Any) -> None:
    jax.tree.map_with_path(_check_parameter, params)


def _check_parameter(path: tuple[Any, ...], param: Any) -> None:
    dtype = jnp.result_type(param)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"the parameter {jax.tree_util.keystr(path)} is {dtype}; parameters must be real "
            "floating-point arrays. Leave others out with optax.masked or optax.multi_transform."
        )
