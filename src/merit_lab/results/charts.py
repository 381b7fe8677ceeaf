"""The charts of reports and studies: from a frame and the names of its columns to a picture.

A chart is SVG, made by altair and vl-convert: the same frame always gives the same bytes, and nothing runs in
the browser. Text and axes have the colour of the text around them on a page, light or dark, and a grey that
can be read on both in a file. An optimizer has one colour in all charts; its series differ in their strokes.

    curves     what was measured during runs, over steps, tokens or seconds
    rates      the loss against a setting, such as the learning rate
    steps_to   steps to a loss against the batch
    lines      any columns, a line for each series
    points     a value for each seed, by group
    heat       a matrix of values
    layers     the largest logit of each layer over the steps, for each series

Example:
    >>> import polars as pl
    >>> frame = pl.DataFrame({"series": ["AdamW", "AdamW"], "batch": [64, 512], "steps": [800, 300]})
    >>> chart = lines(frame, "batch", "steps", name="steps", title="Steps", log_x=True)
    >>> chart.svg[:4], chart.name
    ('<svg', 'steps')
"""

from __future__ import annotations

import math

import altair as alt
import polars as pl

from merit_lab.results.drawing import (
    FEW_POINTS,
    HEIGHT,
    MOST_TICKS,
    NUMBER,
    Plot,
    columns,
    ends,
    look,
    named_rows,
    position,
    title_of,
)
from merit_lab.results.page import Chart
from merit_lab.results.series import layer_logits, with_series

_MOST_POINTS = 120  # of a line
_MOST_COLUMNS = 64  # of a heat map over steps
_FOCUS_FROM = 0.2  # a loss is shown from its value after this share of the steps
_FAR = 4.0  # times the distance of the median from the best: losses above are marked at the top
_TITLES = {"step": "steps", "tokens": "tokens", "seconds": "seconds"}


def curves(
    runs: pl.DataFrame,
    steps: pl.DataFrame,
    value: str = "validation_loss",
    against: str = "step",
    *,
    name: str,
    title: str,
    caption: str = "",
    y_title: str = "",
    zero: bool = False,
    wide: bool = False,
) -> Chart:
    """A column of the frame of steps over ``against``: step, tokens or seconds.

    Thin lines are runs, thick ones the mean of a series, as far as all its runs have got; a cross is where a
    run diverged. Losses are shown without their steep beginning. ``wide`` makes the scale logarithmic where
    values differ by 20 times or more; ``zero`` begins it at 0.
    """
    runs = runs if "left_out" in runs.columns else with_series(runs)
    rows = _measured(runs, steps, value, against)
    if rows.is_empty():
        raise ValueError(f"no finite values of {value} in these runs; there is nothing to draw")
    last = rows.group_by("run", maintain_order=True).last().filter(pl.col("status") == "diverged")
    members = rows.group_by("series").agg(pl.col("run").n_unique().alias("members"))
    means = (
        rows.group_by("series", "bin", maintain_order=True)
        .agg(pl.col("x", "y").mean(), pl.len().alias("present"))
        .join(members, on="series")
        .filter(pl.col("present") == pl.col("members"))
        .sort("series", "x", maintain_order=True)
    )
    lowest, highest = ends(rows["y"])
    log = wide and lowest > 0 and highest > 20 * lowest
    domain = _focus(rows) if value.endswith("loss") else None
    x = position(alt.X, rows["x"], _TITLES.get(against, against), zero=True)
    y = position(alt.Y, rows["y"], y_title or value.replace("_", " "), log=log, zero=zero, domain=domain)
    plot = Plot(x, y, look(runs))
    if rows["run"].n_unique() > rows["series"].n_unique():
        plot.lines(rows, {"detail": alt.Detail("run:N")}, strokeWidth=1, opacity=0.4)
    few = rows.group_by("run").len()["len"].max() <= FEW_POINTS  # type: ignore[operator]
    plot.lines(means, point={"size": 22} if few else False)
    plot.crosses(last.with_columns(pl.col("y").clip(*domain or (lowest, highest))))
    return plot.picture(name, title, caption)


