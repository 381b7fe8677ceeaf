"""Behaviour of all optimizers in a training loop: groups, closures, learning rates, hooks, gradients."""

from typing import Any

import pytest
import torch
from optimizer_cases import (
    CASES,
    OWN_CASES,
    Case,
    add_group,
    arguments,
    as_if_alone,
    assert_same_bits,
    assert_unchanged,
    name_of,
    parameters,
    rebuilt,
    set_gradients,
    snapshot,
    steps_to_move,
    take_steps,
)
from torch.optim import Optimizer

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
every_own_case = pytest.mark.parametrize("case", OWN_CASES, ids=name_of)


def weights_after(optimizer: Optimizer, num_steps: int = 3) -> list[torch.Tensor]:
    take_steps(optimizer, num_steps)
    return snapshot(optimizer)[0]


@every_case
def test_a_step_changes_every_parameter(device, case: Case) -> None:
    params = parameters(device)
    before = [p.detach().clone() for p in params]
    take_steps(case.build(params), steps_to_move(case))
    for old, new in zip(before, params, strict=True):
        assert not torch.equal(old, new.detach())
        assert new.isfinite().all()


@every_case
def test_groups_have_separate_options(device, case: Case) -> None:
    """Two groups of one optimizer change like two optimizers."""
    override: dict[str, Any] = {"lr": 0.003, "weight_decay": 0.2}
    if case.direction != "muon":  # which knows no betas, and Adam's direction no momentum
        override["betas"] = (0.8, 0.7)
    params = parameters(device)
    together = case.build([{"params": params[:3]}, {"params": params[3:], **override}], **as_if_alone(case))
    alone = parameters(device)
    first = case.build(alone[:3], **as_if_alone(case))
    second = case.build(alone[3:], **arguments(case, override), **as_if_alone(case))
    for step in range(3):
        set_gradients(params, step)
        set_gradients(alone, step)
        together.step()
        first.step()
        second.step()
    assert_same_bits([p.detach() for p in params], [p.detach() for p in alone])


@every_case
def test_a_group_added_later_trains_with_its_options(device, case: Case) -> None:
    params, alone = parameters(device), parameters(device)
    optimizer = case.build(params[:2], **as_if_alone(case))
    late = case.build(alone[2:], **arguments(case, {"lr": 0.003}), **as_if_alone(case))
    take_steps(optimizer, 2)
    add_group(optimizer, {"params": params[2:], "lr": 0.003})
    # The rest of the weights has a separate group.
    num_params = [2, 4] if case.direction is None else [1, 1, 3, 1]
    assert [len(group["params"]) for group in optimizer.param_groups] == num_params
    for step in (5, 6):
        set_gradients(params, step)
        optimizer.step()
        set_gradients(alone, step)
        late.step()
    assert_same_bits([p.detach() for p in params[2:]], [p.detach() for p in alone[2:]])


REFUSED_OVERRIDES: list[dict[str, Any]] = [
    {"lr": -1.0},
    {"betas": (0.9, 1.0)},
    {"weight_decay": -0.1},
    {"state_dtype": torch.int32},
    {"nonfinite": "ignore"},
    {"max_grad_norm": 0.0},
]


@every_own_case
@pytest.mark.parametrize("override", REFUSED_OVERRIDES, ids="-".join)
def test_a_group_with_a_wrong_option_is_not_added(device, case: Case, override) -> None:
    params = parameters(device)
    optimizer = case.build(params[:2])
    take_steps(optimizer, 1)
    before = snapshot(optimizer)
    # Muon's direction, which comes first, knows no betas; the scalar's does.
    refused = params[-1:] if "betas" in override else params[2:]
    with pytest.raises(ValueError, match=next(iter(override))):
        add_group(optimizer, {"params": refused, **override})
    assert_unchanged(optimizer, before)  # the number of groups too
    add_group(optimizer, {"params": params[2:]})  # the parameters are still free
    take_steps(optimizer, 1, first=1)


@every_case
def test_a_closure_is_called_once_with_gradients_enabled(device, case: Case) -> None:
    params, plain = parameters(device), parameters(device)
    optimizer, reference = case.build(params), case.build(plain)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == sum((p * p).sum() for p in plain).item()
    for p in plain:
        p.grad = 2 * p.detach()
    assert reference.step() is None
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])


@every_own_case
@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "one element"])
@pytest.mark.parametrize("on_cpu", [True, False], ids=["lr on the CPU", "lr on the device"])
def test_a_tensor_learning_rate_is_the_number_in_it(device, case: Case, shape, on_cpu) -> None:
    lr = torch.full(shape, 2**-6, device="cpu" if on_cpu else device)
    as_tensor = case.build(parameters(device), **arguments(case, {"lr": lr}))
    as_number = case.build(parameters(device), **arguments(case, {"lr": 2**-6}))
    assert_same_bits(weights_after(as_tensor), weights_after(as_number))
    lr.fill_(2**-5)  # a change takes effect at once
    as_number = rebuilt(case, as_number, **arguments(case, {"lr": 2**-5}))
    take_steps(as_tensor, 2, first=3)
    take_steps(as_number, 2, first=3)
    assert_same_bits(snapshot(as_tensor)[0], snapshot(as_number)[0])


@every_case
def test_a_step_without_gradients_changes_nothing(device, case: Case) -> None:
    params = parameters(device)
    optimizer = case.build(params)
    before = snapshot(optimizer)
    optimizer.step()
    assert_unchanged(optimizer, before)
    assert not optimizer.state
    take_steps(optimizer, 1)
    before = snapshot(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert_unchanged(optimizer, before)


@every_case
def test_a_parameter_whose_gradient_comes_late_changes_as_in_a_separate_optimizer(device, case: Case) -> None:
    """Each parameter has its own step count, moments and bias correction."""
    params, alone = parameters(device), parameters(device)
    together, separate = case.build(params), [case.build([p]) for p in alone]
    for step in range(5):
        for group in (params, alone):
            set_gradients(group, step)
            for i, param in enumerate(group):
                if step < i or step == 3:  # late, and once not at all
                    param.grad = None
        together.step()
        for optimizer in separate:
            optimizer.step()
    assert_same_bits([p.detach() for p in params], [p.detach() for p in alone])
    assert len(together.state) == 5  # the last parameter has had no gradient yet


@every_case
def test_maximize_takes_the_opposite_step(device, case: Case) -> None:
    params, turned = parameters(device), parameters(device)
    down, up = case.build(params), case.build(turned, maximize=True)
    for step in range(3):
        set_gradients(params, step)
        for param, other in zip(params, turned, strict=True):
            other.grad = -param.grad
        down.step()
        up.step()
    assert_same_bits([p.detach() for p in turned], [p.detach() for p in params])


# torch's AdamW uses another implementation for two devices, with other last bits.
@pytest.mark.gpu
@every_own_case
def test_parameters_on_two_devices_are_as_on_one(case: Case) -> None:
    halves, alone = ([parameters(d) for d in ("cpu", "cuda")] for _ in range(2))
    together = case.build(halves[0] + halves[1], **as_if_alone(case))
    apart = [case.build(params, **as_if_alone(case)) for params in alone]
    for step in range(3):
        for params in (*halves, *alone):
            set_gradients(params, step)
        for optimizer in (together, *apart):
            optimizer.step()
    assert_same_bits(
        [[p.detach() for p in half] for half in halves], [[p.detach() for p in x] for x in alone]
    )
