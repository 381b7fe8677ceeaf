"""Query and key weights: figures 3 and 10."""

from __future__ import annotations

import math
import statistics
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from merit_lab.models import Model
from merit_lab.paper.entry import Analysis, PaperEntry, Unavailable
from merit_lab.paper.heatmaps import matrix_chart
from merit_lab.paper.records import BySeed, Records, TrialRecord, spread_text
from merit_lab.paper.setups import WATCHED, Scale
from merit_lab.paper.verdict import ALL_DIVERGED, Verdict, paired
from merit_lab.results.curves import Point
from merit_lab.study.charts import Axis, Chart, line_chart
from merit_lab.tables import Table
from merit_lab.train.checkpoint_files import steps_of
from merit_lab.train.snapshot import Snapshot

_ALIKENESS = (
    "The score is the variance of the row (column) means as a share of the variance of all magnitudes, "
    "divided by the share that randomly ordered elements would have. 1 means no structure."
)
_MOST_CELLS = 64  # on a side of a picture; larger weights are averaged over blocks
_PAPER_GAP = (0.99, 0.996)  # of matrices of 1024 x 1024
_PAPER_SIDE = 1024


def query_and_key(model: Model, layer: int) -> dict[str, Tensor]:
    """The query and key weights of a layer, counted from 1, with a row for each output."""
    prefix = f"blocks.{layer - 1}.attention"
    if model.config.family == "gpt2":
        query, key, _ = model.get_parameter(f"{prefix}.query_key_value.weight").detach().chunk(3)
    else:
        query, key = (model.get_parameter(f"{prefix}.{part}.weight").detach() for part in ("query", "key"))
    return {"query": query, "key": key}


def alikeness(weight: Tensor) -> dict[str, float]:
    """How similar magnitudes are within rows and within columns; 1 is the expectation by chance.

    The variance of the row (column) means as a share of the elements' variance, divided by the share that
    randomly ordered elements would have.
    """
    size = weight.abs().double()
    num_rows, num_columns = size.shape
    total = size.var(correction=0)
    by_chance = {"rows": num_rows - 1, "columns": num_columns - 1}
    means = {"rows": size.mean(1), "columns": size.mean(0)}
    return {
        kind: (means[kind].var(correction=0) / total).item() * (size.numel() - 1) / by_chance[kind]
        for kind in means
    }


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


@cache
def _weights(folder: Path, step: int, layer: int) -> dict[str, Tensor]:
    try:
        model = Snapshot.find(folder, step).load_model(torch.device("cpu"))
    except ValueError as damaged:
        raise Unavailable(f"The weights of a run cannot be read: {damaged}") from None
    return {name: weight.clone() for name, weight in query_and_key(model, layer).items()}


def _steps(record: TrialRecord) -> list[int]:
    """Steps of the checkpoints that a finished run has kept."""
    return steps_of(record.folder / "checkpoints") if record.status == "finished" else []


def _need_weights(records: Records) -> None:
    finished = [record for record in records.all if record.status == "finished"]
    if finished and not any(map(_steps, finished)):
        raise Unavailable(
            "The runs have no weights: their checkpoints were removed, or these are records from `merit "
            "keep`, which keeps none."
        )


def _fig3(records: Records, _: Scale) -> Analysis:
    _need_weights(records)

    def score(record: TrialRecord, name: str, kind: str) -> float | None:
        steps = _steps(record)
        return alikeness(_weights(record.folder, steps[-1], 1)[name])[kind] if steps else None

    def scores(series: str, name: str, kind: str) -> BySeed:
        return records.of(series=series).by_seed(lambda record: score(record, name, kind), diverged=math.nan)

    places = [(name, kind) for name in ("query", "key") for kind in ("rows", "columns")]
    claim = Verdict(
        claim="Magnitudes of query and key weights are alike within rows and within columns.",
        source="figure 3",
        comparisons=tuple(
            paired(
                f"{series}, {name}, {kind}: above what chance gives",
                dict.fromkeys(by_seed, 1.0),
                by_seed,
                unit="times chance",
                empty_reason=ALL_DIVERGED,
            )
            for series in records.series
            for name, kind in places
            for by_seed in [scores(series, name, kind)]
        ),
    )
    table = Table(
        ("Optimizer", "Runs", *(f"{name.capitalize()}, {kind}" for name, kind in places)),
        tuple(
            (
                series,
                records.of(series=series).statuses,
                *(spread_text(scores(series, *place), ".2f") for place in places),
            )
            for series in records.series
        ),
        num_text=2,
    )
    charts = []
    for series in records.series:
        first = next((record for record in records.of(series=series).all if _steps(record)), None)
        if first is not None:
            charts += _pictures(first, series)
    return Analysis(
        table=table,
        charts=tuple(charts),
        verdicts=(claim,),
        notes=(_ALIKENESS,),
    )


