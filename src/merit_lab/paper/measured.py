"""What is measured after training: query and key weights of the checkpoints, curvature, evaluations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from merit_lab.measure.curvature.command import CurvatureConfig, measure_curvature
from merit_lab.measure.evaluate.command import Evaluate, evaluate
from merit_lab.measure.evaluate.sets import PAPER_SETS
from merit_lab.models import Model
from merit_lab.paper.quantities import BySeed, Quantity, Query, per_run
from merit_lab.paper.records import Data
from merit_lab.paper.scales import Scale
from merit_lab.train.checkpoint import steps_of
from merit_lab.train.snapshot import Snapshot

_PERPLEXITIES = {"lambada": "perplexity", "wikitext": "word_perplexity"}


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


def checkpoints(data: Data) -> dict[str, tuple[Path, list[int]]]:
    """The folder of each finished run, and the steps of the checkpoints that it has kept, if any."""
    kept = {run: (folder, steps_of(folder / "checkpoints")) for run, folder in data.folders().items()}
    return {run: (folder, steps) for run, (folder, steps) in kept.items() if steps}


def need_weights(data: Data, _: Scale, __: Path | None) -> None:
    """Raise if the runs have finished and none has kept its weights."""
    if data.folders() and not checkpoints(data):
        raise Unavailable(
            "The runs have no weights: their checkpoints were removed, or these are records from an archive, "
            "which keeps none."
        )


def _alike(name: str, kind: str) -> Query:
    """How alike the "rows" or "columns" of the first layer's "query" or "key" are at the end of each run."""

    def of(data: Data) -> pl.DataFrame:
        ends = {run: weights_at(folder, steps[-1], 1) for run, (folder, steps) in checkpoints(data).items()}
        values = [alikeness(weights[name], kind) for weights in ends.values()]
        return pl.DataFrame({"run": list(ends), "value": values}, {"run": pl.String, "value": pl.Float64})

    return of


ALIKE = [
    per_run(f"{name}, {kind}", _alike(name, kind), diverged=math.nan, number=".2f")
    for name in ("query", "key")
    for kind in ("rows", "columns")
]


