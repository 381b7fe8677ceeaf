"""MERIT's ratios on Muon's direction: the equations and the geometry."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
import optax
from muon_reference import DION, POLAR_EXPRESS, AdamW, Muon, orthogonalized
from steps import assert_close, assert_equal, small_tree, update
from trees import Tree, gradients, parameters

from merit_optim.jax import MatrixAxes, muon_merit

# The column stands for an embedding: it has two dimensions and is not hidden.
HIDDEN = {"matrix": True, "experts": True, "zero": True, "column": False, "vector": False, "scalar": False}
PLAIN = {"neuron_beta": None, "ratio_bounds": None}
EXACT = {"ns_steps": 25, "ns_coefficients": (15 / 8, -10 / 8, 3 / 8)}  # these converge


def known(tree: Tree) -> Tree:
    return {name: tree[name] for name in HIDDEN}


def random_matrix(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def direction(grad: Any, **options: Any) -> Any:
    """d in a first step: weights of zero have no ratios."""
    optimizer = muon_merit(1.0, 0.0, hidden=True, clip=None, **options)
    return -update(optimizer, grad, jnp.zeros_like(grad))


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {"bounds": (0.0, 0.1), "neuron_beta": 0.95}),
        (PLAIN, {}),
        (PLAIN | {"ratio_bounds": (0.3, 0.4)}, {"bounds": (0.3, 0.4)}),
        (PLAIN | {"nesterov": False, "momentum": 0.5}, {"nesterov": False, "mu": 0.5}),
        (
            PLAIN | {"ns_coefficients": "polar-express"},
            {"coefficients": POLAR_EXPRESS, "safety": 1.02},
        ),
        (PLAIN | {"ns_coefficients": "dion"}, {"coefficients": DION}),
        (
            PLAIN | {"ns_coefficients": [(3.0, -3.0, 1.0), (2, -1.5, 0.5)]},  # the last is repeated
            {"coefficients": [(3.0, -3.0, 1.0)] + 4 * [(2, -1.5, 0.5)]},
        ),
        (PLAIN | {"ns_coefficients": (3, -3, 1), "ns_steps": 3}, {"coefficients": [(3, -3, 1)] * 3}),
        (PLAIN | {"norm": "l2", "clip": 0.01}, {"norm": "l2", "clip": 0.01}),
        (PLAIN | {"clip": None, "weight_decay": 1.0}, {"clip": None, "wd": 1.0}),
        (PLAIN | {"neuron_beta": 0.9}, {"neuron_beta": 0.9}),
    ],
    ids=lambda options: ", ".join(options) or "defaults",
)
def test_the_equations(options: Any, reference: Any) -> None:
    """100 steps in float32 against float64; measured: 4e-6 of the array's largest element."""
    optimizer = muon_merit(0.02, hidden=HIDDEN, rest_eps=1e-3, **options)
    params = jax.tree.map(jnp.asarray, known(parameters()))
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    wd = reference.get("wd", 0.1)
    expected = {
        name: Muon(leaf.reshape(len(leaf), -1), 0.02, **reference)
        if HIDDEN[name]
        else AdamW(leaf, 0.008, wd, eps=1e-3)
        for name, leaf in params.items()
    }
    for t in range(100):
        grads = known(gradients(t))
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        for name, weight in expected.items():
            weight.step(grads[name].reshape(weight.w.shape))
            assert_near(params[name], weight.w)
    momenta, neurons = optax.tree.get(state, "trace"), optax.tree.get(state, "neurons")
    for name in (name for name, is_hidden in HIDDEN.items() if is_hidden):
        assert_near(momenta[name], expected[name].momentum)
        if "neuron_beta" in reference:
            assert_near(neurons[name], expected[name].neurons)


def assert_near(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    got = np.asarray(got).reshape(expected.shape)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 0.01))


def test_float64_parameters_keep_their_precision() -> None:
    with jax.enable_x64(True):
        weight = random_matrix(5, 8).astype(np.float64)
        optimizer, reference = muon_merit(0.1, hidden=True, **PLAIN), Muon(weight, 0.1)
        params = jnp.asarray(weight)
        state, step = optimizer.init(params), jax.jit(optimizer.update)
        for t in range(1, 4):
            grads = random_matrix(5, 8, seed=t).astype(np.float64)
            updates, state = step(grads, state, params)
            params = optax.apply_updates(params, updates)
            reference.step(grads)
    assert_near(params, reference.w, 1e-12)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6), (7, 1)], ids=str)
def test_the_first_direction_is_orthogonal(shape: tuple[int, int]) -> None:
    grad = random_matrix(*shape)
    left, _, right = np.linalg.svd(grad, full_matrices=False)
    exact = np.sqrt(max(shape)) * left @ right
    np.testing.assert_allclose(direction(grad, **EXACT, neuron_beta=None), exact, atol=2e-5)
    for name, low, high in (("quintic", 0.65, 1.25), ("polar-express", 0.85, 1.15)):
        factor = direction(grad, ns_coefficients=name, neuron_beta=None) / np.sqrt(max(shape))
        sizes = np.linalg.svd(factor, compute_uv=False)
        assert low < sizes.min() <= sizes.max() < high, name


