"""`merit batch-size`: the gradient noise scale of a run, and so which batch size is still worthwhile.

The noise scale is the batch size at which signal and noise of the gradient are equal. With G the gradient of
the whole loss and S the trace of the covariance of one sequence's gradient, a batch of B sequences has a
gradient whose expected squared norm is ``|G|^2 + S / B``. Two batch sizes, micro-batches and batches, give
both; the scale is ``S / |G|^2``.

Training with batches of B takes about ``1 + scale / B`` times the fewest possible steps and ``1 + B / scale``
times the fewest possible tokens: below the scale a larger batch saves steps at little cost, above it hardly
any. This holds for steps along the gradient in a loss that is curved equally in all directions; for an
optimizer that preconditions it is a guide, not a law.

Reference:
    McCandlish et al., "An empirical model of large-batch training", 2018, https://arxiv.org/abs/1812.06162
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from merit_lab.checks import check_at_least
from merit_lab.data import Batches
from merit_lab.json_values import build
from merit_lab.measure.checkpoint import (
    Measured,
    OnData,
    Part,
    StoppableProgress,
    measure_missing,
    run_command,
)
from merit_lab.models import Model
from merit_lab.tables import Table, print_table
from merit_lab.text import amount
from merit_lab.train.snapshot import default_device, token_loss
from merit_optim.optim.engines.gradients import norms
from merit_optim.optim.torch_private import foreach_add_

# Added to the seed: no run has a seed as large, so the sequences are not those that a run has seen first.
_APART_FROM_RUNS = 2**64
_AROUND = 3  # doublings of the batch shown on either side of the noise scale

Norms = tuple[Sequence[float], float]
"""Squared gradient norms of one batch: of its micro-batches, and of their mean."""


@dataclass(frozen=True, kw_only=True)
class NoiseConfig(OnData):
    """Measure the gradient noise scale at a checkpoint of a run, and print what batch sizes around it cost.
    The scale grows as the loss falls, so a late checkpoint allows larger batches than an early one."""

    batches: int = 16
    """Number of batches; the error is estimated from their differences."""
    batch: int = 128
    """Sequences in each batch. More sequences in total allow larger scales to be measured."""
    micro_batch: int = 4
    """Sequences per micro-batch, which goes through the model at once; its gradient shows the noise."""
    seed: int = 0
    """Seed of the sequences, which are drawn from the training file without replacement, and not in the order
    of any run."""

    def __post_init__(self) -> None:
        for name, least in (("batches", 2), ("micro_batch", 1), ("seed", 0)):
            check_at_least(name, getattr(self, name), least)
        if self.batch % self.micro_batch or self.batch < 2 * self.micro_batch:
            raise ValueError(
                f"batch is {self.batch}; it must be a multiple of micro_batch, {self.micro_batch}, at least "
                f"twice as large, for example {2 * self.micro_batch}"
            )


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The noise scale in the units of ``micro_batch``, with its error."""

    value: float
    """noise / signal; infinite if the estimated signal is not positive."""
    low: float
    """Two standard errors of signal / noise below the value."""
    high: float
    """Two standard errors above it; infinite where the signal may be zero."""
    noise: float
    """S, the trace of the covariance of one sequence's gradient."""
    signal: float
    """The squared norm of the gradient without noise; an unbiased estimate, which can be negative."""


def noise_scale(batches: Iterable[Norms], *, micro_batch: int) -> NoiseScale:
    """Estimate the noise scale from gradient norms of several independent batches.

    The unbiased estimates of noise and signal are averaged over the batches before their ratio is taken.
    The error is that of signal / noise, by a jackknife over the batches. The noise is always well determined,
    so this ratio is nearly a mean, and there is no division by a signal that may be zero.

    Args:
        batches: at least two batches, each of at least two micro-batches.
        micro_batch: sequences in a micro-batch.

    Example:
        >>> scale = noise_scale([([5.0, 7.0], 4.0), ([6.0, 6.0], 4.2)], micro_batch=8)
        >>> round(scale.noise, 1), round(scale.signal, 1), round(scale.value, 1)
        (30.4, 2.2, 13.8)
    """
    pairs = [_estimate(batch, micro_batch) for batch in batches]
    noises, signals = zip(*pairs, strict=True)
    noise, signal = statistics.fmean(noises), statistics.fmean(signals)
    if not noise > 0:
        raise ValueError(
            f"the noise of the gradients is estimated as {noise:g}; it must be above 0: are the "
            "micro-batches all the same, or their norms not squared?"
        )
    without_one = [(sum(signals) - pair[1]) / (sum(noises) - pair[0]) for pair in pairs]
    error = math.sqrt((len(pairs) - 1) * statistics.pvariance(without_one))
    value, low, high = (
        1 / ratio if ratio > 0 else math.inf
        for ratio in (signal / noise, signal / noise + 2 * error, signal / noise - 2 * error)
    )
    return NoiseScale(value=value, low=low, high=high, noise=noise, signal=signal)


