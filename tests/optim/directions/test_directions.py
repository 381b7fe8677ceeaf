"""The directions through the optimizers: symmetries, sizes, matrices in weights, state, bad gradients."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_cases import assert_same_bits, assert_unchanged, random_tensor, snapshot
from torch import Tensor, nn
from torch.optim import Optimizer

from merit_optim import MERIT, SOAP, SOAPMERIT, Muon, MuonMERIT, NorMuon, OrScale, param_groups
from merit_optim.optim import algorithm
from merit_optim.optim.axes.directions import Adam as AdamDirection
from merit_optim.optim.axes.directions import Muon as MuonDirection
from merit_optim.optim.axes.directions.muon import mean_squares
from merit_optim.optim.axes.ratios import Weight
from merit_optim.optim.engines.eager import limits
from merit_optim.optim.matrices import Extent
from merit_optim.optim.spec import Spec

DIRECTIONS = {
    MuonMERIT: "muon",
    Muon: "muon",
    NorMuon: "muon",
    OrScale: "muon",
    SOAPMERIT: "soap",
    SOAP: "soap",
}
every_class = pytest.mark.parametrize("optimizer_class", DIRECTIONS, ids=lambda cls: cls.__name__)
muon_classes = pytest.mark.parametrize(
    "optimizer_class", [MuonMERIT, Muon, NorMuon], ids=lambda cls: cls.__name__
)
every_product = pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16", "float16"])


def built(optimizer_class: Any, params: list[Tensor], /, *, view: Any = None, **options: Any) -> Optimizer:
    """An optimizer of hidden matrices; ``view`` has the group's options of that name."""
    group = {"params": params, "direction": DIRECTIONS[optimizer_class], **(view or {})}
    return optimizer_class([group], **options)


def run(
    optimizer_class: Any,
    weight: Tensor,
    change: Callable[[Tensor], Tensor] = lambda x: x,
    num_steps: int = 4,
    **options: Any,
) -> Tensor:
    """A transformed weight after steps with gradients that are transformed in the same way."""
    param = change(weight).clone(memory_format=torch.contiguous_format)
    optimizer = built(optimizer_class, [param], **options)
    for step in range(num_steps):
        grad = random_tensor(weight.shape, 100 + step, dtype=weight.dtype, device=weight.device)
        param.grad = change(grad).contiguous()
        optimizer.step()
    assert not torch.equal(param, change(weight))
    return param


def exact_options(optimizer_class: Any) -> dict[str, Any]:
    """Products in the precision of the weights."""
    return {} if DIRECTIONS[optimizer_class] == "soap" else {"ns_dtype": "float32"}


# --- symmetries -------------------------------------------------------------------------------------------


# SOAP only for squares: eigenvectors of a null space are arbitrary, and may change with the matrix.
WITH_SHAPES = [
    pytest.param(cls, shape, id=f"{cls.__name__}-{shape}")
    for cls, direction in DIRECTIONS.items()
    for shape in [(8, 8), (12, 5), (5, 12)][: 1 if direction == "soap" else 3]
]
every_class_and_shape = pytest.mark.parametrize(("optimizer_class", "shape"), WITH_SHAPES)


@every_class_and_shape
def test_transposing_weight_and_gradient_transposes_the_update(device, optimizer_class, shape) -> None:
    weight = random_tensor(shape, 1, scale=0.3, dtype=torch.float64, device=device)
    options = exact_options(optimizer_class)
    if optimizer_class is Muon:
        options["scale"] = "rms"  # "original" looks at rows and columns differently
    plain = run(optimizer_class, weight, **options)
    turned = run(optimizer_class, weight, lambda x: x.T, **options)
    if optimizer_class in (NorMuon, MuonMERIT):  # they average rows
        assert (turned.T - plain).abs().max() > 1e-4
    else:
        torch.testing.assert_close(turned.T, plain, rtol=1e-9, atol=1e-12)


def test_transposing_in_lower_precision_transposes_the_update_up_to_rounding(device) -> None:
    weight = random_tensor((12, 5), 1, scale=0.3, device=device)
    for ns_dtype, atol in (("float32", 1e-5), ("bfloat16", 0.02), ("float16", 0.002)):
        plain, turned = (
            run(MuonMERIT, weight, change, 1, lr=0.1, ns_dtype=ns_dtype, neuron_beta=None)
            for change in (lambda x: x, lambda x: x.T)
        )
        torch.testing.assert_close(turned.T, plain, rtol=0, atol=0.1 * atol)


