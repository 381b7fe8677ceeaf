"""The charts of entries: each takes an entry's runs and asks results/charts.py for pictures."""

from __future__ import annotations

import math
from collections.abc import Callable

import polars as pl
import torch

from merit_lab.paper import measured
from merit_lab.paper import quantities as q
from merit_lab.paper.records import Data
from merit_lab.results import charts
from merit_lab.results.page import Chart

Draw = Callable[[Data], list[Chart]]

LOSS = "validation loss (nats per token)"
_MOST_CELLS = 64  # on a side of a picture; larger weights are averaged over blocks
_MOST_POINTS = 200


def _for_each(column: str, draw: Callable[[str, Data], Chart | None]) -> Draw:
    """A chart for each value of a column, unless there is nothing to draw."""
    return lambda data: [
        chart for (value,), rows in data.groups(column) if (chart := draw(value, rows)) is not None
    ]


def curves(
    title: str,
    y_title: str,
    curve: q.Query,
    *,
    by: str = "panel",
    against: str = "step",
    wide: bool = False,
    zero: bool = False,
) -> Draw:
    """A curve of each run, a chart for each panel. A query with a column ``series`` has several of a run."""
    value = "value_loss" if y_title == LOSS else "value"  # a loss is shown without its beginning

    def draw(group: str, data: Data) -> Chart | None:
        runs, rows = data.runs, curve(data)
        if rows.is_empty():
            return None
        if "series" in rows.columns:
            rows = rows.with_columns(of="run", run=pl.format("{}, {}", "run", "series"))
            each = rows.select("run", "of", "series").unique(maintain_order=True)
            runs = each.join(runs.select("status", "left_out", of="run"), on="of")
        return charts.curves(
            runs,
            rows.rename({"value": value}),
            value,
            against,
            name=_file(f"{title} {group}"),
            title=f"{title}, {group}",
            caption="Thin lines are seeds, thick ones their mean; crosses mark runs that diverged.",
            y_title=y_title,
            wide=wide,
            zero=zero,
        )

    return _for_each(by, draw)


def layers(data: Data) -> list[Chart]:
    """The largest logit of every layer over the steps, a chart for each series."""
    return charts.layers(data.runs, data.steps, name="layers")


def weights(data: Data) -> list[Chart]:
    """Magnitudes of the first layer's query and key weights after training, of the first finished seed."""
    return [
        _heat(f"{name} weight, {series}", weight.abs())
        for (series,), of_series in data.groups("series")
        for folder, steps in list(measured.checkpoints(of_series).values())[:1]
        for name, weight in measured.weights_at(folder, steps[-1], 1).items()
    ]


def _heat(title: str, size: torch.Tensor) -> Chart:
    block = -(-max(size.shape) // _MOST_CELLS)
    means = torch.nn.functional.avg_pool2d(size[None, None], block, ceil_mode=True)[0, 0]
    cells = pl.DataFrame({"output": range(len(means)), "magnitude": means.tolist()})
    cells = cells.with_columns(input=pl.int_ranges(means.shape[1])).explode("magnitude", "input")
    lowest, highest = cells["magnitude"].min(), cells["magnitude"].quantile(0.995)
    return charts.heat(
        cells,
        "input",
        "output",
        "magnitude",
        name=_file(title),
        title=title.capitalize(),
        caption=f"Magnitudes in the first layer after training, means of {block} x {block} elements.",
        domain=(lowest, highest),  # type: ignore[arg-type]  # the largest would leave all others dark
    )


def density(data: Data) -> list[Chart]:
    """The spectral density of the Hessian of the first seed of each series."""
    points = measured.spectrum(data)
    if points.is_empty():
        return []
    points = points.filter(pl.col("run") == pl.col("run").first().over("series"))
    every = -(-len(points) // (_MOST_POINTS * points["run"].n_unique()))
    floor = 1e-8 * pl.col("density").max().over("series")  # for the logarithm
    chart = charts.lines(
        points.with_columns(pl.max_horizontal("density", floor)).gather_every(every),
        "eigenvalue",
        "density",
        name="density",
        title="Spectral density of the Hessian",
        caption="Lanczos quadrature of the first seed that finished, smoothed by a hundredth of its width.",
        log_y=True,
    )
    return [chart]


def _rates(panel: str, data: Data) -> Chart | None:
    finite = data.runs.filter(pl.col("final").is_finite()).select("series", "lr")
    if finite.n_unique() <= data.runs["series"].n_unique():
        return None
    return charts.rates(
        data.runs,
        "lr",
        name=_file(f"rates {panel}"),
        title=f"Final validation loss against the learning rate, {panel}",
        caption="Lines join means over seeds; dots are runs, rings the lowest; crosses at the top diverged.",
    )


rates = _for_each("panel", _rates)
"""The final loss against the learning rate, a chart for each panel that has a grid and finite losses."""


def _steps_against_batch(model: str, data: Data) -> Chart | None:
    rows = [
        {"series": series, "optimizer.name": optimizer, "batch": batch, "steps": steps}
        for (series, optimizer, batch), one in data.groups("series", "optimizer.name", "batch")
        for steps in q.STEPS.of(one).values()
        if math.isfinite(steps) and steps > 0
    ]
    if not rows:
        return None
    # From the fewest tokens: a line starts at a larger batch if runs with the smallest diverged.
    tokens = min(row["batch"] * row["steps"] for row in rows)
    batches = sorted(data.values("batch"))
    ideal = {"series": "ideal", "batch": batches, "steps": [tokens / batch for batch in batches]}
    return charts.steps_to(
        pl.DataFrame(rows),
        name=_file(f"steps {model}"),
        title=f"Steps against batch, {model}",
        caption=f"Steps to a validation loss of {data.runs['target'][0]:.3f}. Dashed: twice the batch, half "
        "the steps.",
        ideals=pl.DataFrame(ideal),
    )


steps_against_batch = _for_each("model", _steps_against_batch)
"""Steps to the target against the batch, with the line of ideal scaling, a chart for each model."""


def points(title: str, quantity: q.Quantity) -> Draw:
    """A dot for each seed, by model and series."""

    def draw(data: Data) -> list[Chart]:
        rows = [
            {"model": model, "series": series, "value": value}
            for (model, series), of_both in data.groups("model", "series")
            for value in quantity.of(of_both).values()
            if math.isfinite(value)
        ]
        if not rows:
            return []
        chart = charts.points(
            pl.DataFrame(rows),
            "value",
            "model",
            name=_file(title),
            title=title.capitalize(),
            caption="A dot for each seed, a bar at their mean.",
            x_title=title,
        )
        return [chart]

    return draw


def theorem(data: Data) -> list[Chart]:
    """The mean squared gradient norm against the number of steps, and the bound."""
    means = data.runs.group_by("steps", maintain_order=True).agg(pl.col("measured", "bound").mean())
    chart = charts.lines(
        means.unpivot(index="steps", variable_name="series", value_name="norm"),
        "steps",
        "norm",
        name="theorem",
        title="Mean squared gradient norm against the number of steps",
        caption="Each point is the mean of separate runs, with the theorem's learning rate for their length.",
        x_title="steps, and samples in a batch",
        y_title="mean squared gradient norm",
        log_x=True,
        log_y=True,
    )
    return [chart]


def _file(text: str) -> str:
    """A name of a file from a title: "GPT-2 10M, batch 512" becomes gpt-2-10m-batch-512."""
    return "-".join("".join(one if one.isalnum() else " " for one in text.lower()).split())
