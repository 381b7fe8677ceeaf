"""Adam's and Muon's directions with all ratios against float64 NumPy (reference.py).

float64 weights with ``ns_dtype="float32"`` are computed in float64 throughout, so they equal the reference up
to the order of sums. float32 weights and half-precision products have tolerances.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_cases import random_tensor
from reference import UNSCALED, Rule, Weight
from reference_cases import (
    LR,
    OF_ADAM,
    OF_MUON,
    RULES,
    SHAPES,
    VECTORS,
    Options,
    assert_near,
    built,
    check_float64,
    every_shape,
    gradients,
    not_contiguous,
    start,
    twin,
)
from torch import Tensor

from merit_optim import LAMB, MERIT, SOAP, MaxLAMB, Muon, MuonMERIT, NorMuon, OrScale

WITH_SHAPES = [*(("muon", shape) for shape in SHAPES), *(("adam", shape) for shape in SHAPES | VECTORS)]


# Some shapes of each test are tried by default, and of each all rules or variants.
@pytest.mark.parametrize(("direction", "shape"), WITH_SHAPES)
def test_every_scaling(device, direction, shape) -> None:
    for rule in RULES.values():
        check_float64(device, direction, shape, rule, 7)


@pytest.mark.parametrize(
    "shape",
    ["square", "tall", "wide", "one row", "one column", "convolution", "stacked", "split in sizes"],
)
def test_muon_with_every_option(device, shape) -> None:
    for variant in OF_MUON.values():
        check_float64(device, "muon", shape, variant, 5)


NOT_SPLIT = [name for name, (_, view) in SHAPES.items() if "split" not in view]


@pytest.mark.parametrize(
    ("direction", "shape"),
    [(direction, shape) for direction in ("adam", "muon") for shape in NOT_SPLIT]
    + [("adam", shape) for shape in VECTORS],
)
def test_a_ratio_relative_to_the_first_step(device, direction, shape) -> None:
    for rule in ({"norm": "l2", "clip": None}, {"norm": "max"}, {"norm": "l2", "ratio_bounds": (0.9, 1.1)}):
        options = {"calibrated": True, "element_wise": False, **rule}
        check_float64(device, direction, shape, options, 4)


@every_shape
def test_adam_with_every_option(device, shape) -> None:
    for variant in OF_ADAM.values():
        check_float64(device, "adam", shape, variant, 5)


@pytest.mark.parametrize("direction", ["adam", "muon"])
@pytest.mark.parametrize("engine", ["foreach", "differentiable"])
@every_shape
def test_the_other_engines(device, direction, engine, shape) -> None:
    for rule in ("merit", "bounded ratio a matrix", "clipped gradients"):
        check_float64(device, direction, shape, {**RULES[rule], engine: True, "maximize": True}, 3)


def test_hundreds_of_steps(device) -> None:
    """float64 weights drift from the reference only by rounding."""
    for coefficients in reference.PASSES:
        check_float64(device, "muon", "tall", {"ns_coefficients": coefficients}, 200)
    check_float64(device, "muon", "square", {"neuron_beta": 0.95}, 200)
    check_float64(device, "adam", "tall", {}, 300)


@given(st.data())
def test_options_together(data) -> None:
    """Any shape with any combination of options."""
    seen = {name: view for name, (_, view) in SHAPES.items()}
    shape = data.draw(st.sampled_from(list(SHAPES)))
    options: Options = {
        "momentum": data.draw(st.sampled_from([0.0, 0.5, 0.95])),
        "nesterov": data.draw(st.booleans()),
        "ns_steps": data.draw(st.integers(1, 6)),
        "ns_coefficients": data.draw(st.sampled_from([*reference.PASSES, (2.0, -1.5, 0.5)])),
        "scale": data.draw(st.sampled_from(["rms", "match_rms_adamw", "original", "spectral"])),
        "clip": data.draw(st.sampled_from([None, 0.3, 1.0])),
        "element_wise": data.draw(st.booleans()),
        "weight_bound": data.draw(st.booleans()),
        "norm": data.draw(st.sampled_from(["max", "l2", "none"])),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        "maximize": data.draw(st.booleans()),
        "max_grad_norm": data.draw(st.sampled_from([None, 0.1, 10.0])),
    }
    if options["norm"] != "none":
        options["ratio_bounds"] = data.draw(st.sampled_from([None, (0.1, 1.0), (0.5, 2.0)]))
        if not options["element_wise"] and "split" not in seen[shape]:
            options["calibrated"] = data.draw(st.booleans())
    if seen[shape].get("split_dim") != 1:
        options["neuron_beta"] = data.draw(st.sampled_from([None, 0.0, 0.9]))
    check_float64(torch.device("cpu"), "muon", shape, options, 4)


# --- the public classes, with their defaults --------------------------------------------------------------

MUON_MERIT = partial(reference.Muon, momentum=0.9, neuron_beta=0.95), Rule(ratio_bounds=(0.0, 0.1))
ORSCALE = Rule(norm="l2", element_wise=False, clip=None, ratio_bounds=(0.1, 5.0), calibrated=True)


def test_muon_merit_on_a_group_of_each_kind(device) -> None:
    """Hidden matrices, and AdamW at 0.4 of the learning rate for the rest."""
    hidden, vector, table, scalar = (start(s) for s in ((6, 4), (5,), (7, 3), ()))
    params = [x.clone().to(device) for x in (hidden, vector, table, scalar)]
    optimizer = MuonMERIT(
        [
            {"params": params[:1], "direction": "muon"},
            {"params": params[1:], "direction": "adam", "weight_decay": 0.3},
        ],
        ns_dtype="float32",
        max_grad_norm=1.0,
    )
    expected = [Weight(hidden.numpy(), *MUON_MERIT, lr=1e-2, weight_decay=0.1)] + [
        Weight(x.numpy(), reference.adamw, UNSCALED, lr=0.4 * 1e-2, weight_decay=0.3)
        for x in (vector, table, scalar)
    ]
    check_together(params, optimizer, expected, max_norm=1.0)


def test_muon_merit_with_merit_for_the_rest(device) -> None:
    hidden, vector, table = (start(s) for s in ((6, 4), (5,), (7, 5)))
    params = [x.clone().to(device) for x in (hidden, vector, table)]
    rule = {"norm": "max", "element_wise": True, "weight_bound": True, "clip": 0.8}
    merit = {"ratio": "merit", **rule}
    optimizer = MuonMERIT(
        [{"params": params[:1], "kind": "hidden"}, {"params": params[1:], "kind": "embedding"}],
        ns_dtype="float32",
        kinds={"embedding": {**merit, "betas": (0.8, 0.99), "rate_scale": 3.0}},
    )
    expected = [Weight(hidden.numpy(), *MUON_MERIT, lr=1e-2, weight_decay=0.1)] + [
        Weight(
            x.numpy(),
            lambda: reference.Adam((0.8, 0.99), 1e-8, True),
            Rule(**rule),
            lr=0.03,
            weight_decay=0.1,
        )
        for x in (vector, table)
    ]
    check_together(params, optimizer, expected)


@pytest.mark.parametrize(
    ("optimizer_class", "direction", "rule", "rest_betas"),
    [
        (Muon, lambda: reference.Muon(scale="match_rms_adamw"), UNSCALED, (0.9, 0.95)),
        (NorMuon, lambda: reference.Muon(scale="match_rms_adamw", neuron_beta=0.95), UNSCALED, (0.9, 0.95)),
        (OrScale, lambda: reference.Muon(scale="match_rms_adamw"), ORSCALE, (0.9, 0.95)),
        (SOAP, reference.Soap, UNSCALED, (0.95, 0.95)),
    ],
)
def test_the_other_classes_with_their_defaults(device, optimizer_class, direction, rule, rest_betas) -> None:
    hidden, vector = random_tensor((6, 6), 1, dtype=torch.float64), start((5,))
    params = [x.clone().to(device) for x in (hidden, vector)]
    is_soap = optimizer_class is SOAP
    optimizer = optimizer_class(
        [
            {"params": params[:1], "direction": "soap" if is_soap else "muon"},
            {"params": params[1:], "direction": "adam"},
        ],
        lr=0.02,
        weight_decay=0.2,
        **({} if is_soap else {"ns_dtype": "float32"}),
    )
    expected = [
        Weight(hidden.numpy(), direction, rule, lr=0.02, weight_decay=0.2),
        Weight(
            vector.numpy(),
            lambda: reference.Adam(rest_betas, 1e-8, True),
            UNSCALED,
            lr=0.02,
            weight_decay=0.2,
        ),
    ]
    check_together(params, optimizer, expected)


MERIT_ADAM = partial(reference.Adam, betas=(0.9, 0.95), eps=1e-6)
LAMB_ADAM = partial(reference.Adam, betas=(0.9, 0.999), eps=1e-6, bias_correction=True)
OF_WEIGHTS = Rule(clip=None, element_wise=False)


@pytest.mark.parametrize(
    ("optimizer_class", "direction", "rule", "lr", "weight_decay"),
    [
        (MERIT, MERIT_ADAM, Rule(), 9e-3, 0.1),
        (MaxLAMB, MERIT_ADAM, OF_WEIGHTS, 1e-2, 0.1),
        (LAMB, LAMB_ADAM, replace(OF_WEIGHTS, norm="l2"), 1e-3, 0.01),
    ],
)
def test_the_classes_for_all_weights_with_their_defaults(
    device, optimizer_class, direction, rule, lr, weight_decay
) -> None:
    starts = [start(shape) for shape in ((13, 7), (5,), ())]
    params = [x.clone().to(device) for x in starts]
    expected = [Weight(x.numpy(), direction, rule, lr=lr, weight_decay=weight_decay) for x in starts]
    check_together(params, optimizer_class(params), expected)


def check_together(
    params: list[Tensor],
    optimizer: torch.optim.Optimizer,
    expected: list[Weight],
    max_norm: float | None = None,
) -> None:
    for step in range(15):
        grads = [random_tensor(p.shape, 100 * step + i, dtype=torch.float64) for i, p in enumerate(params)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(param.device)
        optimizer.step()
        scale = reference.gradient_scale([g.numpy() for g in grads], max_norm)
        for param, grad, weight in zip(params, grads, expected, strict=True):
            weight.step(grad.numpy(), scale)
            assert_near(param, weight.w)


# --- layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["adam", "muon"])
@pytest.mark.parametrize("shape", [(6, 5), (5, 3, 2, 2)], ids=str)
def test_a_weight_that_is_not_contiguous(device, direction, shape) -> None:
    """A matrix stored by columns, a convolution with channels last."""
    weight = not_contiguous(start(shape)).to(device)
    param, optimizer = built(weight, direction, {})
    assert not param.is_contiguous()
    expected = twin(weight, direction, {})
    for grad in gradients(shape, 7):
        param.grad = torch.empty_like(param).copy_(grad)
        optimizer.step()
        expected.step(grad.numpy())
        assert_near(param, expected.w)


# --- lower precision --------------------------------------------------------------------------------------

FLOAT32_ATOL = LR * 3e-5


@pytest.mark.parametrize(("direction", "shape"), WITH_SHAPES)
@pytest.mark.parametrize("rule", ["merit", "l2", "no ratio"])
def test_every_float32_step_is_within_rounding(device, direction, shape, rule) -> None:
    """The reference starts each step from the optimizer's weight and state: only rounding differs.

    A change is lr * (s*u). Newton-Schulz multiplies rounding errors of the smallest singular values by up to
    3.4**5 = 480, and 480 * 6e-8 = 3e-5 of d's elements, whose size is about 1.
    """
    dimensions, view = (SHAPES | VECTORS)[shape]
    options = view | RULES[rule]
    param, optimizer = built(start(dimensions, torch.float32).to(device), direction, options)
    expected = twin(param, direction, options)
    for grad in gradients(dimensions, 7, torch.float32):
        param.grad = grad.to(device)
        optimizer.step()
        expected.step(grad.double().numpy())
        assert_near(param, expected.w, rtol=1e-6, atol=FLOAT32_ATOL)
        for key in expected.directions[0].state:
            assert_near(optimizer.state[param][key], expected.state(key), 1e-6, 1e-8)
        take_over(expected, param, optimizer.state[param])


def take_over(expected: Weight, param: Tensor, state: dict[str, Tensor]) -> None:
    """Copy the optimizer's weight and state into the reference."""
    expected.w = param.detach().cpu().double().numpy().copy()
    for key, attribute in {"momentum_buffer": "average", "exp_avg": "m", "exp_avg_sq": "v"}.items():
        if key in state:
            stored = state[key].cpu().double().numpy().copy()
            for direction, part in zip(expected.directions, expected.cut(stored), strict=True):
                setattr(direction, attribute, part)


