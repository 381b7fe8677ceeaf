"""Arrays sharded over eight devices: the bits of one device, and nothing but sizes sent between them."""

import functools
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from merit_optim.jax import View, compose, maxlamb, merit, muon_merit, muon_sphere

NUM_STEPS = 5
SHAPES = {"matrix": (64, 48), "experts": (8, 16, 24), "heads": (8, 4, 16), "vector": (40,)}
VIEWS = {"matrix": None, "experts": 2, "heads": View(rows=(0, 1), columns=(2,)), "vector": None}
LAYOUTS = {
    "rows": {"matrix": P("x"), "experts": P(None, "x"), "heads": P("x"), "vector": P("x")},
    "columns": {"matrix": P(None, "y"), "experts": P(None, None, "y"), "heads": P(None, None, "y")},
    "rows and columns": {"matrix": P("x", "y"), "experts": P(None, "x", "y"), "heads": P("x", None, "y")},
    "all devices": {
        "matrix": P(("x", "y")),
        "experts": P(("x", "y")),
        "heads": P("x", "y"),
        "vector": P("y"),
    },
}


def arrays(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    tree = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    tree["matrix"][5] = 0
    tree["experts"][2, :, 7] = 0
    return tree


def gradients(step: int) -> dict[str, Any]:
    """The last ones have a NaN in each array."""
    grads = arrays(100 + step)
    if step == NUM_STEPS:
        for grad in grads.values():
            grad[tuple(length // 2 for length in grad.shape)] = np.nan
    return grads


def steps(optimizer: Any, placement: Any) -> tuple[list[Any], Any]:
    """The parameters after each step, and the last step lowered."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.device_put(arrays(0), placement)
    state = jax.jit(optimizer.init)(params)
    history = []
    for t in range(NUM_STEPS + 1):
        grads = jax.device_put(gradients(t), placement)
        params, state = step(params, state, grads)
        history.append(params)
    return history, step.lower(params, state, grads)


@functools.cache
def steps_on_one_device(factory: Any, **options: Any) -> list[Any]:
    return steps(factory(0.02, view=VIEWS, **options), jax.devices()[0])[0]


def placement(layout: str) -> dict[str, NamedSharding]:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
    return {name: NamedSharding(mesh, LAYOUTS[layout].get(name, P())) for name in SHAPES}


def assert_same_bits(got: list[Any], expected: list[Any]) -> None:
    assert np.isnan(expected[-1]["matrix"]).sum() > SHAPES["matrix"][1], "a NaN goes beyond its own row"
    assert np.isfinite(expected[-2]["matrix"]).all()
    for mine, theirs in zip(got, expected, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(np.asarray(mine[name]), np.asarray(theirs[name]), err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_steps_have_the_bits_of_one_device(layout: str) -> None:
    got, lowered = steps(merit(0.02, view=VIEWS), placement(layout))
    assert got[-1]["matrix"].sharding.is_equivalent_to(placement(layout)["matrix"], 2)
    assert len(got[-1]["matrix"].addressable_shards) == 8
    assert_same_bits(got, steps_on_one_device(merit))
    # Sizes are all that is sent: maxima, all weights' together, once for each way of grouping devices (by x,
    # by y, all) that the layout has.
    collectives = re.findall(
        r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", lowered.compile().as_text()
    )
    assert set(collectives) == {"all-reduce"}
    assert len(collectives) <= 3


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (maxlamb, {"bias_correction": True, "state_dtype": "bfloat16"}),
        (compose, {"direction": "sign", "ratio": "column", "norm": "max", "hold": "cautious"}),
    ],
)
def test_other_choices_keep_the_bits(factory: Any, options: dict[str, Any]) -> None:
    got, _ = steps(factory(0.02, view=VIEWS, **options), placement("rows and columns"))
    assert_same_bits(got, steps_on_one_device(factory, **options))


HIDDEN = {name: name != "vector" for name in SHAPES}


@pytest.mark.parametrize(
    ("factory", "options", "layout"),
    [
        (merit, {"norm": "l2"}, "rows and columns"),
        (muon_merit, {"hidden": HIDDEN, "neuron_beta": None}, "rows"),
        (muon_merit, {"hidden": HIDDEN}, "rows and columns"),
        (muon_sphere, {"hidden": HIDDEN}, "columns"),
        (muon_sphere, {"hidden": HIDDEN, "sphere_of": "output"}, "all devices"),
    ],
)
def test_sums_differ_by_their_order(factory: Any, options: dict[str, Any], layout: str) -> None:
    """Those of Euclidean norms, and of the products of matrices."""
    got, _ = steps(factory(0.02, view=VIEWS, **options), placement(layout))
    expected, _ = steps(factory(0.02, view=VIEWS, **options), jax.devices()[0])
    for name in SHAPES:
        assert got[-1][name].sharding.is_equivalent_to(placement(layout)[name], got[-1][name].ndim)
        np.testing.assert_allclose(got[-2][name], expected[-2][name], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(np.isnan(got[-1][name]), np.isnan(expected[-1][name]))
    is_hit = np.isnan(got[-1]["experts"]).any(axis=(1, 2))
    assert is_hit.tolist() == [False] * 4 + [True] + [False] * 3, "a NaN stays in its matrix"
