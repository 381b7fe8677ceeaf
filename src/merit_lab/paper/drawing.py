"""The charts of entries: each takes an entry's runs and asks results/charts.py for pictures."""

from __future__ import annotations

import math
from collections.abc import Callable

import polars as pl
import torch

from merit_lab.paper import measured
from merit_lab.paper import quantities as q
from merit_lab.paper.plan import Data
from merit_lab.results import charts
from merit_lab.results.page import Chart

Draw = Callable[[Data], list[Chart]]

LOSS = "validation loss (nats per token)"
_MOST_CELLS = 64  # on a side of a picture; larger weights are averaged over blocks
_MOST_POINTS = 200


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

    def draw(data: Data) -> list[Chart]:
        made = []
        for (group,), of_group in data.groups(by):
            runs, rows = of_group.runs, curve(of_group)
            if "series" in rows.columns:
                rows = rows.with_columns(of="run", run=pl.format("{}, {}", "run", "series"))
                each = rows.select("run", "of", "series").unique(maintain_order=True)
                runs = each.join(runs.select("status", "left_out", of="run"), on="of")
            if not rows.is_empty():
                chart = charts.curves(
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
                made.append(chart)
        return made

    return draw


def layers(data: Data) -> list[Chart]:
    """The largest logit of every layer over the steps, a chart for each series."""
    return charts.layers(data.runs, data.steps, name="layers")


def weights(data: Data) -> list[Chart]:
    """Magnitudes of the first layer's query and key weights after training, of the first finished seed."""
    made = []
    for (series,), of_series in data.groups("series"):
        folder, steps = next(iter(measured.checkpoints(of_series).values()), (None, []))
        at_end = {} if folder is None else measured.weights_at(folder, steps[-1], 1)
        for name, weight in at_end.items():
            block = -(-max(weight.shape) // _MOST_CELLS)
            means = torch.nn.functional.avg_pool2d(weight.abs()[None, None], block, ceil_mode=True)[0, 0]
            cells = pl.DataFrame({"output": range(len(means)), "magnitude": means.tolist()})
            cells = cells.with_columns(input=pl.int_ranges(means.shape[1])).explode("magnitude", "input")
            size = cells["magnitude"]
            chart = charts.heat(
                cells,
                "input",
                "output",
                "magnitude",
                name=_file(f"{name} {series}"),
                title=f"{name.capitalize()} weight, {series}",
                caption=f"Magnitudes in the first layer after training, means of {block} x {block} elements.",
                # The largest would leave all others dark.
                domain=(size.min(), size.quantile(0.995)),  # type: ignore[arg-type]
            )
            made.append(chart)
    return made


def density(data: Data) -> list[Chart]:
    """The spectral density of the Hessian of the first seed of each series."""
    points = measured.spectrum(data)
    points = points.filter(pl.col("run") == pl.col("run").first().over("series"))
    if points.is_empty():
        return []
    every = -(-len(points) // (_MOST_POINTS * points["run"].n_unique()))
    floor = 1e-8 * pl.col("density").max().over("series")  # for the logarithm
    points = points.with_columns(pl.max_horizontal("density", floor)).gather_every(every)
    chart = charts.lines(
        points.rename({"grid": "eigenvalue"}),
        "eigenvalue",
        "density",
        name="density",
        title="Spectral density of the Hessian",
        caption="Lanczos quadrature of the first seed that finished, smoothed by a hundredth of its width.",
        log_y=True,
    )
    return [chart]


def rates(data: Data) -> list[Chart]:
    """The final loss against the learning rate, a chart for each panel that has a grid and finite losses."""
    grids = [
        (panel, of_panel.runs)
        for (panel,), of_panel in data.groups("panel")
        if of_panel.runs.filter(pl.col("final").is_finite()).select("series", "lr").n_unique()
        > of_panel.runs["series"].n_unique()
    ]
    caption = "Lines join means over seeds; dots are runs, rings the lowest; crosses at the top diverged."
    return [
        charts.rates(
            runs,
            "lr",
            name=_file(f"rates {panel}"),
            title=f"Final validation loss against the learning rate, {panel}",
            caption=caption,
        )
        for panel, runs in grids
    ]


def steps_against_batch(data: Data) -> list[Chart]:
    """Steps to the target against the batch, with the line of ideal scaling, a chart for each panel."""
    made = []
    for (panel,), of_panel in data.groups("panel"):
        rows = [
            {"series": series, "optimizer.name": optimizer, "batch": batch, "steps": steps}
            for (series, optimizer, batch), one in of_panel.groups("series", "optimizer.name", "batch")
            for steps in q.STEPS.of(one).values()
            if math.isfinite(steps) and steps > 0
        ]
        if rows:
            # From the fewest tokens: a line starts at a larger batch if runs with the smallest diverged.
            tokens = min(row["batch"] * row["steps"] for row in rows)
            batches = sorted(of_panel.values("batch"))
            ideal = {"series": "ideal", "batch": batches, "steps": [tokens / batch for batch in batches]}
            chart = charts.steps_to(
                pl.DataFrame(rows),
                name=_file(f"steps {panel}"),
                title=f"Steps against batch, {panel}",
                caption=f"Steps to a validation loss of {of_panel.runs['target'][0]:.3f}. Dashed: twice the "
                "batch, half the steps.",
                ideals=pl.DataFrame(ideal),
            )
            made.append(chart)
    return made


def points(title: str, quantity: q.Quantity) -> Draw:
    """A dot for each seed, by panel and series."""

    def draw(data: Data) -> list[Chart]:
        rows = [
            {"panel": panel, "series": series, "value": value}
            for (panel, series), of_both in data.groups("panel", "series")
            for value in quantity.of(of_both).values()
            if math.isfinite(value)
        ]
        if not rows:
            return []
        chart = charts.points(
            pl.DataFrame(rows),
            "value",
            "panel",
            name=_file(title),
            title=title.capitalize(),
            caption="A dot for each seed, a bar at their mean.",
            x_title=title,
        )
        return [chart]

    return draw


def theorem(data: Data) -> list[Chart]:
    """The mean squared gradient norm against the number of steps, and the bound."""
    norm, by_steps = pl.col("measured"), data.runs.group_by("steps", maintain_order=True)
    found = by_steps.agg(norm=norm.mean(), low=norm.min(), high=norm.max(), series=pl.lit("MERIT-W").first())
    bound = by_steps.agg(norm=pl.col("bound").first(), series=pl.lit("Bound").first())
    chart = charts.lines(
        pl.concat([found, bound], how="diagonal"),
        "steps",
        "norm",
        name="theorem",
        title="Mean squared gradient norm against the number of steps",
        caption="Each point is a separate run, with the theorem's learning rate for its length.",
        x_title="steps, and samples in a batch",
        y_title="mean squared gradient norm",
        log_x=True,
        log_y=True,
        low="low",
        high="high",
    )
    return [chart]


def _file(text: str) -> str:
    """A name of a file from a title: "GPT-2 10M, batch 512" becomes gpt-2-10m-batch-512."""
    return "-".join("".join(one if one.isalnum() else " " for one in text.lower()).split())
