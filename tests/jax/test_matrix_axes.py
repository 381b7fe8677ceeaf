"""Which axes make a matrix: stacked matrices are those matrices, each on its own."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp

from merit_optim.jax import MatrixAxes, scale_by_merit
from merit_optim.jax.algorithm import matrix_axes


def random_array(*shape: int, seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * 10.0 ** generator.integers(-2, 1, shape)).astype(np.float32)


def scaled(weight: Any, update: Any, matrix_dims: Any = None) -> Any:
    transformation = scale_by_merit(matrix_dims=matrix_dims)
    return jax.jit(lambda: transformation.update(update, transformation.init(weight), weight)[0])()


WEIGHT, UPDATE = random_array(3, 5, 4), random_array(3, 5, 4, seed=1)


@pytest.mark.parametrize(
    ("ndim", "matrix_dims", "expected"),
    [
        (0, None, MatrixAxes((), ())),
        (1, None, MatrixAxes((), (0,))),
        (2, None, MatrixAxes((0,), (1,))),
        (4, None, MatrixAxes((0,), (1, 2, 3))),
        (3, 1, MatrixAxes((), (2,))),
        (4, 2, MatrixAxes((2,), (3,))),
        (4, 3, MatrixAxes((1,), (2, 3))),
        (1, 2, MatrixAxes((), (0,))),
        (4, MatrixAxes(rows=(-1,), columns=(0, 1)), MatrixAxes((3,), (0, 1))),
    ],
)
def test_how_arrays_are_seen(ndim: int, matrix_dims: Any, expected: MatrixAxes) -> None:
    assert matrix_axes(ndim, matrix_dims) == expected


def test_stacked_matrices_have_separate_ratios() -> None:
    got = scaled(WEIGHT, UPDATE, 2)
    for i in range(3):
        np.testing.assert_array_equal(got[i], scaled(WEIGHT[i], UPDATE[i]))
    assert not np.allclose(got, scaled(WEIGHT, UPDATE))


def test_any_axes_can_be_rows_and_columns() -> None:
    """A convolution's (height, width, inputs, outputs) as outputs x the rest, for example."""
    got = scaled(WEIGHT, UPDATE, MatrixAxes(rows=(2,), columns=(0, 1)))
    flat_weight, flat_update = WEIGHT.reshape(15, 4), UPDATE.reshape(15, 4)
    np.testing.assert_array_equal(np.asarray(got).reshape(15, 4), scaled(flat_weight, flat_update))
    between = scaled(WEIGHT, UPDATE, MatrixAxes(rows=(0,), columns=(2,)))
    np.testing.assert_array_equal(between[:, 1], scaled(WEIGHT[:, 1], UPDATE[:, 1]))


@pytest.mark.parametrize(
    "matrix_dims",
    [
        {"layers": {"kernel": 2, "scale": 1}, "head": None},
        lambda params: {"layers": jax.tree.map(lambda p: p.ndim - 1, params["layers"]), "head": None},
    ],
    ids=["tree", "function"],
)
def test_a_tree_or_a_function_says_it_for_each_parameter(matrix_dims: Any) -> None:
    params = {"layers": {"kernel": WEIGHT, "scale": WEIGHT[0]}, "head": WEIGHT[1]}
    updates = {"layers": {"kernel": UPDATE, "scale": UPDATE[0]}, "head": UPDATE[1]}
    got = scaled(params, updates, matrix_dims)
    np.testing.assert_array_equal(got["layers"]["kernel"], scaled(WEIGHT, UPDATE, 2))
    np.testing.assert_array_equal(got["layers"]["scale"], scaled(WEIGHT[0], UPDATE[0], 1))
    np.testing.assert_array_equal(got["head"], scaled(WEIGHT[1], UPDATE[1]))


def test_a_prefix_of_the_tree_is_enough() -> None:
    got = scaled(
        {"a": [WEIGHT, WEIGHT], "b": WEIGHT}, {"a": [UPDATE, UPDATE], "b": UPDATE}, {"a": 2, "b": None}
    )
    np.testing.assert_array_equal(got["a"][1], scaled(WEIGHT, UPDATE, 2))
    np.testing.assert_array_equal(got["b"], scaled(WEIGHT, UPDATE))


def test_a_tree_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="key"):
        scaled({"a": WEIGHT}, {"a": UPDATE}, {"b": 2})


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (MatrixAxes(rows=(0,), columns=(3,)), "an array of 3 dimensions does not have"),
        (MatrixAxes(rows=(0,), columns=(1, -3)), "names an axis twice"),
        ("rows", "matrix_dims is 'rows'; it must be an integer"),
    ],
)
def test_axes_that_make_no_matrix_are_refused(axes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaled(jnp.asarray(WEIGHT), UPDATE, axes)


@pytest.mark.parametrize("rows", [0, "0", (0.0,)])
def test_axes_are_sequences_of_numbers(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"rows is .*0.*; it must be a sequence of axes, such as \(0,\)"):
        MatrixAxes(rows=rows, columns=(1,))
