"""The charts of entries: each takes an entry's runs and makes pictures, by results/charts.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl
import torch

from merit_lab.paper import measured
from merit_lab.paper import quantities as q
from merit_lab.paper.plan import Data, OneRun
from merit_lab.results import charts
from merit_lab.results.page import Chart

Curve = Callable[[OneRun], Sequence[q.Point]]
Draw = Callable[[Data], list[Chart]]

_MOST_CELLS = 64  # on a side of a picture; larger weights are averaged over blocks
_MOST_POINTS = 200
LOSS = "validation loss (nats per token)"


def curves(
    title: str,
    y_title: str,
    curve: Curve | Mapping[str, Curve],
    *,
    by: str = "panel",
    against: str = "step",
    wide: bool = False,
    zero: bool = False,
) -> Draw:
    """A quantity of each run over steps, a chart for each panel; or several, by the names of their series."""
    parts = {"": curve} if callable(curve) else curve

    def draw(data: Data) -> list[Chart]:
        made = []
        for (group,), of_group in data.groups(by):
            runs, rows = [], []
            for part, measure in parts.items():
                for run in of_group.all:
                    about = {"run": f"{run.row['planned']} {part}", "status": run.row["status"]}
                    optimizer = part or run.row["optimizer.name"]
                    runs.append({**about, "series": part or run.row["series"], "optimizer.name": optimizer})
                    size = run.config.batch * run.config.model.context if against == "tokens" else 1
                    rows += [
                        {"run": about["run"], "step": step, against: step * size, "value_loss": value}
                        for step, value in measure(run)
                        if math.isfinite(value)
                    ]
            if rows:
                value = "value_loss" if y_title == LOSS else "value"  # a loss is shown without its beginning
                one = charts.curves(
                    pl.DataFrame(runs),
                    pl.DataFrame(rows).rename({"value_loss": value}),
                    value,
                    against,
                    name=_file(f"{title} {group}"),
                    title=f"{title}, {group}",
                    caption="Thin lines are seeds, thick ones their mean; crosses mark runs that diverged.",
                    y_title=y_title,
                    wide=wide,
                    zero=zero,
                )
                made.append(one)
        return made

    return draw


def layers(data: Data) -> list[Chart]:
    """The largest logit of every layer over the steps, mean over seeds, a chart for each series."""
    frames = {}
    for (series,), of_series in data.groups("series"):
        rows = [
            {"step": step, "layer": layer, "logit": value}
            for run in of_series.all
            for layer in q.every(run.config.model.layers)
            for step, value in q.layer_curve(run, layer)
        ]
        if rows:
            means = pl.DataFrame(rows).group_by("step", "layer").agg(pl.col("logit").mean())
            frames[series] = means.sort("step", "layer")
    values = [value for frame in frames.values() for value in frame["logit"]]
    return [
        charts.heat(
            frame,
            "step",
            "layer",
            "logit",
            name=_file(f"layers {series}"),
            title=f"Every layer, {series}",
            caption="Largest logit of each layer, mean over seeds; one scale of colours for all optimizers.",
            log=min(values) > 0 and max(values) > 20 * min(values),
            domain=(min(values), max(values)),
            x_title="steps",
        )
        for series, frame in frames.items()
    ]


def weights(data: Data) -> list[Chart]:
    """Magnitudes of the first layer's query and key weights after training, of the first finished seed."""
    made = []
    for (series,), of_series in data.groups("series"):
        run = next((run for run in of_series.all if measured.checkpoints(run)), None)
        if run is None:
            continue
        at_end = measured.weights_at(Path(run.row["folder"]), measured.checkpoints(run)[-1], 1)
        for name, weight in at_end.items():
            block = -(-max(weight.shape) // _MOST_CELLS)
            magnitudes = torch.nn.functional.avg_pool2d(weight.abs()[None, None], block, ceil_mode=True)[0, 0]
            cells = [
                {"output": row, "input": column, "magnitude": value}
                for row, line in enumerate(magnitudes.tolist())
                for column, value in enumerate(line)
            ]
            flat = sorted(cell["magnitude"] for cell in cells)
            one = charts.heat(
                pl.DataFrame(cells),
                "input",
                "output",
                "magnitude",
                name=_file(f"{name} {series}"),
                title=f"{name.capitalize()} weight, {series}",
                caption=f"Magnitudes in the first layer after training, means of {block} x {block} elements.",
                domain=(
                    flat[0],
                    flat[int(0.995 * (len(flat) - 1))],
                ),  # the largest would leave all others dark
            )
            made.append(one)
    return made


def density(data: Data) -> list[Chart]:
    """The spectral density of the Hessian of the first seed of each series."""
    rows = []
    for (series,), of_series in data.groups("series"):
        points = next((points for run in of_series.all if (points := measured.spectrum(run))), [])
        highest = max((value for _, value in points), default=1.0)
        rows += [
            {
                "series": series,
                "eigenvalue": at,
                "density": max(value, 1e-8 * highest),
            }  # a floor for the logarithm
            for at, value in points[:: -(-len(points) // _MOST_POINTS) or 1]
        ]
    if not rows:
        return []
    caption = "Lanczos quadrature of the first seed that finished, smoothed by a hundredth of its width."
    title = "Spectral density of the Hessian"
    frame = pl.DataFrame(rows)
    return [
        charts.lines(frame, "eigenvalue", "density", name="density", title=title, caption=caption, log_y=True)
    ]


def rates(data: Data) -> list[Chart]:
    """The final loss against the learning rate, a line for each series, for each panel with a grid."""
    made = []
    for (panel,), of_panel in data.groups("panel"):
        ended = of_panel.runs.filter(pl.col("final").is_finite())
        means = ended.group_by("series", "optimizer.name", "lr", maintain_order=True).agg(
            pl.col("final").mean()
        )
        if len(means) > means["series"].n_unique():  # a grid
            one = charts.lines(
                means.sort("series", "lr", maintain_order=True),
                "lr",
                "final",
                name=_file(f"rates {panel}"),
                title=f"Final validation loss against the learning rate, {panel}",
                caption="Means over seeds. Runs that diverged are not drawn; the table counts them.",
                x_title="peak learning rate",
                y_title=LOSS,
                log_x=True,
            )
            made.append(one)
    return made


def steps_against_batch(data: Data) -> list[Chart]:
    """Steps to the target against the batch, with the line of ideal scaling, a chart for each panel."""
    made = []
    for (panel,), of_panel in data.groups("panel"):
        rows = [
            {
                "series": series,
                "optimizer.name": one.runs["optimizer.name"][0],
                "batch": batch,
                "steps": steps,
            }
            for (series, batch), one in of_panel.groups("series", "batch")
            for steps in q.STEPS.of(one).values()
            if math.isfinite(steps) and steps > 0
        ]
        if rows:
            # From the fewest tokens: a line starts at a larger batch if runs with the smallest diverged.
            tokens = min(row["batch"] * row["steps"] for row in rows)
            batches = sorted(of_panel.values("batch"))
            ideal = {"series": "ideal", "batch": batches, "steps": [tokens / batch for batch in batches]}
            one = charts.steps_to(
                pl.DataFrame(rows),
                name=_file(f"steps {panel}"),
                title=f"Steps against batch, {panel}",
                caption=f"Steps to a validation loss of {of_panel.runs['target'][0]:.3f}. Dashed: twice the "
                "batch, half the steps.",
                ideals=pl.DataFrame(ideal),
            )
            made.append(one)
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
        about = {"name": _file(title), "title": title.capitalize(), "x_title": title}
        caption = "A dot for each seed, a bar at their mean."
        return [charts.points(pl.DataFrame(rows), "value", "panel", caption=caption, **about)]

    return draw


def theorem(data: Data) -> list[Chart]:
    """The mean squared gradient norm against the number of steps, and the bound."""
    by_steps = data.runs.group_by("steps", maintain_order=True)
    norm = pl.col("measured")
    found = by_steps.agg(norm.mean().alias("norm"), norm.min().alias("low"), norm.max().alias("high"))
    bound = by_steps.agg(pl.col("bound").first().alias("norm"))
    both = [found.with_columns(series=pl.lit("MERIT-W")), bound.with_columns(series=pl.lit("Bound"))]
    chart = charts.lines(
        pl.concat(both, how="diagonal"),
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
