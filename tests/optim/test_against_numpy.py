"""Lion and SophiaG against float64 NumPy; directions/test_against_reference.py has the family."""

from typing import Any

import numpy as np
import pytest
import torch
from optimizer_cases import random_tensor
from torch import nn

from merit_optim import Lion, SophiaG

NUM_STEPS = 300
SHAPES = {
    "matrix": (13, 7),
    "row": (1, 11),
    "column": (11, 1),
    "vector": (9,),
    "scalar": (),
    "convolution": (4, 3, 2, 2),
}


def start(shape: tuple[int, ...]) -> torch.Tensor:
    return random_tensor(shape, 1, scale=0.5, dtype=torch.float64)


def gradient(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Random, of varying size, and with a row that is zero in the first steps."""
    grad = random_tensor(shape, 100 + step, scale=10.0 ** (step % 5 - 2), dtype=torch.float64)
    if step < 3 and len(shape) > 1 and shape[0] > 4:
        grad[3] = 0
    return grad


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
