"""`merit curvature`: measure the Hessian of the training loss at a checkpoint of a run, part by part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from merit_lab.checks import check_at_least
from merit_lab.measure.checkpoint import AtCheckpoint, Part, measure_missing, run_command, stoppable
from merit_lab.measure.curvature.hessian import Hessian, hessian_vector_product
from merit_lab.measure.curvature.spectrum import (
    hutchinson_trace,
    num_vectors,
    smooth,
    spectral_density,
    top_eigenvalues,
)
from merit_lab.models import Model, num_parameters
from merit_lab.progress import WorkProgress
from merit_lab.tables import Table, print_table
from merit_lab.train.snapshot import Snapshot, default_device, mean_loss

_CPU_TOKENS = 16384  # in one micro-batch; larger ones are no faster on a CPU
_MOST_SEQUENCES_TRIED = 64


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig:
    """What to measure of the Hessian of the training loss, in float32."""

    sequences: int = 64
    """Number of training sequences in the loss, evenly spread over the training file."""
    top: int = 5
    """How many of the largest eigenvalues to compute. 0: none."""
    tolerance: float = 1e-3
    """Residual of an eigenvalue, relative to it."""
    probes: int = 32
    """Random vectors for the trace. 0: no trace."""
    density: bool = False
    """Measure the spectral density."""
    density_probes: int = 4
    """Random vectors for the density."""
    density_steps: int = 64
    """Lanczos steps, and so products, for each of them."""
    seed: int = 0
    """Determines the random vectors."""
    micro_batch: int | None = None
    """Sequences in one pass. None: found by trial on CUDA, 16384 tokens on a CPU."""

    def __post_init__(self) -> None:
        least = {"sequences": 1, "top": 0, "density_probes": 1, "density_steps": 1}
        for name, smallest in least.items():
            check_at_least(name, getattr(self, name), smallest)
        if self.micro_batch is not None:
            check_at_least("micro_batch", self.micro_batch, 1)
        if self.probes < 0 or self.probes == 1:
            raise ValueError(
                f"probes is {self.probes}; it must be 0 for no trace, or at least 2 for its error"
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; it must be between 0 and 1")


_Method = Callable[[Hessian, CurvatureConfig], dict[str, Any]]
"""Measures a part."""


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """The results of all parts, measured now or earlier."""

    path: Path
    step: int
    parts: dict[str, dict[str, Any]]


def measure_curvature(
    run: Path | str,
    config: CurvatureConfig | None = None,
    *,
    step: int | None = None,
    data: Path | None = None,
) -> Curvature:
    """Measure the parts that were not yet measured at a checkpoint with the same settings.

    Each part is written when it is done. Raises ``Interrupted`` after a signal; a second call continues with
    the missing parts.

    Args:
        run: the run directory.
        config: what to measure.
        step: of the checkpoint; None for the newest.
        data: the folder of the run's data, if it has moved.
    """
    config = config or CurvatureConfig()
    snapshot = Snapshot.find(run, step)
    dataset = snapshot.open_data(data)
    sequences = snapshot.training_sequences(dataset, config.sequences)
    if config.top:  # refuses what is impossible, before anything is computed
        num_vectors(num_parameters(snapshot.config.model), config.top)
    progress = WorkProgress()
    with stoppable(progress) as advance:

        @functools.cache
        def hessian() -> Hessian:
            model = snapshot.load_model(default_device(), twice=True)
            size = config.micro_batch or choose_micro_batch(model, sequences)
            return Hessian(mean_loss(model, sequences, size), model.parameters(), advance)

        def part(name: str, settings: dict[str, Any], method: _Method) -> Part:
            def measure() -> dict[str, Any]:
                with progress.piece(name, None, "products"):
                    return {"result": method(hessian(), config)}

            of_loss = {"sequences": len(sequences), "context": snapshot.config.model.context}
            return Part(of_loss | settings, measure)

        parts = {name: part(name, *how) for name, how in _parts(config).items()}
        written = measure_missing(
            "curvature", snapshot, parts, lambda: snapshot.environment(dataset), progress
        )
    found = {name: written.parts[name]["result"] for name in parts}
    return Curvature(path=written.path, step=snapshot.step, parts=found)


def _parts(config: CurvatureConfig) -> dict[str, tuple[dict[str, Any], _Method]]:
    """Return the configured parts, the fastest first: the settings that each follows from, and its method."""
    seed = {"seed": config.seed}
    parts: dict[str, tuple[dict[str, Any], _Method]] = {
        "loss": ({}, lambda hessian, _: {"value": hessian.loss()})
    }
    if config.top:
        parts["eigenvalues"] = ({"top": config.top, "tolerance": config.tolerance, **seed}, _eigenvalues)
    if config.probes:
        parts["trace"] = ({"probes": config.probes, **seed}, _trace)
    if config.density:
        parts["density"] = (
            {"probes": config.density_probes, "steps": config.density_steps, **seed},
            _density,
        )
    return parts


def _eigenvalues(hessian: Hessian, config: CurvatureConfig) -> dict[str, Any]:
    found = top_eigenvalues(hessian, config.top, tolerance=config.tolerance, seed=config.seed)
    return {"largest": found.values[0], **found._asdict()}


def _trace(hessian: Hessian, config: CurvatureConfig) -> dict[str, Any]:
    return hutchinson_trace(hessian, config.probes, seed=config.seed)._asdict()


def _density(hessian: Hessian, config: CurvatureConfig) -> dict[str, Any]:
    spectrum = spectral_density(hessian, config.density_probes, steps=config.density_steps, seed=config.seed)
    pairs = [pair for probe in zip(*spectrum, strict=True) for pair in zip(*probe, strict=True)]
    grid, values = smooth(spectrum)
    return {
        "smallest": min(node for node, _ in pairs),
        "below_zero": sum(weight for node, weight in pairs if node < 0) / config.density_probes,
        "grid": grid.tolist(),
        "density": values.tolist(),
        **spectrum._asdict(),
    }


def choose_micro_batch(model: Model, sequences: Tensor) -> int:
    """Return the sequences per pass: the largest power of two whose product fits, or fixed on a CPU."""
    device = next(model.parameters()).device
    if device.type == "cpu":
        return max(1, min(len(sequences), _CPU_TOKENS // model.config.context))
    parameters = list(model.parameters())
    vector = torch.zeros(sum(parameter.numel() for parameter in parameters), device=device)
    size = 1 << (min(len(sequences), _MOST_SEQUENCES_TRIED).bit_length() - 1)
    while size > 1:
        try:
            hessian_vector_product(mean_loss(model, sequences[:size], size), parameters, vector)
        except torch.cuda.OutOfMemoryError:
            size //= 2
        else:
            break
        finally:
            torch.cuda.empty_cache()
    return size


@dataclass(frozen=True, kw_only=True)
class Arguments(AtCheckpoint):
    """Measure the curvature of the training loss at a checkpoint of a run: the largest eigenvalues of its
    Hessian, its trace and, optionally, its spectral density. The results go into the run directory;
    existing ones are not measured again."""

    config: Annotated[CurvatureConfig, tyro.conf.arg(name="")] = CurvatureConfig()
    data: Path | None = None
    """The folder of the run's data, if it has moved."""


