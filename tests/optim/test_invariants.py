"""What must hold for any weight and gradient: bounds, symmetries, and freedom from 0/0."""

import math
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import example as explicit_example
from hypothesis import strategies as st
from optimizer_cases import (
    HIDDEN,
    Hidden,
    assert_same_bits,
    is_soap,
    name_of,
    parameters,
    random_tensor,
    set_gradients,
    snapshot,
    take_steps,
)
from torch import Tensor, nn

from merit_optim import MERIT, MuonMERIT
from merit_optim.optim import algorithm
from merit_optim.optim.engines.eager import limits
from merit_optim.optim.family import Family
from merit_optim.optim.matrices import View
from merit_optim.optim.options import rate
from merit_optim.optim.spec import Spec

MUON = Hidden(MuonMERIT, neuron_beta=None, ratio_bounds=None)
every_direction = pytest.mark.parametrize("optimizer", [MERIT, MUON], ids=name_of)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
SIDES = st.sampled_from([1, 2, 3, 5, 8, 13, 17])
# Few elements: some tests cut weights into pieces of one.
SHAPES = st.lists(SIDES, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 1000)
MATRIX_SHAPES = st.lists(SIDES, min_size=2, max_size=2).map(tuple)
SEEDS = st.integers(0, 10_000)
LEARNING_RATES = st.sampled_from([1e-3, 9e-3, 0.5])
OPTIONS = st.fixed_dictionaries(
    {
        "clip": st.sampled_from([None, 0.25, 1.0, 3.0]),
        "element_wise": st.booleans(),
        "weight_bound": st.booleans(),
        "norm": st.sampled_from(["max", "l2"]),
        "bias_correction": st.booleans(),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "nesterov": st.booleans(),
        "ns_dtype": st.sampled_from(["float32", "bfloat16"]),
    }
)
OF_ONE_DIRECTION = {MERIT: {"bias_correction"}, MUON: {"nesterov", "ns_dtype"}}
BARE = {"clip": None, "element_wise": True, "weight_bound": True, "norm": "max", "weight_decay": 0.0}
MAX_NORM_OPTIONS = OPTIONS.map(lambda options: {**options, "norm": "max"})


def built(optimizer: Any, params: Any, **options: Any) -> Family:
    """An optimizer, without options of another direction."""
    of_others = set.union(*OF_ONE_DIRECTION.values()) - OF_ONE_DIRECTION.get(optimizer, set())
    return optimizer(params, **{name: value for name, value in options.items() if name not in of_others})


def after_steps(
    weight: Tensor, grads: list[Tensor], optimizer: Any = MERIT, **options: Any
) -> tuple[Tensor, Family]:
    """The weight after a step with each gradient, and its optimizer."""
    param = nn.Parameter(weight.clone())
    stepped = built(optimizer, [param], **options)
    for grad in grads:
        param.grad = grad.clone()
        stepped.step()
    return param.detach(), stepped


def example(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device, num_steps: int = 2
) -> tuple[Tensor, list[Tensor]]:
    """A random weight and the gradients of a few steps."""
    weight = random_tensor(shape, seed, scale=0.5, dtype=dtype, device=device)
    grads = [random_tensor(shape, seed + 1 + i, dtype=dtype, device=device) for i in range(num_steps)]
    return weight, grads


@every_direction
@given(shape=SHAPES, seed=SEEDS, dtype=DTYPES, lr=LEARNING_RATES, options=OPTIONS)
def test_no_element_changes_by_more_than_lr_times_clip(
    device, optimizer, shape, seed, dtype, lr, options
) -> None:
    assume(options["clip"] is not None)
    assume(optimizer is MERIT or len(shape) > 1)  # vectors take AdamW, which has no clip
    weight, (*earlier, last) = example(shape, seed, dtype, device)
    before, stepped = after_steps(weight, earlier, optimizer, lr=lr, **options)
    param = stepped.param_groups[0]["params"][0]
    old = before.double().clone()
    param.grad = last
    stepped.step()
    new = param.detach().double()
    rounding = torch.finfo(dtype).eps * torch.maximum(old.abs(), new.abs()) + torch.finfo(dtype).tiny
    bound = lr * options["clip"] * (1 + 1e-6)
    assert ((new - old).abs() <= bound + rounding).all()


@given(shape=MATRIX_SHAPES, seed=SEEDS, dtype=DTYPES, options=MAX_NORM_OPTIONS)
def test_permuting_rows_and_columns_permutes_the_update(device, shape, seed, dtype, options) -> None:
    weight, grads = example(shape, seed, dtype, device)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(n, generator=generator).to(device) for n in shape)

    def permuted(x: Tensor) -> Tensor:
        return x[rows][:, columns]

    new, _ = after_steps(weight, grads, lr=0.1, **options)
    moved, _ = after_steps(permuted(weight), [permuted(g) for g in grads], lr=0.1, **options)
    assert_same_bits(moved, permuted(new))


