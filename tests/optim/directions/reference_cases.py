"""Shared by the comparisons with reference.py: shapes, options, an optimizer and its NumPy reference."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference
import torch
from optimizer_cases import random_tensor
from reference import Rule, Weight
from torch import Tensor

from merit_optim import MERIT, SOAPMERIT, MuonMERIT

Options = dict[str, Any]

# A shape, and the options of its view.
SHAPES: dict[str, tuple[tuple[int, ...], Options]] = {
    "square": ((6, 6), {}),
    "tall": ((11, 4), {}),
    "wide": ((4, 11), {}),
    "one row": ((1, 7), {}),
    "one column": ((7, 1), {}),
    "one element": ((1, 1), {}),
    "convolution": ((5, 3, 2, 2), {}),
    "stacked": ((3, 4, 5), {"matrix_dims": 2}),
    "stacked twice": ((2, 2, 5, 3), {"matrix_dims": 2}),
    "stacked convolutions": ((2, 4, 3, 2), {"matrix_dims": 3}),
    "split in 3": ((12, 5), {"split": 3}),
    "split in sizes": ((10, 5), {"split": (4, 3, 3)}),
    "columns split in 3": ((5, 12), {"split": 3, "split_dim": 1}),
    "columns split in sizes": ((5, 10), {"split": (6, 3, 1), "split_dim": 1}),
    "stacked and split": ((2, 6, 5), {"matrix_dims": 2, "split": 3}),
    "stacked, columns split": ((2, 5, 6), {"matrix_dims": 2, "split": 2, "split_dim": 1}),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
VECTORS: dict[str, tuple[tuple[int, ...], Options]] = {
    "vector": ((5,), {}),
    "vector of one": ((1,), {}),
    "scalar": ((), {}),
    "stacked vectors": ((3, 4), {"matrix_dims": 1}),
}

# The rules, for every direction.
RULES: dict[str, Options] = {
    "merit": {},
    "no clip": {"clip": None},
    "small clip": {"clip": 0.05},
    "one ratio a matrix": {"element_wise": False},
    "no bound": {"weight_bound": False},
    "l2": {"norm": "l2"},
    "l2, one ratio a matrix, no clip": {"norm": "l2", "element_wise": False, "clip": None},
    "no ratio": {"norm": "none", "clip": None},
    "no ratio, clipped": {"norm": "none", "clip": 0.5},
    "no ratio to bound": {"norm": "none", "clip": None, "ratio_bounds": (0.0, 0.2)},
    "bounded ratios": {"ratio_bounds": (0.05, 1.5)},
    "bounded ratio a matrix": {"ratio_bounds": (0.2, 1.1), "element_wise": False},
    "no decay": {"weight_decay": 0.0},
    "much decay": {"weight_decay": 2.0},
    "clipped gradients": {"max_grad_norm": 0.5},
    "maximize": {"maximize": True},
}
OF_MUON: dict[str, Options] = {
    "no nesterov": {"nesterov": False},
    "no momentum": {"momentum": 0.0},
    "no momentum, no nesterov": {"momentum": 0.0, "nesterov": False},
    "little momentum": {"momentum": 0.3},
    **{f"{n} passes": {"ns_steps": n} for n in (1, 2, 3, 4, 6)},
    **{f"polar-express, {n}": {"ns_coefficients": "polar-express", "ns_steps": n} for n in (1, 3, 5, 6)},
    **{f"dion, {n}": {"ns_coefficients": "dion", "ns_steps": n} for n in (1, 3, 5, 6)},
    "a triple": {"ns_coefficients": (2.0, -1.5, 0.5)},
    "two triples": {"ns_coefficients": [(3.0, -3.2, 1.2), (1.875, -1.25, 0.375)]},
    "large eps": {"ns_eps": 2.0},
    **{f"scale {name}": {"scale": name} for name in ("match_rms_adamw", "original", "spectral")},
    "neurons": {"neuron_beta": 0.9},
    "neurons, everything else": {
        "neuron_beta": 0.5,
        "scale": "original",
        "norm": "l2",
        "ns_coefficients": "dion",
    },
}
OF_ADAM: dict[str, Options] = {
    "bias correction": {"bias_correction": True},
    "other numbers": {"betas": (0.5, 0.7), "eps": 1e-2},
}
OF_SOAP: dict[str, Options] = {
    "no bias correction": {"bias_correction": False},
    "other betas": {"betas": (0.8, 0.9), "eps": 1e-3},
    "its own beta": {"shampoo_beta": 0.5},
}
OF_DIRECTION: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "adam": (reference.Adam, ("betas", "eps", "bias_correction")),
    "muon": (
        reference.Muon,
        ("momentum", "nesterov", "ns_steps", "ns_coefficients", "ns_eps", "scale", "neuron_beta"),
    ),
    "soap": (
        reference.Soap,
        (
            "betas",
            "eps",
            "bias_correction",
            "shampoo_beta",
            "precondition_frequency",
            "max_precond_dim",
            "refresh_phase",
        ),
    ),
}
CLASSES = {"adam": MERIT, "muon": MuonMERIT, "soap": SOAPMERIT}
LR, DECAY = 0.05, 0.1


def twin(weight: Tensor, direction: str, options: Options, **more: Any) -> Weight:
    """The reference of a weight, with the options of its group."""
    build, names = OF_DIRECTION[direction]
    direction_options = {name: options[name] for name in names if name in options}
    rule = {name: options[name] for name in Rule.__dataclass_fields__ if name in options}
    view = {name: options[name] for name in ("matrix_dims", "split", "split_dim") if name in options}
    return Weight(
        weight.double().cpu().numpy(),
        lambda: build(**direction_options, **more),
        Rule(**rule),
        lr=options.get("lr", LR),
        weight_decay=options.get("weight_decay", DECAY),
        maximize=options.get("maximize", False),
        **view,
    )


def of_family(options: Options) -> Options:
    """A rule of reference.py in the family's options: without ratios, or with a first one, another ratio."""
    if options.get("norm") == "none":
        left_out = ("norm", "element_wise", "weight_bound", "ratio_bounds")
        return {"ratio": "none"} | {k: v for k, v in options.items() if k not in left_out}
    if options.get("calibrated"):
        left_out = ("element_wise", "weight_bound")
        one = {"ratio": "weight", "norm": "max", "clip": 1.0}
        return one | {k: v for k, v in options.items() if k not in left_out}
    return {k: v for k, v in options.items() if k != "calibrated"}


