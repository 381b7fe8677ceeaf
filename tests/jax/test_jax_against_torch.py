"""The JAX transformations against the torch optimizers: the same steps, within a stated tolerance."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
import optax
import torch
from trees import SHAPES, Tree, gradients, parameters

import merit_optim
from merit_optim import LAMB, MERIT, MaxLAMB
from merit_optim.jax import max_lamb, merit, muon_merit

NUM_STEPS = 100
# Of the largest element of the array, at any of 100 steps in float32. The two differ in how they round: XLA
# contracts products and sums, and torch does not.
TOLERANCE = 2e-6

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "stacked matrices, no decay": {"matrix_dims": 2, "weight_decay": 0.0},
    "no lower bound, small clip": {"weight_bound": False, "clip": 0.01},
    "l2, no clip": {"norm": "l2", "clip": None},
    "other moments, corrected": {"b1": 0.5, "b2": 0.999, "eps": 1e-3, "bias_correction": True},
}


def learning_rate(step: Any) -> Any:
    return 0.02 * (1 + step % 5) / 5


def jax_steps(optimizer: Any, params: Tree, num_steps: int = NUM_STEPS) -> Any:
    """Parameters and moments after each step, stacked."""

    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, optax.tree.get(state, "mu"), optax.tree.get(state, "nu"))

    grads = {
        name: np.stack([gradients(t)[name] for t in range(num_steps)]).astype(leaf.dtype)
        for name, leaf in params.items()
    }
    params = jax.tree.map(jnp.asarray, params)
    _, history = jax.jit(lambda carry: jax.lax.scan(step, carry, grads))((params, optimizer.init(params)))
    return history


def torch_steps(kind: Any, params: Tree, num_steps: int = NUM_STEPS, **options: Any) -> Any:
    named = {name: torch.nn.Parameter(torch.tensor(leaf)) for name, leaf in params.items()}
    betas = options.pop("b1", 0.9), options.pop("b2", 0.95)
    optimizer = kind(list(named.items()), betas=betas, **options)
    history = []
    for t in range(num_steps):
        optimizer.param_groups[0]["lr"] = learning_rate(t)
        for name, grad in gradients(t).items():
            named[name].grad = torch.tensor(grad, dtype=named[name].dtype)
        optimizer.step()
        states = {name: optimizer.state[param] for name, param in named.items()}
        history.append(
            (
                {name: param.detach().numpy().copy() for name, param in named.items()},
                {name: state["exp_avg"].double().numpy() for name, state in states.items()},
                {name: state["exp_avg_sq"].double().numpy() for name, state in states.items()},
            )
        )
    return jax.tree.map(lambda *leaves: np.stack(leaves), *history)


def largest_difference(got: Any, expected: Any) -> float:
    """Of any element at any step, relative to the largest element of its array at any step."""

    def difference(name: str) -> float:
        a, b = (np.asarray(tree[name], np.float64) for tree in (got, expected))
        return float(np.max(np.abs(a - b), initial=0) / np.max(np.abs(b), initial=1e-30))

    return max(map(difference, SHAPES))


def assert_same_steps(got: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    for name in SHAPES.keys() - {"empty"}:
        assert not np.array_equal(expected[0][name][0], expected[0][name][-1]), f"{name} did not move"
    for mine, theirs in zip(got, expected, strict=True):  # weights, first and second moments
        assert largest_difference(mine, theirs) < tolerance


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_merit_takes_the_steps_of_torch(options: dict[str, Any]) -> None:
    got = jax_steps(merit(learning_rate, **options), parameters())
    assert_same_steps(got, torch_steps(MERIT, parameters(), **options))


@pytest.mark.parametrize(
    "options",
    [{"matrix_dims": 1}, {"clip": 0.01, "bias_correction": True}],
    ids=["stacked vectors", "clipped"],
)
def test_max_lamb_takes_the_steps_of_torch(options: dict[str, Any]) -> None:
    got = jax_steps(max_lamb(learning_rate, **options), parameters())
    assert_same_steps(got, torch_steps(MaxLAMB, parameters(), **options))


def test_lamb_is_an_ablation_and_is_optax_lamb() -> None:
    options = {"b2": 0.999, "weight_decay": 0.01}
    ours = merit(learning_rate, **options, norm="l2", element_wise=False, clip=None, bias_correction=True)
    got = jax_steps(ours, parameters())
    assert_same_steps(got, torch_steps(LAMB, parameters(), **options))
    theirs = jax_steps(optax.lamb(learning_rate, **options), parameters())
    assert_same_steps(got, theirs, tolerance=2e-5)  # their 1 - b2**t has lost some digits in float32


def test_state_in_bfloat16() -> None:
    """u is formed from the state as it is stored: with float32 moments the step differs by much more."""
    got = jax_steps(merit(learning_rate, state_dtype="bfloat16"), parameters(), num_steps=10)
    assert all(leaf.dtype == jnp.bfloat16 for tree in got[1:] for leaf in tree.values())
    rounded = torch_steps(MERIT, parameters(), num_steps=10, state_dtype=torch.bfloat16)
    exact = torch_steps(MERIT, parameters(), num_steps=10)
    assert largest_difference(got[0], rounded[0]) < 2e-4
    assert largest_difference(exact[0], rounded[0]) > 1e-3


@pytest.mark.parametrize("state_dtype", ["float32", "float64"])
def test_float64_parameters_keep_their_precision(state_dtype: str) -> None:
    with jax.enable_x64(True):
        params = {name: leaf.astype(np.float64) for name, leaf in parameters().items()}
        got = jax_steps(merit(learning_rate, state_dtype=state_dtype, bias_correction=True), params)
        assert all(leaf.dtype == jnp.float64 for leaf in got[0].values())
    expected = torch_steps(MERIT, params, state_dtype=getattr(torch, state_dtype), bias_correction=True)
    assert largest_difference(got[0], expected[0]) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"matrix_dims": 2},
        {"neuron_beta": None},
        {"neuron_beta": None, "ns_coefficients": "polar-express", "momentum": 0.8},
        {"neuron_beta": None, "ns_coefficients": "dion", "ns_steps": 7, "nesterov": False},
        {"neuron_beta": 0.9, "matrix_dims": 2, "weight_decay": 0.0},
    ],
    ids=", ".join,
)
def test_muon_merit_against_torch(options: dict[str, Any]) -> None:
    """Weights and momenta at each of 100 steps, within 1e-5 of the array's largest element."""
    hidden = {name: name in ("matrix", "experts", "zero") for name in SHAPES if name != "empty"}
    params = {name: leaf for name, leaf in parameters().items() if name in hidden}
    named = {name: torch.nn.Parameter(torch.tensor(leaf)) for name, leaf in params.items()}
    theirs = merit_optim.MuonMERIT(
        [
            {
                "params": [(name, named[name]) for name in hidden if hidden[name]],
                "direction": "muon",
                "transposed": "matrix_dims" in options,  # columns are outputs; alike for Muon's direction
            },
            {"params": [(name, named[name]) for name in hidden if not hidden[name]], "direction": "adam"},
        ],
        lr=0.02,
        rest_lr=0.008,
        ns_dtype="float32",
        **options,
    )
    ours = muon_merit(0.02, hidden=hidden, **options)
    state, step = ours.init(params), jax.jit(ours.update)
    for t in range(NUM_STEPS):
        grads = {name: gradients(t)[name] for name in hidden}
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        for name, grad in grads.items():
            named[name].grad = torch.tensor(grad)
        theirs.step()
        momenta, averages = optax.tree.get(state, "trace"), optax.tree.get(state, "mu")
        for name, param in named.items():
            key, mine = ("momentum_buffer", momenta) if hidden[name] else ("exp_avg", averages)
            assert_near(params[name], param.detach())
            assert_near(mine[name], theirs.state[param][key])
            if hidden[name] and options.get("neuron_beta", 0.95) is not None:
                neurons = theirs.state[param]["second_momentum_buffer"]
                assert_near(optax.tree.get(state, "neurons")[name].reshape(neurons.shape), neurons)


def assert_near(got: Any, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    bound = tolerance * max(1e-3, expected.abs().max().item())
    np.testing.assert_allclose(got, expected.double().numpy(), rtol=0, atol=bound)