@given(shape=SHAPES, seed=SEEDS, dtype=DTYPES, options=OPTIONS, zeros=st.sampled_from(["no", "some", "all"]))
def test_zero_gradient_with_zero_lr_changes_no_bit(device, shape, seed, dtype, options, zeros) -> None:
    """Checkpointing libraries take such a step to make a fresh optimizer create its state."""
    weight, (mask,) = example(shape, seed, dtype, device, num_steps=1)
    if zeros != "no":
        weight = torch.where(
            mask > (0 if zeros == "some" else -100), 0.0 * mask, weight
        )  # zeros of both signs
    new, optimizer = after_steps(weight, [torch.zeros_like(weight)], lr=0.0, **options)
    assert_same_bits(new, weight)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()


@every_direction
@given(
    shape=SHAPES,
    seed=SEEDS,
    dtype=DTYPES,
    options=MAX_NORM_OPTIONS,
    zeroed=st.sampled_from(["weight", "gradient", "both"]),
    where=st.sampled_from(["row", "column", "all"]),
)
def test_zero_rows_columns_and_weights_give_finite_updates(
    device, optimizer, shape, seed, dtype, options, zeroed, where
) -> None:
    weight, grads = example(shape, seed, dtype, device)
    index = {"row": (slice(0, 1),), "column": (..., slice(0, 1)), "all": (...,)}[where if shape else "all"]
    for x in [weight] * (zeroed != "gradient") + grads * (zeroed != "weight"):
        x[index] = 0
    new, _ = after_steps(weight, grads, optimizer, lr=0.1, **options)
    assert new.isfinite().all()
    l2, _ = after_steps(weight, grads, optimizer, lr=0.1, **{**options, "norm": "l2"})
    assert l2.isfinite().all()


@every_direction
@given(
    shape=SHAPES,
    seed=SEEDS,
    options=MAX_NORM_OPTIONS,
    weight_scale=st.sampled_from([1e-44, 1e-38, 1.0, 1e30]),
    grad_scale=st.sampled_from([1e-44, 1e-30, 1.0, 1e18, 1e30]),
)
# A ratio that overflows, with some elements of the update zero.
@explicit_example(shape=(5, 7), seed=0, options=BARE, weight_scale=1.0, grad_scale=1e-44)
@explicit_example(shape=(5, 7), seed=0, options=BARE, weight_scale=1e30, grad_scale=1e-38)
def test_huge_and_denormal_values_give_finite_updates(
    device, optimizer, shape, seed, options, weight_scale, grad_scale
) -> None:
    weight, grads = example(shape, seed, torch.float32, device)
    grads = [grad * grad_scale for grad in grads]
    new, _ = after_steps(weight * weight_scale, grads, optimizer, lr=0.1, **options)
    assert new.isfinite().all()


@every_direction
@given(num=st.integers(1, 4), shape=MATRIX_SHAPES, seed=SEEDS, dtype=DTYPES, options=MAX_NORM_OPTIONS)
def test_stacked_matrices_change_like_separate_ones(
    device, optimizer, num, shape, seed, dtype, options
) -> None:
    weight, grads = example((num, *shape), seed, dtype, device)
    together, _ = after_steps(weight, grads, optimizer, lr=0.1, matrix_dims=2, **options)
    for i in range(num):
        alone, _ = after_steps(weight[i], [g[i] for g in grads], optimizer, lr=0.1, **options)
        assert_same_bits(together[i], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"bias_correction": True}, {"ratio": "none"}, {"matrix_dims": 1}], ids=str
)
def test_small_weights_of_one_shape_change_like_separate_ones(device, dtype, options) -> None:
    """They are updated together; some have taken fewer steps, have another memory layout, or are zero."""
    shapes = [(6, 4), (6, 4), (6, 4), (7,), (7,), (7,), (), ()]

    def weights() -> list[nn.Parameter]:
        params = [nn.Parameter(random_tensor(s, i, dtype=dtype, device=device)) for i, s in enumerate(shapes)]
        params[1].data, params[4].data = params[1].data.t().contiguous().t(), torch.zeros_like(params[4])
        return params

    together, apart = weights(), weights()
    optimizers = [MERIT(together, **options), *(MERIT([param], **options) for param in apart)]
    for step in range(3):
        for params in (together, apart):
            set_gradients(params, step)
            if step == 0:
                params[2].grad = params[5].grad = None
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits([p.detach() for p in together], [p.detach() for p in apart])
    states = [
        [optimizer.state[p] for optimizer in optimizers if p in optimizer.state] for p in (*together, *apart)
    ]
    assert_same_bits(states[: len(shapes)], states[len(shapes) :])


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_a_stored_update_equals_a_recomputed_one(norm, monkeypatch) -> None:
    """For weights in several pieces."""
    snapshots = []
    for kept_pieces in (0, 1000):
        monkeypatch.setattr(limits, "KEPT_PIECES", kept_pieces)
        with in_pieces_of(10):
            optimizer = MERIT(parameters(), norm=norm)
            take_steps(optimizer, 3)
        snapshots.append(snapshot(optimizer))
    assert_same_bits(*snapshots)


