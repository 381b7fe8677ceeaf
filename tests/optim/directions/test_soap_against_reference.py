"""SOAP's direction against float64 NumPy, and against its authors' update."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import reference
import torch
from optimizer_cases import random_tensor
from reference import UNSCALED, Weight
from reference_cases import LR, OF_SOAP, RULES, Options, assert_near, built, not_contiguous, twin
from torch import Tensor

from merit_optim import SOAP
from merit_optim.optim.matrices import matrices_of

# Improved only when the averages have full rank: the eigenvectors of a null space are arbitrary.
SOAP_SHAPES: dict[str, tuple[tuple[int, ...], Options]] = {
    "square": ((5, 5), {"precondition_frequency": 1}),
    "square, seldom": ((6, 6), {"precondition_frequency": 4}),
    "tall": ((9, 4), {"precondition_frequency": 3}),
    "wide": ((4, 9), {"precondition_frequency": 5}),
    "one row": ((1, 4), {"precondition_frequency": 5}),
    "one column": ((4, 1), {"precondition_frequency": 5}),
    "one element": ((1, 1), {"precondition_frequency": 2}),
    "convolution": ((5, 3, 2, 1), {"precondition_frequency": 3}),
    "stacked": ((3, 4, 5), {"precondition_frequency": 2, "matrix_dims": 2}),
    "long rows": ((4, 9), {"precondition_frequency": 2, "max_precond_dim": 8}),
    "long columns": ((9, 4), {"precondition_frequency": 2, "max_precond_dim": 4}),
    "both long": ((5, 6), {"precondition_frequency": 2, "max_precond_dim": 3}),
}


def soap_gradients(shape: tuple[int, ...], num: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    """Random, of nearly constant size, so that eigenvalues stay distinct and away from zero."""
    for step in range(num):
        yield random_tensor(shape, 100 + step, scale=1 + step % 3, dtype=dtype)


def adopt_first_bases(expected: Weight, state: dict[str, Tensor]) -> None:
    """Start the reference with the optimizer's eigenvectors, which it checks."""
    for i, direction in enumerate(expected.directions):
        bases = [state[key][i].cpu().double().numpy().copy() for key in ("row_basis", "column_basis")]
        direction.first_bases = [basis if basis.size else None for basis in bases]


def check_soap(
    device: torch.device, shape: str, options: Options, num_steps: int = 14, *, contiguous: bool = True
) -> None:
    """Each step, and the state, equals the reference's."""
    dimensions, shape_options = SOAP_SHAPES[shape]
    options = shape_options | options
    weight = random_tensor(dimensions, 1, scale=0.5, dtype=torch.float64)
    weight = weight if contiguous else not_contiguous(weight)
    param, optimizer = built(weight.to(device), "soap", options)
    assert param.is_contiguous() == contiguous
    expected = twin(weight, "soap", options)
    for step, grad in enumerate(soap_gradients(dimensions, num_steps)):
        param.grad = torch.empty_like(param).copy_(grad)
        optimizer.step()
        if step == 0:
            adopt_first_bases(expected, optimizer.state[param])
        g = grad.numpy()
        expected.step(g, reference.gradient_scale([g], options.get("max_grad_norm")))
        assert_near(param, expected.w)
    state = optimizer.state[param]
    assert_near(state["exp_avg"].abs(), expected.state("exp_avg"), rtol=1e-7)
    assert_near(state["exp_avg_sq"], expected.state("exp_avg_sq"), rtol=1e-7)
    for i, direction in enumerate(expected.directions):
        for average, key in zip(direction.averages, ("row_average", "column_average"), strict=True):
            if state[key].numel():
                assert_near(state[key][i], average)


@pytest.mark.parametrize("shape", SOAP_SHAPES)
def test_soap_with_every_view(device, shape) -> None:
    for rule in ("merit", "l2", "no ratio", "clipped gradients", "maximize"):
        check_soap(device, shape, RULES[rule])


def test_soap_with_every_option(device) -> None:
    for shape, variant in itertools.product(SOAP_SHAPES, OF_SOAP.values()):
        check_soap(device, shape, variant)


