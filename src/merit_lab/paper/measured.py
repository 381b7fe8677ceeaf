"""What is measured after training: query and key weights of the checkpoints, curvature, evaluations."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from merit_lab.measure.curvature.command import CurvatureConfig, measure_curvature
from merit_lab.measure.evaluate.command import evaluate
from merit_lab.measure.evaluate.sets import PAPER_SETS
from merit_lab.models import Model
from merit_lab.paper.plan import Data, OneRun
from merit_lab.paper.quantities import Layers, Point, Quantity, first, middle, per_run, score
from merit_lab.paper.scales import Scale
from merit_lab.train.checkpoint_files import steps_of
from merit_lab.train.snapshot import Snapshot

_LONG_ENOUGH = 512  # tokens of context that fit every answer of every set


class Unavailable(Exception):
    """An entry cannot be made; the message says what is missing and how to get it."""


# Weights: figures 3 and 10.


def query_and_key(model: Model, layer: int) -> dict[str, Tensor]:
    """The query and key weights of a layer, counted from 1, with a row for each output."""
    prefix = f"blocks.{layer - 1}.attention"
    if model.config.family == "gpt2":
        query, key, _ = model.get_parameter(f"{prefix}.query_key_value.weight").detach().chunk(3)
    else:
        query, key = (model.get_parameter(f"{prefix}.{part}.weight").detach() for part in ("query", "key"))
    return {"query": query, "key": key}


def alikeness(weight: Tensor, kind: str) -> float:
    """How similar magnitudes are within "rows" or within "columns"; 1 is the expectation by chance.

    The variance of the row (column) means as a share of the elements' variance, divided by the share that
    randomly ordered elements would have.
    """
    size = weight.abs().double()
    dim = ("rows", "columns").index(kind)
    share = size.mean(1 - dim).var(correction=0) / size.var(correction=0)
    return share.item() * (size.numel() - 1) / (size.shape[dim] - 1)


def relative_gap(weight: Tensor) -> float:
    """(l2 norm - max norm) / l2 norm, as in figure 10."""
    norm = torch.linalg.vector_norm(weight.double())
    return float((norm - weight.abs().max()) / norm)


def peak(gap: float, num_elements: int) -> float:
    """The largest element as a multiple of the largest of as many independent normal numbers.

    The gap alone depends on the size of the matrix: it is 0.995 for 1024 x 1024 normal numbers, 0.943 for
    64 x 64.
    """
    largest = (1 - gap) * math.sqrt(num_elements)  # over the root mean square
    return largest / statistics.NormalDist().inv_cdf(1 - 0.5 / num_elements)


PAPER_PEAKS = peak(0.996, 1024**2), peak(0.99, 1024**2)
"""The ends of what the paper's figure 10 shows, of matrices of 1024 x 1024."""


@cache
def weights_at(folder: Path, step: int, layer: int) -> dict[str, Tensor]:
    """The query and key weights of a checkpoint."""
    try:
        model = Snapshot.find(folder, step).load_model(torch.device("cpu"))
    except ValueError as damaged:
        raise Unavailable(f"The weights of a run cannot be read: {damaged}") from None
    return {name: weight.clone() for name, weight in query_and_key(model, layer).items()}


def checkpoints(run: OneRun) -> list[int]:
    """The steps of the checkpoints that a finished run has kept."""
    return steps_of(Path(run.row["folder"]) / "checkpoints") if run.row["status"] == "finished" else []


def need_weights(data: Data, _: Scale, __: Path | None) -> None:
    """Raise if the runs have finished and none has kept its weights."""
    finished = [run for run in data.all if run.row["status"] == "finished"]
    if finished and not any(map(checkpoints, finished)):
        raise Unavailable(
            "The runs have no weights: their checkpoints were removed, or these are records from an archive, "
            "which keeps none."
        )


def _alike(name: str, kind: str) -> Quantity:
    def of(run: OneRun) -> float | None:
        steps = checkpoints(run)
        return alikeness(weights_at(Path(run.row["folder"]), steps[-1], 1)[name], kind) if steps else None

    return per_run(f"{name}, {kind}", of, diverged=math.nan, number=".2f", unit="times chance")


ALIKE = {
    f"{name.capitalize()}, {kind}": _alike(name, kind)
    for name in ("query", "key")
    for kind in ("rows", "columns")
}