def in_pieces_of(num_elements: int) -> ExitStack:
    """Make the eager engine cut weights into pieces of this size."""
    stack = ExitStack()
    for limit in ("PIECE_ELEMENTS_CPU", "PIECE_ELEMENTS"):
        stack.enter_context(mock.patch.object(limits, limit, num_elements))
    return stack


def by_definition(weight: Tensor, grads: list[Tensor], optimizer: Family) -> Tensor:
    """The weight after steps of algorithm.py with an optimizer's options."""
    group = optimizer.param_groups[0]
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    shapes = optimizer._state_shapes(group["params"][0], group).values()
    state = tuple(torch.zeros(shape, dtype=dtype, device=weight.device) for shape in shapes)
    result = algorithm.Result(weight, state)
    for number, grad in enumerate(grads, start=1):
        result = algorithm.step(
            result.weight,
            grad,
            result.state,
            spec=Spec.of(group),
            lr=rate(group),
            weight_decay=group["weight_decay"],
            step=number,
        )
    return result.weight


def fitting_split(view: View, shape: tuple[int, ...], how: str) -> View:
    """The view with a weight of this shape split into as many equal parts as possible, or unequally."""
    whole = view.matrices(shape)
    length = whole.shape[1 + view.split_dim]
    if how == "no" or whole.is_vector or length < 2:
        return view
    return view._replace(split=length if how == "in equal parts" else (1, length - 1))


@every_direction
@settings(max_examples=80)
@given(
    shape=SHAPES,
    seed=SEEDS,
    dtype=DTYPES,
    matrix_dims=st.sampled_from([None, 1, 2]),
    split=st.sampled_from(["no", "in equal parts", "unequally"]),
    split_dim=st.sampled_from([0, 1]),
    piece=st.integers(1, 60),
    foreach=st.booleans(),
    options=OPTIONS,
)
def test_pieces_give_what_the_definition_gives(
    device, optimizer, shape, seed, dtype, matrix_dims, split, split_dim, piece, foreach, options
) -> None:
    assume(optimizer is MERIT or matrix_dims != 1)  # stacked vectors, which are not orthogonalised
    weight, grads = example(shape, seed, dtype, device, num_steps=3)
    view = fitting_split(View(matrix_dims, split_dim=split_dim), shape, split)
    options = {**options, **view._asdict(), "lr": 0.1, "foreach": foreach, "fused": False}
    with in_pieces_of(piece):
        cut, stepped = after_steps(weight, grads, optimizer, **options)
    with in_pieces_of(10**9):
        whole, _ = after_steps(weight, grads, optimizer, **options)
    expected = by_definition(weight, grads, stepped)
    group = stepped.param_groups[0]
    if Spec.of(group).ratio.measures != "l2" and (device.type == "cpu" or not group.get("bias_correction")):
        assert_same_bits(cut, whole)
        assert_same_bits(cut, expected)
    else:
        rtol = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
        for other in (whole, expected):
            torch.testing.assert_close(cut, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("optimizer", HIDDEN, ids=name_of)
@pytest.mark.parametrize(("shape", "matrix_dims"), [((8, 6), None), ((5, 3, 3), None), ((3, 4, 5), 2)])
def test_every_class_gives_what_the_definition_gives(device, optimizer, shape, matrix_dims) -> None:
    """With enough steps for SOAP to improve its basis. Fused, products are rounded otherwise."""
    weight, grads = example(shape, 0, torch.float32, device, num_steps=13)
    with in_pieces_of(7):
        cut, stepped = after_steps(weight, grads, optimizer, lr=0.1, matrix_dims=matrix_dims, fused=False)
    expected = by_definition(weight, grads, stepped)
    # The order of sums follows the memory, and the engine stores SOAP's bases in another order than LAPACK.
    if Spec.of(stepped.param_groups[0]).ratio.measures == "l2" or is_soap(optimizer):
        torch.testing.assert_close(cut, expected, rtol=1e-5, atol=1e-5)
    else:
        assert_same_bits(cut, expected)


@every_direction
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=5),
    seed=SEEDS,
    dtypes=st.lists(DTYPES, min_size=5, max_size=5),
    piece=st.sampled_from([7, 100, 10**6]),
    options=OPTIONS,
)
def test_foreach_gives_the_same_bits(device, optimizer, shapes, seed, dtypes, piece, options) -> None:
    results = []
    for foreach in (False, True):
        params = [
            nn.Parameter(random_tensor(shape, seed + i, dtype=dtype, device=device))
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
        ]
        groups = [{"params": params[:2], "lr": 0.01}, {"params": params[2:]}]
        stepped = built(optimizer, groups, lr=0.1, foreach=foreach, fused=False, **options)
        with in_pieces_of(piece):
            for step in range(2):
                for i, param in enumerate(params):
                    seed_ = seed + 10 * step + i + 5
                    param.grad = random_tensor(param.shape, seed_, dtype=param.dtype, device=device)
                stepped.step()
        results.append([p.detach() for p in params])
    assert_same_bits(results[1], results[0])