@pytest.mark.parametrize("direction", ["adam", "muon"])
def test_the_update_is_computed_from_the_state_as_stored_in_bfloat16(device, direction) -> None:
    """m, v and M are rounded before they are used, so that a loaded checkpoint continues exactly."""

    def rounded(x: Any) -> Any:
        return torch.from_numpy(x).bfloat16().double().numpy()

    weight = start((6, 5), torch.float32)
    options = {"state_dtype": torch.bfloat16}
    param, optimizer = built(weight.to(device), direction, options)
    expected = twin(weight, direction, {}, stored=rounded)
    for grad in gradients((6, 5), 12, torch.float32):
        param.grad = grad.to(device)
        optimizer.step()
        expected.step(grad.double().numpy())
        assert_near(param, expected.w, rtol=1e-5, atol=1e-5)
    for key, value in expected.directions[0].state.items():
        stored = optimizer.state[param][key]
        assert stored.dtype == torch.bfloat16
        assert_near(stored, value, rtol=1e-2)  # one bf16 step where float32 rounds to the other neighbour


# |d - exact d| / |d| in the Frobenius norm: twice the largest that was measured. The second number is that of
# polar-express for a single row or column, whose only singular value is 1: there its first pass has a slope
# of 17, which multiplies the rounding error of that value.
HALF_PRECISION = {"bfloat16": (0.06, 0.3), "float16": (0.006, 0.06)}
LEAST = {"bfloat16": 1e-3, "float16": 1e-4}  # float32's is 3e-5 at most: the products are in half precision


@pytest.mark.parametrize("ns_dtype", HALF_PRECISION)
@pytest.mark.parametrize("coefficients", reference.PASSES)
@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (32, 96), (1, 40), (40, 1), (64, 65)], ids=str)
def test_half_precision_products_are_near_the_exact_ones(device, ns_dtype, coefficients, shape) -> None:
    """d after five passes with rounded products, against float64."""
    param = torch.zeros(shape, device=device)
    group = {"params": [param], "direction": "muon"}
    options = {"ns_coefficients": coefficients, "ns_dtype": ns_dtype, "ratio": "none", "clip": None}
    optimizer = MuonMERIT([group], lr=1.0, weight_decay=0.0, neuron_beta=None, **options)
    direction = reference.Muon(momentum=0.9, ns_coefficients=coefficients)
    for step in range(4):
        grad = random_tensor(shape, step)
        before = param.clone()
        param.grad = grad.to(device)
        optimizer.step()
        exact = direction(grad.double().numpy())
        d = (before - param).cpu().double().numpy()
        error = np.linalg.norm(d - exact) / np.linalg.norm(exact)
        assert (
            LEAST[ns_dtype]
            < error
            < HALF_PRECISION[ns_dtype][coefficients == "polar-express" and min(shape) == 1]
        )
