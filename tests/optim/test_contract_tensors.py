"""All sorts of tensors: any memory layout, empty, 0-d, and several dtypes in one group."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import (
    CASES,
    OWN_CASES,
    Case,
    as_if_alone,
    assert_same_bits,
    is_soap,
    name_of,
    random_tensor,
    steps_to_move,
)
from torch import Tensor, nn

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
every_own_case = pytest.mark.parametrize("case", OWN_CASES, ids=name_of)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def every_second(x: Tensor) -> Tensor:
    room = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    room[..., ::2] = x
    return room[..., ::2]


def permuted(x: Tensor) -> Tensor:
    order = [*range(1, x.ndim), 0]
    back = [x.ndim - 1, *range(x.ndim - 1)]
    return x.permute(order).contiguous().permute(back)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def with_offset(x: Tensor) -> Tensor:
    """A view that starts inside its storage, not on a 16-byte boundary."""
    room = x.new_full((x.numel() + 1,), torch.nan)
    room[1:] = x.reshape(-1)
    return room[1:].view(x.shape)


LAYOUTS: list[tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = [
    ((6, 9), transposed),
    ((6, 9), every_second),
    ((6, 9), with_offset),
    ((5, 17), with_offset),  # products of such matrices depend on it on some CPUs
    ((4, 3, 5), permuted),
    ((4, 3, 5, 2), channels_last),
    ((7,), every_second),
]


@every_own_case
@pytest.mark.parametrize("odd_tensors", ["weight", "gradient", "both"])
def test_memory_layout_changes_no_bit(device, case: Case, odd_tensors) -> None:
    """Of two weights, which an engine may copy into one."""
    for shape, layout in LAYOUTS:
        check_layout(device, case, shape, layout, odd_tensors)


def check_layout(device: torch.device, case: Case, shape: Any, layout: Any, odd_tensors: str) -> None:
    weights = [random_tensor(shape, i, device=device) for i in range(2)]
    plain = [nn.Parameter(weight.clone()) for weight in weights]
    odd = [
        nn.Parameter(layout(weight) if odd_tensors != "gradient" else weight.clone()) for weight in weights
    ]
    if odd_tensors != "gradient" and layout is not with_offset:
        assert not odd[0].is_contiguous()
    # The fused engine leaves non-contiguous weights to the eager one, whose last bits may differ.
    options = {"fused": False} if "fused" in case.build(plain).defaults else {}
    optimizers = [case.build(params, **options) for params in (plain, odd)]
    for step in range(3):
        for i, (plain_one, odd_one) in enumerate(zip(plain, odd, strict=True)):
            grad = random_tensor(shape, 10 + 2 * step + i, device=device)
            plain_one.grad = grad
            odd_one.grad = layout(grad) if odd_tensors != "weight" else grad
        for optimizer in optimizers:
            optimizer.step()
        for plain_one, odd_one in zip(plain, odd, strict=True):
            if optimizers[0].param_groups[0].get("norm") == "l2":  # a sum: its order follows the memory
                torch.testing.assert_close(odd_one, plain_one, rtol=1e-6, atol=1e-6)
            else:
                assert_same_bits(odd_one.detach(), plain_one.detach())
    for pair in zip(plain, odd, strict=True):
        states = [dict(optimizer.state[p]) for optimizer, p in zip(optimizers, pair, strict=True)]
        ratios = [state.pop("first_ratio", torch.ones(())) for state in states]
        torch.testing.assert_close(ratios[1], ratios[0], rtol=1e-6, atol=0)  # of such sums
        assert_same_bits(states[1], states[0])


@every_case
def test_empty_tensors_do_not_affect_other_parameters(device, case: Case) -> None:
    weights = [nn.Parameter(random_tensor((4, 3), 0, device=device)) for _ in range(2)]
    empty = [nn.Parameter(torch.zeros(shape, device=device)) for shape in [(0,), (0, 3), (2, 0), (2, 0, 3)]]
    with_empty, without = case.build([empty[0], weights[0], *empty[1:]]), case.build([weights[1]])
    for step in range(2):
        for param in (*weights, *empty):
            param.grad = random_tensor(param.shape, step, device=device)
        with_empty.step()
        without.step()
    assert_same_bits(weights[0].detach(), weights[1].detach())
    for param in empty:
        assert with_empty.state[param]["step"].item() == 2
        of_its_shape = "momentum_buffer" if case.direction == "muon" and param.ndim > 1 else "exp_avg"
        assert with_empty.state[param][of_its_shape].shape == param.shape


@every_own_case
def test_only_empty_tensors_pass_clipping_and_checks(device, case: Case) -> None:
    for nonfinite in ("skip", "raise"):
        param = nn.Parameter(torch.zeros(0, 3, device=device))
        optimizer = case.build([param], nonfinite=nonfinite, max_grad_norm=1.0)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert optimizer.state[param]["step"].item() == 1
        assert optimizer.grad_norm.item() == 0
        assert optimizer.num_skipped_steps == 0


@every_case
def test_dtypes_mix_in_one_group(device, case: Case) -> None:
    """Each parameter changes as it would in a separate optimizer."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32]
    together, alone = (
        [nn.Parameter(random_tensor((5, 4), i, dtype=d, device=device)) for i, d in enumerate(dtypes)]
        for _ in range(2)
    )
    optimizer, separate = case.build(together, **as_if_alone(case)), [case.build([p]) for p in alone]
    for step in range(3):
        for i, pair in enumerate(zip(together, alone, strict=True)):
            for param in pair:
                param.grad = random_tensor((5, 4), 10 * step + i, dtype=param.dtype, device=device)
        optimizer.step()
        for single in separate:
            single.step()
    assert_same_bits([p.detach() for p in together], [p.detach() for p in alone])
    assert [p.dtype for p in together] == dtypes


