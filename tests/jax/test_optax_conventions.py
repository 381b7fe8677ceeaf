"""The optimizers do in optax what optax's own do, and refuse what makes no sense."""

import functools
from dataclasses import dataclass
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

from merit_optim.jax import (
    View,
    add_cautious_decay,
    compose,
    hold_sphere,
    merit,
    muon_merit,
    muon_sphere,
    scale_by_adam,
    scale_by_ratio,
)

SMALL = {"kernel": True, "bias": False}
HIDDEN = {"hidden": SMALL}
FACTORIES = {
    "merit": merit,
    "muon_merit": functools.partial(muon_merit, **HIDDEN),
    "muon_sphere": functools.partial(muon_sphere, **HIDDEN),
}
each_factory = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)


@pytest.mark.parametrize("option", ["learning_rate", "weight_decay"])
@pytest.mark.parametrize("hold", ["decay", "cautious"])
def test_schedules(hold: str, option: str) -> None:
    values = jnp.asarray([0.3, 0.1, 0.2])
    options = {"learning_rate": 0.1, "weight_decay": 0.1}
    factory = functools.partial(compose, direction="muon", hold=hold, ratio="none", **HIDDEN)
    got, _ = train(factory(**options | {option: lambda count: values[count]}), small_tree())
    params, state = small_tree(), factory(**options).init(small_tree())
    for t, value in enumerate(values, start=1):
        params, state = train(factory(**options | {option: value}), params, 1, first=t, state=state)
    assert_close(got, params)


def test_the_rest_is_adamw_or_any_optimizer() -> None:
    schedule = optax.linear_schedule(0.1, 0.2, 10)
    optimizer = muon_merit(schedule, 0.3, hidden=SMALL)
    expected, _ = train(optax.adamw(lambda t: 0.4 * schedule(t), b2=0.95, weight_decay=0.3), small_tree())
    assert_close(train(optimizer, small_tree())[0]["bias"], expected["bias"])
    lion = compose(0.1, direction="muon", hidden=SMALL, rest=optax.lion(1e-2))
    assert_close(train(lion, small_tree())[0]["bias"], train(optax.lion(1e-2), small_tree())[0]["bias"])


@pytest.mark.parametrize(
    "mask",
    [
        {"kernel": True, "bias": False},
        lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        lambda params: {name: params[name].ndim > 1 for name in params},
    ],
    ids=["tree", "function", "function of names"],
)
@pytest.mark.parametrize("hold", ["decay", "cautious"])
def test_only_masked_parameters_decay(hold: str, mask: Any) -> None:
    factory = functools.partial(compose, 0.1, direction="muon", hold=hold, **HIDDEN)
    got, _ = train(factory(0.5, mask), small_tree())
    assert_equal(got["kernel"], train(factory(0.5), small_tree())[0]["kernel"])
    assert_equal(got["bias"], train(factory(0.0), small_tree())[0]["bias"])


def test_hidden_is_a_tree_a_prefix_or_a_function() -> None:
    params, grads = ({"layers": [small_tree(t)["kernel"]] * 2, "head": small_tree(t)} for t in (0, 1))
    expected = update(muon_merit(0.1, hidden={"layers": True, "head": SMALL}), grads, params)

    def in_layers(params: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, _: np.bool_("bias" not in jax.tree_util.keystr(path)), params
        )

    assert_equal(update(muon_merit(0.1, hidden=in_layers), grads, params), expected)


@jax.tree_util.register_dataclass
@dataclass
class Module:
    """A tree that can be called, as Equinox's are."""

    kernel: Any
    bias: Any

    def __call__(self, _: Any) -> Any:
        raise AssertionError("a tree was taken for a function")


def test_trees_that_can_be_called() -> None:
    optimizer = muon_merit(
        0.1, mask=Module(True, True), hidden=Module(True, False), view=Module(View(), None)
    )
    got = update(optimizer, Module(**small_tree(1)), Module(**small_tree()))
    assert_close(vars(got), update(muon_merit(0.1, **HIDDEN), small_tree(1), small_tree()))


