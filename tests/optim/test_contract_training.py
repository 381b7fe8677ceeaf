"""Optimizers with all learning rate schedules of torch, and with GradScaler."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import (
    CASES,
    OWN_CASES,
    Case,
    arguments,
    assert_same_bits,
    assert_unchanged,
    is_soap,
    name_of,
    parameters,
    random_tensor,
    rebuilt,
    set_gradients,
    snapshot,
    steps_to_move,
)
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
one_of_each_direction = pytest.mark.parametrize(
    "case", {case.direction: case for case in reversed(OWN_CASES)}.values(), ids=name_of
)

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.7),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.7)], milestones=[2]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.7)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=1e-3, max_lr=2e-2, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=7),
    "SWALR": lambda o: SWALR(o, swa_lr=1e-3, anneal_epochs=3),
}


def test_every_schedule_of_torch_is_tried() -> None:
    """A schedule that is new in torch fails here until it is added above."""
    abstract = {"LRScheduler", "_LRScheduler"}
    there_are = {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert there_are - abstract == set(SCHEDULES) - {"SWALR"}


@one_of_each_direction
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_sets_what_the_steps_use(device, case: Case, schedule) -> None:
    """Optimizers rebuilt with the schedule's current rates and decays take the same steps.

    All kinds of weights move in proportion, because all groups have the same ``lr``.
    """
    params, by_hand = parameters(device), parameters(device)
    optimizer, replayed = case.build(params), case.build(by_hand)
    scheduler = SCHEDULES[schedule](optimizer)
    rates = []
    for step in range(6):
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        replayed = rebuilt(case, replayed, **arguments(case, *optimizer.param_groups))
        set_gradients(params, step)
        set_gradients(by_hand, step)
        optimizer.step()
        replayed.step()
        scheduler.step(*([1.0] if schedule == "ReduceLROnPlateau" else []))
    assert all(len(set(of_step)) == 1 for of_step in rates)
    assert len(set(rates)) > 1
    assert_same_bits([p.detach() for p in params], [p.detach() for p in by_hand])


@every_case
@pytest.mark.parametrize("schedule", ["CosineAnnealingLR", "LambdaLR", "SequentialLR"])
def test_a_schedule_moves_a_tensor_learning_rate_in_place(device, case: Case, schedule) -> None:
    params, plain = parameters(device), parameters(device)
    lr = torch.tensor(0.01)
    optimizer, reference = case.build(params, lr=lr), case.build(plain, lr=0.01)
    schedulers = [SCHEDULES[schedule](o) for o in (optimizer, reference)]
    for step in range(4):
        for group in (params, plain):
            set_gradients(group, step)
        for o in (optimizer, reference):
            o.step()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(reference.param_groups[0]["lr"], rel=1e-5)
    torch.testing.assert_close(params, plain, rtol=1e-5, atol=1e-6)


# SOAP does not support capturable, so it cannot unscale gradients in the step.
every_case_and_route = pytest.mark.parametrize(
    ("case", "in_step"),
    [
        pytest.param(case, in_step, id=f"{case.name}-{'step' if in_step else 'scaler'} unscales")
        for in_step in (False, True)
        for case in CASES
        if not (in_step and is_soap(case))
    ],
)


def scaler_for(device: torch.device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3)


def backward(params: list[nn.Parameter], step: int, scale: Callable[[Tensor], Tensor]) -> None:
    """A loss with random gradients that are exact: scaling by a power of two does not round."""
    losses = [
        (p * random_tensor(p.shape, 50 * step + i, device=p.device)).sum() for i, p in enumerate(params)
    ]
    scale(torch.stack(losses).sum()).backward()


def scaling_options(case: Case, device: torch.device) -> dict[str, Any]:
    """Options that leave scaling to the step. torch's AdamW has capturable only for GPUs."""
    return {"fused": True} if case.name == "create-adamw" and device.type == "cpu" else {"capturable": True}


def unscales(optimizer: Optimizer) -> bool:
    """Whether GradScaler leaves scaling to the step."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


@every_case_and_route
def test_a_scaled_loss_gives_the_same_steps(device, case: Case, in_step) -> None:
    options = scaling_options(case, device) if in_step else {}
    params, plain = parameters(device), parameters(device)
    scaled, reference = case.build(params, **options), case.build(plain, **options)
    scaler = scaler_for(device)
    if device.type == "cpu":  # on a GPU the fused engine, if chosen, unscales too
        assert unscales(scaled) == in_step
    for step in range(5):  # the scale doubles after three
        scaled.zero_grad()
        reference.zero_grad()
        backward(params, step, scaler.scale)
        backward(plain, step, lambda loss: loss)
        scale = scaler.get_scale()
        scaler.step(scaled)
        scaler.update()
        reference.step()
        if case.is_own:  # torch's fused kernel unscales in place
            left_in_grad = plain[0].grad * (scale if unscales(scaled) else 1)
            assert_same_bits(params[0].grad, left_in_grad)  # which of the two unscaled them
    assert scaler.get_scale() == 2048
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])


@every_case_and_route
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_step_that_overflowed_has_no_effect(device, case: Case, in_step, bad) -> None:
    options = scaling_options(case, device) if in_step else {}
    params, plain = parameters(device), parameters(device)
    scaled, reference = case.build(params, **options), case.build(plain, **options)
    scaler = scaler_for(device)
    for step in range(4):
        scaled.zero_grad()
        backward(params, step, scaler.scale)
        if step == 2:
            params[3].grad[2] = bad
            before, scale = snapshot(scaled), scaler.get_scale()
            scaler.step(scaled)
            assert_unchanged(scaled, before)
            scaler.update()
            assert scaler.get_scale() == scale / 2
            continue
        scaler.step(scaled)
        scaler.update()
        reference.zero_grad()
        backward(plain, step, lambda loss: loss)
        reference.step()
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])
    assert [s["step"].item() for s in scaled.state.values()] == [3.0] * len(params)
    if case.is_own:
        assert scaled.num_skipped_steps == (1 if unscales(scaled) else 0)


@every_case
def test_gradients_unscaled_by_hand_are_not_unscaled_again(device, case: Case) -> None:
    options = {} if is_soap(case) else scaling_options(case, device)
    params, plain = parameters(device), parameters(device)
    scaled, reference = case.build(params, **options), case.build(plain, **options)
    scaler = scaler_for(device)
    for step in range(steps_to_move(case)):
        scaled.zero_grad()
        reference.zero_grad()
        backward(params, step, scaler.scale)
        scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        backward(plain, step, lambda loss: loss)
        reference.step()
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])
