"""The fused engine against the eager one: every shape, dtype and option, and changes between steps."""

import copy
from typing import Any

import pytest
import torch
from optimizer_cases import (
    HIDDEN,
    adam_update,
    assert_same_bits,
    assert_unchanged,
    default_dtype,
    name_of,
    random_tensor,
    snapshot,
)
from torch import Tensor, nn

pytest.importorskip("triton", reason="the fused engine needs triton, which is not installed")

from fused_cases import ULPS, Pair, assert_within_ulps, gradient, parameters, tiles

from merit_optim import LAMB, MERIT, MaxLAMB
from merit_optim.optim import algorithm
from merit_optim.optim.axes.directions.adam import moments as moments_of
from merit_optim.optim.axes.ratios import Merit
from merit_optim.optim.axes.ratios.ratio import sizes
from merit_optim.optim.engines.fused.engine import FusedEngine
from merit_optim.optim.engines.fused.tables import StepTensors, Tile
from merit_optim.optim.engines.work import Control
from merit_optim.optim.matrices import matrices_of

# NumPy's warnings about NaN and infinities; Triton's interpreter uses NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")

# The tiles are 32 x 64.
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "row": ((1, 70), None),
    "column": ((70, 1), None),
    "one element": ((1, 1), None),
    "primes": ((7, 13), None),
    "higher than a tile": ((67, 5), None),
    "wider than a tile": ((5, 131), None),
    "higher and wider than a tile": ((33, 67), None),
    "exactly a tile": ((32, 64), None),
    "aligned": ((3, 80), None),
    "scalar": ((), None),
    "vector of one": ((1,), None),
    "vector": ((30,), None),
    "vector of prime length": ((97,), None),
    "longer vector of prime length": ((131,), None),
    "vector of 16 times a prime": ((592,), None),
    "four dimensions": ((3, 2, 5, 3), None),
    "stacked matrices": ((3, 4, 5), 2),
    "twice stacked matrices": ((2, 1, 3, 7), 2),
    "stacked vectors": ((3, 7), 1),
    "vector with matrix_dims": ((9,), 2),
}
EMPTY = [(0,), (0, 5), (3, 0), (2, 0, 4)]


