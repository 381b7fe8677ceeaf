"""``muon_merit`` does in optax what optax's own optimizers do, and refuses what makes no sense."""

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
from steps import assert_close, assert_equal, small_tree, train, update

from merit_optim.jax import merit, muon_merit

SMALL = {"kernel": True, "bias": False}


def test_the_rest_is_adamw_at_a_share_of_the_learning_rate() -> None:
    schedule = optax.linear_schedule(0.1, 0.2, 10)
    options = {"b2": 0.95, "weight_decay": 0.1}
    for learning_rate, rest in ((0.1, 0.04), (schedule, lambda count: 0.4 * schedule(count))):
        got, _ = train(muon_merit(learning_rate, hidden=SMALL), small_tree())
        expected, _ = train(optax.adamw(rest, **options), small_tree())
        assert_close(got["bias"], expected["bias"])
    optimizer = muon_merit(
        0.1, hidden=SMALL, rest_learning_rate=schedule, rest_b1=0.5, rest_b2=0.75, rest_eps=0.125
    )
    expected, _ = train(optax.adamw(schedule, 0.5, 0.75, 0.125, weight_decay=0.1), small_tree())
    assert_close(train(optimizer, small_tree())[0]["bias"], expected["bias"])


@pytest.mark.parametrize("option", ["learning_rate", "weight_decay"])
def test_schedules(option: str) -> None:
    values = jnp.asarray([0.3, 0.1, 0.2])
    options = {"learning_rate": 0.1, "weight_decay": 0.1, "hidden": SMALL}
    got, _ = train(muon_merit(**options | {option: lambda count: values[count]}), small_tree())
    params, state = small_tree(), muon_merit(**options).init(small_tree())
    for t, value in enumerate(values, start=1):
        params, state = train(muon_merit(**options | {option: value}), params, 1, first=t, state=state)
    assert_close(got, params)


@pytest.mark.parametrize(
    "mask",
    [
        {"kernel": True, "bias": False},
        lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        lambda params: {name: params[name].ndim > 1 for name in params},
    ],
    ids=["tree", "function", "function of names"],
)
def test_only_masked_parameters_decay(mask: Any) -> None:
    got, _ = train(muon_merit(0.1, 0.5, mask, hidden=SMALL), small_tree())
    assert_equal(got["kernel"], train(muon_merit(0.1, 0.5, hidden=SMALL), small_tree())[0]["kernel"])
    assert_equal(got["bias"], train(muon_merit(0.1, 0.0, hidden=SMALL), small_tree())[0]["bias"])


def test_hidden_is_a_tree_a_prefix_or_a_function() -> None:
    params, grads = ({"layers": [small_tree(t)["kernel"]] * 2, "head": small_tree(t)} for t in (0, 1))
    expected = update(muon_merit(0.1, hidden={"layers": True, "head": SMALL}), grads, params)

    def in_layers(params: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, _: np.bool_("bias" not in jax.tree_util.keystr(path)), params
        )

    assert_equal(update(muon_merit(0.1, hidden=in_layers), grads, params), expected)
    alone = {"layers": False, "head": SMALL}
    assert_close(update(muon_merit(0.1, hidden=alone), grads, params)["head"], expected["head"])


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
        0.1, mask=Module(True, True), hidden=Module(True, False), matrix_dims=Module(2, None)
    )
    got = update(optimizer, Module(**small_tree(1)), Module(**small_tree()))
    assert_close(vars(got), update(muon_merit(0.1, hidden=SMALL), small_tree(1), small_tree()))


