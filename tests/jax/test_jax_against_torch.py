"""The optimizers against those of torch: the same steps, within a stated tolerance."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
import optax
import torch
from trees import Tree, gradients, parameters

import merit_optim
from merit_optim.jax import View, lamb, lamb_uncorrected, maxlamb, merit, muon, muon_merit, normuon

NUM_STEPS = 100
# Of the largest element of the array, at any of 100 steps in float32. The two differ in how they round: XLA
# contracts products and sums, and torch does not.
TOLERANCE, TOLERANCE_OF_PRODUCTS = 2e-6, 1e-5
STATE = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer", "neurons": "second_momentum_buffer"}

STACKED = {"view": 2}, {"matrix_dims": 2}
THREE = {"view": View(split=(3, 3, 1), split_dim=1)}, {"split": (3, 3, 1), "split_dim": 1, "transposed": True}


def both(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the same names for both."""
    betas = {"betas": (options["b1"], options["b2"])} if "b1" in options else {}
    return options, {name: value for name, value in options.items() if name not in ("b1", "b2")} | betas


def learning_rate(step: Any) -> Any:
    return 0.02 * (1 + step % 5) / 5


def jax_steps(optimizer: Any, params: Tree, num_steps: int = NUM_STEPS) -> tuple[Tree, Any]:
    """Parameters after each step, stacked, and the last state."""

    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    grads = {
        name: np.stack([gradients(t)[name] for t in range(num_steps)]).astype(leaf.dtype)
        for name, leaf in params.items()
    }
    params = jax.tree.map(jnp.asarray, params)
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, grads))
    (_, state), history = run((params, optimizer.init(params)))
    return history, state


def torch_steps(kind: Any, params: Tree, num_steps: int = NUM_STEPS, **options: Any) -> Any:
    named = {name: torch.nn.Parameter(torch.tensor(leaf)) for name, leaf in params.items()}
    group = {"params": list(named.items())}
    of_group = {"split", "split_dim", "transposed"} & options.keys()
    group |= {name: options.pop(name) for name in of_group}
    if "ns_dtype" in options:
        group["direction"] = "muon"
    optimizer = kind([group], **options)
    history = []
    for t in range(num_steps):
        optimizer.param_groups[0]["lr"] = learning_rate(t)
        for name, param in named.items():
            param.grad = torch.tensor(gradients(t)[name], dtype=param.dtype)
        optimizer.step()
        history.append({name: param.detach().numpy().copy() for name, param in named.items()})
    states = {name: optimizer.state[param] for name, param in named.items()}
    return jax.tree.map(lambda *leaves: np.stack(leaves), *history), states


def largest_difference(got: Tree, expected: Tree) -> float:
    """Of any element at any step, relative to the largest element of its array at any step."""

    def difference(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.max(np.abs(a - b), initial=0) / np.max(np.abs(b), initial=1e-3))

    return max(difference(got[name], expected[name]) for name in expected)


def assert_same_steps(got: Any, expected: Any, tolerance: float) -> None:
    (history, state), (torch_history, torch_state) = got, expected
    for name, leaf in torch_history.items():
        assert leaf.size == 0 or not np.array_equal(leaf[0], leaf[-1]), f"{name} did not move"
    assert largest_difference(history, torch_history) < tolerance
    for mine, theirs in STATE.items():
        if all(theirs in of_one for of_one in torch_state.values()):
            buffers = {name: np.asarray(of_one[theirs].double()) for name, of_one in torch_state.items()}
            own = {
                name: np.reshape(x, buffers[name].shape) for name, x in optax.tree.get(state, mine).items()
            }
            assert largest_difference(own, buffers) < tolerance


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (merit, "MERIT", both()),
        (merit, "MERIT", STACKED),
        (merit, "MERIT", both(weight_bound=False, clip=0.01, weight_decay=0.0)),
        (merit, "MERIT", both(norm="l2", clip=None, b1=0.5, b2=0.999, eps=1e-3, bias_correction=True)),
        (maxlamb, "MaxLAMB", ({"view": 1}, {"matrix_dims": 1})),
        (maxlamb, "MaxLAMB", both(clip=0.01, bias_correction=True)),
        (lamb, "LAMB", both()),
        (
            lamb_uncorrected,
            "LAMB",
            ({}, {"betas": (0.9, 0.95), "weight_decay": 0.1, "bias_correction": False}),
        ),
    ],
)
def test_adams_direction(ours: Any, theirs: str, options: Any) -> None:
    got = jax_steps(ours(learning_rate, **options[0]), parameters())
    kind = getattr(merit_optim, theirs)
    assert_same_steps(got, torch_steps(kind, parameters(), **options[1]), TOLERANCE)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (muon, "Muon", both(scale="original")),
        (muon, "Muon", both(ns_coefficients="polar-express", momentum=0.8)),
        (normuon, "NorMuon", THREE),
        (muon_merit, "MuonMERIT", ({"view": 2}, {"matrix_dims": 2, "transposed": True})),
        (muon_merit, "MuonMERIT", ({"view": View(outputs="rows")}, {})),
        (muon_merit, "MuonMERIT", both(neuron_beta=None, ns_coefficients="dion", ns_steps=7, nesterov=False)),
    ],
)
def test_muons_direction(ours: Any, theirs: str, options: Any) -> None:
    params = {name: leaf for name, leaf in parameters().items() if leaf.ndim > 1 and leaf.size}
    if options in (THREE, both(scale="original")):
        params = {"matrix": params["matrix"]}
    options = ({"view": View(outputs="rows")} | options[0], options[1])
    got = jax_steps(ours(learning_rate, hidden=True, **options[0]), params)
    expected = torch_steps(getattr(merit_optim, theirs), params, ns_dtype="float32", **options[1])
    assert_same_steps(got, expected, TOLERANCE_OF_PRODUCTS)


def test_lamb_is_optax_lamb() -> None:
    options = {"b2": 0.999, "weight_decay": 0.01}
    ours, _ = jax_steps(lamb(learning_rate, **options), parameters())
    theirs, _ = jax_steps(optax.lamb(learning_rate, **options), parameters())
    assert largest_difference(ours, theirs) < 2e-5  # their 1 - b2**t has lost some digits in float32


def test_state_in_bfloat16() -> None:
    """u is formed from the state as it is stored: with float32 moments the step differs by much more."""
    history, state = jax_steps(merit(learning_rate, state_dtype="bfloat16"), parameters(), num_steps=10)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in optax.tree.get(state, "mu").values())
    kind = merit_optim.MERIT
    rounded, _ = torch_steps(kind, parameters(), num_steps=10, state_dtype=torch.bfloat16)
    exact, _ = torch_steps(kind, parameters(), num_steps=10)
    assert largest_difference(history, rounded) < 2e-4
    assert largest_difference(exact, rounded) > 1e-3


def test_float64_parameters_keep_their_precision() -> None:
    params = {name: leaf.astype(np.float64) for name, leaf in parameters().items()}
    with jax.enable_x64(True):
        got, state = jax_steps(merit(learning_rate, bias_correction=True), params)
        assert all(leaf.dtype == jnp.float64 for leaf in got.values())
        assert all(leaf.dtype == jnp.float64 for leaf in optax.tree.get(state, "nu").values())
    options = {"state_dtype": torch.float64, "bias_correction": True}
    expected, _ = torch_steps(merit_optim.MERIT, params, **options)
    assert largest_difference(got, expected) < 1e-12