def main(argv: Sequence[str]) -> int:
    """Run `merit curvature` and return its exit status."""
    return run_command("curvature", Arguments, _show, argv)


def _show(arguments: Arguments) -> None:
    curvature = measure_curvature(
        arguments.run, arguments.config, step=arguments.checkpoint, data=arguments.data
    )
    print_table(_table(curvature))
    print(f"\nThe results are in {curvature.path}")


def _table(curvature: Curvature) -> Table:
    parts = curvature.parts
    rows = [("loss", f"{parts['loss']['value']:.4f}", "")]
    if "eigenvalues" in parts:
        pairs = zip(parts["eigenvalues"]["values"], parts["eigenvalues"]["residuals"], strict=True)
        for place, (value, residual) in enumerate(pairs, start=1):
            rows.append((f"eigenvalue {place}", f"{value:.5g}", f"{residual:.2g}"))
    if "trace" in parts:
        trace = parts["trace"]
        rows.append(("trace", f"{trace['value']:.5g}", f"{trace['standard_error']:.2g}"))
    if "density" in parts:
        rows.append(("smallest eigenvalue seen", f"{parts['density']['smallest']:.5g}", ""))
        rows.append(("weight below zero", f"{parts['density']['below_zero']:.1%}", ""))
    return Table((f"Step {curvature.step}", "Value", "Error"), tuple(rows))