def test_injected_hyperparameters() -> None:
    injecting = optax.inject_hyperparams(muon_merit, static_args="ns_steps")
    schedule = optax.linear_schedule(0.1, 0.2, 10)
    optimizer = injecting(learning_rate=schedule, hidden=SMALL, clip=0.5)
    plain = muon_merit(schedule, hidden=SMALL, clip=0.5)
    assert_close(train(optimizer, small_tree())[0], train(plain, small_tree())[0])
    optimizer = injecting(learning_rate=0.1, hidden=SMALL)
    before, state = train(optimizer, small_tree(), 1)
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    after, _ = train(optimizer, before, 1, state=state)
    assert_equal(after, before)  # both kinds: AdamW's is a share of it
    assert {"weight_decay", "momentum", "clip", "rest_b1", "rest_b2", "rest_eps"} <= set(state.hyperparams)
    with pytest.raises(ValueError, match=r"ns_steps is .*static_args"):
        optax.inject_hyperparams(muon_merit)(0.1, hidden=SMALL).init(small_tree())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes(dtype: Any) -> None:
    params = small_tree(dtype=dtype)
    optimizer = muon_merit(0.1, hidden=SMALL)
    state = jax.eval_shape(optimizer.init, params)
    updates, new_state = jax.eval_shape(optimizer.update, params, state, params)
    assert {leaf.dtype for leaf in updates.values()} == {jnp.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype(jnp.float32)}
    assert new_state == state  # in all shapes and dtypes
    in_float32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    assert_equal(update(optimizer, small_tree(1), params), update(optimizer, small_tree(1), in_float32))


def test_state_is_one_buffer_for_hidden_matrices_and_two_for_the_rest() -> None:
    """And a number for each output."""
    state = muon_merit(0.1, hidden=SMALL, neuron_beta=None).init(small_tree())
    sizes = sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert sizes == [(4,), (4,), (6, 4)]
    state = muon_merit(0.1, hidden=SMALL).init(small_tree())
    sizes = sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert sizes == [(1, 4), (4,), (4,), (6, 4)]


def test_state_can_be_mapped_like_parameters() -> None:
    for hidden in (SMALL, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)):
        optimizer = muon_merit(
            0.1,
            mask={"kernel": True, "bias": False},
            hidden=hidden,
            neuron_beta=0.9,
            matrix_dims={"kernel": 2, "bias": None},
        )
        doubled = optax.tree.map_params(optimizer, lambda leaf: leaf + 1, optimizer.init(small_tree()))
        assert_equal(optax.tree.get(doubled, "trace")["kernel"], jnp.ones((6, 4)))
        assert_equal(optax.tree.get(doubled, "neurons")["kernel"], jnp.ones((1, 4)))
        assert_equal(optax.tree.get(doubled, "mu")["bias"], jnp.ones(4))


def test_steps_do_not_compile_again_and_overwrite_their_state() -> None:
    schedule = optax.cosine_decay_schedule(0.1, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon_merit(schedule, hidden=SMALL))
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


def test_wrappers_and_extra_arguments() -> None:
    """With bfloat16, whose updates must not come as float32: the branches of a condition would differ."""
    params, optimizer = small_tree(dtype=jnp.bfloat16), muon_merit(0.1, hidden=SMALL)
    expected, _ = train(optimizer, params, 1)
    assert_equal(train(optax.apply_if_finite(optimizer, 3), params, 1)[0], expected)
    accumulating = optax.MultiSteps(optimizer, every_k_schedule=2)
    unchanged, state = train(accumulating, params, 1)
    assert_equal(unchanged, params)
    assert_equal(train(accumulating, params, 1, state=state)[0], expected)
    jax.eval_shape(lambda: optimizer.update(params, optimizer.init(params), params, value=1.0))


def test_beside_other_optimizers() -> None:
    kernels = {"first": small_tree(0)["kernel"], "second": small_tree(1)["kernel"]}
    optimizer = optax.partition(
        {"muon": muon_merit(0.1, hidden=True, matrix_dims={"first": 2, "second": None}), "merit": merit(0.1)},
        {"first": "muon", "second": "merit"},
    )
    got = update(optimizer, kernels, kernels)
    assert_close(got["first"], update(muon_merit(0.1, hidden=True), kernels["first"], kernels["first"]))
    assert_close(got["second"], update(merit(0.1), kernels["second"], kernels["second"]))


def test_trees_with_nothing_in_places() -> None:
    optimizer = muon_merit(0.1, hidden={"frozen": None, "kernel": True, "bias": False})
    updates = update(optimizer, {"frozen": None, **small_tree(1)}, {"frozen": None, **small_tree()})
    assert updates.pop("frozen") is None
    assert_close(updates, update(muon_merit(0.1, hidden=SMALL), small_tree(1), small_tree()))
    empty = muon_merit(0.1, hidden=True)
    assert empty.update({}, empty.init({}), {})[0] == {}
    for shape in ((0, 4), (4, 0), (0, 5, 4)):
        nothing = jnp.zeros(shape)
        assert_equal(update(muon_merit(0.1, hidden=True, matrix_dims=2), nothing, nothing), nothing)