def test_injected_hyperparameters_change_without_compiling_again() -> None:
    injecting = optax.inject_hyperparams(muon_merit, static_args=("ns_steps", "view"))
    schedule = optax.linear_schedule(0.1, 0.2, 10)
    optimizer = injecting(schedule, clip=0.5, view=2, **HIDDEN)
    plain = muon_merit(schedule, clip=0.5, **HIDDEN)
    assert_close(train(optimizer, small_tree())[0], train(plain, small_tree())[0])
    num_traces = 0

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        updates, state = optimizer.update(small_tree(1), state, params)
        return optax.apply_updates(params, updates), state

    optimizer = injecting(0.1, **HIDDEN)
    before, state = step(small_tree(), optimizer.init(small_tree()))
    _, state = step(before, state)
    assert {"weight_decay", "momentum", "neuron_beta", "clip", "rest_scale"} <= set(state.hyperparams)
    num_traces = 0
    state.hyperparams["learning_rate"] = jnp.zeros_like(state.hyperparams["learning_rate"])
    assert_equal(step(before, state)[0], before)  # both kinds: AdamW's is a share of it
    assert num_traces == 0
    with pytest.raises(ValueError, match=r"ns_steps is .*static_args"):
        optax.inject_hyperparams(muon_merit)(0.1, **HIDDEN).init(small_tree())
    with pytest.raises(ValueError, match=r"view is .*static_args"):
        update(optax.inject_hyperparams(merit)(0.1, view=2), small_tree(1), small_tree())


def test_beside_other_optimizers() -> None:
    optimizer = optax.partition(
        {"muon": muon_merit(0.1, hidden=True, view={"kernel": 2, "bias": None}), "adamw": optax.adamw(1e-3)},
        {"kernel": "muon", "bias": "adamw"},
    )
    got, _ = train(optimizer, small_tree())
    assert_close(got["kernel"], train(muon_merit(0.1, **HIDDEN), small_tree())[0]["kernel"])
    assert_equal(got["bias"], train(optax.adamw(1e-3), small_tree())[0]["bias"])


@each_factory
def test_steps_do_not_compile_again_and_overwrite_their_state(factory: Any) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), factory(optax.cosine_decay_schedule(0.1, 100)))
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


@each_factory
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_arithmetic_and_state_are_in_float32(factory: Any, dtype: Any) -> None:
    params, optimizer = small_tree(dtype=dtype), factory(0.1)
    state = jax.eval_shape(optimizer.init, params)
    updates, new_state = jax.eval_shape(optimizer.update, params, state, params)
    assert {leaf.dtype for leaf in updates.values()} == {jnp.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype(jnp.float32)}
    assert new_state == state  # in all shapes and dtypes
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    # With gradients in float32 a weight is rounded once, at the end.
    assert_equal(update(optimizer, small_tree(1), params), update(optimizer, small_tree(1), wide))


def test_state_takes_little() -> None:
    """A momentum and a number for each output, two moments for the rest; a radius for each matrix."""
    for optimizer, shapes in (
        (muon_merit(0.1, **HIDDEN), [(1, 4), (4,), (4,), (6, 4)]),
        (muon_sphere(0.1, **HIDDEN), [(1, 1), (4,), (4,), (6, 4)]),
    ):
        state = optimizer.init(small_tree())
        assert sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim) == shapes


def test_state_can_be_mapped_like_parameters() -> None:
    """What optax users shard and cast optimizer states with."""
    optimizer = compose(
        0.1,
        direction="normuon",
        hold="sphere",
        mask={"kernel": True, "bias": False},
        hidden=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        view={"kernel": 2, "bias": None},
    )
    more = optax.tree.map_params(optimizer, lambda leaf: 0 * leaf + 1, optimizer.init(small_tree()))
    for name, key, shape in (
        ("trace", "kernel", (6, 4)),
        ("neurons", "kernel", (1, 4)),
        ("radius", "kernel", (1, 1)),
        ("mu", "bias", (4,)),
    ):
        assert_equal(optax.tree.get(more, name)[key], jnp.ones(shape))


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


@each_factory
def test_wrappers_and_extra_arguments(factory: Any) -> None:
    """With bfloat16, whose updates must not come as float32: the branches of a condition would differ."""
    params, optimizer = small_tree(dtype=jnp.bfloat16), factory(0.1)
    expected, _ = train(optimizer, params, 1)
    assert_equal(train(optax.apply_if_finite(optimizer, 3), params, 1)[0], expected)
    accumulating = optax.MultiSteps(optimizer, every_k_schedule=2)
    unchanged, state = train(accumulating, params, 1)
    assert_equal(unchanged, params)
    assert_equal(train(accumulating, params, 1, state=state)[0], expected)
    jax.eval_shape(lambda: optimizer.update(params, optimizer.init(params), params, value=1.0))