@every_own_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_are_the_float32_step_rounded(device, case: Case, dtype) -> None:
    half = nn.Parameter(random_tensor((8, 6), 0, dtype=dtype, device=device))
    single = nn.Parameter(half.detach().float())
    optimizers = [case.build([param], lr=0.1) for param in (half, single)]
    for step in range(steps_to_move(case)):
        half.grad = random_tensor((8, 6), 1 + step, dtype=dtype, device=device)
        single.grad = half.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    assert not half.equal(random_tensor((8, 6), 0, dtype=dtype, device=device))
    assert_same_bits(half.detach(), single.detach().to(dtype))


@every_own_case
def test_dtypes_mix_with_clipping_and_skipping(device, case: Case) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    params = [nn.Parameter(random_tensor((5, 4), i, dtype=d, device=device)) for i, d in enumerate(dtypes)]
    optimizer = case.build(params, max_grad_norm=0.5, nonfinite="skip")
    for i, param in enumerate(params):
        param.grad = random_tensor((5, 4), 10 + i, dtype=param.dtype, device=device)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    expected = torch.stack([p.grad.double().norm() for p in params]).norm()
    torch.testing.assert_close(optimizer.grad_norm.double(), expected, rtol=1e-6, atol=0)
    group = optimizer.param_groups[0]
    for old, param in zip(before, params, strict=True):
        assert torch.equal(old, param.detach()) == is_soap(case)  # SOAP's first step changes no matrix
        averaged = param.grad.double() * 0.5 / expected
        if is_soap(case):
            key, decay, averaged = "row_average", group["betas"][1], (averaged @ averaged.T)[None]
        elif case.name.lower().endswith("muown"):  # its momentum is of a part of the gradient
            unit = old.double() / old.double().norm(dim=1, keepdim=True)
            key, decay = "magnitude_exp_avg", group["magnitude_betas"][0]
            averaged = (averaged * unit).sum(1)[None, :, None]
        elif case.direction == "muon":
            key, decay = "momentum_buffer", group["momentum"]
        else:  # Lion's momentum uses the second of its betas
            key, decay = "exp_avg", group["betas"][1 if "lion" in case.name.lower() else 0]
        average = optimizer.state[param][key].double()
        torch.testing.assert_close(average, averaged * (1 - decay), rtol=1e-4, atol=1e-7)


@every_own_case
def test_a_0d_parameter_is_clipped_with_one_of_another_dtype(device, case: Case) -> None:
    """The norm of all gradients is in float64, the dtype of one of them."""
    scalar, vector = (nn.Parameter(torch.full(shape, 0.7, device=device)) for shape in ((), (1,)))
    for single in (scalar, vector):
        double = nn.Parameter(torch.ones(3, dtype=torch.float64, device=device))
        optimizer = case.build([single, double], max_grad_norm=0.3)
        for grad in (0.7, -0.4):
            single.grad, double.grad = torch.full_like(single, grad), torch.full_like(double, grad / 3)
            optimizer.step()
    assert scalar.dtype == torch.float32
    assert_same_bits(scalar.detach().reshape(1), vector.detach())


@every_own_case
def test_an_expanded_gradient_gives_the_same_step_as_its_copy(device, case: Case) -> None:
    weights = [nn.Parameter(random_tensor((5, 6), 0, device=device)) for _ in range(2)]
    row = random_tensor((6,), 1, device=device)
    weights[0].grad, weights[1].grad = row.expand(5, 6), row.repeat(5, 1)
    # As above: an expanded gradient is not contiguous.
    options = {"fused": False} if "fused" in case.build([weights[0]]).defaults else {}
    for weight in weights:
        optimizer = case.build([weight], **options)
        for _ in range(steps_to_move(case)):
            optimizer.step()
    assert not weights[0].equal(random_tensor((5, 6), 0, device=device))
    assert_same_bits(weights[0].detach(), weights[1].detach())