@every_class_and_shape
@pytest.mark.parametrize("dim", [0, 1])
def test_permuting_rows_or_columns_permutes_the_update(device, optimizer_class, shape, dim) -> None:
    weight = random_tensor(shape, 1, scale=0.3, dtype=torch.float64, device=device)
    order = torch.from_numpy(np.random.default_rng(0).permutation(shape[dim])).to(device)
    options = exact_options(optimizer_class)
    plain = run(optimizer_class, weight, **options)
    permuted = run(optimizer_class, weight, lambda x: x.index_select(dim, order), **options)
    torch.testing.assert_close(permuted, plain.index_select(dim, order), rtol=1e-9, atol=1e-12)


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [MuonMERIT, SOAPMERIT], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("clip", [1.0, 0.25])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_no_element_moves_further_than_the_clip_allows(device, optimizer_class, clip, scale) -> None:
    """Large weights have large ratios, so their elements reach the bound."""
    lr, param = 0.05, random_tensor((9, 6), 1, scale=scale, device=device)
    optimizer = built(optimizer_class, [param], lr=lr, clip=clip, ratio_bounds=None)
    largest = 0.0
    for step in range(8):
        before = param.clone()
        param.grad = random_tensor(param.shape, 10 + step, scale=10.0 ** (3 * (step % 3) - 3), device=device)
        optimizer.step()
        moved = (param - before).abs()
        rounding = 2**-23 * before.abs() + 1e-9
        assert (moved <= lr * clip + rounding).all()
        largest = max(largest, moved.max().item())
    assert (largest > 0.99 * lr * clip) == (scale >= 1)


def test_large_weights_move_half_as_far_as_muon_s_and_small_ones_less(device) -> None:
    """MuonMERIT's largest ratio is half of Muon's factor, so that weights do not grow exponentially."""

    def moved(optimizer_class: Any, scale: float, **options: Any) -> Tensor:
        weight = random_tensor((9, 6), 1, scale=scale, dtype=torch.float64, device=device)
        param = weight.clone()
        param.grad = random_tensor((9, 6), 2, dtype=torch.float64, device=device)
        built(optimizer_class, [param], lr=0.05, weight_decay=0.0, ns_dtype="float32", **options).step()
        return param - weight

    for scale in (1.0, 1e3):
        ours, muons = moved(MuonMERIT, scale, clip=None, neuron_beta=None), moved(Muon, scale)
        torch.testing.assert_close(ours, muons / 2, rtol=1e-9, atol=1e-9)
    assert (moved(MuonMERIT, 1e-3).abs() < 0.1 * moved(Muon, 1e-3).abs()).all()


@every_product
@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96), (8, 128)], ids=str)
@pytest.mark.parametrize("coefficients", ["quintic", "polar-express", "dion"])
def test_the_direction_has_a_root_mean_square_of_about_one(device, ns_dtype, shape, coefficients) -> None:
    param = torch.zeros(shape, device=device)
    options = {"ns_dtype": ns_dtype, "ns_coefficients": coefficients}
    optimizer = built(MuonMERIT, [param], lr=1.0, weight_decay=0.0, ratio="none", clip=None, **options)
    param.grad = random_tensor(shape, 1, scale=1e-3, device=device)
    optimizer.step()
    assert 0.8 < param.square().mean().sqrt() < 1.1


@pytest.mark.parametrize("optimizer_class", [SOAPMERIT, SOAP], ids=lambda cls: cls.__name__)
def test_soap_s_direction_has_a_root_mean_square_of_about_one_after_the_first_step(
    device, optimizer_class
) -> None:
    param = torch.zeros(48, 32, device=device)
    options = {} if optimizer_class is SOAP else {"ratio": "none", "clip": None}
    optimizer = built(optimizer_class, [param], lr=1.0, weight_decay=0.0, **options)
    for step in range(2):
        assert not param.any()  # the first step only computes the basis
        param.grad = random_tensor(param.shape, step, scale=1e-3, device=device)
        optimizer.step()
    assert 0.9 < param.square().mean().sqrt() < 1.1


