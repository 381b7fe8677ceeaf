"""The geometry of Muon's direction."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
from steps import assert_close, assert_equal, update

from merit_optim.jax import View, muon_merit, scale_by_muon

EXACT = {"ns_steps": 25, "ns_coefficients": (15 / 8, -10 / 8, 3 / 8)}  # these converge


def random_matrix(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def direction(grad: Any, **options: Any) -> Any:
    return update(scale_by_muon(**options), grad, jnp.zeros_like(grad))


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6), (7, 1)], ids=str)
def test_the_first_direction_is_orthogonal(shape: tuple[int, int]) -> None:
    grad = random_matrix(*shape)
    left, _, right = np.linalg.svd(grad, full_matrices=False)
    exact = np.sqrt(max(shape)) * left @ right
    np.testing.assert_allclose(direction(grad, **EXACT), exact, atol=2e-5)
    for name, low, high in (("quintic", 0.65, 1.25), ("polar-express", 0.85, 1.15)):
        sizes = np.linalg.svd(direction(grad, ns_coefficients=name, scale="spectral"), compute_uv=False)
        assert low < sizes.min() <= sizes.max() < high, name


def test_equal_outputs_have_equal_sizes_and_the_whole_keeps_its_own() -> None:
    grad = random_matrix(9, 4)
    plain, equal = (np.asarray(direction(grad, neuron_beta=beta)) for beta in (None, 0.0))
    sizes = np.linalg.norm(equal, axis=0)
    np.testing.assert_allclose(sizes, sizes[0], rtol=1e-5)
    assert np.ptp(np.linalg.norm(plain, axis=0)) > 0.1
    np.testing.assert_allclose(np.linalg.norm(equal), np.linalg.norm(plain), rtol=1e-5)
    for view in (View(outputs="rows"), View(rows=(1,), columns=(0,))):
        np.testing.assert_allclose(direction(grad.T, neuron_beta=0.0, view=view).T, equal, rtol=1e-5)


def test_nesterov_looks_ahead_as_torch_does() -> None:
    """Not as optax's own Muon does: its bias correction mixes the first gradients otherwise."""
    first, second = random_matrix(6, 4, seed=1), random_matrix(6, 4, seed=2)
    transformation = scale_by_muon(0.9, **EXACT)
    step = jax.jit(transformation.update)
    _, state = step(first, transformation.init(first))
    updates, _ = step(second, state)
    momentum = 0.1 * (0.9 * first + second)
    left, _, right = np.linalg.svd(0.1 * second + 0.9 * momentum, full_matrices=False)
    np.testing.assert_allclose(updates, np.sqrt(6) * left @ right, atol=2e-5)


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e-20, 1e-18, 1e-12, 1e-6, 1e3, 1e15])
def test_the_size_of_gradients_does_not_matter(scale: float) -> None:
    """Below 1e-7 torch's directions begin to shrink; where squares underflow, so do these."""
    got, expected = direction(scale * random_matrix(6, 4)), direction(random_matrix(6, 4))
    assert np.isfinite(got).all()
    assert np.linalg.norm(got, 2) < 1.25 * np.sqrt(6)
    if scale >= 1e-6:
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_zero_gradients_have_no_direction() -> None:
    zeros = jnp.zeros((6, 4))
    assert_equal(direction(zeros), zeros)
    assert_equal(direction(zeros, neuron_beta=0.9), zeros)


def test_rows_and_columns_in_any_order() -> None:
    weight, grad = random_matrix(6, 4), random_matrix(6, 4, seed=1)
    optimizer = muon_merit(0.1, hidden=True)
    rows, columns = np.random.default_rng(2).permutation(6), np.random.default_rng(3).permutation(4)
    permuted = update(optimizer, grad[rows][:, columns], weight[rows][:, columns])
    assert_close(permuted, update(optimizer, grad, weight)[rows][:, columns])


def test_matrices_between_other_axes() -> None:
    weight, grad = random_matrix(3, 5, 4), random_matrix(3, 5, 4, seed=1)
    one = muon_merit(0.1, hidden=True)
    between = update(muon_merit(0.1, hidden=True, view=View((0,), (2,))), grad, weight)
    assert_close(between[:, 1], update(one, grad[:, 1], weight[:, 1]))
    heads = update(muon_merit(0.1, hidden=True, view=View((0, 1), (2,))), grad, weight)
    assert_close(heads.reshape(15, 4), update(one, grad.reshape(15, 4), weight.reshape(15, 4)))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nan_reaches_the_weights_it_belongs_to_and_no_others(bad: float) -> None:
    params = {"one": random_matrix(6, 4), "other": random_matrix(6, 4, seed=1), "bias": random_matrix(4)}
    optimizer = muon_merit(0.1, hidden={"one": True, "other": True, "bias": False})
    grads = jax.tree.map(np.copy, params)
    grads["one"][2, 3] = grads["bias"][1] = bad
    updates, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    assert np.isnan(updates["one"]).any(axis=1).all(), "in every row"
    assert np.isnan(updates["bias"]).tolist() == [False, True, False, False]
    assert_close(updates["other"], update(optimizer, params, params)["other"])
    updates, _ = jax.jit(optimizer.update)(params, state, params)
    assert np.isnan(updates["one"]).any(), "it stays"