def test_an_ensemble_by_vmap() -> None:
    optimizer = muon_merit(0.1, hidden=SMALL)
    members = [small_tree(0), small_tree(1)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    updates = jax.jit(jax.vmap(lambda p: optimizer.update(p, optimizer.init(p), p)[0]))(together)
    for i, member in enumerate(members):
        assert_close({name: leaf[i] for name, leaf in updates.items()}, update(optimizer, member, member))


def test_parameters_are_needed() -> None:
    optimizer = muon_merit(0.1, hidden=SMALL)
    with pytest.raises(ValueError, match=r"params is None.*update\(grads, state, params\)"):
        optimizer.update(small_tree(), optimizer.init(small_tree()))


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (True, r"\['bias'\] is marked hidden, but its shape \(4,\), .*Set hidden to False"),
        (False, r"hidden marks none of 2 parameters; .*optax.adamw"),
        ({"kernel": 1, "bias": 0}, r"hidden is 0 for the parameter \['bias'\]; it must be True or False"),
        ({"kernel": True}, "bias"),
    ],
    ids=repr,
)
def test_parameters_that_are_not_hidden_matrices_are_refused(hidden: Any, message: str) -> None:
    for marks in (hidden, lambda _: hidden):
        with pytest.raises(ValueError, match=message):
            muon_merit(0.1, hidden=marks).init(small_tree())


def test_parameters_without_rows_and_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['kernel'\] is marked hidden.*\(6, 4\).*matrix_dims"):
        muon_merit(0.1, hidden=SMALL, matrix_dims=1).init(small_tree())
    with pytest.raises(TypeError, match=r"\['step'\] is int32.*optax.masked"):
        muon_merit(0.1, hidden={"step": True}).init({"step": jnp.zeros((3, 3), jnp.int32)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": None}, "hidden is None; it must say which parameters .* tree of bools.* function"),
        ({"learning_rate": -0.1}, "learning_rate is -0.1; it must be a finite number"),
        ({"learning_rate": "0.1"}, "learning_rate is '0.1'"),
        ({"rest_learning_rate": -1}, "rest_learning_rate is -1"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"momentum": 1.0}, "momentum is 1.0; it must be a number that is at least 0 and less than 1"),
        ({"neuron_beta": 1.0}, "neuron_beta is 1.0; it must be .* less than 1, or None"),
        ({"rest_b1": 1.0}, "rest_b1 is 1.0"),
        ({"rest_b2": -0.1}, "rest_b2 is -0.1"),
        ({"rest_eps": 0.0}, "rest_eps is 0.0; it must be a number greater than 0"),
        ({"ratio_bounds": 0.2}, "ratio_bounds is 0.2; it must be the smallest and the largest ratio"),
        ({"ratio_bounds": (0.2, 0.1)}, r"ratio_bounds is \(0.2, 0.1\); it must be the smallest and"),
        ({"ratio_bounds": (-1, 0.1)}, r"ratio_bounds is \(-1, 0.1\); it must be .*, or None"),
        ({"ratio_bounds": "no"}, "ratio_bounds is 'no'; it must be the smallest and the largest ratio"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"norm": "l1"}, "norm is 'l1'"),
        ({"matrix_dims": 0}, "matrix_dims is 0"),
        ({"ns_steps": 0}, "ns_steps is 0; it must be an integer of at least 1"),
        ({"ns_steps": 5.0}, "ns_steps is 5.0"),
        ({"ns_steps": True}, "ns_steps is True"),
        ({"ns_coefficients": "cubic"}, "'cubic'; it must be one of 'quintic', 'polar-express', 'dion', or"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients is \(1.0, 2.0\); it must be one of"),
        ({"ns_coefficients": ((1.0, 2.0, 3.0), (1.0,))}, "ns_coefficients is .*; it must be one of"),
        ({"ns_coefficients": (1.0, 2.0, float("inf"))}, "ns_coefficients is .*inf"),
        ({"ns_coefficients": None}, "ns_coefficients is None"),
        ({"ns_coefficients": ()}, r"ns_coefficients is \(\)"),
    ],
    ids=repr,
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon_merit(**{"learning_rate": 0.1, "hidden": SMALL} | options)