def _estimate(batch: Norms, micro_batch: int) -> tuple[float, float]:
    """Unbiased estimates of noise and signal from one batch."""
    squares, at_large = batch
    small, large = micro_batch, micro_batch * len(squares)
    at_small = statistics.fmean(squares)
    if not math.isfinite(at_small + at_large):
        raise FloatingPointError(
            f"the squared gradient norms are {at_small} in micro-batches and {at_large} in the batch; a "
            "diverged run has no noise scale: use an earlier checkpoint"
        )
    noise = (at_small - at_large) / (1 / small - 1 / large)
    signal = (large * at_large - small * at_small) / (large - small)
    return noise, signal


def gradient_norms(model: Model, sequences: Tensor, micro_batch: int) -> Norms:
    """Squared gradient norms of a batch's micro-batches, which must have the same size, and of their mean."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    pieces = sequences.split(micro_batch)
    squares = []
    for piece in pieces:
        gradients = torch.autograd.grad(token_loss(model, piece.to(parameters[0].device)), parameters)
        foreach_add_(total, gradients)
        squares.append(_squared_norm(gradients))
    mean = _squared_norm(total) / len(pieces) ** 2
    return [square.item() for square in squares], mean.item()


def _squared_norm(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """In float64 and on the device, so that the host waits once per batch, not per micro-batch."""
    return torch.stack(norms(list(tensors), 2.0)).double().square().sum()


def measure_noise_scale(config: NoiseConfig) -> Measured:
    """Measure the noise scale at a checkpoint: the part "scale", a :class:`NoiseScale`."""
    snapshot = config.snapshot()
    dataset = snapshot.open_data(config.data)
    context = snapshot.config.model.context
    batches = Batches(dataset.train, context=context, batch=config.batch, seed=config.seed + _APART_FROM_RUNS)
    # Sequences must not repeat: the estimates assume that they are independent.
    if (wanted := config.batches * config.batch) > batches.num_windows:
        raise ValueError(
            f"{config.batches} batches of {config.batch} sequences are {wanted}, but "
            f"{dataset.train.path.name} has {batches.num_windows} of context {context}, and none may be used "
            "twice: choose fewer or smaller batches"
        )

    def measure(progress: StoppableProgress) -> dict[str, float]:
        model, found = snapshot.load_model(default_device()), []
        for number in range(config.batches):
            sequences = torch.from_numpy(batches.sequences(number))
            found.append(gradient_norms(model, sequences, config.micro_batch))
            progress.advance()
        return asdict(noise_scale(found, micro_batch=config.micro_batch))

    settings = {name: getattr(config, name) for name in ("batches", "batch", "micro_batch", "seed")}
    part = Part(settings | {"context": context}, measure, total=config.batches)
    return measure_missing("noise", snapshot, {"scale": part}, snapshot.environment(dataset), "batches")


def main(argv: Sequence[str]) -> int:
    """Run `merit batch-size` and return its exit status."""
    return run_command("batch-size", NoiseConfig, _show, argv)


def _show(config: NoiseConfig) -> None:
    measured = measure_noise_scale(config)
    scale = build(NoiseScale, measured.results["scale"], "scale")  # which may come from a damaged file
    context = measured.snapshot.config.model.context
    print(f"After step {measured.snapshot.step} {describe(scale, context)}")
    if math.isfinite(scale.low):
        print()
        print_table(_costs(scale, context))
    print(f"\nThe results: {measured.path}")


def describe(scale: NoiseScale, context: int) -> str:
    """Return the scale in words."""
    above = f"above {amount(scale.low)} sequences"
    if math.isinf(scale.value):
        known = f"it is {above}" if math.isfinite(scale.low) else "nothing can be said about it"
        return (
            f"no signal can be seen in the gradients, so the noise scale is not determined; {known}. "
            "Measure with more batches, or larger ones."
        )
    between = above if math.isinf(scale.high) else f"{amount(scale.low)} to {amount(scale.high)}"
    return (
        f"the noise scale is {amount(scale.value)} sequences ({between} with two standard errors), "
        f"or {amount(scale.value * context)} tokens."
    )


def _costs(scale: NoiseScale, context: int) -> Table:
    """The cost of batch sizes around the scale, with the uncertainty from the scale's error."""
    rows = []
    nearest = max(0, round(math.log2(scale.value if math.isfinite(scale.value) else scale.low)))
    for power in range(max(0, nearest - _AROUND), nearest + _AROUND + 1):
        batch = 2**power
        steps = _range(1 + scale.low / batch, 1 + scale.high / batch)
        tokens = _range(1 + batch / scale.high, 1 + batch / scale.low)
        rows.append((f"{batch:,}", f"{batch * context:,}", steps, tokens))
    head = ("Batch", "Tokens per batch", "Steps / fewest", "Tokens / fewest")
    return Table(head, tuple(rows), num_text=0)


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"above {low:.2f}"
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
