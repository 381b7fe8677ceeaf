"""What every optimizer does in a training loop: groups, closures, learning rates, hooks, gradients."""

from typing import Any

import pytest
import torch
from optimizer_cases import (
    CASES,
    OWN_CASES,
    Case,
    assert_same_bits,
    assert_unchanged,
    name_of,
    parameters,
    rebuilt,
    set_gradients,
    snapshot,
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
    after = weights_after(case.build(params), 1)
    for old, new in zip(before, after, strict=True):
        assert not torch.equal(old, new)
        assert new.isfinite().all()


@every_case
def test_groups_have_options_of_their_own(device, case: Case) -> None:
    """Two groups of one optimizer take the steps of two optimizers."""
    override = {"lr": 0.003, "weight_decay": 0.2, "betas": (0.8, 0.7)}
    params = parameters(device)
    together = case.build([{"params": params[:3]}, {"params": params[3:], **override}])
    alone = parameters(device)
    first, second = case.build(alone[:3]), case.build(alone[3:], **override)
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
    optimizer, late = case.build(params[:2]), case.build(alone[2:], lr=0.003)
    take_steps(optimizer, 2)
    optimizer.add_param_group({"params": params[2:], "lr": 0.003})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    set_gradients(params, 5)
    optimizer.step()
    set_gradients(alone, 5)
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
    with pytest.raises(ValueError, match=next(iter(override))):
        optimizer.add_param_group({"params": params[2:], **override})
    assert len(optimizer.param_groups) == 1
    assert_unchanged(optimizer, before)
    optimizer.add_param_group({"params": params[2:]})  # the parameters are still free
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
    lr = torch.full(shape, 0.02, device="cpu" if on_cpu else device)
    as_tensor = case.build(parameters(device), lr=lr)
    as_number = case.build(parameters(device), lr=0.02)
    assert_same_bits(weights_after(as_tensor), weights_after(as_number))
    lr.fill_(0.04)  # a change takes effect at once
    as_number = rebuilt(case, as_number, lr=0.04)
    take_steps(as_tensor, 2, first=3)
    take_steps(as_number, 2, first=3)
    assert_same_bits(snapshot(as_tensor)[0], snapshot(as_number)[0])


@every_case
def test_a_learning_rate_set_in_a_group_takes_effect_at_once(device, case: Case) -> None:
    optimizer, other = case.build(parameters(device)), case.build(parameters(device))
    take_steps(optimizer, 2)
    take_steps(other, 2)
    optimizer.param_groups[0]["lr"] = 0.04
    other = rebuilt(case, other, lr=0.04)
    take_steps(optimizer, 1, first=2)
    take_steps(other, 1, first=2)
    assert_same_bits(snapshot(optimizer)[0], snapshot(other)[0])


@every_case
def test_step_hooks_run_before_and_after(device, case: Case) -> None:
    params = parameters(device)
    optimizer = case.build(params)
    seen: list[tuple[str, float]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", params[0][0, 0].item())))
    post = optimizer.register_step_post_hook(lambda *_: seen.append(("after", params[0][0, 0].item())))
    start = params[0][0, 0].item()
    take_steps(optimizer, 1)
    assert seen == [("before", start), ("after", params[0][0, 0].item())]
    post.remove()
    take_steps(optimizer, 1, first=1)
    assert [when for when, _ in seen] == ["before", "after", "before"]


@every_case
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_gradients(device, case: Case, set_to_none) -> None:
    params = parameters(device)
    optimizer = case.build(params)
    take_steps(optimizer, 1)
    kept = [p.grad for p in params]
    optimizer.zero_grad(set_to_none=set_to_none)
    for param, grad in zip(params, kept, strict=True):
        assert param.grad is (None if set_to_none else grad)
        assert set_to_none or not grad.any()


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
def test_a_parameter_whose_gradient_comes_late_is_as_in_an_optimizer_of_its_own(device, case: Case) -> None:
    """With a step count, moments and bias correction of its own."""
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
def test_maximize_climbs_where_the_same_step_descends(device, case: Case) -> None:
    params, turned = parameters(device), parameters(device)
    down, up = case.build(params), case.build(turned, maximize=True)
    for step in range(3):
        set_gradients(params, step)
        for param, other in zip(params, turned, strict=True):
            other.grad = -param.grad
        down.step()
        up.step()
    assert_same_bits([p.detach() for p in turned], [p.detach() for p in params])


@every_case
def test_a_step_leaves_gradients_as_they_are(device, case: Case) -> None:
    params = parameters(device)
    optimizer = case.build(params)
    set_gradients(params, 0)
    grads = [p.grad.clone() for p in params]
    optimizer.step()
    assert_same_bits([p.grad for p in params], grads)


@every_case
def test_names_given_with_the_parameters_are_kept(device, case: Case) -> None:
    params = parameters(device)
    optimizer = case.build([(f"layer.{i}", p) for i, p in enumerate(params)])
    take_steps(optimizer, 1)
    assert optimizer.param_groups[0]["param_names"] == [f"layer.{i}" for i in range(len(params))]


# Torch's AdamW takes another implementation when there are two devices, and other last bits.
@pytest.mark.gpu
@every_own_case
def test_parameters_on_two_devices_are_as_on_one(case: Case) -> None:
    params = [p for d in ("cpu", "cuda") for p in parameters(d)]
    together = case.build(params)
    apart = [case.build(parameters(d)) for d in ("cpu", "cuda")]
    for step in range(3):
        for half, optimizer in zip((params[:6], params[6:]), apart, strict=True):
            set_gradients(half, step)
            set_gradients(optimizer.param_groups[0]["params"], step)
            optimizer.step()
        together.step()
    assert_same_bits(snapshot(together)[0], snapshot(apart[0])[0] + snapshot(apart[1])[0])