def built(weight: Tensor, direction: str, options: Options) -> tuple[Tensor, torch.optim.Optimizer]:
    """A copy of the weight, and its optimizer, which has MERIT's ratios by default."""
    param = weight.clone()
    of_step = {k: v for k, v in options.items() if k in ("max_grad_norm", "differentiable", "foreach")}
    group = of_family({k: v for k, v in options.items() if k not in of_step})
    if direction == "muon":
        plain = {"momentum": 0.95, "neuron_beta": None, "ratio_bounds": None}
        group = {"ns_dtype": "float32", **plain, **group}
        if group.get("ratio") == "none":
            del group["ratio_bounds"]
    group = {"params": [param], "direction": direction, **group}
    return param, CLASSES[direction]([group], lr=LR, weight_decay=DECAY, **of_step)


def start(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """A random weight; a matrix of some size with a row and a column of zeros, which have no ratios."""
    weight = random_tensor(shape, 1, scale=0.5, dtype=dtype)
    if len(shape) == 2 and min(shape) > 3:
        weight[1] = 0
        weight[:, 2] = 0
    return weight


def gradients(shape: tuple[int, ...], num: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    """Random, of varying size, and with a row that is zero at first."""
    for step in range(num):
        grad = random_tensor(shape, 100 + step, scale=10.0 ** (step % 5 - 3), dtype=dtype)
        if step < 2 and len(shape) == 2 and shape[0] > 4:
            grad[3] = 0
        yield grad


def not_contiguous(x: Tensor) -> Tensor:
    """A matrix stored by columns, or a convolution with its channels last."""
    return x.T.contiguous().T if x.ndim == 2 else x.to(memory_format=torch.channels_last)


def assert_near(actual: Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(actual.detach().cpu().double().numpy(), expected, rtol=rtol, atol=atol)


def check_float64(device: torch.device, direction: str, shape: str, options: Options, num_steps: int) -> None:
    """Each step of an optimizer, and its state, equals the reference's."""
    dimensions, view = (SHAPES | VECTORS)[shape]
    options = view | options
    weight = start(dimensions)
    param, optimizer = built(weight.to(device), direction, options)
    expected = twin(weight, direction, options)
    for grad in gradients(dimensions, num_steps):
        param.grad = grad.to(device)
        optimizer.step()
        g = grad.numpy()
        expected.step(g, reference.gradient_scale([g], options.get("max_grad_norm")))
        assert_near(param, expected.w)
    state = optimizer.state[param]
    assert state["step"].item() == num_steps
    if direction == "adam":
        assert_near(state["exp_avg"], expected.state("exp_avg"))
        assert_near(state["exp_avg_sq"], expected.state("exp_avg_sq"))
    elif direction == "muon":
        assert_near(state["momentum_buffer"], expected.state("momentum_buffer"))
        if "second_momentum_buffer" in state:
            check_neurons(state["second_momentum_buffer"], expected)
    if "first_ratio" in state:
        assert_near(state["first_ratio"].flatten(), [scaling.first or 0 for scaling in expected.scalings])


def check_neurons(actual: Tensor, expected: Weight) -> None:
    """One average for each row of each matrix: (stacked, rows, 1)."""
    num = actual.shape[0]
    of_parts = [direction.state["second_momentum_buffer"] for direction in expected.directions]
    splits = len(of_parts) // num
    stacked = [np.concatenate(of_parts[i * splits : (i + 1) * splits]) for i in range(num)]
    assert_near(actual, np.stack(stacked))
