"""A small tree of parameters, steps on it, and comparisons of trees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def small_tree(seed: int = 0, dtype: Any = jnp.float32) -> Any:
    generator = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(generator.standard_normal((6, 4)), dtype),
        "bias": jnp.asarray(generator.standard_normal(4), dtype),
    }


def update(optimizer: Any, grads: Any, params: Any) -> Any:
    """The updates of a first step."""
    return jax.jit(lambda: optimizer.update(grads, optimizer.init(params), params)[0])()


def train(optimizer: Any, params: Any, num_steps: int = 3, *, first: int = 1, state: Any = None) -> Any:
    """Parameters and state after some steps on gradients that depend on the step alone."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        grads = jax.tree.map(lambda p, g: g.astype(p.dtype), params, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params) if state is None else state
    for t in range(first, first + num_steps):
        params, state = step(params, state, small_tree(t))
    return params, state


def assert_equal(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(got: Any, expected: Any, tolerance: float = 1e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), got, expected)