def _pictures(record: TrialRecord, series: str) -> list[Chart]:
    weights = _weights(record.folder, _steps(record)[-1], 1)
    charts = []
    for name, weight in weights.items():
        magnitudes = weight.abs()
        block = -(-max(weight.shape) // _MOST_CELLS)
        if block > 1:
            magnitudes = torch.nn.functional.avg_pool2d(magnitudes[None, None], block, ceil_mode=True)[0, 0]
        charts.append(
            matrix_chart(
                magnitudes.tolist(),
                name=f"{name}-{series.lower()}",
                title=f"{name.capitalize()} weight, {series}",
                caption="Magnitudes in the first layer after training, the first seed that finished"
                + (f"; means of {block} x {block} blocks." if block > 1 else "."),
                rows="outputs",
                columns="inputs",
            )
        )
    return charts


def _fig10(records: Records, scale: Scale) -> Analysis:
    _need_weights(records)
    num_layers = scale.observed.model.layers
    layers = list(dict.fromkeys([1, (num_layers + 1) // 2]))
    num_elements = scale.observed.model.width**2
    places = [(layer, name) for layer in layers for name in ("query", "key")]

    def curve(record: TrialRecord, layer: int, name: str) -> list[Point]:
        return [(step, relative_gap(_weights(record.folder, step, layer)[name])) for step in _steps(record)]

    def mean_gap(record: TrialRecord) -> float | None:
        gaps = [gap for place in places for _, gap in curve(record, *place)]
        return statistics.fmean(gaps) if gaps else None

    low, high = sorted(peak(gap, _PAPER_SIDE**2) for gap in _PAPER_GAP)
    comparisons = []
    for series in records.series:
        gaps = records.of(series=series).by_seed(mean_gap, diverged=math.nan)
        peaks = {seed: peak(gap, num_elements) for seed, gap in gaps.items()}
        bounds = dict.fromkeys(peaks, low), dict.fromkeys(peaks, high)
        comparisons += [
            paired(
                f"{series}: at least the lowest",
                bounds[0],
                peaks,
                paper=f"{low:.2f}",
                unit="times normal",
                empty_reason=ALL_DIVERGED,
            ),
            paired(
                f"{series}: at most the highest",
                peaks,
                bounds[1],
                paper=f"{high:.2f}",
                unit="times normal",
                empty_reason=ALL_DIVERGED,
            ),
        ]
    claim = Verdict(
        claim="The largest query and key weights are a small part of the l2 norm: of 1024 x 1024 weights the "
        "gap is 0.99 to 0.996, so that the largest is "
        f"{low:.2f} to {high:.2f} times what normal numbers would have.",
        source="figure 10",
        comparisons=tuple(comparisons),
    )
    table = Table(
        ("Optimizer", "Runs", "Gap, paper", "Gap, ours", "Largest, times normal"),
        tuple(
            (
                series,
                runs.statuses,
                "0.99 to 0.996",
                spread_text(runs.by_seed(mean_gap), ".4f"),
                spread_text(
                    {seed: peak(gap, num_elements) for seed, gap in runs.by_seed(mean_gap).items()}, ".2f"
                ),
            )
            for series in records.series
            for runs in [records.of(series=series)]
        ),
        num_text=2,
    )
    charts = tuple(
        line_chart(
            {
                f"Layer {layer}, {name}": records.of(series=series).lines(
                    lambda record, layer=layer, name=name: curve(record, layer, name)  # type: ignore[misc]
                )
                for layer, name in places
            },
            {f"Layer {layer}, {name}": f"layer {layer}" for layer, name in places},
            Axis("steps", ",d", from_zero=True),
            Axis("(l2 - max) / l2", ".3f"),
            name=f"gap-{series.lower()}",
            title=f"Gap between l2 and max norm, {series}",
            caption="At the checkpoints of each run.",
        )
        for series in records.series
    )
    note = (
        "The gap depends on the size of the matrix, so the comparison divides the largest element by that of "
        "as many independent normal numbers; means over layers, weights and checkpoints."
    )
    return Analysis(table=table, charts=charts, verdicts=(claim,), notes=(note,))


ENTRIES = (
    PaperEntry(
        name="fig3",
        title="Figure 3: query and key weights",
        shows="magnitudes of query and key weights, and how alike rows and columns are",
        trials=lambda scale, seeds: scale.trials([scale.gpt2[0]], WATCHED, seeds),
        analyse=_fig3,
    ),
    PaperEntry(
        name="fig10",
        title="Figure 10: l2 norm and max norm",
        shows="relative gap between l2 and max norm of query and key weights during training",
        trials=lambda scale, seeds: scale.trials([scale.observed], WATCHED, seeds),
        analyse=_fig10,
    ),
)
