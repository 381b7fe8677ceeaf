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

from merit_optim.jax import MatrixAxes, merit, muon_merit

NUM_STEPS = 5
SHAPES = {"matrix": (64, 48), "experts": (8, 16, 24), "heads": (8, 4, 16), "vector": (40,)}
MATRIX_DIMS = {"matrix": None, "experts": 2, "heads": MatrixAxes(rows=(0, 1), columns=(2,)), "vector": None}
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


def steps(optimizer: Any, placement: Any, dtype: Any = np.float32) -> tuple[list[Any], str]:
    """The parameters after each step, and the text of the compiled program."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def placed(tree: Any) -> Any:
        return jax.device_put(jax.tree.map(lambda leaf: leaf.astype(dtype), tree), placement)

    params = placed(arrays(0))
    state = jax.jit(optimizer.init)(params)
    program = step.lower(params, state, params).compile()
    history = []
    for t in range(NUM_STEPS + 1):
        params, state = program(params, state, placed(gradients(t)))
        history.append(params)
    return history, program.as_text()


@functools.cache
def steps_on_one_device(**options: Any) -> list[Any]:
    return steps(merit(0.02, matrix_dims=MATRIX_DIMS, **options), jax.devices()[0])[0]


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
    got, program = steps(merit(0.02, matrix_dims=MATRIX_DIMS), placement(layout))
    assert got[-1]["matrix"].sharding.is_equivalent_to(placement(layout)["matrix"], 2)
    assert len(got[-1]["matrix"].addressable_shards) == 8
    assert_same_bits(got, steps_on_one_device())
    # Sizes are all that is sent: maxima, all weights' together, once for each way of grouping devices (by x,
    # by y, all) that the layout has.
    collectives = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", program)
    assert set(collectives) == {"all-reduce"}
    assert len(collectives) <= 3


def test_other_options_keep_the_bits() -> None:
    options = {"bias_correction": True, "element_wise": False, "state_dtype": "bfloat16"}
    got, _ = steps(merit(0.02, matrix_dims=MATRIX_DIMS, **options), placement("rows and columns"))
    assert_same_bits(got, steps_on_one_device(**options))


def test_euclidean_norms_differ_by_the_order_of_their_sums() -> None:
    got, _ = steps(merit(0.02, matrix_dims=MATRIX_DIMS, norm="l2"), placement("rows and columns"))
    expected = steps_on_one_device(norm="l2")
    for name in SHAPES:
        np.testing.assert_allclose(got[-2][name], expected[-2][name], rtol=0, atol=1e-5)
        assert np.isnan(got[-1][name]).any()


@functools.cache
def muon(neuron_beta: float | None) -> Any:
    hidden = {name: name != "vector" for name in SHAPES}
    return muon_merit(0.02, hidden=hidden, matrix_dims=MATRIX_DIMS, neuron_beta=neuron_beta)


@functools.cache
def muon_steps_on_one_device(neuron_beta: float | None) -> list[Any]:
    return steps(muon(neuron_beta), jax.devices()[0])[0]


@pytest.mark.parametrize("neuron_beta", [None, 0.9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_orthogonalised_steps_differ_by_the_order_of_their_sums(
    layout: str, neuron_beta: float | None
) -> None:
    got, _ = steps(muon(neuron_beta), placement(layout))
    expected = muon_steps_on_one_device(neuron_beta)
    for name in SHAPES:
        assert got[-1][name].sharding.is_equivalent_to(placement(layout)[name], got[-1][name].ndim)
        np.testing.assert_allclose(got[-2][name], expected[-2][name], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(np.isnan(got[-1][name]), np.isnan(expected[-1][name]))
    assert np.isnan(got[-1]["matrix"]).all()
    assert np.isnan(got[-1]["experts"]).any(axis=(1, 2)).tolist() == [False] * 4 + [True] + [False] * 3
