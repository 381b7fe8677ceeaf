"""Optimizers against float64 NumPy, written from the equations and sharing no code with the package.

Covers Adam's direction, Lion and SophiaG; directions/test_against_reference.py covers the other directions.
"""

from typing import Any

import numpy as np
import pytest
import torch
from optimizer_cases import random_tensor
from torch import nn

from merit_optim import LAMB, MERIT, Lion, MaxLAMB, SophiaG

Array = np.ndarray[Any, np.dtype[np.float64]]

NUM_STEPS = 300
SHAPES = {
    "matrix": (13, 7),
    "row": (1, 11),
    "column": (11, 1),
    "vector": (9,),
    "scalar": (),
    "convolution": (4, 3, 2, 2),
}


def size(x: Array, norm: str, axis: int | None = None) -> Array:
    """The norm of all of x, or of each of its rows (axis 1) or columns (axis 0)."""
    if norm == "max":
        return np.max(np.abs(x), axis=axis)
    return np.sqrt(np.sum(x * x, axis=axis))


def quotient(w_size: Array, u_size: Array) -> Array:
    """|w| / |u|, or 1 where one of them is zero."""
    result = np.ones_like(w_size)
    np.divide(w_size, u_size, out=result, where=(w_size > 0) & (u_size > 0))
    return result


class TrustRatio:
    """The equations in the docstring of ``MERIT``, its ablations, and LAMB as one of them."""

    def __init__(
        self,
        w: Array,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip: float | None,
        element_wise: bool,
        weight_bound: bool,
        norm: str,
        bias_correction: bool,
    ) -> None:
        self.w, self.m, self.v, self.t = w.copy(), np.zeros_like(w), np.zeros_like(w), 0
        self.lr, self.betas, self.eps, self.weight_decay, self.clip = lr, betas, eps, weight_decay, clip
        self.element_wise, self.weight_bound, self.norm = element_wise, weight_bound, norm
        self.bias_correction = bias_correction

    def step(self, g: Array) -> None:
        b1, b2 = self.betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        m_hat, v_hat = self.m, self.v
        if self.bias_correction:
            m_hat, v_hat = m_hat / (1 - b1**self.t), v_hat / (1 - b2**self.t)
        u = m_hat / (np.sqrt(v_hat) + self.eps) + self.weight_decay * self.w
        scaled = self.ratios(u) * u
        if self.clip is not None:
            scaled = np.clip(scaled, -self.clip, self.clip)
        self.w = self.w - self.lr * scaled

    def ratios(self, u: Array) -> Array:
        """s for every element."""
        b = quotient(size(self.w, self.norm), size(u, self.norm))
        if self.w.ndim < 2 or not self.element_wise:
            return b
        w_matrix, u_matrix = (x.reshape(x.shape[0], -1) for x in (self.w, u))
        sizes = [[size(x, self.norm, axis) for x in (w_matrix, u_matrix)] for axis in (1, 0)]
        (w_rows, u_rows), (w_columns, u_columns) = sizes
        r, c = quotient(w_rows, u_rows), quotient(w_columns, u_columns)
        s = np.maximum(r[:, None], c[None, :])
        if self.weight_bound:
            s = np.maximum(s, b)
        s[(w_rows == 0) | (u_rows == 0), :] = 1
        s[:, (w_columns == 0) | (u_columns == 0)] = 1
        return s.reshape(self.w.shape)


MERIT_DEFAULTS: dict[str, Any] = {
    "lr": 9e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "clip": 1.0,
    "element_wise": True,
    "weight_bound": True,
    "norm": "max",
    "bias_correction": False,
}
MAXLAMB_DEFAULTS = {**MERIT_DEFAULTS, "lr": 1e-2, "clip": None, "element_wise": False}
LAMB_DEFAULTS = {
    **MAXLAMB_DEFAULTS,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "weight_decay": 0.01,
    "norm": "l2",
    "bias_correction": True,
}

# The optimizer, its defaults, and the options passed to it.
VARIANTS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "merit": (MERIT, MERIT_DEFAULTS, {}),
    "merit, other numbers": (
        MERIT,
        MERIT_DEFAULTS,
        {"lr": 0.03, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.5},
    ),
    "merit without clip": (MERIT, MERIT_DEFAULTS, {"clip": None}),
    "merit with a small clip": (MERIT, MERIT_DEFAULTS, {"clip": 0.1}),
    "merit with one ratio a weight": (MERIT, MERIT_DEFAULTS, {"element_wise": False}),
    "merit without the bound": (MERIT, MERIT_DEFAULTS, {"weight_bound": False}),
    "merit, l2": (MERIT, MERIT_DEFAULTS, {"norm": "l2"}),
    "merit, bias correction": (MERIT, MERIT_DEFAULTS, {"bias_correction": True}),
    "merit, no decay": (MERIT, MERIT_DEFAULTS, {"weight_decay": 0.0}),
    "lamb": (LAMB, LAMB_DEFAULTS, {}),
    "lamb of the MERIT paper": (LAMB, LAMB_DEFAULTS, {"bias_correction": False, "weight_decay": 0.1}),
    "maxlamb": (MaxLAMB, MAXLAMB_DEFAULTS, {}),
    "maxlamb, bias correction": (MaxLAMB, MAXLAMB_DEFAULTS, {"bias_correction": True}),
}


def start(shape: tuple[int, ...], *, zeros: bool = True) -> torch.Tensor:
    """A random weight; a matrix of some size with a zero row and a zero column."""
    weight = random_tensor(shape, 1, scale=0.5, dtype=torch.float64)
    if zeros and len(shape) > 1 and min(shape[:2]) > 2:
        weight[1] = 0
        weight.view(shape[0], -1)[:, 2] = 0
    return weight