@pytest.mark.parametrize(
    ("scale", "share"),
    [("rms", 1.0), ("match_rms_adamw", 0.2), ("original", 2**0.5 / 64**0.5), ("spectral", 1 / 64**0.5)],
)
def test_every_scale_gives_its_size(device, scale, share) -> None:
    """A polar factor of 64 x 32 has a root mean square of 1/8."""
    param = torch.zeros(64, 32, device=device)
    optimizer = built(Muon, [param], lr=1.0, weight_decay=0.0, scale=scale, ns_coefficients="dion")
    param.grad = random_tensor(param.shape, 1, device=device)
    optimizer.step()
    assert param.square().mean().sqrt().item() == pytest.approx(share, rel=0.03)


@every_class
def test_without_gradient_momentum_and_decay_no_bit_of_the_weight_changes(device, optimizer_class) -> None:
    param = random_tensor((6, 5), 1, device=device)
    param[0], param[1], param[2] = 0.0, -0.0, 1e-42
    before = param.clone()
    optimizer = built(optimizer_class, [param], weight_decay=0.0)
    for _ in range(4):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert_same_bits(param, before)


@pytest.mark.parametrize("optimizer_class", [MuonMERIT, SOAPMERIT], ids=lambda cls: cls.__name__)
def test_a_weight_of_zeros_starts_to_move(device, optimizer_class) -> None:
    """It has no ratio, so s = 1."""
    param = torch.zeros(6, 5, device=device)
    optimizer = built(optimizer_class, [param], lr=0.1)
    for step in range(2):
        param.grad = random_tensor(param.shape, step, device=device)
        optimizer.step()
    assert param.isfinite().all()
    assert 0.01 < param.abs().mean() < 0.1


# --- matrices inside weights ------------------------------------------------------------------------------


def assert_parts_equal_separate_parameters(
    optimizer_class: Any,
    weight: Tensor,
    view: dict[str, Any],
    parts_of: Callable[[Tensor], list[Tensor]],
    stored: Callable[[Tensor], Tensor] = torch.clone,
    **options: Any,
) -> None:
    """One weight with a view, and its parts as parameters with the given storage: the same bits."""
    whole = weight.clone()
    parts = [stored(part) for part in parts_of(weight)]
    options["fused"] = False  # a weight with split columns uses the eager engine, and its parts would not
    together = built(optimizer_class, [whole], view=view, **options)
    apart = built(optimizer_class, parts, **options)
    for step in range(4):
        whole.grad = random_tensor(weight.shape, 100 + step, device=weight.device)
        for part, grad in zip(parts, parts_of(whole.grad), strict=True):
            part.grad = stored(grad)
        together.step()
        apart.step()
        for i, (expected, actual) in enumerate(zip(parts, parts_of(whole), strict=True)):
            assert_same_bits(actual, expected, f"part {i} after step {step}")
    momentum = together.state[whole]["momentum_buffer"]
    for part, actual in zip(parts, parts_of(momentum), strict=True):
        assert_same_bits(actual, apart.state[part]["momentum_buffer"])
    if optimizer_class is NorMuon:
        rows = torch.cat([apart.state[part]["second_momentum_buffer"].reshape(-1) for part in parts])
        assert_same_bits(together.state[whole]["second_momentum_buffer"].reshape(-1), rows)
    assert not torch.equal(whole, weight)


@muon_classes
@every_product
def test_split_rows_equal_separate_parameters(device, optimizer_class, ns_dtype) -> None:
    weight = random_tensor((48, 20), 1, scale=0.3, device=device)
    for split, sizes in ((3, [16, 16, 16]), ((32, 12, 4), [32, 12, 4]), ((48,), [48])):
        assert_parts_equal_separate_parameters(
            optimizer_class,
            weight,
            {"split": split},
            lambda x, sizes=sizes: list(x.split(sizes)),
            ns_dtype=ns_dtype,
        )