@pytest.mark.usefixtures("chunks_as_on_a_gpu")
@pytest.mark.parametrize(("shape", "matrix_dims"), SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_changes_as_with_the_eager_engine(device, shape, matrix_dims) -> None:
    pair = Pair(parameters([shape], device), matrix_dims=matrix_dims)
    for _ in range(2):
        pair.step()
    assert not pair.engine._unfused


def test_empty_tensors_take_part_in_a_step(device) -> None:
    pair = Pair(parameters([*EMPTY, (3, 4)], device))
    for _ in range(2):
        pair.step()
    only_empty = Pair(parameters(EMPTY, device))
    only_empty.step()


@pytest.mark.parametrize("build", [MERIT, LAMB, MaxLAMB], ids=name_of)
def test_many_weights_of_all_shapes_share_a_step(device, build) -> None:
    pair = Pair(parameters([(9, 17), (20,), (2, 3, 5), (), (7, 32), (32,), (0, 3), (4, 1)], device), build)
    with tiles():
        for _ in range(2):
            pair.step()


def test_the_tables_do_not_follow_a_default_device(device) -> None:
    """With ``torch.set_default_device``, tensors that are indexed on the host stay on the host."""
    pair = Pair(parameters([(9, 17), (20,)], device), bias_correction=True)
    pair.set_gradients()
    with torch.device("meta"):
        (part,), _ = FusedEngine(pair.params[0].device).parts_of(pair.fused._gather(), Control())
    part.advance()  # outside: Triton's interpreter follows the default device
    part.apply(None)
    pair.eager.step()
    pair.compare()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_tables_do_not_follow_a_default_dtype(device, dtype) -> None:
    pair = Pair(parameters([(9, 17), (20,)], device), bias_correction=True)
    with default_dtype(dtype):
        for _ in range(2):
            pair.step()
    assert not pair.engine._unfused


@pytest.mark.parametrize("shape", [(), (1,), (6, 5)], ids=str)
def test_gradients_that_are_lazily_negated_are_not_taken_as_they_are_stored(device, shape) -> None:
    """Autograd makes them for the imaginary part of a complex number. They may come and go."""
    pair = Pair(parameters([shape], device))
    for negated in (False, True, False, True):
        grad = gradient(pair.params[0], pair.num_steps)
        pair.step([torch._neg_view(grad) if negated else grad])
        assert pair.engine._unfused == ({0} if negated else set())


def test_a_gradient_that_becomes_negated_at_the_same_address(device) -> None:
    pair = Pair(parameters([(6, 5)], device))
    grad = gradient(pair.params[0], 0)
    for now in (grad, torch._neg_view(grad)):
        pair.step([now])


def test_a_weight_that_is_transposed_in_place(device) -> None:
    """At the same address, with a gradient and state as before."""
    pair = Pair(parameters([(6, 6)], device))
    grads = [gradient(pair.params[0], step) for step in range(3)]
    for step, grad in enumerate(grads):
        if step == 2:
            for param in (pair.params[0], pair.eager_params[0]):
                param.data = param.data.t()
        pair.step([grad])
    assert pair.engine._unfused == {0}


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_state_that_is_too_small_is_never_read_beyond_its_end(device, key) -> None:
    pair = Pair(parameters([(6, 5)], device))
    pair.step()
    state = pair.fused.state[pair.params[0]]
    state[key] = state[key].flatten()[:5].clone()
    pair.set_gradients()
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        pair.fused.step()


@pytest.mark.usefixtures("chunks_as_on_a_gpu")
def test_a_weight_may_have_more_tiles_than_a_chunk(device) -> None:
    """Tiles are assigned in chunks of 16, and the two phases may have different tiles."""
    pair = Pair(parameters([(34, 3), (3, 2), (5, 21)], device))
    with tiles(moments=Tile(2, 4, 1, 1), apply=Tile(1, 8, 2, 1)):
        for _ in range(2):
            pair.step()
    assert max(pair.engine._launches[0].moments_grid.num_tiles) > 16
    assert max(pair.engine._launches[0].apply_grid.num_tiles) > 16


OPTIONS: list[dict[str, Any]] = [
    {"maximize": True},
    {"clip": None},
    {"clip": 0.5},
    {"weight_decay": 0.0},
    {"weight_decay": 3.0, "eps": 1e-2, "betas": (0.5, 0.6)},
    {"betas": (0.0, 0.0)},
    {"element_wise": False},
    {"weight_bound": False},
    {"bias_correction": True},
    {"norm": "l2", "element_wise": False, "clip": None},
    {"norm": "l2", "element_wise": False, "bias_correction": True, "maximize": True},
    {"ratio": "none", "clip": 1.0},
    {"ratio": "none", "clip": None, "bias_correction": True},
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 1e6},
    {"nonfinite": "skip", "capturable": True},
    {"matrix_dims": 2, "element_wise": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_every_option_works_as_with_the_eager_engine(device, options) -> None:
    pair = Pair(parameters([(9, 17), (20,), (2, 3, 2)], device), lr=0.1, **options)
    with tiles():
        for _ in range(2):
            pair.step()


@pytest.mark.parametrize("element_wise", [True, False], ids=["element-wise", "whole"])
@pytest.mark.parametrize("bounds", [(0.05, 0.06), (0.0, 0.02), (9.0, 9.5)], ids=repr)
def test_ratios_are_bounded_as_with_the_eager_engine(device, element_wise, bounds) -> None:
    """Those of a row of zeros, which are undefined, are not."""
    params = parameters([(9, 17), (20,), (2, 3, 2)], device)
    with torch.no_grad():
        params[0][4] = 0
    group = {"params": slice(None), "ratio_bounds": bounds}
    pair = Pair(params, groups=[group], lr=0.1, clip=None, element_wise=element_wise)
    free = Pair(
        [p.detach().clone().requires_grad_() for p in params], lr=0.1, clip=None, element_wise=element_wise
    )
    with tiles():
        for _ in range(2):
            pair.step()
            free.step()
    assert not pair.engine._unfused
    assert all((x - y).abs().amax() > 1e-4 for x, y in zip(pair.params, free.params, strict=True))


@pytest.mark.parametrize("build", [LAMB, MaxLAMB], ids=name_of)
@pytest.mark.parametrize("options", [{"clip": 0.5}, {"matrix_dims": 2}], ids=repr)
def test_every_option_of_lamb_works_as_with_the_eager_engine(device, build, options) -> None:
    pair = Pair(parameters([(9, 17), (2, 3, 2)], device), build, lr=0.1, **options)
    with tiles():
        for _ in range(2):
            pair.step()


def test_the_options_make_a_difference_here(device) -> None:
    """Otherwise the tests above would prove nothing."""
    without = [{"max_grad_norm": 1e6}, {"nonfinite": "skip", "capturable": True}]
    results: list[Tensor] = []
    for options in ({}, *(options for options in OPTIONS if options not in without)):
        param = parameters([(2, 9, 17)], device)[0]
        optimizer = MERIT([param], lr=0.1, fused=False, **options)
        for step in range(2):
            param.grad = gradient(param, step)
            optimizer.step()
        assert all((param - other).abs().amax() > 1e-4 for other in results), options
        results.append(param.detach())


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_mix_of_dtypes_is_computed_in_float32(device, param_dtype, grad_dtype, state_dtype) -> None:
    """And stored in its dtype, rounded once: towards zero in the interpreter, to nearest on a GPU.

    The expected weight is computed from the state as stored.
    """
    params = parameters([(9, 17), (6,)], device, param_dtype)
    optimizer = MERIT(params, lr=0.1, state_dtype=state_dtype, fused=True)
    ratio = Merit()
    with tiles():
        for step in range(2):
            before = []
            for i, param in enumerate(params):
                param.grad_dtype = None
                param.grad = gradient(param, 10 * step + i, grad_dtype)
                state = optimizer.state.get(param) or {}
                zeros = torch.zeros_like(param, dtype=state_dtype)
                moments = [state.get(key, zeros).clone() for key in ("exp_avg", "exp_avg_sq")]
                before.append((param.detach().clone(), *moments))
            optimizer.step()
            for param, (weight, *moments) in zip(params, before, strict=True):
                stored = [optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")]
                expected = moments_of(*(x.float() for x in moments), param.grad.float(), 0.9, 0.95)
                for actual, value in zip(stored, expected, strict=True):
                    assert_rounded(actual, value, state_dtype)
                matrices = matrices_of(weight.shape)
                weight, *stored = (x.float().reshape(matrices.shape) for x in (weight, *stored))
                update = adam_update(*stored, weight, 1e-6, 0.1)
                of_both = [sizes(x, ratio, is_vector=matrices.is_vector) for x in (weight, update)]
                scale = ratio.scale(*algorithm.ratios_of(*of_both))
                value = (weight - ratio.clipped(update * scale) * 0.1).reshape(param.shape)
                assert_rounded(param.detach(), value, param_dtype)
    assert not next(iter(optimizer._engines.values()))._unfused


def assert_rounded(actual: Tensor, value: Tensor, dtype: torch.dtype) -> None:
    """Check a float32 value, some ulps off, in another dtype: each element within one of its ulps."""
    assert actual.dtype == dtype
    float32_error = ULPS * torch.finfo(torch.float32).eps * value.abs().amax()
    smallest = torch.finfo(dtype).smallest_normal
    ulp = 0 if dtype == torch.float32 else torch.finfo(dtype).eps * value.abs().clamp(min=smallest)
    assert ((actual.float() - value).abs() <= ulp + float32_error).all()


def sizes_in_the_buffer(engine: FusedEngine, params: list[nn.Parameter]) -> dict[int, list[list[Tensor]]]:
    """The row, column and whole sizes of each parameter's weight and update, at the places in the tables."""
    sizes_of: dict[int, list[list[Tensor]]] = {i: [[], []] for i in range(len(params))}
    for launch in engine._launches:
        for w in launch.weights:
            for stored, of_item in zip(engine._shared.sizes, sizes_of[w.item], strict=True):
                if w.has_rows:
                    of_item.append(stored[w.rows_at : w.rows_at + w.rows])
                    of_item.append(stored[w.columns_at : w.columns_at + w.columns])
                of_item.append(stored[w.whole_at : w.whole_at + 1])
    return sizes_of


@pytest.mark.parametrize("element_wise", [True, False])
def test_the_sizes_are_exact(device, element_wise) -> None:
    """|w| to the last bit. |u| up to the rounding of u, of which the kernel keeps no copy."""
    params = parameters([(9, 37), (41, 3), (20,), (2, 3, 2)], device)
    optimizer = MERIT(params, matrix_dims=2, element_wise=element_wise, fused=True)
    ratio = Merit(element_wise=element_wise)
    for step in range(2):
        for i, param in enumerate(params):
            param.grad = gradient(param, 10 * step + i)
        before = [p.detach().clone() for p in params]
        with tiles():
            optimizer.step()
        measured = sizes_in_the_buffer(optimizer._engines[params[0].device], params)
        for i, (param, weight) in enumerate(zip(params, before, strict=True)):
            matrices = matrices_of(weight.shape, 2)
            state = [optimizer.state[param][key].reshape(matrices.shape) for key in ("exp_avg", "exp_avg_sq")]
            weight = weight.reshape(matrices.shape)
            update = adam_update(*state, weight, 1e-6, 0.1)
            weights, updates = (
                [
                    size
                    for n in range(matrices.num)
                    for size in sizes(x[n : n + 1], ratio, is_vector=matrices.is_vector)
                    if size is not None
                ]
                for x in (weight, update)
            )
            assert_same_bits(measured[i][0], [x.reshape(-1) for x in weights])
            for actual, expected in zip(measured[i][1], updates, strict=True):
                torch.testing.assert_close(
                    actual, expected.reshape(-1), rtol=ULPS * torch.finfo(torch.float32).eps, atol=0
                )


@pytest.mark.parametrize("build", [MERIT, LAMB], ids=name_of)
def test_a_run_repeats_bit_for_bit(device, build) -> None:
    """Including LAMB's sums, which depend on their order."""

    def run() -> tuple[list[Tensor], dict[str, Any]]:
        params = parameters([(19, 37), (20,)], device)
        optimizer = build(params, fused=True)
        with tiles():
            for step in range(2):
                for i, param in enumerate(params):
                    param.grad = gradient(param, 10 * step + i)
                optimizer.step()
        return snapshot(optimizer)

    assert_same_bits(run(), run())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_rows_and_columns_without_a_ratio_are_not_scaled(device, weight_decay) -> None:
    params = parameters([(9, 17), (6, 5), (6, 5), (7,), (7,)], device, scale=4.0)
    with torch.no_grad():
        params[0][3] = 0
        params[0][:, 16] = 0
        params[1].zero_()
        params[3].zero_()
    pair = Pair(params, weight_decay=weight_decay)
    with tiles():
        for step in range(2):
            grads = [gradient(p, 10 * step + i) for i, p in enumerate(params)]
            grads[0][8] = 0
            grads[0][:, 0] = 0
            grads[2].zero_()
            grads[4].zero_()
            pair.step(grads)


BAD = [torch.nan, torch.inf, -torch.inf]


def test_a_row_without_a_ratio_is_not_scaled_whatever_the_others_hold(device) -> None:
    """The whole weight's ratio is NaN here; the zero row and column keep s = 1 and finite weights."""
    params = parameters([(9, 17)], device)
    with torch.no_grad():
        params[0][3] = 0
        params[0][:, 5] = 0
    grad = gradient(params[0], 0)
    grad[0, 0] = torch.nan
    pair = Pair(params)
    pair.step([grad])
    assert params[0][3].isfinite().all()
    assert params[0][1:, 5].isfinite().all()
    assert params[0][1, 1].isnan()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": None},
        {"weight_bound": False},
        {"element_wise": False},
        {"norm": "l2", "element_wise": False},
        {"bias_correction": True},
    ],
    ids=repr,
)
@pytest.mark.parametrize("place", [(0, 0), (8, 16)], ids=["first tile", "last tile"])
def test_a_nan_is_never_lost(device, options, place) -> None:
    """It reaches the weight and all elements that share a ratio, and no other parameter."""
    params = parameters([(9, 17), (3, 4)], device)
    pair = Pair(params, **options)
    grads = [gradient(p, i) for i, p in enumerate(params)]
    grads[0][place] = torch.nan
    with tiles():
        pair.step(grads)
    nan = params[0].detach().isnan()
    assert nan[place[0]].all()
    assert nan[:, place[1]].all()
    if options.get("weight_bound", True):
        assert nan.all()
    else:
        assert int(nan.sum()) == 9 + 17 - 1
    assert params[1].isfinite().all()


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_gradient_of_a_vector_or_scalar_is_not_hidden(device, bad) -> None:
    params = parameters([(33,), ()], device)
    pair = Pair(params)
    grads = [gradient(p, i) for i, p in enumerate(params)]
    for grad in grads:
        grad.view(-1)[-1] = bad
    with tiles():
        pair.step(grads)
    assert all(p.detach().view(-1)[-1].isnan() for p in params)


@pytest.mark.parametrize("build", [MERIT, LAMB], ids=name_of)
def test_the_device_can_skip_a_step(device, build) -> None:
    params = parameters([(9, 17), (7,)], device)
    optimizer = build(params, fused=True)
    with tiles():
        for skip in (True, False, True):
            for i, param in enumerate(params):
                param.grad = gradient(param, i)
            works = optimizer._gather()
            before = snapshot(optimizer)
            flag = torch.tensor(skip, device=device)
            optimizer._update(works, {params[0].device: Control(skip=flag)}, None)
            if skip:
                assert_unchanged(optimizer, before)
            else:
                assert not any(map(torch.equal, snapshot(optimizer)[0], before[0]))


def test_a_bad_step_is_skipped_with_nonfinite_skip(device) -> None:
    pair = Pair(parameters([(3, 4), (7,)], device), nonfinite="skip")
    pair.step()
    before = snapshot(pair.fused)
    grads = [gradient(p, i) for i, p in enumerate(pair.params)]
    grads[1][3] = torch.nan
    pair.step(grads)
    assert_unchanged(pair.fused, before)
    assert pair.fused.num_skipped_steps == 1
    pair.step()


def test_the_step_unscales_and_skips_for_grad_scaler(device) -> None:
    pair = Pair(parameters([(3, 4), (7,)], device))
    assert pair.fused._step_supports_amp_scaling
    for optimizer in (pair.fused, pair.eager):
        optimizer.grad_scale = torch.tensor(3.0, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
    for _ in range(2):
        pair.step()
    unscaled = Pair(parameters([(3, 4), (7,)], device))
    for step in range(2):
        unscaled.step([gradient(p, 100 * step + i) / 3 for i, p in enumerate(unscaled.params)])
    for param, expected in zip(pair.params, unscaled.params, strict=True):
        assert_within_ulps(param, expected, 2 * ULPS)
    before = snapshot(pair.fused)
    for optimizer in (pair.fused, pair.eager):
        optimizer.found_inf = torch.tensor(1.0, device=device)
    pair.step()
    assert_unchanged(pair.fused, before)


def test_grad_scale_and_max_grad_norm_go_together(device) -> None:
    pair = Pair(parameters([(3, 4), (7,)], device), max_grad_norm=0.5)
    for optimizer in (pair.fused, pair.eager):
        optimizer.grad_scale = torch.tensor(3.0, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
    pair.step()
    assert_same_bits(pair.fused.grad_norm, pair.eager.grad_norm)


def test_changes_of_a_tensor_learning_rate_take_effect(device) -> None:
    """Changed in place, replaced by another tensor, and by a number."""
    lr = torch.tensor(0.1, device=device)
    pair = Pair(parameters([(3, 4)], device), lr=lr, capturable=True)
    pair.step()
    for group in (pair.fused.param_groups[0], pair.eager.param_groups[0]):
        group["lr"].fill_(0.3)
    pair.step()
    for rate in (torch.tensor([0.7], device=device), 0.2):
        for group in (pair.fused.param_groups[0], pair.eager.param_groups[0]):
            group["lr"] = rate
        pair.step()


def test_numbers_may_change_between_steps(device) -> None:
    """Those that a schedule changes, and those that the tables depend on."""
    pair = Pair(parameters([(3, 4), (5,)], device))
    changes = [
        {"lr": 0.5},
        {"betas": (0.3, 0.4)},
        {"weight_decay": 1.0},
        {"eps": 0.1},
        {"clip": 0.01},
        {"clip": None},
        {"maximize": True},
        {"element_wise": False},
        {"bias_correction": True},
        {"norm": "l2"},
        {"ratio": "none"},
        {"norm": "max", "element_wise": True, "weight_bound": False},
        {"matrix_dims": 1},
    ]
    pair.step()
    for change in changes:
        for optimizer in (pair.fused, pair.eager):
            optimizer.param_groups[0].update(change)
        pair.step()


def test_groups_may_differ_in_everything(device) -> None:
    groups = [
        {"params": slice(0, 2), "lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.0},
        {"params": slice(2, 4), "lr": 0.3, "clip": None, "eps": 1e-3},
        {"params": slice(4, 5), "maximize": True, "element_wise": False, "norm": "l2"},
        {"params": slice(5, 6), "bias_correction": True, "matrix_dims": 1, "state_dtype": torch.float32},
        {"params": slice(6, 8), "ratio": "none", "clip": None},
    ]
    shapes = [(9, 17), (7,), (3, 4), (6,), (5, 4), (2, 6), (4, 5), (3,)]
    pair = Pair(parameters(shapes, device), groups=groups)
    with tiles():
        for _ in range(2):
            pair.step()


def test_groups_on_either_engine_share_a_step(device) -> None:
    params = parameters([(9, 17), (5, 4)], device)
    optimizer = MERIT([{"params": params[:1], "fused": True}, {"params": params[1:], "fused": False}])
    others = copy.deepcopy(params)
    eager = MERIT(others, fused=False)
    with tiles():
        for step in range(2):
            for i, (param, other) in enumerate(zip(params, others, strict=True)):
                param.grad = other.grad = gradient(param, 10 * step + i)
            optimizer.step()
            eager.step()
    for param, other in zip(params, others, strict=True):
        assert_within_ulps(param, other, 2 * ULPS)
    assert_same_bits(params[1].detach(), others[1].detach())
    assert [p is params[0] for p in optimizer._engines[params[0].device]._originals] == [True]


@pytest.mark.parametrize("optimizer_class", HIDDEN, ids=name_of)
def test_the_rest_of_the_weights_is_fused_even_if_hidden_matrices_are_not(device, optimizer_class) -> None:
    params, others = (parameters([(9, 17), (20,), (5, 4), ()], device) for _ in range(2))
    optimizer = optimizer_class(params, lr=0.1, fused=False, kinds={"vector": {"fused": True}})
    eager = optimizer_class(others, lr=0.1, fused=False)
    with tiles():
        for step in range(3):
            for i, (param, other) in enumerate(zip(params, others, strict=True)):
                param.grad = other.grad = gradient(param, 10 * step + i)
            optimizer.step()
            eager.step()
    for param, other in zip(params, others, strict=True):
        if param.ndim > 1:
            assert_same_bits(param.detach(), other.detach())
        else:
            assert_within_ulps(param, other, 3 * ULPS)
    assert [id(p) for p in optimizer._engines[params[0].device]._originals] == [id(params[1]), id(params[3])]


SPLIT_BY_ROWS: list[tuple[list[tuple[int, ...]], dict[str, Any]]] = [
    ([(6, 5), (9, 5), (5,)], {"split": 3}),
    ([(9, 16), (9, 5)], {"split": (1, 6, 2), "bias_correction": True}),
    ([(2, 6, 5), (3, 6, 4)], {"split": [4, 2], "matrix_dims": 2}),
    ([(6, 5), (4, 3)], {"split": 2, "element_wise": False}),
    ([(6, 5), (4, 3)], {"split": 2, "element_wise": False, "norm": "l2"}),
    ([(6, 5), (4, 3)], {"split": 2, "ratio": "none"}),
    ([(6, 2, 3), (4, 3)], {"split": 2, "split_dim": 0, "maximize": True}),
]


@pytest.mark.parametrize(("shapes", "options"), SPLIT_BY_ROWS, ids=name_of)
def test_weights_that_are_split_by_rows(device, shapes, options) -> None:
    """Each of their matrices has its own ratios; the steps of a weight are counted once."""
    groups = [
        {"params": slice(i, i + 1), **(options if len(shape) > 1 else {})} for i, shape in enumerate(shapes)
    ]
    pair = Pair(parameters(shapes, device), groups=groups)
    with tiles():
        for _ in range(3):
            pair.step()
    assert not pair.engine._unfused
    assert [pair.fused.state[param]["step"].item() for param in pair.params] == [3] * len(shapes)


def test_a_split_may_come_and_go(device) -> None:
    pair = Pair(parameters([(3, 4), (6, 4)], device))
    for split in (None, 3, None):
        for optimizer in (pair.fused, pair.eager):
            optimizer.param_groups[0]["split"] = split
        pair.step()
        assert not pair.engine._unfused


def test_options_that_the_kernels_do_not_support_use_the_eager_engine(device) -> None:
    """And back to the fused engine."""
    pair = Pair(parameters([(3, 4), (6, 4)], device))
    pair.step()
    change, back = {"split": (1, 3), "split_dim": 1}, {"split": None, "split_dim": 0}
    for options, unfused in ((change, {0, 1}), (back, set())):
        for optimizer in (pair.fused, pair.eager):
            optimizer.param_groups[0].update(options)
        pair.step()
        assert pair.engine._unfused == unfused


def test_parameters_without_a_gradient_stay_as_they_are(device) -> None:
    """Different ones each time, in the same or another number."""
    pair = Pair(parameters([(3, 4), (5,), (2, 3)], device), bias_correction=True)
    for present in ((0, 1), (1, 2), (0, 2), (0, 1, 2), (), (1,)):
        before = [p.detach().clone() for p in pair.params]
        grads = [gradient(p, pair.num_steps) if i in present else None for i, p in enumerate(pair.params)]
        pair.step(grads)
        for i, param in enumerate(pair.params):
            assert torch.equal(param, before[i]) == (i not in present)


def test_frozen_parameters_take_no_part(device) -> None:
    params = parameters([(3, 4), (5,)], device)
    params[0].requires_grad_(False)
    pair = Pair(params)
    before = params[0].detach().clone()
    pair.step([None, gradient(params[1], 0)])
    assert_same_bits(params[0].detach(), before)
    for param in (params[0], pair.eager_params[0]):
        param.requires_grad_(True)
    pair.step()
    assert not torch.equal(params[0], before)


def test_gradients_in_new_tensors_are_used(device) -> None:
    """As after zero_grad(), with the old ones kept alive so that no address is reused."""
    pair = Pair(parameters([(3, 4), (5,)], device))
    kept = []
    for _ in range(3):
        pair.step()
        kept += [p.grad for p in pair.params]
    assert len({grad.data_ptr() for grad in kept}) == len(kept)


def test_no_gradient_is_changed(device) -> None:
    pair = Pair(parameters([(3, 4)], device), maximize=True, max_grad_norm=0.1)
    grad = gradient(pair.params[0], 0)
    kept = grad.clone()
    pair.step([grad])
    assert_same_bits(grad, kept)


def strided(values: Tensor, where: Tensor) -> Tensor:
    """The values, stored by columns, in the memory of another tensor at the same address."""
    return where.view(-1)[: values.numel()].view(values.T.shape).copy_(values.T).T


def test_a_gradient_with_other_strides_is_read_correctly(device) -> None:
    """Also in the memory of the previous one."""
    pair = Pair(parameters([(3, 4), (5,)], device))
    first = [gradient(p, 50 + i) for i, p in enumerate(pair.params)]
    pair.step(first)
    assert not pair.engine._unfused
    values = gradient(pair.params[0], 60)
    pair.step([strided(values, where=first[0]), first[1]])
    assert pair.engine._unfused == {0}
    pair.step([strided(values, where=torch.empty(12, device=device)), first[1]])
    pair.step()
    assert not pair.engine._unfused


def test_a_gradient_of_another_dtype_is_read_correctly(device) -> None:
    """Also in the memory of the previous one."""
    pair = Pair(parameters([(3, 4), (5,)], device))
    for param in (*pair.params, *pair.eager_params):
        param.grad_dtype = None
    first = [gradient(p, 50 + i) for i, p in enumerate(pair.params)]
    pair.step(first)
    values = gradient(pair.params[0], 60, torch.bfloat16)
    in_place = first[0].view(torch.bfloat16).view(-1)[:12].view(3, 4).copy_(values)
    pair.step([in_place, first[1]])
    pair.step([gradient(pair.params[0], 70, torch.float16), first[1]])
    pair.step()


def test_state_of_another_dtype_is_read_correctly(device) -> None:
    """In the memory of the previous state. The interpreter rounds to bfloat16 towards zero."""
    (param,) = parameters([(3, 4)], device)
    optimizer = MERIT([param], fused=True)
    for step in range(2):
        param.grad = gradient(param, step)
        optimizer.step()
        state = optimizer.state[param]
        if step == 0:
            for key in ("exp_avg", "exp_avg_sq"):
                values = state[key].to(torch.bfloat16)
                state[key] = state[key].view(torch.bfloat16).view(-1)[:12].view(3, 4).copy_(values)
            before = state["exp_avg"].float()
    expected = before * 0.9 + param.grad * 0.1
    assert (state["exp_avg"].float() - expected).abs().max() < 0.01 * expected.abs().max()


def test_state_of_two_dtypes_is_not_fused(device) -> None:
    """Kernels are compiled for one. Such state may come from another optimizer."""
    (param,) = parameters([(3, 4)], device)
    optimizer = MERIT([param], fused=True)
    for step in range(2):
        param.grad = gradient(param, step)
        optimizer.step()
        if step == 0:
            state = optimizer.state[param]
            state["exp_avg"] = state["exp_avg"].bfloat16()
            expected = state["exp_avg"].float() * 0.9 + gradient(param, 1) * 0.1
            squares = state["exp_avg_sq"] * 0.95 + gradient(param, 1).square() * 0.05
    torch.testing.assert_close(state["exp_avg"].float(), expected, rtol=0.01, atol=1e-4)
    torch.testing.assert_close(state["exp_avg_sq"], squares)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_state_on_another_device_is_an_error(device, key) -> None:
    """Not an access to memory that is not the device's, which no process survives."""
    (param,) = parameters([(3, 4)], device)
    optimizer = MERIT([param], fused=True)
    param.grad = gradient(param, 0)
    optimizer.step()
    optimizer.state[param][key] = torch.empty(3, 4, device="meta")
    with pytest.raises(RuntimeError, match="device"):
        optimizer.step()


def test_kernels_get_the_scale_of_gradients_in_float32(device) -> None:
    """It is float64 in steps in which any gradient is, and kernels are compiled once."""
    optimizer = MERIT(parameters([(3, 4)], device), fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 4, device=device)
    control = Control(gradient_scale=torch.tensor(0.5, dtype=torch.float64, device=device))
    parts, _ = FusedEngine(torch.device(device)).parts_of(optimizer._gather(), control)
    assert [part.control.gradient_scale.dtype for part in parts] == [torch.float32]


def test_an_unaligned_gradient_is_read_correctly(device) -> None:
    """Not at a multiple of 16 bytes, unlike the previous one."""
    pair = Pair(parameters([(3, 16)], device))
    pair.step()
    assert pair.engine._launches[0].variant.aligned
    buffer = torch.empty(3 * 16 + 1, device=device)
    pair.step([buffer[1:].view(3, 16).copy_(gradient(pair.params[0], 60))])
    assert not pair.engine._launches[0].variant.aligned
    pair.step()
    assert pair.engine._launches[0].variant.aligned


def test_vectors_of_any_length_are_aligned_as_declared(device) -> None:
    """ALIGNED promises rows of a multiple of 16 elements, also for those that a vector is folded into."""
    for size in (*range(16, 2048, 16), 16 * 1009):
        param = nn.Parameter(torch.ones(size, device=device))
        param.grad = torch.ones(size, device=device)
        works = MERIT([param], fused=True)._gather()
        engine = FusedEngine(device)
        engine._build(works, StepTensors.of(works), {})
        (launch,) = engine._launches
        assert launch.variant.aligned
        assert all(weight.columns % 16 == 0 for weight in launch.weights), (size, launch.weights)


def test_parameters_that_are_not_contiguous_use_the_eager_engine(device) -> None:
    """In the same step, with the bits of a separate eager optimizer."""
    pair = Pair(parameters([(4, 6), (9, 17)], device))
    for param in (pair.params[0], pair.eager_params[0]):
        param.data = param.data.T.contiguous().T
    with tiles():
        for _ in range(2):
            before = pair.eager_params[0].detach().clone()
            pair.step()
            assert pair.engine._unfused == {0}
            assert not torch.equal(pair.params[0], before)
    assert not pair.params[0].is_contiguous()


def test_a_parameter_that_replaces_another_in_its_group_is_updated(device) -> None:
    pair = Pair(parameters([(3, 4), (5,)], device))
    pair.step()
    old = pair.params[0].detach().clone()
    for optimizer, params in ((pair.fused, pair.params), (pair.eager, pair.eager_params)):
        replaced = params[0]
        params[0] = nn.Parameter(random_tensor((3, 4), 9, device=device))
        optimizer.param_groups[0]["params"][0] = params[0]
        optimizer.state.pop(replaced)
    pair.step()
    pair.step()
    assert_same_bits(replaced.detach(), old)


def test_a_parameter_replaced_in_the_same_memory_gets_new_tables(device) -> None:
    """Of another shape, with its state in the old one's memory too."""
    pair = Pair(parameters([(3, 4), (5,)], device))
    pair.step()
    for optimizer, params in ((pair.fused, pair.params), (pair.eager, pair.eager_params)):
        old = params[0]
        new = params[0] = optimizer.param_groups[0]["params"][0] = nn.Parameter(old.detach().view(2, 6))
        state = optimizer.state.pop(old)
        optimizer.state[new] = {key: x.view(2, 6) if x.ndim else x for key, x in state.items()}
    assert pair.params[0].data_ptr() == pair.engine._addresses[0]
    pair.step([gradient(p, 7 + i) for i, p in enumerate(pair.params)])
    pair.step()


def test_a_parameter_whose_data_moved_is_updated(device) -> None:
    pair = Pair(parameters([(3, 4), (5,)], device))
    pair.step()
    old = pair.params[0].data
    pair.params[0].data = old.clone()
    kept = old.clone()
    pair.step()
    assert_same_bits(old, kept)
    # Another shape, at another address.
    for param, optimizer in ((pair.params[1], pair.fused), (pair.eager_params[1], pair.eager)):
        param.data = random_tensor((2, 7), 3, device=device)
        param.grad = None
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[param][key] = torch.zeros(2, 7, device=device)
    pair.step()


def test_loaded_state_is_used(device) -> None:
    pair = Pair(parameters([(3, 4), (5,)], device), bias_correction=True)
    pair.step()
    pair.step()
    saved, eager_saved = (copy.deepcopy(optimizer.state_dict()) for optimizer in (pair.fused, pair.eager))
    weights = [p.detach().clone() for p in pair.params]
    pair.step()
    after = snapshot(pair.fused)
    pair.fused.load_state_dict(saved)
    pair.eager.load_state_dict(eager_saved)
    for params in (pair.params, pair.eager_params):
        for param, weight in zip(params, weights, strict=True):
            param.data.copy_(weight)
    pair.num_steps = 2
    pair.step()
    assert_same_bits(snapshot(pair.fused), after)


def test_a_copied_optimizer_steps_its_own_parameters(device) -> None:
    pair = Pair(parameters([(3, 4)], device))
    pair.step()
    before = snapshot(pair.fused)
    twin = copy.deepcopy(pair.fused)
    (param,) = twin.param_groups[0]["params"]
    param.grad = gradient(param, 100)
    twin.step()
    assert_unchanged(pair.fused, before)
    pair.step()
    assert_same_bits(snapshot(twin), snapshot(pair.fused))


def test_tables_are_kept_while_only_numbers_and_gradients_change(device, monkeypatch) -> None:
    pair = Pair(parameters([(3, 4), (5,)], device))
    pair.step()
    monkeypatch.setattr(FusedEngine, "_build", lambda *_: pytest.fail("the tables were built again"))
    pair.step()
    pair.fused.param_groups[0]["lr"] = pair.eager.param_groups[0]["lr"] = 0.5
    pair.step()


def test_ratios_beyond_float32_equal_the_eager_engine_s(device) -> None:
    """The largest number replaces an infinite ratio, because infinity marks "not scaled"."""
    params = parameters([(3, 4), (3, 4), (6,)], device)
    with torch.no_grad():
        params[0].mul_(1e10)
        params[1].mul_(1e-30)
    before = params[0].detach().clone()
    pair = Pair(params, weight_decay=0.0, lr=0.1, eps=1.0, clip=None)
    scales = (1e-29, 1e15, 1.0)
    grads = [gradient(p, i) * scale for i, (p, scale) in enumerate(zip(params, scales, strict=True))]
    grads[0][1, 2] = 0  # times an infinite ratio it would be NaN
    pair.step(grads)
    assert all(p.isfinite().all() for p in params)
    assert (params[0] - before).abs().amax() > 1e6


def test_autograd_notices_that_weights_have_changed(device) -> None:
    weight = nn.Parameter(random_tensor((4, 4), 0).to(device))
    optimizer = MERIT([weight], lr=0.1, fused=True)
    inputs = torch.ones(2, 4, device=device, requires_grad=True)
    loss = (inputs @ weight).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert weight._version > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
