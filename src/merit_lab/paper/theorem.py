"""Theorem 1: MERIT-W on a smooth problem with known constants, against the paper's bound.

The problem: f(w) = sum over j of x_j**2 / (1 + x_j**2), x = w - a. It is not convex, its minimum is 0, its
second derivatives are between -1/2 and 2, and its gradients' elements are at most 3 sqrt(3) / 8. Each
sample's gradient has bounded noise of a known deviation. Nothing is trained.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import polars as pl
import torch
from torch import Tensor

from merit_lab.paper.plan import Data
from merit_lab.paper.quantities import BySeed, Quantity, per_run
from merit_optim.optim import MERIT

_LIPSCHITZ = 2.0
_LARGEST_SLOPE = 3 * math.sqrt(3) / 8
_NOISE = 0.5
_BLOCKS, _BLOCK_SIZE = 4, 32
_BETA2 = 0.95
_WEIGHTS_WITHIN = (0.5, 4.0)  # the theorem's alpha_l and alpha_u: each block's max norm stays inside
_FIRST_DISTANCE = 0.5  # from each element to its goal
_FIRST_VALUE = _BLOCKS * _BLOCK_SIZE * _FIRST_DISTANCE**2 / (1 + _FIRST_DISTANCE**2)
_STEPS = (64, 128, 256, 512, 1024)  # shorter runs do not get far enough to fit a rate
_SEEDS = 5


class Descent(NamedTuple):
    """Runs of one length: each seed's mean of the squared gradient norms, and the weights' range."""

    mean_squared_gradients: list[float]
    smallest: float
    largest: float


def gradient(x: Tensor) -> Tensor:
    """The gradient of f at w = a + x."""
    return 2 * x / (1 + x * x) ** 2


def descend(steps: int, seeds: int = _SEEDS) -> Descent:
    """Run MERIT-W for ``steps`` steps with ``steps`` samples in a batch, at the theorem's learning rate.

    All seeds run together; each block of each seed is a separate weight.
    """
    generator = torch.Generator().manual_seed(steps)
    shape = (seeds, _BLOCKS, _BLOCK_SIZE)
    goals = 1 + torch.rand(shape, generator=generator)  # between 1 and 2
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    weights = (goals + _FIRST_DISTANCE * signs).requires_grad_()
    optimizer = MERIT(
        [weights],
        lr=learning_rate(steps),
        betas=(0.0, _BETA2),
        eps=1e-12,
        weight_decay=0.0,
        element_wise=False,
        clip=None,
        matrix_dims=1,
    )
    sums = torch.zeros(seeds, dtype=torch.float64)
    smallest, largest = math.inf, 0.0
    halves = torch.full(shape, 0.5)
    for _ in range(steps):
        norms = weights.detach().abs().amax(-1)
        smallest, largest = min(smallest, float(norms.min())), max(largest, float(norms.max()))
        exact = gradient(weights.detach() - goals)
        sums += exact.double().square().sum((1, 2))
        # The mean of ``steps`` independent signs.
        heads = torch.binomial(torch.full(shape, float(steps)), halves, generator)
        weights.grad = exact + _NOISE * (2 * heads / steps - 1)
        optimizer.step()
    return Descent((sums / steps).tolist(), smallest, largest)


def learning_rate(steps: int) -> float:
    """The theorem's eta."""
    dimension, (_, upper) = _BLOCKS * _BLOCK_SIZE, _WEIGHTS_WITHIN
    return math.sqrt(2 * _FIRST_VALUE / (upper**2 * _BLOCKS * _LIPSCHITZ * dimension * steps))


def bound(steps: int) -> float:
    """The bound on the mean squared gradient norm, from the proof's last inequality."""
    dimension, (lower, upper) = _BLOCKS * _BLOCK_SIZE, _WEIGHTS_WITHIN
    eta, lipschitz = learning_rate(steps), _BLOCKS * _LIPSCHITZ
    largest_gradient = _LARGEST_SLOPE + _NOISE
    right = (
        _FIRST_VALUE / (steps * eta * lower)
        + upper * _NOISE * dimension / (lower * math.sqrt(steps))
        + eta * dimension * upper**2 * lipschitz / (2 * lower)
    )
    left = math.sqrt(_BLOCKS * (1 - _BETA2) / (2 * largest_gradient**2 * math.log(dimension)))
    return right / left


def data() -> Data:
    """A row for each number of steps and each seed: what was measured, and the bound."""
    rows = []
    for steps in _STEPS:
        descent = descend(steps)
        if not _WEIGHTS_WITHIN[0] <= descent.smallest <= descent.largest <= _WEIGHTS_WITHIN[1]:
            raise ArithmeticError(
                f"the max norms of the weights went from {descent.smallest:.3g} to {descent.largest:.3g}, "
                f"outside the {_WEIGHTS_WITHIN[0]} to {_WEIGHTS_WITHIN[1]} that the theorem assumes"
            )
        rows += [
            {"seed": seed, "steps": steps, "measured": value, "bound": bound(steps)}
            for seed, value in enumerate(descent.mean_squared_gradients)
        ]
    same = {"run": "", "model": "", "paper": "", "part": "", "series": "MERIT-W", "status": "finished"}
    frame = pl.DataFrame([{**same, **row} for row in rows])
    return Data(frame.with_columns(panel=pl.format("{} steps", "steps"), factor=1.0, message=pl.lit("")))


def exponents(rows: Data) -> BySeed:
    """The exponent of each seed's power law, fitted to its points by least squares on logarithms."""
    steps, norms = pl.col("steps").log(), pl.col("measured").log()
    slopes = rows.runs.group_by("seed", maintain_order=True).agg(pl.cov(steps, norms) / steps.var())
    return dict(slopes.rows())


MEASURED = per_run("mean squared gradient norm", pl.col("measured"), number=".4g")
LOG_MEASURED = per_run("log10 of the mean squared gradient norm", pl.col("measured").log10())
BOUND = per_run("bound", pl.col("bound"), number=".4g")
LOG_BOUND = per_run("that of the bound", pl.col("bound").log10())
EXPONENT = Quantity(name="fitted exponent", of=exponents)
ABOUT = (
    f"{_BLOCKS} blocks of {_BLOCK_SIZE}, beta1 = 0, beta2 = {_BETA2}, no weight decay, no clip; {_SEEDS} "
    f"seeds. The blocks' max norms stayed within the theorem's assumed {_WEIGHTS_WITHIN[0]} to "
    f"{_WEIGHTS_WITHIN[1]}."
)