def has_full_rank(shape: str, phase: int) -> bool:
    """Whether the averages have full rank when they are first used to improve the bases."""
    dimensions, options = SOAP_SHAPES[shape]
    _, *sides = matrices_of(dimensions, options.get("matrix_dims")).shape
    num_gradients = 1 + (phase or options["precondition_frequency"])
    return num_gradients * min(sides) >= max(sides)


@pytest.mark.parametrize(
    ("shape", "phase"),
    [
        (shape, phase)
        for shape, (_, options) in SOAP_SHAPES.items()
        for phase in range(options["precondition_frequency"])
        if has_full_rank(shape, phase)
    ],
)
def test_soap_with_every_phase(device, shape, phase) -> None:
    check_soap(device, shape, {"refresh_phase": phase})


# In the order of the group; with three phases, the most expensive matrices get a phase each.
TURNS = [((4, 4), 1), ((6, 6), 0), ((5, 5), 1), ((3, 3), 2), ((5, 5), 2)]


@pytest.mark.parametrize("refresh_phase", [None, 0, 2])
def test_soap_of_matrices_that_take_turns(device, refresh_phase) -> None:
    """Each is improved in its step of the cycle, or all in a fixed one."""
    weights = [random_tensor(shape, i, dtype=torch.float64) for i, (shape, _) in enumerate(TURNS)]
    params = [weight.clone().to(device) for weight in weights]
    group = {"params": params, "direction": "soap"}
    options = {"precondition_frequency": 3, "refresh_phase": refresh_phase}
    optimizer = SOAP([group], lr=LR, weight_decay=0.1, **options)
    phases = [phase if refresh_phase is None else refresh_phase for _, phase in TURNS]
    expected = [
        Weight(
            weight.numpy(),
            lambda phase=phase: reference.Soap(precondition_frequency=3, refresh_phase=phase),
            UNSCALED,
            lr=LR,
            weight_decay=0.1,
        )
        for weight, phase in zip(weights, phases, strict=True)
    ]
    for step in range(12):
        for i, (param, twin_) in enumerate(zip(params, expected, strict=True)):
            grad = random_tensor(param.shape, 100 * step + i, dtype=torch.float64)
            param.grad = grad.to(device)
            twin_.step(grad.numpy())
        optimizer.step()
        for param, twin_ in zip(params, expected, strict=True):
            assert_near(param, twin_.w)


@pytest.mark.parametrize("shape", ["tall", "convolution"])
def test_soap_of_a_weight_that_is_not_contiguous(device, shape) -> None:
    check_soap(device, shape, {}, contiguous=False)


def of_authors(w: Any, grads: list[Any], weight_decay: float) -> Any:
    """The weight as their code updates it: bias correction in the step size, decay after the step.

    w <- w - lr * sqrt(1 - b2**t) / (1 - b1**t) * d        d from uncorrected moments
    w <- w - lr * weight_decay * w
    """
    direction = reference.Soap(bias_correction=False, precondition_frequency=3)
    for step, g in enumerate(grads):
        d = direction(g)
        if d is not None:
            w = w - LR * np.sqrt(1 - 0.95**step) / (1 - 0.95**step) * d
            w = w - LR * weight_decay * w
    return w


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_soap_equals_its_authors_update(device, weight_decay) -> None:
    """To the last digits without decay. With it ours is w - lr*(d + wd*w), lr**2 * wd * d more per step."""
    weight = random_tensor((5, 5), 1, dtype=torch.float64)
    param, grads = weight.clone().to(device), list(soap_gradients((5, 5), 10))
    group = {"params": [param], "direction": "soap", "precondition_frequency": 3}
    optimizer = SOAP([group], lr=LR, weight_decay=weight_decay)
    for grad in grads:
        param.grad = grad.to(device)
        optimizer.step()
    theirs = of_authors(weight.numpy(), [grad.numpy() for grad in grads], weight_decay)
    difference = np.abs(param.cpu().numpy() - theirs).max()
    if weight_decay:
        assert 0.1 * LR**2 * weight_decay < difference < 10 * LR**2 * weight_decay
    else:
        assert difference < 1e-12
