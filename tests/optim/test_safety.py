"""Nonfinite gradients and clipping: steps are skipped, raise or are taken, and nothing in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import (
    HIDDEN,
    OWN,
    OWN_BUT_SOAP,
    OWN_CASES,
    Case,
    add_group,
    assert_same_bits,
    assert_unchanged,
    is_soap,
    name_of,
    parameters,
    params_of,
    random_tensor,
    set_gradients,
    snapshot,
    take_steps,
)
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from merit_optim import MERIT, SophiaG
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.engines.eager import engine as eager
from merit_optim.optim.engines.gradients import norms
from merit_optim.optim.engines.work import Control, scalar

every_own_case = pytest.mark.parametrize("case", OWN_CASES, ids=name_of)
every_own_class = pytest.mark.parametrize("optimizer_class", OWN, ids=name_of)
# Capturable steps, which SOAP does not support.
every_capturable_class = pytest.mark.parametrize("optimizer_class", OWN_BUT_SOAP, ids=name_of)
every_bad_value = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])


def spoil(params: list[nn.Parameter], bad: float, number: int = 3) -> None:
    """Put one bad value into one gradient."""
    grad = params[number].grad
    grad.view(-1)[-1] = bad


def assert_no_progress(optimizer: SafeOptimizer) -> None:
    """There is no state, or it counts no step."""
    for state in optimizer.state.values():
        assert not any(x.any() for x in state.values())


@every_own_case
@every_bad_value
def test_a_skipped_step_has_no_effect(device, case: Case, bad) -> None:
    params, plain = parameters(device), parameters(device)
    optimizer, reference = case.build(params, nonfinite="skip"), case.build(plain)
    for step in range(5):
        set_gradients(params, step)
        if step in (1, 3):
            spoil(params, bad, number=step)
            before = snapshot(optimizer)
            optimizer.step()
            assert_unchanged(optimizer, before)
            continue
        optimizer.step()
        set_gradients(plain, step)
        reference.step()
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])
    assert_same_bits([s["step"] for s in optimizer.state.values()], [torch.tensor(3.0)] * len(params))
    assert optimizer.num_skipped_steps == 2


@every_own_case
def test_a_first_step_that_is_skipped_leaves_no_trace(device, case: Case) -> None:
    params = parameters(device)
    optimizer = case.build(params, nonfinite="skip")
    set_gradients(params, 0)
    spoil(params, torch.nan)
    optimizer.step()
    assert_same_bits([p.detach() for p in params], [p.detach() for p in parameters(device)])
    assert_no_progress(optimizer)
    assert optimizer.num_skipped_steps == 1


@every_own_case
@every_bad_value
@pytest.mark.parametrize("named", [True, False])
def test_raise_names_the_parameter_and_changes_nothing(device, case: Case, bad, named) -> None:
    params = parameters(device)
    optimizer = case.build(
        [(f"layer.{i}", p) for i, p in enumerate(params)] if named else params, nonfinite="raise"
    )
    # Hidden matrices have a separate group.
    message = "layer.4" if named else f"parameter {4 if case.direction is None else 3} of group 0"
    for step in range(2):  # with fresh state, and with state
        before, weights = snapshot(optimizer), [p.detach().clone() for p in params]
        set_gradients(params, 0)
        spoil(params, bad, number=4)
        with pytest.raises(FloatingPointError, match=rf"gradient of {message} \(shape .*\) has 1 NaN or inf"):
            optimizer.step()
        assert_same_bits([p.detach() for p in params], weights)
        if step:
            assert_unchanged(optimizer, before)
        else:
            assert_no_progress(optimizer)
        take_steps(optimizer, 1, first=step)  # a good step is taken


@every_own_case
def test_a_nan_that_is_propagated_reaches_the_weight(device, case: Case) -> None:
    """But no other parameter."""
    params = parameters(device)
    optimizer = case.build(params)
    take_steps(optimizer, 1)
    set_gradients(params, 1)
    spoil(params, torch.nan)
    optimizer.step()
    assert params[3].detach().view(-1)[-1].isnan()
    assert all(p.isfinite().all() for i, p in enumerate(params) if i != 3)
    set_gradients(params, 2)
    optimizer.step()
    assert params[3].detach().view(-1)[-1].isnan()


@pytest.mark.parametrize("optimizer_class", HIDDEN, ids=name_of)
@pytest.mark.parametrize("num_good", [0, 2, 11])
@every_bad_value
def test_a_bad_gradient_of_one_matrix_reaches_no_other(device, optimizer_class, num_good, bad) -> None:
    """Matrices stacked in one weight are rotated together: at first, later, and when a basis is improved."""
    params = [nn.Parameter(random_tensor((3, 4, 5), 0, device=device)) for _ in range(2)]
    optimizers = [optimizer_class([p], matrix_dims=2) for p in params]
    for step in range(num_good + 3):
        for param in params:
            param.grad = random_tensor((3, 4, 5), 1 + step, device=device)
        if step == num_good:
            params[0].grad[1, 2, 3] = bad
        for optimizer in optimizers:
            optimizer.step()
    spoilt, good = (p.detach() for p in params)
    assert spoilt[1].isnan().all()
    assert_same_bits(spoilt[[0, 2]], good[[0, 2]])


@every_own_case
@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clipping", "not clipping"])
def test_max_grad_norm_equals_clip_grad_norm_before_a_step(device, case: Case, max_norm) -> None:
    params, plain = parameters(device), parameters(device)
    optimizer, reference = case.build(params, max_grad_norm=max_norm), case.build(plain)
    assert optimizer.grad_norm is None
    for step in range(3):
        set_gradients(params, step)
        set_gradients(plain, step)
        grads = [p.grad.clone() for p in params]
        norm = clip_grad_norm_(plain, max_norm)
        optimizer.step()
        reference.step()
        assert_same_bits(optimizer.grad_norm, norm)
        assert optimizer.grad_norm.device == params[0].device
        assert_same_bits([p.grad for p in params], grads)
    assert_same_bits(snapshot(optimizer)[0], snapshot(reference)[0])
    assert_same_bits(snapshot(optimizer)[1]["state"], snapshot(reference)[1]["state"])


@every_own_case
def test_the_gradient_norm_of_a_step_without_gradients_is_zero(device, case: Case) -> None:
    """Not the norm of the previous step."""
    optimizer = case.build(parameters(device), max_grad_norm=1.0)
    take_steps(optimizer, 1)
    assert optimizer.grad_norm > 0
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.grad_norm == 0


LARGE_GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.full((3000, 1000), 0.3),
    "transposed": lambda: torch.full((1000, 3000), 0.3).t(),
    "every second column": lambda: torch.full((3000, 2000), 0.3)[:, ::2],
    "expanded": lambda: torch.tensor(0.3).expand(3000, 1000),
    "expanded rows": lambda: torch.tensor(0.3).expand(2, 1500000),
    "expanded vector": lambda: torch.tensor(0.3).expand(3000000),
    "half precision": lambda: torch.full((3000, 1000), 0.3, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("layout", LARGE_GRADIENTS)
def test_the_norm_of_a_large_gradient_is_not_far_off(device, layout) -> None:
    """On CPUs torch adds squares sequentially and loses digits, most if all elements are equal."""
    grad = LARGE_GRADIENTS[layout]().to(device)
    (norm,) = norms([grad], 2.0)
    assert norm.item() == pytest.approx(3000000**0.5 * grad.flatten()[0].item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_norm_of_half_precision_gradients_does_not_overflow(device, dtype) -> None:
    param = nn.Parameter(torch.ones(64, 64, dtype=dtype, device=device))
    optimizer = MERIT([param], max_grad_norm=1.0)
    param.grad = torch.full_like(param, 2000)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(2000 * 64)  # beyond float16
    moment = optimizer.state[param]["exp_avg"]
    torch.testing.assert_close(moment, torch.full_like(moment, 0.1 / 64), rtol=1e-5, atol=0)


@every_capturable_class
def test_scaled_clipped_and_checked_gradients_go_together(device, optimizer_class) -> None:
    """With the attributes that GradScaler sets on an optimizer during a step."""
    options: dict[str, Any] = {"max_grad_norm": 0.5, "nonfinite": "skip", "capturable": True}
    params, plain = parameters(device), parameters(device)
    optimizer, reference = optimizer_class(params, **options), optimizer_class(plain, **options)
    for step in range(5):
        set_gradients(params, step)
        for param in params:
            param.grad.mul_(8.0)
        overflow, bad = step in (1, 3), step in (2, 3)
        if bad:
            spoil(params, torch.inf)
        optimizer.grad_scale = torch.tensor(8.0, device=device)
        optimizer.found_inf = torch.tensor(float(overflow), device=device)
        before = snapshot(optimizer)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        if overflow or bad:
            assert_unchanged(optimizer, before)
            continue
        set_gradients(plain, step)
        reference.step()
        assert_same_bits(optimizer.grad_norm, reference.grad_norm)  # the norm of the unscaled gradients
    assert_same_bits(snapshot(optimizer), snapshot(reference))
    assert optimizer.num_skipped_steps == 3  # each step once, whatever the reasons
    assert reference.num_skipped_steps == 0


def test_bad_gradients_of_the_curvature_are_skipped_or_raised_on(device) -> None:
    params = parameters(device)
    optimizer = SophiaG([("first", params[0])], nonfinite="skip")
    take_steps(optimizer, 1)
    before = snapshot(optimizer)
    params[0].grad = torch.full_like(params[0], torch.nan)
    optimizer.update_hessian(num_labels=4)
    assert_unchanged(optimizer, before)
    optimizer.param_groups[0]["nonfinite"] = "raise"
    with pytest.raises(FloatingPointError, match="first"):
        optimizer.update_hessian(num_labels=4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@every_capturable_class
@pytest.mark.parametrize("bad", [None, torch.nan])
def test_a_checked_and_clipped_step_never_waits_for_the_gpu(optimizer_class, bad) -> None:
    params = parameters("cuda")
    optimizer = optimizer_class(params, nonfinite="skip", max_grad_norm=1.0, capturable=True)
    take_steps(optimizer, 2)
    set_gradients(params, 2)
    if bad is not None:
        spoil(params, bad)
    optimizer.grad_scale = torch.ones((), device="cuda")
    optimizer.found_inf = torch.zeros((), device="cuda")
    before = snapshot(optimizer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.num_skipped_steps == (0 if bad is None else 1)
    if bad is not None:
        assert_unchanged(optimizer, before)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_large_gradient_in_float64_is_finite(nonfinite) -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = MERIT([param], nonfinite=nonfinite)
    param.grad = torch.full((2,), 1e39, dtype=torch.float64)
    optimizer.step()
    assert optimizer.num_skipped_steps == 0


@every_own_class
def test_a_group_added_after_loading_has_the_loaded_options(optimizer_class) -> None:
    saved = optimizer_class(parameters("cpu"), max_grad_norm=2.0, nonfinite="skip").state_dict()
    optimizer = optimizer_class(parameters("cpu"))
    optimizer.load_state_dict(saved)
    num_groups = len(optimizer.param_groups)
    add_group(optimizer, {"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == num_groups + 1
    assert {group["max_grad_norm"] for group in optimizer.param_groups} == {2.0}
    assert {group["nonfinite"] for group in optimizer.param_groups} == {"skip"}


@every_own_class
def test_a_misspelt_option_of_a_group_is_refused_and_an_unrelated_key_is_not(optimizer_class) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"'weight_decays'.*did you mean 'weight_decay'"):
        optimizer_class([{"params": [param], "weight_decays": 0.1}])
    optimizer = optimizer_class([{"params": [param], "name": "head", "lr_scale": 0.1, "initial_lr": 1.0}])
    assert optimizer.param_groups[0]["name"] == "head"


@pytest.mark.parametrize("optimizer_class", [MERIT, *HIDDEN], ids=name_of)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_eager_engine_skips_where_the_device_says_so(
    optimizer_class, foreach, skips, state_dtype
) -> None:
    """On a CPU the host usually decides, so that the engine gets no skip flag."""
    if state_dtype == torch.bfloat16 and is_soap(optimizer_class):
        state_dtype = torch.float32  # bfloat16 is refused
    options = {"foreach": foreach, "state_dtype": state_dtype}
    controlled, plain = (optimizer_class(parameters("cpu"), **options) for _ in range(2))
    for optimizer in (controlled, plain):
        take_steps(optimizer, 2)
        set_gradients(params_of(optimizer), 2)
    before = snapshot(controlled)
    with torch.no_grad():
        for optimizer, skip in ((controlled, torch.tensor(skips)), (plain, None)):
            for part in eager.parts_of(optimizer._gather(), {torch.device("cpu"): Control(skip=skip)}):
                part.advance()
                part.apply(None)
    if skips:
        assert_unchanged(controlled, before)
    else:
        assert_same_bits(snapshot(controlled), snapshot(plain))


def test_a_copy_to_the_host_is_waited_for(monkeypatch) -> None:
    """Of an asynchronous one, the host would read a learning rate, norm or flag before it has arrived."""
    to = Tensor.to
    targets = []

    def watched(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if "non_blocking" in options:
            targets.append(args[0])
            assert not options["non_blocking"]
        return to(x, *args, **options)

    monkeypatch.setattr(Tensor, "to", watched)
    params = parameters("cpu")
    set_gradients(params, 0)
    MERIT(params, max_grad_norm=1.0, nonfinite="skip").step()
    scalar(torch.tensor(0.1, requires_grad=True), params[0].device)
    assert len(targets) > 2
    assert set(targets) == {torch.device("cpu")}
