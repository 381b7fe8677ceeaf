"""How arrays are seen: stacked matrices are those matrices, each on its own."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax

from merit_optim.jax import View, scale_by_ratio
from merit_optim.jax.view import matrices_of


def random_array(*shape: int, seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * 10.0 ** generator.integers(-2, 1, shape)).astype(np.float32)


def scaled(weight: Any, update: Any, view: Any = None) -> Any:
    transformation = scale_by_ratio(view=view)
    return jax.jit(lambda: transformation.update(update, transformation.init(weight), weight)[0])()


WEIGHT, UPDATE = random_array(3, 5, 4), random_array(3, 5, 4, seed=1)


@pytest.mark.parametrize(
    ("ndim", "view", "rows", "columns"),
    [
        (0, None, (), ()),
        (1, None, (), (0,)),
        (2, None, (0,), (1,)),
        (4, View(), (0,), (1, 2, 3)),
        (3, 1, (), (2,)),
        (4, 3, (1,), (2, 3)),
        (1, 2, (), (0,)),
        (4, View(rows=(-1,), columns=(0, 1)), (3,), (0, 1)),
    ],
)
def test_how_arrays_are_seen(ndim: int, view: Any, rows: Any, columns: Any) -> None:
    matrices = matrices_of(range(ndim), view)
    assert (matrices.rows, matrices.columns) == (rows, columns)


def test_any_axes_can_be_rows_and_columns() -> None:
    """A convolution's (height, width, inputs, outputs) as outputs x the rest, for example."""
    got = scaled(WEIGHT, UPDATE, View(rows=(2,), columns=(0, 1)))
    flat_weight, flat_update = WEIGHT.reshape(15, 4), UPDATE.reshape(15, 4)
    np.testing.assert_array_equal(np.asarray(got).reshape(15, 4), scaled(flat_weight, flat_update))
    between = scaled(WEIGHT, UPDATE, View(rows=(0,), columns=(2,)))
    np.testing.assert_array_equal(between[:, 1], scaled(WEIGHT[:, 1], UPDATE[:, 1]))


@pytest.mark.parametrize(
    "view",
    [
        {"layers": {"kernel": 2, "scale": 1}, "head": None},
        lambda params: {"layers": jax.tree.map(lambda p: p.ndim - 1, params["layers"]), "head": None},
    ],
    ids=["tree", "function"],
)
def test_a_tree_or_a_function_says_it_for_each_parameter(view: Any) -> None:
    params = {"layers": {"kernel": WEIGHT, "scale": WEIGHT[0]}, "head": WEIGHT[1]}
    updates = {"layers": {"kernel": UPDATE, "scale": UPDATE[0]}, "head": UPDATE[1]}
    got = scaled(params, updates, view)
    for i in range(3):
        np.testing.assert_array_equal(got["layers"]["kernel"][i], scaled(WEIGHT[i], UPDATE[i]))
    np.testing.assert_array_equal(got["layers"]["scale"], scaled(WEIGHT[0], UPDATE[0], 1))
    np.testing.assert_array_equal(got["head"], scaled(WEIGHT[1], UPDATE[1]))


def test_a_prefix_of_the_tree_is_enough() -> None:
    got = scaled(
        {"a": [WEIGHT, WEIGHT], "b": WEIGHT}, {"a": [UPDATE, UPDATE], "b": UPDATE}, {"a": 2, "b": None}
    )
    np.testing.assert_array_equal(got["a"][1], scaled(WEIGHT, UPDATE, 2))
    np.testing.assert_array_equal(got["b"], scaled(WEIGHT, UPDATE))


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View(rows=(0,), columns=(3,)), "an array of 3 dimensions does not have"),
        (View(rows=(0,), columns=(1, -3)), "names an axis twice"),
        ("rows", "view is 'rows'; it must be a View, None, or the number of trailing axes"),
        (0, "view is 0"),
        (View(split=2), "needs a matrix with one axis to cut.* leave an axis out of rows and columns"),
        (View(rows=(1,), columns=(2,), split=3), "split=3 does not divide a length of 4; give lengths that"),
        (View(rows=(1,), columns=(2,), split=(2, 1)), r"split=\(2, 1\) does not divide"),
    ],
    ids=repr,
)
def test_views_that_make_no_matrix_are_refused(view: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaled(WEIGHT, UPDATE, view)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0, "columns": (1,)}, r"rows is 0; it must be a sequence of axes, such as \(0,\)"),
        ({"rows": (0,)}, "give both rows and columns, or neither"),
        ({"split": 0}, "split is 0; it must be a number of matrices, their lengths, or None"),
        ({"split_dim": 2}, "split_dim is 2; it must be 0"),
        ({"outputs": "left"}, "outputs is 'left'; it must be 'rows' or 'columns'"),
    ],
)
def test_views_that_say_nothing_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        View(**options)
