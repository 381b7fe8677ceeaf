"""Theorem 1: MERIT-W on a smooth problem with known constants, against the paper's bound.

The problem: f(w) = sum over j of x_j**2 / (1 + x_j**2), x = w - a. It is not convex, its minimum is 0, its
second derivatives are between -1/2 and 2, and its gradients' elements are at most 3 sqrt(3) / 8. Each
sample's gradient has bounded noise of a known deviation. Nothing is trained.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.records import Records
from merit_lab.paper.setups import Scale
from merit_lab.paper.verdict import ClaimComparison, Verdict
from merit_lab.results.outcome import Spread
from merit_lab.study.charts import Axis, line_chart
from merit_lab.tables import Table
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


@dataclass(frozen=True)
class Descent:
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


def fitted_rate(points: list[tuple[float, float]]) -> float:
    """The exponent of a power law fitted to points, by least squares on logarithms."""
    slope, _ = statistics.linear_regression(
        [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    )
    return slope


def _theorem1(_: Records, __: Scale) -> Analysis:
    runs = {steps: descend(steps) for steps in _STEPS}
    bounds = {steps: bound(steps) for steps in _STEPS}
    measured = [
        [(float(steps), descent.mean_squared_gradients[seed]) for steps, descent in runs.items()]
        for seed in range(_SEEDS)
    ]
    rates = [fitted_rate(points) for points in measured]
    smallest = min(descent.smallest for descent in runs.values())
    largest = max(descent.largest for descent in runs.values())
    under = Verdict(
        claim="With as many samples in a batch as there are steps, MERIT-W's mean squared gradient norm "
        "stays under the theorem's bound.",
        source="theorem 1, beta2 > 0, with the constants of its proof",
        comparisons=tuple(
            ClaimComparison(
                label=f"log10 of bound over measured, {steps} steps",
                paper="above 0",
                margins=tuple(math.log10(bounds[steps] / value) for value in descent.mean_squared_gradients),
            )
            for steps, descent in runs.items()
        ),
    )
    falls = Verdict(
        claim="It falls with the number of steps T at least as fast as the bound, as 1 / sqrt(T).",
        source="theorem 1",
        comparisons=(
            ClaimComparison(
                label="fitted exponent below -1/2, by how much",
                paper="-1/2",
                margins=tuple(-0.5 - rate for rate in rates),
            ),
        ),
    )
    table = Table(
        ("Steps", "Mean squared gradient norm", "Bound"),
        tuple(
            (
                str(steps),
                f"{statistics.fmean(descent.mean_squared_gradients):.4g}",
                f"{bounds[steps]:.4g}",
            )
            for steps, descent in runs.items()
        ),
    )
    chart = line_chart(
        {
            "MERIT-W": [(f"seed {seed}", points, False) for seed, points in enumerate(measured)],
            "Bound": [("bound", list(bounds.items()), False)],
        },
        {"MERIT-W": "merit", "Bound": "bound"},
        Axis("steps, and samples in a batch", "~s", logarithmic=True),
        Axis("mean squared gradient norm", "~s", logarithmic=True),
        name="theorem",
        title="Mean squared gradient norm against the number of steps",
        caption="Each point is a separate run, with the theorem's learning rate for its length.",
    )
    inside = _WEIGHTS_WITHIN[0] <= smallest and largest <= _WEIGHTS_WITHIN[1]
    range_seen = (
        f"The blocks' max norms were between {smallest:.2f} and {largest:.2f}, which is "
        f"{'inside' if inside else 'NOT inside'} the theorem's assumed {_WEIGHTS_WITHIN[0]} to "
        f"{_WEIGHTS_WITHIN[1]}."
    )
    notes = (
        f"Fitted exponent: {Spread(tuple(rates)).text('.3f')}, {_SEEDS} seeds.",
        range_seen,
        f"{_BLOCKS} blocks of {_BLOCK_SIZE}, beta1 = 0, beta2 = {_BETA2}, no weight decay, no clip.",
    )
    return Analysis(table=table, charts=(chart,), verdicts=(under, falls), notes=notes)


ENTRIES = (
    PaperEntry(
        name="theorem1",
        title="Theorem 1: convergence of MERIT-W",
        shows="gradient norm of MERIT-W on a smooth problem under the paper's bound, and its rate",
        analyse=_theorem1,
    ),
)
