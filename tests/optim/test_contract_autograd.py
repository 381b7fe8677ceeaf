"""Compiled steps, which must not recompile, and differentiable steps."""

from typing import Any

import pytest
import torch
from optimizer_cases import HIDDEN, NEED_A_START, OWN, OWN_BUT_SOAP, is_soap, name_of, random_tensor
from torch import Tensor, nn

from merit_optim import MERIT

every_own_class_but_soap = pytest.mark.parametrize("optimizer_class", OWN_BUT_SOAP, ids=name_of)
# torch's compiler imports a deprecated part of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def do_not_fuse(optimizer: Any) -> None:
    """On a GPU, for comparisons with the definition: the kernels round Muon's products otherwise."""
    for group in optimizer.param_groups:
        group["fused"] = False


def trained(
    optimizer_class: type, device: torch.device, backend: str | None, **options: Any
) -> tuple[list[Tensor], Any]:
    """Weights after five steps with a changing learning rate, compiled or not."""
    shapes = [(6, 5), (7,), (3, 2, 2)]
    params = [nn.Parameter(random_tensor(s, i, device=device)) for i, s in enumerate(shapes)]
    lr = torch.tensor(0.01, device=device)
    optimizer = optimizer_class(params, lr=lr, **options)
    do_not_fuse(optimizer)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
    for number in range(5):
        for i, param in enumerate(params):
            param.grad = random_tensor(param.shape, 10 * number + i, device=device)
        lr.fill_(0.01 / (1 + number))
        # The first call creates the state, the second uses it; later calls must not recompile.
        with torch._dynamo.config.patch(error_on_recompile=number >= 2):
            step()
    # One graph: no graph break except torch's at the beginning of a step.
    breaks = torch._dynamo.utils.counters["graph_break"]
    others = [why for why in breaks if "torch._dynamo.graph_break()" not in why]
    if backend is not None and is_soap(optimizer_class):  # it counts its steps on the host
        (why,) = others
        assert "_take_step_uncompiled" in why
    else:
        assert others == []
    return [p.detach() for p in params], optimizer


ONE_OF_EACH_DIRECTION = {cls.direction: cls for cls in reversed(HIDDEN)}.values()

SKIPPING = {"max_grad_norm": 1.0, "nonfinite": "skip"}
COMPILED: list[tuple[Any, str, dict[str, Any]]] = [
    (MERIT, "inductor", {}),
    (MERIT, "aot_eager", {**SKIPPING, "bias_correction": True}),
    # Clipping and skipping come before the direction, so these classes are enough.
    *((cls, "aot_eager", SKIPPING) for cls in ONE_OF_EACH_DIRECTION),
]
COMPILED_SLOWLY = [pytest.param(cls, "aot_eager", {}, marks=pytest.mark.slow) for cls in OWN]


@pytest.mark.parametrize(
    ("optimizer_class", "backend", "options"), [*COMPILED, *COMPILED_SLOWLY], ids=name_of
)
def test_a_compiled_step_matches_and_never_recompiles_for_a_learning_rate(
    device, optimizer_class, backend, options
) -> None:
    compiled, optimizer = trained(optimizer_class, device, backend, **options)
    plain, reference = trained(optimizer_class, device, None, **options)
    # Compiled, the bias correction is computed in float32, because the step count is a tensor.
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    for state, expected in zip(optimizer.state.values(), reference.state.values(), strict=True):
        # The compiler keeps the step count on the device.
        torch.testing.assert_close(dict(state), dict(expected), rtol=1e-5, atol=1e-6, check_device=False)


def test_a_compiled_step_can_be_skipped_and_leaves_its_norm(device) -> None:
    param = nn.Parameter(random_tensor((4, 3), 0, device=device))
    optimizer = MERIT([param], nonfinite="skip", max_grad_norm=1.0)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="aot_eager")
    for number in range(4):
        param.grad = random_tensor((4, 3), number, device=device)
        before = param.detach().clone()
        if number % 2:
            param.grad[0, 0] = torch.nan
        step()
        assert torch.equal(param.detach(), before) == bool(number % 2)
        torch.testing.assert_close(optimizer.grad_norm, param.grad.norm(), equal_nan=True)
    assert optimizer.state[param]["step"].item() == 2
    assert optimizer.num_skipped_steps == 2