def test_equal_columns_have_equal_sizes_and_the_whole_keeps_its_own() -> None:
    grad = random_matrix(9, 4)
    plain, equal = (np.asarray(direction(grad, neuron_beta=beta)) for beta in (None, 0.0))
    sizes = np.linalg.norm(equal, axis=0)
    np.testing.assert_allclose(sizes, sizes[0], rtol=1e-5)
    assert np.ptp(np.linalg.norm(plain, axis=0)) > 0.1
    np.testing.assert_allclose(np.linalg.norm(equal), np.linalg.norm(plain), rtol=1e-5)
    exchanged = direction(grad.T, neuron_beta=0.0, matrix_dims=MatrixAxes(rows=(1,), columns=(0,)))
    np.testing.assert_allclose(np.transpose(exchanged), equal, rtol=1e-5)
    stacked = direction(np.stack([grad, 2 * grad[::-1]]), neuron_beta=0.0, matrix_dims=2)
    np.testing.assert_allclose(stacked, np.stack([equal, equal[::-1]]), rtol=1e-4)


def test_nesterov_looks_ahead_as_torch_does() -> None:
    """Not as optax's own Muon does: its bias correction mixes the first gradients otherwise."""
    first, second = random_matrix(6, 4, seed=1), random_matrix(6, 4, seed=2)
    optimizer = muon_merit(1.0, 0.0, hidden=True, clip=None, neuron_beta=None, **EXACT)
    params = jnp.zeros((6, 4))
    step = jax.jit(optimizer.update)
    _, state = step(first, optimizer.init(params), params)
    updates, _ = step(second, state, params)
    momentum = 0.1 * (0.9 * first + second)
    left, _, right = np.linalg.svd(0.1 * second + 0.9 * momentum, full_matrices=False)
    np.testing.assert_allclose(updates, -np.sqrt(6) * left @ right, atol=2e-5)


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e-20, 1e-19, 1e-18, 1e-12, 1e-6, 1e-3, 1e3, 1e15])
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

    params = small_tree()
    nothing, hidden = jax.tree.map(jnp.zeros_like, params), {"kernel": True, "bias": False}
    assert_equal(train_on(muon_merit(0.1, 0.0, hidden=hidden), params, nothing), params)
    assert_equal(train_on(muon_merit(0.0, 0.1, hidden=hidden), params, nothing), params)
    unbounded = muon_merit(0.1, 0.1, hidden=hidden, clip=None, ratio_bounds=None)
    decayed = train_on(unbounded, params, nothing)
    assert_close(decayed["kernel"], 0.9 * params["kernel"])  # the ratios make u as large as w
    assert_close(decayed["bias"], (1 - 0.04 * 0.1) * params["bias"])


def train_on(optimizer: Any, params: Any, grads: Any) -> Any:
    return optax.apply_updates(params, update(optimizer, grads, params))


def test_rows_columns_and_transposes() -> None:
    weight, grad = random_matrix(6, 4), random_matrix(6, 4, seed=1)
    optimizer = muon_merit(0.1, hidden=True)
    expected = update(optimizer, grad, weight)
    exchanged = muon_merit(0.1, hidden=True, matrix_dims=MatrixAxes(rows=(1,), columns=(0,)))
    assert_close(update(exchanged, grad.T, weight.T).T, expected)
    rows, columns = np.random.default_rng(2).permutation(6), np.random.default_rng(3).permutation(4)
    permuted = update(optimizer, grad[rows][:, columns], weight[rows][:, columns])
    assert_close(permuted, expected[rows][:, columns])


@pytest.mark.parametrize("clip", [1.0, 0.01])
def test_no_element_changes_by_more_than_the_clip(clip: float) -> None:
    params, grads = 100 * random_matrix(6, 4), random_matrix(6, 4, seed=1)
    changes = np.abs(update(muon_merit(0.1, hidden=True, clip=clip), grads, params))
    assert changes.max() <= np.float32(0.1) * np.float32(clip)
    assert np.isclose(changes, 0.1 * clip).any()


def test_stacked_matrices_are_orthogonalised_each_by_itself() -> None:
    weight, grad = random_matrix(3, 5, 4), random_matrix(3, 5, 4, seed=1)
    one = muon_merit(0.1, hidden=True)
    got = update(muon_merit(0.1, hidden=True, matrix_dims=2), grad, weight)
    for i in range(3):
        assert_close(got[i], update(one, grad[i], weight[i]))
    between = update(muon_merit(0.1, hidden=True, matrix_dims=MatrixAxes((0,), (2,))), grad, weight)
    assert_close(between[:, 1], update(one, grad[:, 1], weight[:, 1]))
    heads = update(muon_merit(0.1, hidden=True, matrix_dims=MatrixAxes((0, 1), (2,))), grad, weight)
    assert_close(heads.reshape(15, 4), update(one, grad.reshape(15, 4), weight.reshape(15, 4)))
    beside = muon_merit(0.1, hidden={"heads": True, "bias": False}, matrix_dims=MatrixAxes((0, 1), (2,)))
    tree = {"heads": weight, "bias": weight[0, 0]}
    assert_close(update(beside, {"heads": grad, "bias": grad[0, 0]}, tree)["heads"], heads)
    by_name = {"experts": 2, "matrix": None}
    together = muon_merit(0.1, hidden={"experts": True, "matrix": False}, matrix_dims=by_name)
    tree = {"experts": weight, "matrix": weight[0]}
    assert_close(update(together, {"experts": grad, "matrix": grad[0]}, tree)["experts"], got)
    np.testing.assert_allclose(
        direction(grad, matrix_dims=2, neuron_beta=None)[1],
        np.sqrt(5) * orthogonalized(grad[1].astype(np.float64)),
        atol=1e-5,
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
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