@pytest.mark.parametrize("params", [{}, [], (), optax.MaskedNode(), {"frozen": None}], ids=repr)
def test_trees_without_arrays(params: Any) -> None:
    for optimizer in (merit(0.1), muon_sphere(0.1, hidden=True)):
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_none_beside_arrays() -> None:
    frozen = {"frozen": None}
    optimizer = muon_merit(0.1, hidden=SMALL | frozen, view={"kernel": 2, "bias": None} | frozen)
    updates = update(optimizer, small_tree(1) | frozen, small_tree() | frozen)
    assert updates.pop("frozen") is None
    assert_close(updates, update(muon_merit(0.1, **HIDDEN), small_tree(1), small_tree()))


def test_arrays_without_elements() -> None:
    for optimizer in (merit(0.1), muon_merit(0.1, hidden=True, view=2), muon_sphere(0.1, hidden=True)):
        nothing = {"rows": jnp.zeros((0, 4)), "columns": jnp.zeros((4, 0)), "stacked": jnp.zeros((0, 5, 4))}
        assert_equal(update(optimizer, nothing, nothing), nothing)


@each_factory
def test_an_ensemble_by_vmap(factory: Any) -> None:
    optimizer = factory(0.1)
    members = [small_tree(0), small_tree(1)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    updates = jax.jit(jax.vmap(lambda p: optimizer.update(p, optimizer.init(p), p)[0]))(together)
    for i, member in enumerate(members):
        assert_close({name: leaf[i] for name, leaf in updates.items()}, update(optimizer, member, member))


@pytest.mark.parametrize("options", [{"clip": None}, {"hold": "sphere", "norm": "l2"}], ids=repr)
def test_gradients_through_a_step(options: dict[str, Any]) -> None:
    """As for a learning rate that is learned: derivatives of what a step leads to, by finite differences."""

    @jax.jit
    def after(learning_rate: Any, params: Any, grads: Any) -> Any:
        optimizer = compose(learning_rate, **options)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in optax.apply_updates(params, updates).values())

    arguments = jnp.asarray(0.5), small_tree(), small_tree(1)
    check_grads(after, arguments, order=1, modes=["rev"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_gradients_pass_where_there_is_no_ratio(norm: str) -> None:
    transformation = scale_by_ratio(norm=norm)

    @jax.jit
    @jax.grad
    def gradient(params: Any, updates: Any) -> Any:
        return transformation.update(updates, transformation.init(params), params)[0].sum()

    assert np.isfinite(gradient(jnp.ones((2, 3)), jnp.ones((2, 3)).at[0].set(0))).all()


def test_a_ratio_beyond_the_largest_number_makes_no_nan_of_an_update_of_zero() -> None:
    scaled = update(scale_by_ratio(), 1e-30 * jnp.eye(2), jnp.full((2, 2), 1e30))
    assert scaled[0, 0] > 1e8
    assert scaled[0, 1] == scaled[1, 0] == 0


def test_zero_gradients_and_learning_rate_leave_the_bits() -> None:
    params = jax.tree.map(jnp.asarray, parameters())
    zeros = jax.tree.map(jnp.zeros_like, params)
    hidden = {name: name in ("matrix", "experts", "zero") for name in params}
    for optimizer in (merit(0.0), muon_merit(0.0, hidden=hidden), muon_merit(0.1, 0.0, hidden=hidden)):
        assert_equal(optax.apply_updates(params, update(optimizer, zeros, params)), params)


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


def test_numbers_of_numpy_are_numbers() -> None:
    options = {"b1": 0.5, "b2": 0.75, "eps": 0.125, "weight_decay": 0.25, "clip": 2.0}  # exact in float16
    params = small_tree()
    ours = merit(np.float16(0.5), **{name: np.float16(value) for name, value in options.items()})
    assert_close(update(ours, params, params), update(merit(0.5, **options), params, params))
    assert_equal(
        update(merit(0.1, view=np.int64(2)), params, params), update(merit(0.1, view=2), params, params)
    )


def test_parameters_are_needed() -> None:
    for transformation in (merit(0.1), scale_by_ratio(), hold_sphere(), add_cautious_decay(0.1)):
        state = transformation.init(small_tree())
        with pytest.raises(ValueError, match=r"params is None.*update\(grads, state, params\)"):
            transformation.update(small_tree(), state)
    direction = scale_by_adam()
    direction.update(small_tree(), direction.init(small_tree()))


def test_parameters_that_are_not_arrays_of_reals_are_refused() -> None:
    with pytest.raises(TypeError, match=r"\['step'\] is int32.*optax.masked"):
        merit(0.1).init({"step": jnp.zeros(3, jnp.int32)})
    with pytest.raises(TypeError, match="complex64"):
        merit(0.1).init(jnp.zeros(3, jnp.complex64))


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (True, r"shape \(4,\) is seen as a vector.*set hidden to False"),
        (False, "hidden marks no parameter.*optax.adamw"),
        ({"kernel": True}, "bias"),
    ],
    ids=repr,
)
def test_parameters_that_are_not_hidden_matrices_are_refused(hidden: Any, message: str) -> None:
    for marks in (hidden, lambda _: hidden):
        with pytest.raises(ValueError, match=message):
            muon_merit(0.1, hidden=marks).init(small_tree())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -0.1}, "learning_rate is -0.1; it must be a finite number of at least 0"),
        ({"learning_rate": "0.1"}, "learning_rate is '0.1'"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"b1": 1.0}, "b1 is 1.0; it must be a number that is at least 0 and less than 1"),
        ({"b2": optax.constant_schedule(0.9)}, "b2 is <function"),
        ({"eps": 0.0}, "eps is 0.0; it must be a number greater than 0"),
        ({"clip": 0.0}, "clip is 0.0; .* or None for no clip"),
        ({"clip": np.True_}, "clip is .*True"),
        ({"norm": "l1"}, "norm is 'l1'; it must be one of 'max', 'l2'"),
        ({"ratio_bounds": (0.2, 0.1)}, r"ratio_bounds is \(0.2, 0.1\); it must be the smallest and"),
        ({"ratio_bounds": "no"}, "ratio_bounds is 'no'; it must be the smallest and the largest ratio"),
        ({"state_dtype": None}, "state_dtype is None"),
        ({"state_dtype": "float16"}, "state_dtype is 'float16'; it must be one of 'float32', 'bfloat16'"),
        ({"direction": "muon"}, "hidden is None; it must say which parameters .* tree of bools.* function"),
        ({"rest": optax.sgd(0.1)}, "hidden is None"),
        ({"direction": "adan"}, "direction is 'adan'; it must be one of 'adam'.* a GradientTransformation"),
        ({"hold": optax.identity}, "hold is .*; it must be one of 'decay'.* or a Hold"),
        ({"hold": "sphere", "sphere_of": "rows"}, "sphere_of is 'rows'; it must be one of 'matrix', 'out"),
        ({"direction": "sgd", "momentum": 1.0}, "momentum is 1.0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(**{"learning_rate": 0.1} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"neuron_beta": 1.0}, "neuron_beta is 1.0; it must be .* less than 1, or None"),
        ({"scale": "rns"}, "scale is 'rns'; it must be one of 'rms'"),
        ({"ns_steps": 5.0}, "ns_steps is 5.0; it must be an integer of at least 1"),
        ({"ns_coefficients": "cubic"}, "'cubic'; it must be one of 'quintic', 'polar-express', 'dion', or"),
        ({"ns_coefficients": ((1.0, 2.0, 3.0), (1.0,))}, "ns_coefficients is .*; it must be one of"),
        ({"ns_coefficients": (1.0, 2.0, float("inf"))}, "ns_coefficients is .*inf"),
        ({"rest_scale": -1}, "rest_scale is -1; it must be a number of at least 0"),
    ],
    ids=repr,
)
def test_wrong_options_of_muon_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon_merit(0.1, **HIDDEN, **options)


def test_unknown_options_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"'momentun' is no option of .*muon.*; did you mean 'momentum'"):
        muon_merit(0.1, momentun=0.9, **HIDDEN)
    with pytest.raises(TypeError, match=r"'ns_steps' is no option of .*sgd.*; their options are clip, mom"):
        compose(0.1, direction="sgd", ns_steps=5)