def gradient(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Random, of varying size, and with a row that is zero in the first steps."""
    grad = random_tensor(shape, 100 + step, scale=10.0 ** (step % 5 - 2), dtype=torch.float64)
    if step < 3 and len(shape) > 1 and shape[0] > 4:
        grad[3] = 0
    return grad


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float64_steps_equal_numpy(device, variant, shape) -> None:
    """Hundreds of steps for the matrix, where errors would add up, and fewer for the other shapes."""
    num_steps = NUM_STEPS if shape == SHAPES["matrix"] else NUM_STEPS // 5
    optimizer_class, defaults, options = VARIANTS[variant]
    weight = start(shape)
    param = nn.Parameter(weight.clone().to(device))
    optimizer = optimizer_class([param], **options)
    reference = TrustRatio(weight.numpy(), **{**defaults, **options})
    for step in range(num_steps):
        grad = gradient(shape, step)
        param.grad = grad.to(device)
        optimizer.step()
        reference.step(grad.numpy())
        # Compare after each step, so that no early difference can hide behind later steps.
        np.testing.assert_allclose(param.detach().cpu().numpy(), reference.w, rtol=1e-7, atol=1e-10)
    state = optimizer.state[param]
    np.testing.assert_allclose(state["exp_avg"].cpu().numpy(), reference.m, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state["exp_avg_sq"].cpu().numpy(), reference.v, rtol=1e-9, atol=1e-12)
    assert state["step"].item() == num_steps


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_float32_step_is_within_rounding_of_numpy(device, variant) -> None:
    """The reference starts each step from the optimizer's weight and state: only rounding differs."""
    optimizer_class, defaults, options = VARIANTS[variant]
    shape = (13, 7)
    param = nn.Parameter(start(shape).float().to(device))
    optimizer = optimizer_class([param], **options)
    reference = TrustRatio(param.detach().cpu().double().numpy(), **{**defaults, **options})
    for step in range(50):
        grad = gradient(shape, step).float()
        param.grad = grad.to(device)
        optimizer.step()
        reference.step(grad.double().numpy())
        # 1 - beta2**t has few correct digits in float32, where it is computed on the device.
        np.testing.assert_allclose(param.detach().cpu().numpy(), reference.w, rtol=3e-5, atol=3e-6)
        reference.w = param.detach().cpu().double().numpy()
        reference.m = optimizer.state[param]["exp_avg"].cpu().double().numpy()
        reference.v = optimizer.state[param]["exp_avg_sq"].cpu().double().numpy()


def test_stacked_matrices_equal_numpy_on_each(device) -> None:
    weight = random_tensor((3, 6, 5), 1, dtype=torch.float64)
    param = nn.Parameter(weight.clone().to(device))
    optimizer = MERIT([param], matrix_dims=2)
    references = [TrustRatio(matrix, **MERIT_DEFAULTS) for matrix in weight.numpy()]
    for step in range(30):
        grad = random_tensor(weight.shape, 100 + step, dtype=torch.float64)
        param.grad = grad.to(device)
        optimizer.step()
        for reference, g in zip(references, grad.numpy(), strict=True):
            reference.step(g)
    expected = np.stack([reference.w for reference in references])
    np.testing.assert_allclose(param.detach().cpu().numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", [{}, {"lr": 0.02, "betas": (0.95, 0.98), "weight_decay": 0.1}])
def test_lion_equals_numpy(device, shape, options) -> None:
    settings = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, **options}
    lr, (b1, b2), decay = settings["lr"], settings["betas"], settings["weight_decay"]
    param = nn.Parameter(start(shape).to(device))
    optimizer = Lion([param], **options)
    w = start(shape).numpy()
    m = np.zeros_like(w)
    for step in range(NUM_STEPS):
        grad = gradient(shape, step)
        param.grad = grad.to(device)
        optimizer.step()
        g = grad.numpy()
        w = w - lr * (np.sign(b1 * m + (1 - b1) * g) + decay * w)
        m = b2 * m + (1 - b2) * g
    np.testing.assert_allclose(param.detach().cpu().numpy(), w, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(optimizer.state[param]["exp_avg"].cpu().numpy(), m, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", [{}, {"lr": 0.02, "betas": (0.92, 0.9), "gamma": 0.5, "eps": 1e-3}])
def test_sophia_equals_numpy(device, shape, options) -> None:
    defaults = {"lr": 1e-4, "betas": (0.965, 0.99), "gamma": 0.05, "eps": 1e-12, "weight_decay": 0.1}
    settings: dict[str, Any] = {**defaults, **options}
    lr, (b1, b2), decay = settings["lr"], settings["betas"], settings["weight_decay"]
    param = nn.Parameter(start(shape).to(device))
    optimizer = SophiaG([param], **options, hessian_interval=4)
    w = start(shape).numpy()
    m, h = np.zeros_like(w), np.zeros_like(w)
    for step in range(NUM_STEPS):
        assert optimizer.hessian_due == (step % 4 == 0)
        if optimizer.hessian_due:
            estimate = random_tensor(shape, 5000 + step, dtype=torch.float64)
            param.grad = estimate.to(device)
            optimizer.update_hessian(num_labels=16)
            h = b2 * h + (1 - b2) * 16 * estimate.numpy() ** 2
        grad = gradient(shape, step)
        param.grad = grad.to(device)
        optimizer.step()
        m = b1 * m + (1 - b1) * grad.numpy()
        w = (1 - lr * decay) * w - lr * np.clip(m / np.maximum(settings["gamma"] * h, settings["eps"]), -1, 1)
    np.testing.assert_allclose(param.detach().cpu().numpy(), w, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(optimizer.state[param]["hessian"].cpu().numpy(), h, rtol=1e-9, atol=1e-12)
