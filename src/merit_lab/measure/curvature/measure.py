"""Measure the curvature at a checkpoint of a run, part by part, into the run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merit_lab.checks import check_at_least
from merit_lab.folders import check_writable
from merit_lab.measure.curvature.density import spectral_density
from merit_lab.measure.curvature.eigenvalues import num_vectors, top_eigenvalues
from merit_lab.measure.curvature.hessian import Hessian, hessian_vector_product
from merit_lab.measure.curvature.trace import hutchinson_trace
from merit_lab.models import Model, num_parameters
from merit_lab.progress import WorkProgress
from merit_lab.runs import Measurements
from merit_lab.train.signals import StopRequest, listening
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

    def __post_init__(self) -> None:
        least = {"sequences": 1, "top": 0, "density_probes": 1, "density_steps": 1}
        for name, smallest in least.items():
            check_at_least(name, getattr(self, name), smallest)
        if self.probes < 0 or self.probes == 1:
            raise ValueError(
                f"probes is {self.probes}; it must be 0 for no trace, or at least 2 for its error"
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; it must be between 0 and 1")


@dataclass(frozen=True)
class Measurement:
    """One part to measure: the settings it depends on besides the loss, and the function that measures it."""

    settings: dict[str, Any]
    products: int | None
    measure: Callable[[Hessian], dict[str, Any]]


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
    micro_batch: int | None = None,
) -> Curvature:
    """Measure the parts that were not yet measured at a checkpoint with the same settings.

    Each part is written when it is done. Raises ``Interrupted`` after a signal; a second call continues with
    the missing parts.

    Args:
        run: the run directory.
        config: what to measure.
        step: of the checkpoint; None for the newest.
        data: the folder of the run's data, if it has moved.
        micro_batch: sequences in one pass. None: found by trial on CUDA, 16384 tokens on a CPU.
    """
    config = config or CurvatureConfig()
    if micro_batch is not None:
        check_at_least("micro_batch", micro_batch, 1)
    snapshot = Snapshot.find(run, step)
    dataset = snapshot.open_data(data)
    sequences = snapshot.training_sequences(dataset, config.sequences)
    parts = _parts(config, num_parameters(snapshot.config.model))
    results = Measurements(snapshot.run.folder / "curvature" / f"{snapshot.path.name}.json")
    loss_settings = {"sequences": len(sequences), "context": snapshot.config.model.context}
    settings = {name: loss_settings | part.settings for name, part in parts.items()}
    found = {name: result for name in parts if (result := results.find(name, settings[name])) is not None}
    missing = {name: part for name, part in parts.items() if name not in found}
    if missing:
        check_writable(results.path.parent)
        about = snapshot.environment(dataset)
        with listening() as stop:
            work = _Work(snapshot, sequences, micro_batch, stop)
            for name, part in missing.items():
                began = time.monotonic()
                found[name] = work.measure(name, part)
                seconds = round(time.monotonic() - began, 3)
                results.put(name, settings[name], found[name], seconds=seconds, environment=about)
    return Curvature(path=results.path, step=snapshot.step, parts=found)


def _parts(config: CurvatureConfig, size: int) -> dict[str, Measurement]:
    """Return the configured parts, the fastest first."""
    seed = config.seed
    parts = {"loss": Measurement({}, 0, lambda hessian: {"value": hessian.loss()})}
    if config.top:
        # Refuse impossible requests before anything is computed.
        num_vectors(size, config.top)
        parts["eigenvalues"] = Measurement(
            {"top": config.top, "tolerance": config.tolerance, "seed": seed},
            None,
            lambda hessian: asdict(
                top_eigenvalues(hessian, config.top, tolerance=config.tolerance, seed=seed)
            ),
        )
    if config.probes:
        parts["trace"] = Measurement(
            {"probes": config.probes, "seed": seed},
            config.probes,
            lambda hessian: _trace(hessian, config),
        )
    if config.density:
        parts["density"] = Measurement(
            {"probes": config.density_probes, "steps": config.density_steps, "seed": seed},
            config.density_probes * config.density_steps,
            lambda hessian: _density(hessian, config),
        )
    return parts


def _trace(hessian: Hessian, config: CurvatureConfig) -> dict[str, Any]:
    trace = hutchinson_trace(hessian, config.probes, seed=config.seed)
    return {"value": trace.value, "standard_error": trace.standard_error, **asdict(trace)}


def _density(hessian: Hessian, config: CurvatureConfig) -> dict[str, Any]:
    spectrum = spectral_density(hessian, config.density_probes, steps=config.density_steps, seed=config.seed)
    grid, density = spectrum.density()
    return {"grid": grid.tolist(), "density": density.tolist(), **asdict(spectrum)}


class _Work:
    """The loaded model's Hessian; shows progress and checks for signals after each product."""

    def __init__(
        self, snapshot: Snapshot, sequences: Tensor, micro_batch: int | None, stop: StopRequest
    ) -> None:
        model = snapshot.load_model(default_device(), twice=True)
        size = micro_batch or choose_micro_batch(model, sequences)
        self._progress = WorkProgress()
        self._stop = stop
        self._hessian = Hessian(mean_loss(model, sequences, size), model.parameters(), self._after_product)

    def measure(self, name: str, part: Measurement) -> dict[str, Any]:
        began, before = time.monotonic(), self._hessian.num_products
        with self._progress.piece(name, part.products, "products"):
            result = part.measure(self._hessian)
        if num_products := self._hessian.num_products - before:
            self._progress.say(f"{name}: {num_products} products in {time.monotonic() - began:.1f} s")
        return result

    def _after_product(self) -> None:
        self._progress.advance()
        if self._stop.signum:
            raise self._stop.interrupted("; finished parts are kept")


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
