"""Theorem 1: MERIT-W on a smooth problem with known constants, against the paper's bound.

The problem: f(w) = sum over j of x_j**2 / (1 + x_j**2), x = w - a. It is not convex, its minimum is 0, its
second derivatives are between -1/2 and 2, and its gradients' elements are at most 3 sqrt(3) / 8. Each
sample's gradient has bounded noise of a known deviation. Nothing is trained.
"""

from __future__ import annotations

import math

import polars as pl
import torch
from torch import Tensor

from merit_lab.paper.quantities import BySeed, Quantity, per_run
from merit_lab.paper.records import Data
from merit_optim.optim import MERIT

_LIPSCHITZ = 2.0
_LARGEST_SLOPE = 3 * math.sqrt(3) / 8
_NOISE = 0.5
_BLOCKS, _BLOCK_SIZE = 4, 32
_BETA2 = 0.95
WEIGHTS_WITHIN = (0.5, 4.0)  # the theorem's alpha_l and alpha_u: each block's max norm stays inside
_FIRST_DISTANCE = 0.5  # from each element to its goal
_FIRST_VALUE = _BLOCKS * _BLOCK_SIZE * _FIRST_DISTANCE**2 / (1 + _FIRST_DISTANCE**2)
STEPS = (64, 128, 256, 512, 1024)  # shorter runs do not get far enough to fit a rate
_SEEDS = 5


def gradient(x: Tensor) -> Tensor:
    """The gradient of f at w = a + x."""
    return 2 * x / (1 + x * x) ** 2


def descend(steps: int, seeds: int = _SEEDS) -> tuple[list[float], Tensor]:
    """Run MERIT-W for ``steps`` steps with ``steps`` samples in a batch, at the theorem's learning rate.

    All seeds run together; each block of each seed is a separate weight. Returns each seed's mean of the
    squared gradient norms, and the max norms of the blocks at each step.
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
    sizes, halves = [], torch.full(shape, 0.5)
    for _ in range(steps):
        sizes.append(weights.detach().abs().amax(-1))
        exact = gradient(weights.detach() - goals)
        sums += exact.double().square().sum((1, 2))
        # The mean of ``steps`` independent signs.
        heads = torch.binomial(torch.full(shape, float(steps)), halves, generator)
        weights.grad = exact + _NOISE * (2 * heads / steps - 1)
        optimizer.step()
    return (sums / steps).tolist(), torch.stack(sizes)


def learning_rate(steps: int) -> float:
    """The theorem's eta."""
    dimension, (_, upper) = _BLOCKS * _BLOCK_SIZE, WEIGHTS_WITHIN
    return math.sqrt(2 * _FIRST_VALUE / (upper**2 * _BLOCKS * _LIPSCHITZ * dimension * steps))


def bound(steps: int) -> float:
    """The bound on the mean squared gradient norm, from the proof's last inequality."""
    dimension, (lower, upper) = _BLOCKS * _BLOCK_SIZE, WEIGHTS_WITHIN
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
    rows = [
        {"steps": steps, "panel": f"{steps} steps", "seed": seed, "measured": value, "bound": bound(steps)}
        for steps in STEPS
        for seed, value in enumerate(descend(steps)[0])
    ]
    same = {"run": "", "model": "", "series": "MERIT-W", "status": "finished", "message": ""}
    return Data(pl.DataFrame([{**same, **row} for row in rows]))


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
    f"seeds. The blocks' max norms stayed within the theorem's assumed {WEIGHTS_WITHIN[0]} to "
    f"{WEIGHTS_WITHIN[1]}."
)