@pytest.mark.parametrize(("optimizer_class", "options"), [(MuonMERIT, {"neuron_beta": None}), (Muon, {})])
@every_product
def test_split_columns_equal_separate_parameters(device, optimizer_class, options, ns_dtype) -> None:
    weight = random_tensor((20, 48), 1, scale=0.3, device=device)
    for split, sizes in ((3, [16, 16, 16]), ((32, 12, 4), [32, 12, 4])):
        assert_parts_equal_separate_parameters(
            optimizer_class,
            weight,
            {"split": split, "split_dim": 1},
            lambda x, sizes=sizes: list(x.split(sizes, 1)),
            ns_dtype=ns_dtype,
            **options,
        )


def stored_by_columns(x: Tensor) -> Tensor:
    return x.T.contiguous().T


@every_product
def test_split_columns_equal_separate_parameters_that_are_stored_by_columns(device, ns_dtype) -> None:
    """The order in memory changes no bit."""
    assert_parts_equal_separate_parameters(
        MuonMERIT,
        random_tensor((20, 48), 1, scale=0.3, device=device),
        {"split": 3, "split_dim": 1},
        lambda x: list(x.split(16, 1)),
        stored_by_columns,
        ns_dtype=ns_dtype,
        neuron_beta=None,
    )


def test_split_columns_are_split_rows_of_the_transposed_weight(device) -> None:
    """A Conv1D holds the transposed weight of a Linear, and changes in the same way."""
    weight = random_tensor((20, 48), 1, scale=0.3, dtype=torch.float64, device=device)
    linear, conv1d = weight.T.contiguous(), weight.clone()
    optimizers = [
        built(MuonMERIT, [linear], view={"split": 3}, ns_dtype="float32"),
        built(MuonMERIT, [conv1d], view={"split": 3, "transposed": True}, ns_dtype="float32"),
    ]
    for step in range(4):
        conv1d.grad = random_tensor(weight.shape, step, dtype=torch.float64, device=device)
        linear.grad = conv1d.grad.T.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(conv1d, linear.T, rtol=1e-9, atol=1e-12)


@muon_classes
@every_product
def test_stacked_matrices_equal_separate_parameters(device, optimizer_class, ns_dtype) -> None:
    weight = random_tensor((4, 12, 20), 1, scale=0.3, device=device)
    assert_parts_equal_separate_parameters(
        optimizer_class, weight, {"matrix_dims": 2}, lambda x: list(x.unbind()), ns_dtype=ns_dtype
    )


