"""The transformations do in optax what optax's own do."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
import optax
from jax.test_util import check_grads
from steps import assert_close, assert_equal, small_tree, train, update
from trees import gradients, parameters

from merit_optim.jax import max_lamb, merit, scale_by_merit

FACTORIES = {"merit": merit, "max_lamb": max_lamb}


@pytest.mark.parametrize("option", ["learning_rate", "weight_decay"])
def test_schedules(option: str) -> None:
    values = jnp.asarray([0.3, 0.1, 0.2])
    options = {"learning_rate": 0.1, "weight_decay": 0.1}
    got, _ = train(merit(**options | {option: lambda count: values[count]}), small_tree())

    @jax.jit
    def step(value: Any, params: Any, state: Any, grads: Any) -> Any:
        updates, state = merit(**options | {option: value}).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = small_tree(), merit(**options).init(small_tree())
    for t, value in enumerate(values, start=1):
        params, state = step(value, params, state, small_tree(t))
    assert_close(got, params)


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_only_masked_parameters_decay(factory: Callable[..., Any]) -> None:
    got, _ = train(factory(0.1, weight_decay=0.5, mask={"kernel": True, "bias": False}), small_tree())
    assert_equal(got["kernel"], train(factory(0.1, weight_decay=0.5), small_tree())[0]["kernel"])
    assert_equal(got["bias"], train(factory(0.1, weight_decay=0.0), small_tree())[0]["bias"])
    by_function = factory(0.1, weight_decay=0.5, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree))
    assert_equal(train(by_function, small_tree())[0], got)


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_injected_hyperparameters_change_without_compiling_again(factory: Callable[..., Any]) -> None:
    schedule = optax.linear_schedule(0.1, 0.2, 10)
    optimizer = optax.inject_hyperparams(factory)(learning_rate=schedule, clip=0.5, bias_correction=True)
    plain = factory(schedule, clip=0.5, bias_correction=True)
    assert_close(train(optimizer, small_tree())[0], train(plain, small_tree())[0])

    num_traces = 0

    @jax.jit
    def step(state: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        return optimizer.update(small_tree(1), state, small_tree())

    _, state = step(optimizer.init(small_tree()))
    before, _ = step(state)
    assert {"learning_rate", "b1", "b2", "eps", "weight_decay", "clip"} <= set(state.hyperparams)
    num_traces = 0
    state.hyperparams["weight_decay"] = jnp.full_like(state.hyperparams["weight_decay"], 100)
    after, _ = step(state)
    assert not np.allclose(before["kernel"], after["kernel"])
    assert num_traces == 0


def test_injecting_keeps_matrix_dims_where_it_is_static() -> None:
    params = {"experts": jnp.ones((2, 3, 4)).at[0].mul(3)}
    injected = optax.inject_hyperparams(merit, static_args="matrix_dims")
    assert_close(
        update(injected(0.1, matrix_dims=2), params, params),
        update(merit(0.1, matrix_dims=2), params, params),
    )
    with pytest.raises(ValueError, match="static_args"):
        optax.inject_hyperparams(merit)(0.1, matrix_dims=2).init(params)


def test_parameters_of_several_optimizers() -> None:
    optimizer = optax.multi_transform(
        {"merit": merit(0.1, matrix_dims={"kernel": 2, "bias": None}), "adamw": optax.adamw(1e-3)},
        {"kernel": "merit", "bias": "adamw"},
    )
    got, _ = train(optimizer, small_tree())
    assert_equal(got["kernel"], train(merit(0.1), small_tree())[0]["kernel"])
    assert_equal(got["bias"], train(optax.adamw(1e-3), small_tree())[0]["bias"])


def test_chain_by_hand_is_merit() -> None:
    by_hand = optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-6),
        optax.add_decayed_weights(0.1),
        scale_by_merit(clip=0.5),
        optax.scale_by_learning_rate(0.1),
    )
    got, _ = train(by_hand, small_tree())
    assert_close(got, train(merit(0.1, clip=0.5, bias_correction=True), small_tree())[0])


def test_steps_do_not_compile_again_and_overwrite_their_state() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), merit(optax.cosine_decay_schedule(0.1, 100)))
    num_traces = 0

    @functools.partial(jax.jit, donate_argnums=1)
    def step(grads: Any, state: Any, params: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        return optimizer.update(grads, state, params)

    params = small_tree()
    state = optimizer.init(params)
    for t in range(1, 4):
        before = state
        _, state = step(small_tree(t), state, params)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert num_traces == 1


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("state_dtype", ["float32", jnp.bfloat16])
def test_dtypes(factory: Callable[..., Any], dtype: Any, state_dtype: Any) -> None:
    params = small_tree(dtype=dtype)
    optimizer = factory(0.1, state_dtype=state_dtype, bias_correction=True)
    state = jax.eval_shape(optimizer.init, params)
    updates, new_state = jax.eval_shape(optimizer.update, params, state, params)
    assert {leaf.dtype for leaf in updates.values()} == {jnp.dtype(dtype)}
    moments = [*optax.tree.get(state, "mu").values(), *optax.tree.get(state, "nu").values()]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype(state_dtype)}
    assert new_state == state  # in all shapes and dtypes


def test_bfloat16_parameters_with_float32_gradients_are_rounded_once() -> None:
    params = small_tree(dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    optimizer = merit(0.1, weight_decay=0.3)
    updates = update(optimizer, small_tree(1), params)
    assert_equal(updates, update(optimizer, small_tree(1), wide))
    assert {leaf.dtype for leaf in updates.values()} == {jnp.dtype(jnp.float32)}


def test_wrappers() -> None:
    """With bfloat16, whose updates must not come as float32: the branches of a condition would differ."""
    params = small_tree(dtype=jnp.bfloat16)
    expected, _ = train(merit(0.1), params, 1)
    assert_equal(train(optax.apply_if_finite(merit(0.1), 3), params, 1)[0], expected)
    accumulating = optax.MultiSteps(merit(0.1), every_k_schedule=2)
    unchanged, state = train(accumulating, params, 1)
    assert_equal(unchanged, params)
    twice, _ = train(accumulating, params, 1, state=state)  # the mean of two equal gradients
    assert_equal(twice, expected)


def test_extra_arguments_pass_through() -> None:
    params = small_tree()
    for optimizer in (merit(0.1), max_lamb(0.1), scale_by_merit()):
        jax.eval_shape(lambda o=optimizer: o.update(params, o.init(params), params, value=1.0))


def test_state_can_be_mapped_like_parameters() -> None:
    """What optax users shard and cast optimizer states with."""
    optimizer = merit(0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    state = optimizer.init(small_tree())
    doubled = optax.tree.map_params(optimizer, lambda leaf: leaf + 1, state)
    assert_equal(optax.tree.get(doubled, "mu"), jax.tree.map(jnp.ones_like, small_tree()))


def test_an_adamw_run_can_be_continued() -> None:
    schedule = optax.constant_schedule(1e-3)
    params, adamw_state = train(optax.adamw(schedule, b1=0.9, b2=0.95), small_tree())
    optimizer = merit(schedule)
    adam_state = optax.tree.get(adamw_state, "ScaleByAdamState")
    state = optax.tree.set(optimizer.init(params), ScaleByAdamState=adam_state)
    _, expected = train(optimizer, small_tree())
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for moment in ("mu", "nu"):
        assert_close(optax.tree.get(state, moment), optax.tree.get(expected, moment))


@pytest.mark.parametrize("params", [{}, [], (), None, {"frozen": None}], ids=repr)
def test_trees_without_arrays(params: Any) -> None:
    if params is None:
        params = optax.MaskedNode()
    optimizer = merit(0.1)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_none_beside_arrays_and_frozen_parameters() -> None:
    params = {"frozen": None, **small_tree()}
    optimizer = merit(0.1, matrix_dims={"frozen": None, "kernel": None, "bias": None})
    updates = update(optimizer, {"frozen": None, **small_tree(1)}, params)
    assert updates["frozen"] is None

    masked = optax.masked(merit(0.1), {"kernel": True, "bias": False})
    got = update(masked, small_tree(1), small_tree())
    assert_equal(got, {"kernel": updates["kernel"], "bias": small_tree(1)["bias"]})


def test_an_ensemble_by_vmap() -> None:
    optimizer = merit(0.1)
    members = [small_tree(0), small_tree(1)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    updates = jax.jit(jax.vmap(lambda p: optimizer.update(p, optimizer.init(p), p)[0]))(together)
    for i, member in enumerate(members):
        assert_close({name: leaf[i] for name, leaf in updates.items()}, update(optimizer, member, member))


def test_gradients_through_a_step() -> None:
    """As for a learning rate that is learned: derivatives of what a step leads to, by finite differences."""

    @jax.jit
    def after(learning_rate: Any, params: Any, grads: Any) -> Any:
        optimizer = merit(learning_rate, clip=None)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in optax.apply_updates(params, updates).values())

    arguments = jnp.asarray(1.0), small_tree(), small_tree(1)
    check_grads(after, arguments, order=1, modes=["rev"], rtol=1e-2, atol=1e-2)


def test_gradients_pass_where_there_is_no_ratio() -> None:
    transformation = scale_by_merit()

    @jax.jit
    @jax.grad
    def gradient(params: Any, updates: Any) -> Any:
        return transformation.update(updates, optax.EmptyState(), params)[0].sum()

    assert np.isfinite(gradient(jnp.ones((2, 3)), jnp.ones((2, 3)).at[0].set(0))).all()


def test_a_ratio_beyond_the_largest_number_makes_no_nan_of_an_update_of_zero() -> None:
    scaled = update(scale_by_merit(clip=None), 1e-30 * jnp.eye(2), jnp.full((2, 2), 1e30))
    assert scaled[0, 0] > 1e8
    assert scaled[0, 1] == scaled[1, 0] == 0


def test_parameters_that_are_not_arrays_of_reals_are_refused() -> None:
    with pytest.raises(TypeError, match=r"\['step'\] is int32.*optax.masked"):
        merit(0.1).init({"step": jnp.zeros(3, jnp.int32)})
    with pytest.raises(TypeError, match="complex64"):
        merit(0.1).init(jnp.zeros(3, jnp.complex64))


@pytest.mark.parametrize("factory", [lambda: merit(0.1), lambda: max_lamb(0.1), scale_by_merit])
def test_parameters_are_needed(factory: Callable[[], Any]) -> None:
    optimizer = factory()
    with pytest.raises(ValueError, match=r"params is None.*update\(grads, state, params\)"):
        optimizer.update(small_tree(), optimizer.init(small_tree()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -0.1}, "learning_rate is -0.1; it must be a finite number of at least 0"),
        ({"learning_rate": None}, "learning_rate is None"),
        ({"learning_rate": "0.1"}, "learning_rate is '0.1'"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"b1": 1.0}, "b1 is 1.0; it must be a number that is at least 0 and less than 1"),
        ({"b2": -0.1}, "b2 is -0.1"),
        ({"b2": optax.constant_schedule(0.9)}, "b2 is <function"),
        ({"eps": 0.0}, "eps is 0.0; it must be a number greater than 0"),
        ({"clip": 0.0}, "clip is 0.0; .* or None for no clip"),
        ({"clip": True}, "clip is True"),
        ({"clip": np.True_}, "clip is .*True"),
        ({"b1": np.float32(1.0)}, r"b1 is .*1\.0.*; it must be a number that is at least 0"),
        ({"matrix_dims": np.int64(0)}, "matrix_dims is .*0.*; it must be an integer"),
        ({"norm": "l1"}, "norm is 'l1'; it must be one of 'max', 'l2'"),
        ({"matrix_dims": 0}, "matrix_dims is 0; it must be an integer"),
        ({"matrix_dims": 1.5}, "matrix_dims is 1.5"),
        ({"state_dtype": "int32"}, "state_dtype is 'int32'"),
        ({"state_dtype": None}, "state_dtype is None"),
        ({"state_dtype": "bfloat"}, "state_dtype is 'bfloat'; it must be one of"),
        ({"state_dtype": jnp.float8_e4m3fn}, "state_dtype is .*float8_e4m3fn.*; it must be one of 'float32'"),
        ({"state_dtype": "float16"}, "state_dtype is 'float16'; it must be one of 'float32', 'bfloat16'"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merit(**{"learning_rate": 0.1} | options)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64])
def test_numbers_of_numpy_are_numbers(kind: type) -> None:
    options = {"b1": 0.5, "b2": 0.75, "eps": 0.125, "weight_decay": 0.25, "clip": 2.0}  # exact in all
    params = small_tree()
    ours = merit(kind(0.5), **{name: kind(value) for name, value in options.items()}, bias_correction=True)
    assert_close(
        update(ours, params, params), update(merit(0.5, **options, bias_correction=True), params, params)
    )
    assert_equal(
        update(merit(0.1, matrix_dims=np.int64(2)), params, params),
        update(merit(0.1, matrix_dims=2), params, params),
    )


def test_zero_gradients_and_learning_rate_leave_the_bits() -> None:
    params = jax.tree.map(jnp.asarray, parameters())
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert_equal(optax.apply_updates(params, update(merit(0.0), zeros, params)), params)


@pytest.mark.parametrize("options", [{}, {"norm": "l2", "clip": None}], ids=repr)
def test_nan_reaches_the_weights_it_belongs_to_and_no_others(options: dict[str, Any]) -> None:
    names = "matrix", "vector", "zero"
    params = {name: jnp.asarray(parameters()[name]) for name in names}
    optimizer = merit(0.1, **options)
    step = jax.jit(optimizer.update)
    grads = {name: gradients(0)[name] for name in names}
    clean, _ = step(grads, optimizer.init(params), params)
    grads = {name: grad.copy() for name, grad in grads.items()}
    grads["matrix"][2, 3] = np.nan  # in a row of zero weights, which has no ratio
    grads["vector"][1] = np.nan
    updates, state = step(grads, optimizer.init(params), params)
    assert np.isnan(updates["matrix"][2, 3])
    assert np.isnan(updates["vector"]).all()
    assert_equal(updates["zero"], clean["zero"])
    updates, _ = step(params, state, params)
    assert np.isnan(updates["matrix"][2, 3]), "a NaN stays"