def gaps(data: Data) -> pl.DataFrame:
    """The gap of each query and key weight at each checkpoint: run, step, series, value; and the peak."""
    rows = []
    for run, (folder, steps) in checkpoints(data).items():
        model = data.configs[run].model
        rows += [
            (run, step, f"{where} layer, {name}", gap := relative_gap(weight), peak(gap, weight.numel()))
            for where, layer in (("first", 1), ("middle", (model.layers + 1) // 2))
            for step in steps
            for name, weight in weights_at(folder, step, layer).items()
        ]
    schema = {
        "run": pl.String,
        "step": pl.Int64,
        "series": pl.String,
        "value": pl.Float64,
        "peak": pl.Float64,
    }
    return pl.DataFrame(rows, schema, orient="row")


def _mean(column: str) -> Query:
    return lambda data: gaps(data).group_by("run").agg(value=pl.col(column).mean())


GAP = per_run("gap", _mean("value"), diverged=math.nan, number=".4f")
PEAK = per_run("largest weight, times normal", _mean("peak"), diverged=math.nan, number=".2f")


# Curvature: figure 7.


def measure_curvature_of(data: Data, scale: Scale, _: Path | None) -> None:
    """Measure the Hessian at the end of every run. Parts that are known are not measured again."""
    for run, folder in data.folders().items():
        of_run = data.configs[run]
        if of_run.data.is_dir():
            measure_curvature(
                CurvatureConfig(
                    run=folder,
                    checkpoint=of_run.steps,
                    data=of_run.data,
                    sequences=scale.curvature_sequences,
                    top=1,
                    probes=scale.curvature_probes,
                    density=True,
                    density_probes=1,
                    density_steps=2 * scale.curvature_probes,
                )
            )
        elif not (TOP_EIGENVALUE.of(data.where(run=run)) and TRACE.of(data.where(run=run))):
            raise Unavailable(
                f"Curvature needs the runs' data, which are not in {of_run.data}: give them with --data"
            )


_AT_END = pl.when(pl.col("curvature.step") == pl.col("steps"))  # not of an earlier checkpoint
TOP_EIGENVALUE = per_run(
    "top eigenvalue", _AT_END.then(pl.col("curvature.eigenvalues.values").list.first()), number=".4g"
)
TRACE = per_run("trace", _AT_END.then(pl.col("curvature.trace")), number=".4g")


def spectrum(data: Data) -> pl.DataFrame:
    """The spectral density of each run that has one: run, series, eigenvalue, density."""
    grid, density = "curvature.density.grid", "curvature.density.density"
    if grid not in data.runs.columns:
        return pl.DataFrame()
    columns = {"eigenvalue": _AT_END.then(pl.col(grid)), "density": _AT_END.then(pl.col(density))}
    return data.runs.select("run", "series", **columns).drop_nulls().explode(*columns)


# Evaluations: figures 5 and 12, table 1. They are columns of the runs.


def _column(name: str) -> pl.Expr:
    """The perplexity, or the accuracy in percent, on an evaluation set."""
    if name in _PERPLEXITIES:
        return pl.col(f"evaluate.{name}.{_PERPLEXITIES[name]}")
    return 100 * pl.col(f"evaluate.{name}.acc")


def score(name: str) -> Quantity:
    """The perplexity, or the accuracy in percent, on an evaluation set."""
    if name in _PERPLEXITIES:
        return per_run(name, _column(name), number=".4g")
    return per_run(name, _column(name), diverged=-math.inf, number=".2f")


def log_perplexity(name: str) -> Quantity:
    """The logarithm of a perplexity: a difference of two is a ratio."""
    return per_run(f"log perplexity on {name}", _column(name).log())


def average(entry: str) -> Quantity:
    """The mean accuracy on an entry's sets, of runs that have all of them."""
    columns = [_column(name) for name in PAPER_SETS[entry]]
    mean = pl.sum_horizontal(columns, ignore_nulls=False) / len(columns)
    return per_run("average accuracy", mean, diverged=-math.inf, number=".2f")


def wins(entry: str, rival: str) -> Quantity:
    """The sets on which MERIT is above the rival, less those on which it is below."""

    def of(data: Data) -> BySeed:
        won: dict[int, float] = {}
        for name in PAPER_SETS[entry]:
            ours, theirs = (score(name).of(data.where(series=one)) for one in ("MERIT", rival))
            for seed in sorted(ours.keys() & theirs.keys()):
                if ours[seed] != theirs[seed] or math.isfinite(ours[seed]):  # one of them did not diverge
                    sign = (ours[seed] > theirs[seed]) - (ours[seed] < theirs[seed])
                    won[seed] = won.get(seed, 0.0) + sign
        return won

    name = f"sets where MERIT is above {rival}, less those where it is below"
    return Quantity(name=name, of=of, silent="both diverged, with every seed")


def evaluate_on(entry: str) -> Callable[[Data, Scale, Path | None], None]:
    """Evaluate the runs on an entry's sets."""

    def measure(data: Data, scale: Scale, task_files: Path | None) -> None:
        for run, folder in data.folders().items():
            if task_files is None and all(score(name).of(data.where(run=run)) for name in PAPER_SETS[entry]):
                continue  # evaluated before, wherever the sets came from
            if task_files is None and not scale.is_large:
                raise Unavailable(
                    "The evaluation sets are missing: give their folder with --task-files (`merit evaluate "
                    "-h` lists the files), or use scale small or paper, which load them from the Hugging "
                    "Face hub."
                )
            evaluate(
                Evaluate(run=folder, tasks=(entry,), task_files=task_files, limit=scale.evaluation_limit)
            )

    return measure
