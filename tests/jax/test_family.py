"""Directions, ratios and holds against NumPy, from the equations; splits and stacks are those matrices."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
import optax
from jax_reference import POLAR_EXPRESS, Weight
from steps import assert_close, assert_equal, small_tree, train, update
from trees import gradients, parameters

from merit_optim.jax import View, compose, hold_sphere, muon_sphere, scale_by_muon, scale_by_ratio

NUM_STEPS = 30


def matrices(**choices: Any) -> dict[str, Any]:
    """A step of Muon's direction alone on matrices, unless said otherwise."""
    return {"direction": "muon", "ratio": "none", "weight_decay": 0.0, **choices}


def reference_options(options: dict[str, Any]) -> dict[str, Any]:
    polar_express = {"coefficients": POLAR_EXPRESS, "safety": 1.02}
    named = {"polar-express": polar_express, "quintic": {}}
    coefficients = options.get("ns_coefficients", "quintic")
    clip = {"clip": options.get("clip", 1.0 if options.get("ratio", "merit") == "merit" else None)}
    known = named[coefficients] if isinstance(coefficients, str) else {"coefficients": coefficients}
    return options | known | clip


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": "row", "hold": "decoupled", "bias_correction": True},
        {"ratio": "column", "norm": "max", "hold": "cautious", "b1": 0.5},
        {"ratio": "merit", "hold": "cautious", "clip": 0.01, "weight_decay": 0.5},
        {"ratio": "merit", "weight_bound": False, "norm": "l2", "ratio_bounds": (0.3, 0.4)},
        {"direction": "sgd", "ratio": "weight", "nesterov": True},
        {"direction": "sign", "ratio": "none", "hold": "decoupled", "momentum": 0.5},
        matrices(scale="original", momentum=0.5, nesterov=False),
        matrices(ns_coefficients="polar-express", ratio="merit", ratio_bounds=(0.0, 0.1), weight_decay=0.1),
        matrices(ns_coefficients=[(3.0, -3.0, 1.0)] + 4 * [(2.0, -1.5, 0.5)], scale="spectral"),
        matrices(neuron_beta=0.9, ratio="row", ratio_bounds=(0.0, 0.2), scale="match_rms_adamw"),
        matrices(hold="sphere"),
        matrices(hold="sphere", sphere_of="output", neuron_beta=0.9),
        {"ratio": "merit", "hold": "sphere", "clip": 0.01},
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items())[:60],
)
def test_the_equations(options: dict[str, Any]) -> None:
    """Steps in float32 against float64, on a matrix with zeros, its split in three, a stack and a vector."""
    tree = {name: parameters()[name] for name in ("matrix", "experts", "vector")}
    tree["split"] = np.concatenate([tree["matrix"]] * 2 + [tree["matrix"][:, :3]], axis=1)
    if "muon" in options.values():
        del tree["vector"]
    if options.get("hold") == "sphere":
        tree = {name: leaf + 0.1 for name, leaf in tree.items()}  # no sphere through zero
    views = {"matrix": None, "experts": 2, "vector": None, "split": View(split=(7, 7, 3))}
    optimizer = compose(0.02, **options, view={name: views[name] for name in tree}, hidden=True)
    expected = {
        name: [Weight(part, 0.02, **reference_options(options)) for part in parts(name, leaf)]
        for name, leaf in tree.items()
    }
    params = jax.tree.map(jnp.asarray, tree)
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for t in range(NUM_STEPS):
        grads = {name: gradients(t)[name] for name in tree if name != "split"}
        grads["split"] = np.concatenate([grads["matrix"], -grads["matrix"], grads["matrix"][:, 1:4]], axis=1)
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        for name in tree:
            for weight, part in zip(expected[name], parts(name, grads[name]), strict=True):
                weight.step(part)
    for name in tree:
        for got, weight in zip(parts(name, params[name]), expected[name], strict=True):
            bound = 2e-5 * max(np.abs(weight.w).max(), 0.01)
            np.testing.assert_allclose(got, weight.w, rtol=0, atol=bound, err_msg=name)