def rates(
    runs: pl.DataFrame,
    rate: str = "optimizer.lr",
    *,
    name: str,
    title: str,
    caption: str = "",
) -> Chart:
    """The last value of runs against a setting: a line for each series of runs that differ in it alone.

    Lines join means over seeds, dots are runs, and a ring is the lowest of a series. At the top: a cross for
    each run that diverged, a triangle for each far above the others.
    """
    runs = runs if "left_out" in runs.columns else with_series(runs, ignoring=(rate,))
    kept = runs.filter(pl.col("left_out").is_null() & pl.col(rate).is_not_null())
    rows = kept.with_columns(pl.col(rate).alias("x").cast(pl.Float64), pl.col("validation_loss").alias("y"))
    failed = pl.col("status") == "diverged"
    known = rows.filter(~failed & pl.col("y").is_finite())
    if known.is_empty():
        raise ValueError(f"no run with a {rate} finished with a validation loss; there is nothing to draw")
    lowest, highest = ends(known["y"])
    middle = float(known["y"].median())  # type: ignore[arg-type]
    far = highest - lowest > _FAR * (middle - lowest) > 0
    ceiling = lowest + _FAR * (middle - lowest) if far else highest
    margin = 0.06 * (ceiling - lowest) or 0.05
    top = ceiling + margin
    means = known.group_by("series", "x", maintain_order=True).agg(pl.col("y").mean()).sort("x")
    best = means.filter(pl.col("y") == pl.col("y").min().over("series"))
    log = ends(rows["x"])[0] > 0
    x = position(alt.X, rows["x"], title_of(rate), log=log, ticks=rows["x"].unique().sort())
    y = position(alt.Y, known["y"], title_of("validation_loss"), domain=(lowest - margin, top + margin))
    plot, shown = Plot(x, y, look(runs)), pl.col("y") <= ceiling
    plot.lines(means)
    plot.marks(known.filter(shown), "circle", size=24, opacity=0.6)
    plot.marks(best.filter(shown), "point", size=220, strokeWidth=1.6, filled=False)
    plot.triangles(known.filter(~shown).with_columns(y=pl.lit(top)))
    plot.crosses(rows.filter(failed | ~pl.col("y").is_finite()).with_columns(y=pl.lit(top)))
    return plot.picture(name, title, caption)


def steps_to(
    reached: pl.DataFrame,
    *,
    name: str,
    title: str,
    caption: str = "",
    fits: pl.DataFrame | None = None,
    ideals: pl.DataFrame | None = None,
    missed: pl.DataFrame | None = None,
) -> Chart:
    """Steps to a loss against the batch, both logarithmic: a dot for each run.

    All frames have the columns series, batch and steps. ``fits`` are drawn as lines, ``ideals`` dashed, and
    ``missed``, the runs that did not reach it, as triangles at their last step. Without ``fits``, a line
    joins the means.
    """
    shown = reached if missed is None else pl.concat([reached, missed], how="diagonal_relaxed")
    rows, dots = columns(shown, "batch", "steps"), columns(reached, "batch", "steps")
    x = position(alt.X, rows["x"], "batch (sequences)", log=True, ticks=rows["x"].unique().sort())
    plot = Plot(x, position(alt.Y, rows["y"], "steps", log=True), look(shown))
    means = dots.group_by("series", "x", maintain_order=True).agg(pl.col("y").mean()).sort("x")
    plot.lines(means if fits is None else columns(fits, "batch", "steps"))
    if ideals is not None:
        dashed = columns(ideals, "batch", "steps")
        plot.marks(dashed, "line", strokeWidth=1.3, strokeDash=[5, 4], opacity=0.7)
    plot.marks(dots, "circle", size=40)
    if missed is not None:
        plot.triangles(columns(missed, "batch", "steps"))
    return plot.picture(name, title, caption)


def lines(
    frame: pl.DataFrame,
    x: str,
    y: str,
    *,
    name: str,
    title: str,
    caption: str = "",
    x_title: str = "",
    y_title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    low: str | None = None,
    high: str | None = None,
) -> Chart:
    """A line for each series over any column; the colours are those of ``optimizer.name``, if there is one.

    ``low`` and ``high`` are columns drawn as bars.
    """
    span = [column for column in (low, high) if column]
    rows = columns(frame, x, y, *span)
    values = pl.concat([rows["y"], *(rows[column] for column in span)])
    ticks = rows["x"].unique().sort()
    across = position(
        alt.X, rows["x"], x_title or title_of(x), log=log_x, ticks=ticks if len(ticks) <= MOST_TICKS else None
    )
    plot = Plot(across, position(alt.Y, values, y_title or title_of(y), log=log_y), look(frame))
    few = rows.group_by("series").len()["len"].max() <= FEW_POINTS  # type: ignore[operator]
    plot.lines(rows, point={"size": 30} if few else False)
    if low and high:
        plot.marks(rows, "rule", {"y": alt.Y(f"{low}:Q"), "y2": alt.Y2(high)}, opacity=0.6)
    return plot.picture(name, title, caption)


def points(
    frame: pl.DataFrame,
    value: str,
    group: str = "series",
    *,
    name: str,
    title: str,
    caption: str = "",
    x_title: str = "",
) -> Chart:
    """A dot for each row, in a line for each group, and a tick at the mean of a series."""
    rows = frame.with_columns(pl.col(value).alias("x")).filter(pl.col("x").is_finite())
    names, axis, height = named_rows(rows[group])
    rows = rows.with_columns(names.alias("y"))
    x = position(alt.X, rows["x"], x_title or title_of(value))
    plot = Plot(x, axis, look(frame, legend=group != "series"))
    order = rows["series"].unique(maintain_order=True).to_list()
    beside = {"yOffset": alt.YOffset("series:N", sort=order)}
    plot.marks(rows, "circle", beside, size=44, opacity=0.75)
    means = rows.group_by("series", "y", maintain_order=True).agg(pl.col("x").mean())
    plot.marks(means, "tick", beside, thickness=2.5, size=14, orient="vertical")
    return plot.picture(name, title, caption, height=height)


