"""The figures of a report: their charts, captions, scales and data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from merit_lab.results import old_charts as charts
from merit_lab.results.curves import (
    Point,
    combination,
    layer_name,
    mean_curve,
    thin,
    tokens_per_step,
)
from merit_lab.results.gather import MeasuredRun
from merit_lab.results.measures import ATTENTION, BITS_PER_BYTE, LOGIT, LOSSES, OTHERS, Measure
from merit_lab.results.old_series import Series, have_other_data

_MAX_POINTS = 240  # in a line; the CSV file has more
_MAX_COLUMNS = 80  # in a heatmap

Datasets = dict[str, list[dict[str, Any]]]
Horizontals = dict[charts.XQuantity, charts.Horizontal]


@dataclass(frozen=True)
class Figure:
    """A chart, its title and caption, and the rows it is made from.

    ``on_page`` has the chart for each x axis, ``in_files`` the charts to write as SVG, by file name.
    """

    key: str
    section: str
    row: str
    title: str
    caption: str
    on_page: dict[charts.XQuantity, dict[str, Any]]
    in_files: dict[str, dict[str, Any]]
    datasets: Datasets
    series: str | None = None  # if it shows only one


def make_figures(all_series: Sequence[Series]) -> list[Figure]:
    """Every figure that has data, in page order."""
    look = charts.Look.of({series.label: series.optimizer for series in all_series})
    horizontals = _horizontals(all_series)
    losses = (
        [_across_data(measure, all_series) for measure in LOSSES] if have_other_data(all_series) else LOSSES
    )

    def lines(measures: Iterable[Measure]) -> list[Figure]:
        figures = [_lines(measure, all_series, look, horizontals) for measure in measures]
        return [figure for figure in figures if figure is not None]

    with unchecked():
        return [
            *lines(losses),
            *lines([LOGIT, *_layer_measures(all_series)]),
            *_layers(all_series, horizontals),
            *lines(OTHERS),
        ]


def is_figure(name: str) -> bool:
    """Whether reports write a figure with this file name (without suffix)."""
    keys = {measure.key.replace("_", "-") for measure in (*LOSSES, LOGIT, *OTHERS)}
    is_line = name.removesuffix("-by-tokens") in keys
    return is_line or re.fullmatch(r"max-logit-layers?-\d+", name) is not None


def unchecked() -> AbstractContextManager[None]:
    """Skip altair's checks against Vega-Lite's schema, which take seconds; tests make them instead."""
    from altair.utils.schemapi import debug_mode

    return debug_mode(False)


def _layer_measures(all_series: Sequence[Series]) -> Iterator[Measure]:
    """The largest logit of the first, the middle and the last layer."""
    num_layers = _num_layers(all_series)
    chosen = dict.fromkeys([1, (num_layers + 1) // 2, num_layers]) if num_layers > 1 else {}
    names = {1: "First layer", num_layers: "Last layer"}
    for layer in chosen:
        yield Measure(
            key=layer_name(layer),
            section=ATTENTION,
            row="layers",
            title=names.get(layer, "Middle layer"),
            caption=f"Largest attention logit of layer {layer} of {num_layers}.",
            unit="logit",
            may_be_logarithmic=True,
        )


def _horizontals(all_series: Sequence[Series]) -> Horizontals:
    """One x axis for all figures, so that they line up."""
    ends = [
        (points[-1][0], points[-1][0] * tokens_per_step(run.rows))
        for series in all_series
        for run in series.runs
        for points in run.curves.values()
    ]
    tokens = [end for _, end in ends if math.isfinite(end)]
    return {
        "step": charts.Horizontal("step", max(1, *(step for step, _ in ends))),
        "tokens": charts.Horizontal("tokens", max(tokens, default=1)),
    }


def _lines(
    measure: Measure, all_series: Sequence[Series], look: charts.Look, horizontals: Horizontals
) -> Figure | None:
    present = [(series, run) for series in all_series for run in series.runs if _drawn(run, measure)]
    if not present:
        return None
    curves = thin(
        [_drawn(run, measure) for _, run in present],
        limit=_MAX_POINTS,
        combine=combination(measure.key),
    )
    by_label: dict[str, list[tuple[MeasuredRun, list[Point]]]] = {}
    for (series, run), points in zip(present, curves, strict=True):
        by_label.setdefault(series.label, []).append((run, points))
    finished = [place for place, (_, run) in enumerate(present) if run.status == "finished"]
    rows, vertical = _line_rows(by_label), _vertical(measure, curves, finished)

    def chart(axis: charts.XQuantity, *, standalone: bool = False) -> dict[str, Any]:
        return charts.line_chart(
            measure.key,
            look,
            horizontals[axis],
            vertical,
            labels=list(by_label),
            num_points=max(map(len, curves)),
            kinds=rows,
            standalone=standalone,
        )

    key = measure.key.replace("_", "-")
    files = {f"{key}-by-tokens": chart("tokens", standalone=True)} if measure.is_loss else {}
    return Figure(
        key=key,
        section=measure.section,
        row=measure.row,
        title=measure.title,
        caption=measure.caption,
        on_page={axis: chart(axis) for axis in horizontals},
        in_files={key: chart("step", standalone=True), **files},
        datasets={f"{measure.key}-{kind}": values for kind, values in rows.items()},
    )


def _across_data(measure: Measure, all_series: Sequence[Series]) -> Measure:
    """A loss on different data: per byte, or with a warning if the bytes per token are not known."""
    if all(run.bits_per_byte for series in all_series for run in series.runs):
        caption = f"{measure.caption} Per byte of text, since the data differ."
        return replace(measure, caption=caption, unit=BITS_PER_BYTE)
    return replace(measure, caption=f"{measure.caption} The data differ, so tokens cannot be compared.")


def _drawn(run: MeasuredRun, measure: Measure) -> list[Point]:
    """The finite points of a run, in the unit of the measure."""
    points = run.points(measure.key)
    if measure.unit != BITS_PER_BYTE or run.bits_per_byte is None:
        return points
    return [(step, value * run.bits_per_byte) for step, value in points]


def _line_rows(curves: Mapping[str, Sequence[tuple[MeasuredRun, Sequence[Point]]]]) -> Datasets:
    """The rows of each series: its runs, if there are several; their mean; the ends of those that diverged.

    Empty datasets are left out.
    """
    rows: Datasets = {"runs": [], "means": [], "ends": []}
    for place, (label, drawn) in enumerate(curves.items()):
        scale = tokens_per_step(drawn[0][0].rows)
        for run, points in drawn:
            if len(drawn) > 1:
                rows["runs"] += _rows(points, scale, series=label, run=run.name)
            if run.status == "diverged":
                rows["ends"] += _rows(points[-1:], scale, series=label, run=run.name, message="diverged")
        mean = mean_curve([points for _, points in drawn])
        rows["means"] += _rows(mean, scale, series=label, key=f"s{place}")
    return {kind: drawn for kind, drawn in rows.items() if drawn}


def _rows(points: Sequence[Point], scale: float, **names: str) -> list[dict[str, Any]]:
    return [
        {**names, "step": step, "tokens": charts.rounded(step * scale), "value": charts.rounded(value)}
        for step, value in points
    ]


def _vertical(
    measure: Measure, curves: Sequence[Sequence[Point]], finished: Sequence[int]
) -> charts.Vertical:
    values = [value for points in curves for _, value in points]
    lowest, highest = min(values), max(values)
    logarithmic = measure.may_be_logarithmic and charts.is_wide(lowest, highest)
    focus = whole = None
    if logarithmic:
        whole = lowest * 0.9, highest * 1.1
    elif measure.is_loss and highest > lowest:
        focus = charts.focus(curves, finished)
        whole = focus[0], highest + lowest - focus[0]
    return charts.Vertical(
        title=measure.unit,
        format=measure.format,
        ticks=measure.ticks,
        logarithmic=logarithmic,
        from_zero=measure.from_zero,
        focus=focus,
        whole=whole,
    )


def _num_layers(all_series: Sequence[Series]) -> int:
    attention = [row for series in all_series for run in series.runs for row in run.rows.get("attention", [])]
    return max((len(row["max_logits"]) for row in attention), default=0)


def _layers(all_series: Sequence[Series], horizontals: Horizontals) -> list[Figure]:
    """A heatmap for each series: every layer's largest logit over the run."""
    num_layers = _num_layers(all_series)
    heatmaps = {series.label: rows for series in all_series if (rows := _heatmap(series, num_layers))}
    values = [row["value"] for rows in heatmaps.values() for row in rows]
    if num_layers < 2 or not values:
        return []
    domain = min(values), max(values)
    figures = []
    for place, (label, rows) in enumerate(heatmaps.items(), start=1):
        key = f"max-logit-layers-{place}"

        def chart(axis: charts.XQuantity, *, standalone: bool = False, key: str = key) -> dict[str, Any]:
            return charts.layer_chart(
                key,
                horizontals[axis],
                num_layers=num_layers,
                domain=domain,
                logarithmic=charts.is_wide(*domain),
                standalone=standalone,
            )

        figures.append(
            Figure(
                key=key,
                section=ATTENTION,
                row="heatmaps",
                title=f"Every layer, {label}",
                caption="Largest logit of each layer, mean over seeds; all series share one colour scale.",
                on_page={axis: chart(axis) for axis in horizontals},
                in_files={key: chart("step", standalone=True)},
                datasets={key: rows},
                series=label,
            )
        )
    return figures


def _heatmap(series: Series, num_layers: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for layer in range(1, num_layers + 1):
        runs = [run for run in series.runs if run.points(layer_name(layer))]
        if not runs:
            continue
        scale = tokens_per_step(runs[0].rows)
        curves = thin([run.points(layer_name(layer)) for run in runs], _MAX_COLUMNS, max)
        begin = 0
        for step, value in mean_curve(curves):
            if step > begin:  # a measurement before training has no width
                rows.append(
                    {
                        "layer": layer,
                        "value": charts.rounded(value),
                        "step_begin": begin,
                        "step_end": step,
                        "tokens_begin": charts.rounded(begin * scale),
                        "tokens_end": charts.rounded(step * scale),
                    }
                )
            begin = step
    return rows