def _gap_curve(layers: Layers, name: str) -> Callable[[OneRun], list[Point]]:
    """The gap of a query or key weight at each checkpoint."""

    def curve(run: OneRun) -> list[Point]:
        layer, folder = layers(run.config.model.layers)[0], Path(run.row["folder"])
        return [(step, relative_gap(weights_at(folder, step, layer)[name])) for step in checkpoints(run)]

    return curve


GAP_CURVES = {
    f"{where} layer, {name}": _gap_curve(layers, name)
    for where, layers in (("first", first), ("middle", middle))
    for name in ("query", "key")
}


def _mean_gap(run: OneRun) -> float | None:
    gaps = [gap for curve in GAP_CURVES.values() for _, gap in curve(run)]
    return statistics.fmean(gaps) if gaps else None


def _mean_peak(run: OneRun) -> float | None:
    gap = _mean_gap(run)
    return None if gap is None else peak(gap, run.config.model.width**2)


GAP = per_run("gap", _mean_gap, diverged=math.nan, number=".4f")
PEAK = per_run("largest weight", _mean_peak, diverged=math.nan, number=".2f", unit="times normal")


# Curvature: figure 7.


def measure_curvature_of(data: Data, scale: Scale, _: Path | None) -> None:
    """Measure the Hessian at the end of every run. Parts that are known are not measured again."""
    config = CurvatureConfig(
        sequences=scale.curvature_sequences,
        top=1,
        probes=scale.curvature_probes,
        density=True,
        density_probes=1,
        density_steps=2 * scale.curvature_probes,
    )
    for run in _finished(data):
        if run.config.data.is_dir():
            try:
                measure_curvature(
                    Path(run.row["folder"]), config, step=run.config.steps, data=run.config.data
                )
            except ModuleNotFoundError as error:
                raise Unavailable(
                    f"Curvature needs {error.name}, which is not installed: pip install "
                    "'merit-optim[curvature]'"
                ) from None
        elif any(of.of(data.where(run=run.row["run"])) == {} for of in (TOP_EIGENVALUE, TRACE)):
            raise Unavailable(
                f"Curvature needs the runs' data, which are not in {run.config.data}: give them with --data"
            )


def _at_end(run: OneRun, key: str) -> str | float | None:
    """A result of the run's last checkpoint; None if only an earlier one was measured."""
    return run.row.get(key) if run.row.get("curvature.step") == run.config.steps else None


def _top(run: OneRun) -> float | None:
    values = _at_end(run, "curvature.eigenvalues.values")
    return None if values is None else float(json.loads(str(values))[0])


def _trace(run: OneRun) -> float | None:
    value = _at_end(run, "curvature.trace")
    return None if value is None else float(value)


def spectrum(run: OneRun) -> list[tuple[float, float]]:
    """The points of the spectral density."""
    grid, density = (_at_end(run, f"curvature.density.{name}") for name in ("grid", "density"))
    return (
        []
        if grid is None or density is None
        else list(zip(json.loads(str(grid)), json.loads(str(density)), strict=True))
    )


TOP_EIGENVALUE = per_run("top eigenvalue", _top, number=".4g")
TRACE = per_run("trace", _trace, number=".4g")


# Evaluations: figures 5 and 12, table 1.


def evaluate_on(entry: str) -> Callable[[Data, Scale, Path | None], None]:
    """Evaluate the runs on an entry's sets."""

    def measure(data: Data, scale: Scale, task_files: Path | None) -> None:
        for run in _finished(data):
            one = data.where(run=run.row["run"])
            if task_files is None and all(score(name).of(one) for name in PAPER_SETS[entry]):
                continue  # evaluated before, wherever the sets came from
            if task_files is None and scale.tokenizer is not None:
                raise Unavailable(
                    "The evaluation sets are missing: give their folder with --task-files (`merit evaluate "
                    "-h` lists the files), or use scale small or paper, which load them from the Hugging "
                    "Face hub."
                )
            try:
                evaluate(
                    Path(run.row["folder"]), [entry], task_files=task_files, limit=scale.evaluation_limit
                )
            except (ModuleNotFoundError, ConnectionError) as error:
                raise Unavailable(str(error)) from None
            except ValueError as error:
                is_short = run.config.model.context < _LONG_ENOUGH
                way_out = "; a larger scale has models with longer contexts" if is_short else ""
                raise Unavailable(f"{error}{way_out}") from None

    return measure


def _finished(data: Data) -> list[OneRun]:
    return [run for run in data.all if run.row["status"] == "finished"]
