"""The directions through the optimizers: matrices in weights, state, bad gradients."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from optimizer_cases import assert_same_bits, random_tensor
from torch import Tensor, nn
from torch.optim import Optimizer

from merit_optim import MERIT, SOAP, SOAPMERIT, Muon, MuonMERIT, NorMuon, OrScale, param_groups
from merit_optim.optim import algorithm
from merit_optim.optim.axes.directions import Adam as AdamDirection
from merit_optim.optim.axes.directions import Muon as MuonDirection
from merit_optim.optim.axes.directions.muon import mean_squares
from merit_optim.optim.axes.ratios import Weight
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


def built(optimizer_class: Any, params: list[Tensor], /, *, view: Any = None, **options: Any) -> Optimizer:
    """An optimizer of hidden matrices; ``view`` has the group's options of that name."""
    group = {"params": params, "direction": DIRECTIONS[optimizer_class], **(view or {})}
    return optimizer_class([group], **options)


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


# --- matrices inside weights ------------------------------------------------------------------------------


Parts = Callable[[Tensor], Sequence[Tensor]]
IN_A_STACK: list[tuple[Any, tuple[int, ...], dict[str, Any], Parts]] = [
    # Some libraries round products by the address of a matrix, and here none but the first is aligned.
    (optimizer_class, (3, *shape), {"matrix_dims": 2}, Tensor.unbind)
    for optimizer_class in (MuonMERIT, NorMuon, SOAPMERIT)
    for shape in [(1, 13), (7, 3), (7, 13)]
]
IN_A_WEIGHT: list[tuple[Any, tuple[int, ...], dict[str, Any], Parts]] = [
    (NorMuon, (48, 20), {"split": 3}, lambda x: x.split(16)),
    (MuonMERIT, (48, 20), {"split": (32, 12, 4)}, lambda x: x.split([32, 12, 4])),
    (Muon, (20, 48), {"split": 3, "split_dim": 1}, lambda x: x.split(16, 1)),
    (Muon, (20, 48), {"split": (32, 12, 4), "split_dim": 1}, lambda x: x.split([32, 12, 4], 1)),
    (
        NorMuon,
        (2, 12, 20),
        {"matrix_dims": 2, "split": (8, 4)},
        lambda x: [part for each in x for part in each.split([8, 4])],
    ),
]


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("optimizer_class", "shape", "view", "parts_of"), [*IN_A_STACK, *IN_A_WEIGHT])
def test_matrices_of_a_weight_have_the_bits_of_separate_ones(
    device, optimizer_class, shape, view, parts_of, ns_dtype
) -> None:
    weight = random_tensor(shape, 1, scale=0.3, device=device)
    whole, parts = weight.clone(), [part.contiguous().clone() for part in parts_of(weight)]
    options = {"refresh_phase": 0} if optimizer_class is SOAPMERIT else {"ns_dtype": ns_dtype}
    options["fused"] = False  # a weight with split columns uses the eager engine, and its parts would not
    together = built(optimizer_class, [whole], view=view, **options)
    apart = built(optimizer_class, parts, **options)
    for step in range(4):
        whole.grad = random_tensor(shape, 100 + step, device=device)
        for part, grad in zip(parts, parts_of(whole.grad), strict=True):
            part.grad = grad.contiguous().clone()
        together.step()
        apart.step()
    assert not torch.equal(whole, weight)
    for actual, expected in zip(parts_of(whole), parts, strict=True):
        assert_same_bits(actual, expected)


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