def in_float64(optimizer_class: Any) -> dict[str, Any]:
    """Options that make Newton-Schulz keep the dtype of float64 weights."""
    return {"ns_dtype": "float32"} if getattr(optimizer_class, "direction", None) == "muon" else {}


def differentiable_step(
    optimizer_class: type, weight: Tensor, grad: Tensor, state: list[Tensor], lr: Any, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """A step as a function of all of its inputs."""
    param = weight.clone()  # not a leaf, so that autograd can record the in-place update
    param.grad = grad
    optimizer = optimizer_class([param], lr=lr, differentiable=True, **options)
    keys = optimizer._state_keys(optimizer.param_groups[0])
    kept = {key: x.clone() for key, x in zip(keys, state, strict=True)}
    optimizer.state[param] = {"step": torch.tensor(2.0), **kept}
    optimizer.step()
    return param, *kept.values()


DIFFERENTIATED: list[tuple[Any, dict[str, Any]]] = [
    *((cls, in_float64(cls)) for cls in OWN_BUT_SOAP),
    (MERIT, {"norm": "l2", "bias_correction": True, "clip": None}),
    (MERIT, {"max_grad_norm": 0.5}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), DIFFERENTIATED, ids=name_of)
@pytest.mark.parametrize("shape", [(3, 4), (5,)], ids=["matrix", "vector"])
def test_autograd_differentiates_through_a_step(device, optimizer_class, options, shape) -> None:
    """With respect to the weight, its gradient, its state and the learning rate."""

    def values(seed: int, shape: tuple[int, ...] = shape) -> Tensor:
        return random_tensor(shape, seed, dtype=torch.float64, device=device)

    optimizer = optimizer_class([values(0)], **options)
    (param,), group = optimizer.param_groups[0]["params"], optimizer.param_groups[0]
    first, *others = optimizer._state_shapes(param, group).values()
    inputs = [values(0), values(1), values(2, first)]
    inputs += [values(3 + i, other).abs() + 0.1 for i, other in enumerate(others)]
    inputs.append(torch.tensor(0.1, dtype=torch.float64, device=device))
    for x in inputs:
        x.requires_grad_()

    def function(weight: Tensor, grad: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *state, lr = rest
        return differentiable_step(optimizer_class, weight, grad, state, lr, options)

    assert torch.autograd.gradcheck(function, inputs, eps=1e-7, atol=1e-5, rtol=1e-4)


@every_own_class_but_soap
def test_a_differentiable_step_takes_the_ordinary_step(device, optimizer_class) -> None:
    weights = []
    for differentiable in (False, True):
        weight = random_tensor((4, 5), 0, device=device).requires_grad_()
        weight = weight.clone() if differentiable else weight
        optimizer = optimizer_class([weight], lr=0.1, differentiable=differentiable)
        do_not_fuse(optimizer)
        for number in range(3):
            weight.grad = random_tensor((4, 5), 1 + number, device=device)
            optimizer.step()
        weights.append(weight.detach())
        assert (weight.grad_fn is not None) == differentiable
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


@every_own_class_but_soap
def test_a_differentiable_step_of_a_weight_of_zeros_has_finite_derivatives(device, optimizer_class) -> None:
    """As of a bias that begins at zero: its Euclidean norm has no derivative there."""
    if optimizer_class in NEED_A_START:
        return  # refused
    start = torch.zeros(4, 5, device=device, requires_grad=True)
    weight = start.clone()
    optimizer = optimizer_class([weight], lr=0.1, differentiable=True)
    weight.grad = random_tensor((4, 5), 1, device=device)
    optimizer.step()
    (slope,) = torch.autograd.grad(weight.square().sum(), start)
    assert slope.isfinite().all()