@pytest.mark.parametrize("optimizer_class", [MuonMERIT, NorMuon, SOAPMERIT], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("shape", [(1, 13), (5, 5), (7, 3), (7, 13)], ids=str)
def test_the_place_in_a_stack_does_not_matter(device, optimizer_class, shape) -> None:
    """Some libraries round products by the address of a matrix, and here none but the first is aligned."""
    stack = random_tensor((3, *shape), 1, scale=0.3, device=device).requires_grad_()
    apart = [x.clone().detach().requires_grad_() for x in stack]
    options = {"refresh_phase": 0} if optimizer_class is SOAPMERIT else {"ns_dtype": "float32"}
    together = built(optimizer_class, [stack], view={"matrix_dims": 2}, **options)
    separate = built(optimizer_class, apart, **options)
    for step in range(3):
        stack.grad = random_tensor(stack.shape, 100 + step, device=device)
        for part, grad in zip(apart, stack.grad, strict=True):
            part.grad = grad.clone()
        together.step()
        separate.step()
    for i, part in enumerate(apart):
        assert_same_bits(stack[i], part)


@muon_classes
def test_stacked_and_split_matrices_equal_separate_parameters(device, optimizer_class) -> None:
    weight = random_tensor((2, 12, 20), 1, scale=0.3, device=device)
    assert_parts_equal_separate_parameters(
        optimizer_class,
        weight,
        {"matrix_dims": 2, "split": (8, 4)},
        lambda x: [part for each in x.unbind() for part in each.split([8, 4])],
    )


def test_a_weight_that_is_updated_in_pieces_has_the_same_bits(device, monkeypatch) -> None:
    def steps() -> Tensor:
        return run(MuonMERIT, random_tensor((6, 14, 10), 1, device=device), view={"matrix_dims": 2})

    whole = steps()
    monkeypatch.setattr(limits, "PIECE_ELEMENTS_CPU", 35)
    monkeypatch.setattr(limits, "PIECE_ELEMENTS", 35)
    assert_same_bits(steps(), whole)


@muon_classes
def test_the_kind_of_a_weight_decides_its_view(device, optimizer_class) -> None:
    """Experts are stacked matrices, a convolution is one matrix, and tables and vectors use AdamW."""
    shapes = {
        "experts": (3, 4, 5),
        "hidden": (4, 3, 2, 2),
        "embedding": (7, 4),
        "head": (7, 4),
        "vector": (4,),
    }
    params = [random_tensor(shape, 1, device=device) for shape in shapes.values()]
    optimizer = optimizer_class([{"params": p, "kind": k} for p, k in zip(params, shapes, strict=True)])
    seen = {
        id(p): (group["direction"], group["matrix_dims"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert [seen[id(p)] for p in params] == [("muon", 2), ("muon", None), *[("adam", None)] * 3]


# --- state ------------------------------------------------------------------------------------------------


def state_bytes(optimizer: Optimizer, params: list[Tensor]) -> int:
    """Bytes of all state tensors except the step counts, which every optimizer has: 4 bytes per weight."""
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    tensors = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
    return sum(x.numel() * x.element_size() for x in tensors)


def test_muon_merit_needs_half_of_adamw_s_memory(device) -> None:
    model = nn.ModuleList(nn.Linear(64, 64 * (1 + i % 3), bias=False) for i in range(6)).to(device)
    params = list(model.parameters())
    num_elements = sum(param.numel() for param in params)
    adamw = state_bytes(torch.optim.AdamW(params), params)
    assert adamw == 8 * num_elements
    num_rows = sum(param.shape[0] for param in params)
    averages = {Muon: 0, MuonMERIT: 4 * num_rows, NorMuon: 4 * num_rows}
    for optimizer_class, of_rows in averages.items():
        optimizer = optimizer_class(param_groups(model))
        assert {group["direction"] for group in optimizer.param_groups} == {"muon"}
        assert state_bytes(optimizer, params) == adamw // 2 + of_rows
    in_half = MuonMERIT(param_groups(model), state_dtype=torch.bfloat16)
    assert state_bytes(in_half, params) == adamw // 4 + 2 * num_rows


def test_soap_keeps_no_products_of_a_side_that_is_not_rotated(device) -> None:
    param = random_tensor((10, 6), 1, device=device)
    expected = {10: 2 * 60 + 2 * 100 + 2 * 36, 6: 2 * 60 + 2 * 36, 5: 2 * 60}
    for max_precond_dim, num_elements in expected.items():
        optimizer = built(SOAP, [param], max_precond_dim=max_precond_dim)
        assert state_bytes(optimizer, [param]) == 4 * num_elements


# --- gradients that are not finite ------------------------------------------------------------------------


def model_and_optimizer(device: torch.device, optimizer_class: Any, **options: Any) -> Any:
    """A model with weights of every kind."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 6), "blocks": blocks, "head": nn.Linear(6, 9)})
    model.to(device)
    return model, optimizer_class(param_groups(model), **options)


def set_model_gradients(model: nn.Module, step: int) -> None:
    for i, param in enumerate(model.parameters()):
        param.grad = random_tensor(param.shape, 100 * step + i, device=param.device)


@every_class
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["blocks.1.weight", "blocks.0.bias", "embedding.weight"])
def test_skip_leaves_everything_as_it_was(device, optimizer_class, bad, where) -> None:
    """Also in the first step. Later steps are as if the bad steps had not been taken."""
    model, optimizer = model_and_optimizer(device, optimizer_class, nonfinite="skip")
    same, other = model_and_optimizer(device, optimizer_class, nonfinite="skip")
    for step in range(5):
        if step in (0, 1, 3):
            set_model_gradients(model, 1000 + step)
            model.get_parameter(where).grad.view(-1)[3] = bad
            before = snapshot(optimizer)
            optimizer.step()
            if step:
                assert_unchanged(optimizer, before)
            else:  # the first step creates the state, of zeros
                assert_same_bits(snapshot(optimizer)[0], before[0])
        set_model_gradients(model, step)
        set_model_gradients(same, step)
        optimizer.step()
        other.step()
    assert optimizer.num_skipped_steps == 3
    assert_same_bits([p.detach() for p in model.parameters()], [p.detach() for p in same.parameters()])
    assert_same_bits(optimizer.state_dict()["state"], other.state_dict()["state"])


@every_class
@pytest.mark.parametrize("where", ["blocks.1.weight", "blocks.0.bias"])
def test_raise_names_the_parameter_and_changes_nothing(device, optimizer_class, where) -> None:
    model, optimizer = model_and_optimizer(device, optimizer_class, nonfinite="raise")
    for step in range(3):
        set_model_gradients(model, step)
        optimizer.step()
    before = snapshot(optimizer)
    model.get_parameter(where).grad.view(-1)[2] = float("nan")
    with pytest.raises(FloatingPointError, match=rf"gradient of {where} .* has 1 NaN .*nothing was changed"):
        optimizer.step()
    assert_unchanged(optimizer, before)


@every_class
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_propagate_lets_bad_values_reach_the_weights(device, optimizer_class, bad) -> None:
    """All of a hidden matrix, because all of it is orthogonalised or rotated, and no other weight."""
    model, optimizer = model_and_optimizer(device, optimizer_class)
    for step in range(2):
        set_model_gradients(model, step)
        optimizer.step()
    set_model_gradients(model, 2)
    model.blocks[1].weight.grad[2, 3] = bad
    optimizer.step()
    assert model.blocks[1].weight.isnan().all()
    rest = {name: param for name, param in model.named_parameters() if name != "blocks.1.weight"}
    assert all(param.isfinite().all() for param in rest.values())


@pytest.mark.parametrize("optimizer_class", [SOAPMERIT, SOAP], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_basis_from_bad_gradients_shows_in_the_next_step(device, optimizer_class, bad) -> None:
    """The first step changes no weight, so the second is the first that can show it. Nothing raises."""
    param = random_tensor((5, 6), 1, device=device)
    optimizer = built(optimizer_class, [param], precondition_frequency=1)
    for step in range(3):
        assert param.isnan().any() == (step > 1)
        param.grad = random_tensor(param.shape, step, device=device)
        if step == 0:
            param.grad[0, 0] = bad
        optimizer.step()
    assert param.isnan().all()


def test_one_bad_matrix_of_a_stack_leaves_the_others(device) -> None:
    for view, index in (({"matrix_dims": 2}, 1), ({"matrix_dims": 2, "split": 2}, (1, slice(0, 3)))):
        param = random_tensor((3, 6, 5), 1, device=device)
        optimizer = built(MuonMERIT, [param], view=view)
        param.grad = random_tensor(param.shape, 2, device=device)
        param.grad[1, 0, 0] = float("nan")
        optimizer.step()
        assert param[index].isnan().all()
        assert param.isnan().sum() == param[index].numel()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 60_001])
def test_normuon_gives_a_matrix_the_same_bits_whatever_it_is_stacked_with(device, rows, transposed) -> None:
    """torch's own sums do not: on a CPU, threads share a single one of this length."""
    direction = MuonDirection(neuron_beta=0.9, transposed=transposed)
    x_NRC = random_tensor((8, rows, 60_001 // rows), 0, device=device)
    extent = Extent.whole(*x_NRC.shape[1:])

    def equalized(x_NRC: Tensor) -> tuple[Tensor, ...]:
        mean_sq = mean_squares(x_NRC, direction.output_dim)
        state = torch.empty_like(x_NRC), torch.ones_like(mean_sq)
        d_NRC, (_, average) = direction.after((x_NRC, mean_sq), state, x_NRC.dtype, extent)
        return mean_sq, d_NRC, average

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together, alone = equalized(x_NRC), [equalized(x_1RC) for x_1RC in x_NRC.split(1)]
    finally:
        torch.set_num_threads(threads)
    for stacked, single in zip(together, zip(*alone, strict=True), strict=True):
        assert_same_bits(stacked, torch.cat(single))


def test_a_side_that_begins_or_ends_to_be_rotated_is_refused(device) -> None:
    """Its state would be another; before anything is changed."""
    param = random_tensor((6, 8), 0, device=device)
    optimizer = built(SOAP, [param])
    param.grad = random_tensor((6, 8), 1, device=device)
    optimizer.step()
    optimizer.param_groups[0]["max_precond_dim"] = 7
    before = copy.deepcopy(optimizer.state[param])
    with pytest.raises(
        ValueError, match=r"column_average of .* needs \(1, 0, 0\) .*max_precond_dim\). Change"
    ):
        optimizer.step()
    assert_same_bits(optimizer.state[param], before)
    optimizer.param_groups[0]["max_precond_dim"] = 8
    optimizer.step()


@every_class
def test_a_copy_continues_like_the_optimizer(device, optimizer_class) -> None:
    """State, sorting and options survive copy.deepcopy together with the weights."""
    model, optimizer = model_and_optimizer(device, optimizer_class)
    for step in range(3):
        set_model_gradients(model, step)
        optimizer.step()
    copied_model, copied = copy.deepcopy((model, optimizer))
    for each, each_optimizer in ((model, optimizer), (copied_model, copied)):
        for step in range(3, 6):
            set_model_gradients(each, step)
            each_optimizer.step()
    for expected, actual in zip(model.parameters(), copied_model.parameters(), strict=True):
        assert_same_bits(actual.detach(), expected.detach())
    for each_optimizer in (optimizer, copied):  # and the options of weights that are added later
        each_optimizer.add_param_group(
            {"params": [("late", torch.ones(3, device=device))], "direction": "adam"}
        )
    last, copied_last = (
        {key: value for key, value in each_optimizer.param_groups[-1].items() if key != "params"}
        for each_optimizer in (optimizer, copied)
    )
    assert copied_last == last


def test_the_definition_keeps_the_dtype_of_the_first_ratio() -> None:
    """So that the next step is computed from it as the engines store it."""
    spec = Spec(direction=MuonDirection(), ratio=Weight(calibrated=True))
    zeros = [torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 1, dtype=torch.bfloat16)]
    weight, grad = random_tensor((4, 4), 0), random_tensor((4, 4), 1)
    result = algorithm.step(weight, grad, zeros, spec=spec, lr=0.1, weight_decay=0.0)
    assert [x.dtype for x in result.state] == [torch.bfloat16] * 2


def test_a_first_ratio_in_float64_leaves_the_arithmetic_in_float32() -> None:
    ratio = Weight(norm="max", calibrated=True)
    param = random_tensor((6, 5), 0)
    options = {"direction": "adam", "state_dtype": torch.float64, **ratio.options}
    optimizer = MERIT([{"params": [param], **options}], lr=0.1, weight_decay=0.1)
    weight, state = param.clone(), [torch.zeros(6, 5).double()] * 2 + [torch.zeros(1, 1, 1).double()]
    for step in range(1, 4):
        param.grad = random_tensor((6, 5), step)
        spec = Spec(direction=AdamDirection(), ratio=ratio)
        weight, state = algorithm.step(
            weight, param.grad, state, spec=spec, lr=0.1, weight_decay=0.1, step=step
        )
        optimizer.step()
        assert_same_bits(param, weight)


@pytest.mark.parametrize(("zero", "weight_decay"), [("weight", 0.0), ("weight", 0.1), ("gradient", 0.0)])
def test_an_undefined_ratio_is_not_the_first(device, zero: str, weight_decay: float) -> None:
    """The weight is not scaled in that step, and its ratio is calibrated in the next."""
    param = random_tensor((2, 4, 3), 0, device=device)
    param[1] *= zero != "weight"
    before = param.clone()
    # Eager both: fused kernels cannot compute a first ratio, and round Muon's products otherwise.
    options = {"direction": "muon", "matrix_dims": 2, "fused": False}
    optimizer = OrScale([{"params": [param], **options}], lr=0.1, weight_decay=weight_decay)
    muon = Muon([{"params": [unscaled := param.clone()], **options}], lr=0.1, weight_decay=weight_decay)
    param.grad = random_tensor(param.shape, 1, device=device)
    param.grad[1] *= zero != "gradient"
    unscaled.grad = param.grad.clone()
    optimizer.step()
    muon.step()
    torch.testing.assert_close(param, unscaled)  # the first matrix has a ratio of 1 too
    first = optimizer.state[param]["first_ratio"]
    assert (first.flatten() == 0).tolist() == [False, True]
    assert zero == "gradient" or not torch.equal(param[1], before[1])
    kept = first[0].clone()
    param.grad = random_tensor(param.shape, 2, device=device)
    optimizer.step()
    first = optimizer.state[param]["first_ratio"]
    assert torch.equal(first[0], kept)
    assert first[1] > 0
