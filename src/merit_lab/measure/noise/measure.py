"""Measure the gradient noise scale at a checkpoint, and write it into the run directory."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from merit_lab.checks import check_at_least
from merit_lab.data import Batches
from merit_lab.folders import check_writable
from merit_lab.measure.noise.scale import GradientNorms, NoiseScale, noise_scale
from merit_lab.models import Model
from merit_lab.progress import WorkProgress
from merit_lab.runs import Measurements
from merit_lab.train.signals import listening
from merit_lab.train.snapshot import Snapshot, default_device, token_loss
from merit_optim.optim.engines.gradients import norms
from merit_optim.optim.torch_private import foreach_add_

# Added to the seed: no run has a seed as large, so the sequences are not those that a run has seen first.
_APART_FROM_RUNS = 2**64


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The gradients from which the noise scale is measured."""

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
        for name, least in (("batches", 2), ("micro_batch", 1)):
            check_at_least(name, getattr(self, name), least)
        if self.batch % self.micro_batch or self.batch < 2 * self.micro_batch:
            raise ValueError(
                f"batch is {self.batch}; it must be a multiple of micro_batch, {self.micro_batch}, at least "
                f"twice as large, for example {2 * self.micro_batch}"
            )


@dataclass(frozen=True, kw_only=True)
class MeasuredScale:
    """A run's noise scale in sequences, and where it was written."""

    path: Path
    step: int
    context: int
    batch: int
    """The batch size of the run."""
    scale: NoiseScale


def measure_noise_scale(
    run: Path | str,
    config: NoiseConfig | None = None,
    *,
    step: int | None = None,
    data: Path | None = None,
) -> MeasuredScale:
    """Measure the noise scale at a checkpoint, or read an earlier measurement with the same settings.

    Args:
        run: the run directory.
        config: the gradients to measure it from.
        step: step of the checkpoint; None for the newest.
        data: current folder of the run's data, if they have moved.
    """
    config = config or NoiseConfig()
    snapshot = Snapshot.find(run, step)
    dataset = snapshot.open_data(data)
    context = snapshot.config.model.context
    batches = Batches(dataset.train, context=context, batch=config.batch, seed=config.seed + _APART_FROM_RUNS)
    _check_enough(batches, config)
    results = Measurements(snapshot.run.folder / "noise" / f"{snapshot.path.name}.json")
    settings = {**asdict(config), "context": context}
    result = results.find("noise_scale", settings)
    if result is None:
        check_writable(results.path.parent)
        about = snapshot.environment(dataset)
        began = time.monotonic()
        scale = noise_scale(_norms(snapshot, batches, config), micro_batch=config.micro_batch)
        seconds = round(time.monotonic() - began, 3)
        result = asdict(scale)
        results.put("noise_scale", settings, result, seconds=seconds, environment=about)
    return MeasuredScale(
        path=results.path,
        step=snapshot.step,
        context=context,
        batch=snapshot.config.batch,
        scale=NoiseScale(**result),
    )


def _check_enough(batches: Batches, config: NoiseConfig) -> None:
    """Raise ValueError if sequences would repeat: the estimates assume that they are independent."""
    available, wanted = batches.num_windows, config.batches * config.batch
    if wanted <= available:
        return
    micro = config.micro_batch
    fewer, smaller = available // config.batch, available // config.batches // micro * micro
    if fewer >= 2:
        way_out = f"choose fewer batches, at most {fewer}, or smaller ones"
    elif smaller >= 2 * micro:
        way_out = f"choose smaller batches, of at most {smaller}"
    elif available >= 4 * micro:
        way_out = f"choose at most {available // (2 * micro)} batches of {2 * micro}"
    else:
        way_out = f"choose a smaller micro_batch than {micro}, or train on more text"
    raise ValueError(
        f"{config.batches} batches of {config.batch} sequences are {wanted}, but {batches.tokens.path.name} "
        f"has {available} of context {batches.context}, and none may be used twice: {way_out}"
    )


def gradient_norms(model: Model, sequences: Tensor, micro_batch: int) -> GradientNorms:
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
    return GradientNorms([square.item() for square in squares], mean.item())


def _squared_norm(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """In float64 and on the device, so that the host waits once per batch, not per micro-batch."""
    return torch.stack(norms(list(tensors), 2.0)).double().square().sum()


def _norms(snapshot: Snapshot, batches: Batches, config: NoiseConfig) -> list[GradientNorms]:
    model = snapshot.load_model(default_device())
    progress = WorkProgress()
    norms, began = [], time.monotonic()
    with listening() as stop, progress.piece("gradients", config.batches, "batches"):
        for number in range(config.batches):
            sequences = torch.from_numpy(batches.sequences(number))
            norms.append(gradient_norms(model, sequences, config.micro_batch))
            progress.advance()
            if stop.signum:
                raise stop.interrupted()
    progress.say(f"gradients: {config.batches} batches in {time.monotonic() - began:.1f} s")
    return norms