def parts(name: str, leaf: Any) -> list[Any]:
    if name == "experts":
        return list(leaf)
    return np.split(np.asarray(leaf), [7, 14], axis=1) if name == "split" else [leaf]


@pytest.mark.parametrize("view", [View(split=2, split_dim=0), View(rows=(1,), columns=(0,), split=2)])
def test_rows_can_be_split(view: View) -> None:
    """With state for each part: the neurons of both, and their radii."""
    weight, grad = small_tree()["kernel"], small_tree(1)["kernel"]
    options = {"direction": "normuon", "ratio": "merit", "hold": "sphere", "hidden": True}
    one = View(view.rows, view.columns)
    got = update(compose(0.1, **options, view=view), grad, weight)
    for half in (slice(0, 3), slice(3, 6)):
        assert_close(got[half], update(compose(0.1, **options, view=one), grad[half], weight[half]))


def test_a_sphere_keeps_the_norm_of_the_start() -> None:
    params = small_tree()
    optimizer = muon_sphere(0.3, hidden={"kernel": True, "bias": False})
    moved, state = train(optimizer, params, 50)
    norm = np.linalg.norm(params["kernel"])
    np.testing.assert_allclose(optax.tree.get(state, "radius")["kernel"], norm, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(moved["kernel"]), norm, rtol=1e-6)
    assert np.linalg.norm(moved["kernel"] - params["kernel"]) > 0.5 * norm
    doubled = jax.tree.map(lambda leaf: 2 * leaf, moved)  # as if other weights had been loaded
    back, _ = train(optimizer, doubled, 1, state=state)
    np.testing.assert_allclose(np.linalg.norm(back["kernel"]), norm, rtol=1e-6)


def test_a_sphere_at_rest_leaves_the_bits() -> None:
    for sphere_of in ("matrix", "output"):
        sphere = {"hold": "sphere", "sphere_of": sphere_of, "direction": "sgd", "ratio": "none"}
        params = jax.tree.map(lambda leaf: 1.01 * leaf, small_tree())  # beside the sphere
        state = compose(0.1, **sphere).init(small_tree())
        nothing = jax.tree.map(jnp.zeros_like, params)
        for rate, grads in ((0.0, params), (0.1, nothing)):
            updates, _ = jax.jit(compose(rate, **sphere).update)(grads, state, params)
            assert_equal(optax.apply_updates(params, updates), params)


def test_a_weight_of_zeros_gets_the_sphere_of_its_first_update() -> None:
    zeros = jnp.zeros((6, 4))
    first, state = train_one(zeros, 1)
    assert np.linalg.norm(first) > 0
    second, _ = train_one(first, 2, state)
    np.testing.assert_allclose(np.linalg.norm(second), np.linalg.norm(first), rtol=1e-6)


def train_one(weight: Any, seed: int, state: Any = None) -> Any:
    optimizer = muon_sphere(0.1, hidden=True)
    state = optimizer.init(weight) if state is None else state
    updates, state = jax.jit(optimizer.update)(small_tree(seed)["kernel"], state, weight)
    return weight + updates, state


def test_a_chain_by_hand_is_the_composition() -> None:
    by_hand = optax.chain(
        scale_by_muon(0.95, neuron_beta=0.9),
        scale_by_ratio("weight", norm="l2"),
        optax.scale_by_learning_rate(0.1),
        hold_sphere(),
    )
    composed = muon_sphere(0.1, hidden=True, neuron_beta=0.9)
    kernel, grad = small_tree()["kernel"], small_tree(1)["kernel"]
    assert_close(update(by_hand, grad, kernel), update(composed, grad, kernel))
    lion = compose(0.1, direction=optax.scale_by_lion(), ratio="row", weight_decay=0.2, hold="decoupled")
    by_hand = optax.chain(
        optax.scale_by_lion(),
        scale_by_ratio("row", norm="l2"),
        optax.add_decayed_weights(0.2),
        optax.scale_by_learning_rate(0.1),
    )
    assert_close(train(lion, small_tree())[0], train(by_hand, small_tree())[0])
