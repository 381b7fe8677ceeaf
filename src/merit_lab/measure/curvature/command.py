"""`merit curvature`: measure the Hessian of the training loss at a checkpoint of a run, part by part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from merit_lab.checks import check_at_least
from merit_lab.measure.checkpoint import (
    Measured,
    OnData,
    Part,
    StoppableProgress,
    measure_missing,
    run_command,
)
from merit_lab.measure.curvature.hessian import Hessian
from merit_lab.measure.curvature.spectrum import (
    hutchinson_trace,
    num_vectors,
    spectral_density,
    top_eigenvalues,
)
from merit_lab.models import num_parameters
from merit_lab.tables import Table, print_table
from merit_lab.train.snapshot import default_device, mean_loss

# In one pass: more are no faster on a CPU, and a GPU has to hold all graphs of them.
_TOKENS = {"cpu": 16384, "cuda": 4096}


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig(OnData):
    """Measure the curvature of the training loss at a checkpoint of a run, in float32: the largest
    eigenvalues of its Hessian, its trace and, optionally, its spectral density. The results go into the run
    directory; existing ones are not measured again."""

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
    """Sequences in one pass; fewer need less memory. None: 16384 tokens on a CPU, 4096 on CUDA."""

    def __post_init__(self) -> None:
        least = {"sequences": 1, "top": 0, "density_probes": 1, "density_steps": 1, "seed": 0}
        for name, smallest in least.items():
            check_at_least(name, getattr(self, name), smallest)
        if self.micro_batch is not None:
            check_at_least("micro_batch", self.micro_batch, 1)
        if self.probes != 0 and self.probes < 2:
            raise ValueError(
                f"probes is {self.probes}; it must be 0 for no trace, or at least 2 for its error"
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; it must be between 0 and 1")


def measure_curvature(config: CurvatureConfig) -> Measured:
    """Measure the parts that were not yet measured at a checkpoint with the same settings."""
    snapshot = config.snapshot()
    dataset = snapshot.open_data(config.data)
    sequences = snapshot.training_sequences(dataset, config.sequences)
    if config.top:  # refuses what is impossible, before anything is computed
        num_vectors(num_parameters(snapshot.config.model), config.top)

    @functools.cache
    def hessian(progress: StoppableProgress) -> Hessian:
        device = default_device()
        model = snapshot.load_model(device, twice=True)
        size = config.micro_batch or max(1, _TOKENS[device.type] // model.config.context)
        return Hessian(mean_loss(model, sequences, size), model.parameters(), progress.advance)

    def part(method: Callable[..., dict[str, Any]], settings: dict[str, Any]) -> Part:
        of_loss = {"sequences": len(sequences), "context": snapshot.config.model.context}
        return Part(of_loss | settings, lambda progress: method(hessian(progress), **settings))

    parts = {name: part(*how) for name, how in _parts(config).items()}
    return measure_missing("curvature", snapshot, parts, snapshot.environment(dataset), "products")


def _parts(config: CurvatureConfig) -> dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]]:
    """Return the configured parts, the fastest first: the method of each, and its settings."""
    seed = config.seed
    parts: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = {"loss": (_loss, {})}
    if config.top:
        parts["eigenvalues"] = (
            top_eigenvalues,
            {"top": config.top, "tolerance": config.tolerance, "seed": seed},
        )
    if config.probes:
        parts["trace"] = hutchinson_trace, {"probes": config.probes, "seed": seed}
    if config.density:
        how = {"probes": config.density_probes, "steps": config.density_steps, "seed": seed}
        parts["density"] = spectral_density, how
    return parts


def _loss(hessian: Hessian) -> dict[str, float]:
    return {"value": hessian.loss()}


def main(argv: Sequence[str]) -> int:
    """Run `merit curvature` and return its exit status."""
    return run_command("curvature", CurvatureConfig, _show, argv)


def _show(config: CurvatureConfig) -> None:
    measured = measure_curvature(config)
    print_table(_table(measured))
    print(f"\nThe results are in {measured.path}")


def _table(measured: Measured) -> Table:
    parts = measured.results
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
    return Table((f"Step {measured.snapshot.step}", "Value", "Error"), tuple(rows))