def heat(
    frame: pl.DataFrame,
    x: str,
    y: str,
    value: str,
    *,
    name: str,
    title: str,
    caption: str = "",
    log: bool = False,
    domain: tuple[float, float] | None = None,
) -> Chart:
    """A cell for each pair of numbers, the last y at the top, with values beyond ``domain`` cut to it."""
    rows = frame.select(pl.col(x).alias("x"), pl.col(y).alias("y"), pl.col(value).alias("value"))
    limits = domain or ends(rows["value"])
    log = log and limits[0] > 0
    colour = alt.Color(
        "value:Q",
        title=title_of(value),
        scale=alt.Scale(type="log" if log else "linear", scheme="viridis", domain=list(limits), clamp=True),
        legend=alt.Legend(orient="bottom", gradientThickness=10, gradientLength=220, labelExpr=NUMBER),
    )
    axis = alt.Axis(labelOverlap="greedy", labelSeparation=8, labelExpr=NUMBER, labelAngle=0)
    across = alt.X("x:O", title=title_of(x), axis=axis)
    up = alt.Y("y:O", title=title_of(y), sort="descending", axis=axis)
    plot = Plot(across, up, (colour, alt.StrokeDash()))
    # A stroke of the same colour closes the gaps that antialiased edges leave.
    plot.marks(rows, "rect", strokeWidth=0.6, stroke=alt.ExprRef("scale('color', datum.value)"))
    height = min(HEIGHT, max(80, 18 * rows["y"].n_unique()))
    return plot.picture(name, title, caption, height=height)


def layers(runs: pl.DataFrame, steps: pl.DataFrame, *, name: str) -> list[Chart]:
    """For each series the largest logit of each layer over the steps, as the mean over its runs.

    All have one scale; empty if no logits were measured, or those of a single layer.
    """
    rows = layer_logits(steps.select("run", "step", "max_logits").filter(pl.col("step") > 0))
    rows = rows.filter(pl.col("value").is_finite()).join(
        runs.select("run", "series"), on="run", maintain_order="right_left"
    )
    if rows["layer"].n_unique() < 2:
        return []
    width = max(1, math.ceil(ends(rows["step"])[1] / _MOST_COLUMNS))
    cells = (
        rows.with_columns(step=-(-pl.col("step") // width) * width)
        .group_by("series", "step", "layer", "run", maintain_order=True)
        .agg(pl.col("value").max())
        .group_by("series", "step", "layer", maintain_order=True)
        .agg(pl.col("value").mean())
    )
    domain = ends(cells["value"])
    wide = domain[0] > 0 and domain[1] > 20 * domain[0]
    return [
        heat(
            of_series.rename({"step": "steps", "value": "largest logit"}),
            "steps",
            "layer",
            "largest logit",
            name=f"{name}-{place}",
            title=str(series),
            log=wide,
            domain=domain,
        )
        for place, ((series,), of_series) in enumerate(cells.group_by("series", maintain_order=True), start=1)
    ]


def _measured(runs: pl.DataFrame, steps: pl.DataFrame, value: str, against: str) -> pl.DataFrame:
    """The finite values of the runs, at most _MOST_POINTS of each: run, series, status, bin, x, y."""
    shown = runs.filter(pl.col("left_out").is_null() | (pl.col("left_out") == pl.col("status")))
    rows = steps.join(shown.select("run", "series", "status"), on="run", maintain_order="right_left")
    if against == "seconds":  # recorded with training alone; a validation lies between two records
        first = pl.when(pl.col("step") == 0).then(0.0).otherwise(pl.col("seconds"))
        rows = rows.with_columns(seconds=first.interpolate_by("step").over("run"))
    # Sharp or missing values are no points of a line; that a run diverged is marked at its end.
    rows = rows.filter(pl.col(value).is_finite() & pl.col(against).is_not_null())
    width = max(1, math.ceil(ends(rows["step"])[1] / _MOST_POINTS))
    many = rows.group_by("run").len()["len"].max() or 0
    place = -(-pl.col("step") // width) if many > _MOST_POINTS else pl.col("step")  # type: ignore[operator]
    combine = pl.max if "logit" in value else pl.min if value.endswith("lowest") else pl.mean
    return (
        rows.with_columns(bin=place)
        .group_by("run", "series", "status", "bin", maintain_order=True)
        .agg(pl.col("step").last(), pl.col(against).last().alias("x"), combine(value).alias("y"))
    )


def _focus(rows: pl.DataFrame) -> tuple[float, float]:
    """The range of a loss to show: the ends of all runs, and where half of them are soon after the start."""
    whole = float(rows["x"].max())  # type: ignore[arg-type]
    last = rows.filter(pl.col("status") != "diverged").group_by("run").agg(pl.col("y").last())["y"]
    early = rows.filter(pl.col("x") >= _FOCUS_FROM * whole).group_by("run").agg(pl.col("y").first())["y"]
    lowest = ends(rows["y"])[0]
    upper = max([*last, *([early.median()] if len(early) else [])], default=ends(rows["y"])[1])
    margin = 0.04 * (upper - lowest) or 0.1
    return lowest - margin, upper + margin
