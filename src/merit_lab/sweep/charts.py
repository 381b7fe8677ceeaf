"""The chart of a sweep: loss against learning rate, a line for each optimizer.

A diverged run has no loss, and a run that ended far above the others would flatten them. Both are marked in
a band at the top, with a cross and a triangle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from merit_lab.results.figures import unchecked
from merit_lab.results.old_charts import Look, by_series
from merit_lab.study.charts import Chart, finish
from merit_lab.study.fields import LR
from merit_lab.sweep.ledger import Ledger, Line, axis_name

_HEIGHT = 320
_MARK_HEIGHT, _MOST_BAND = 14, 84  # pixels: one line's marks in the band, and the band at most
_FAR = 3.0  # multiple of the range of interest above which a loss is drawn in the band
_MOST_TICKS = 14


def make_chart(ledger: Ledger) -> Chart:
    """Return the chart of a ledger, which must have at least one line."""
    lines = ledger.lines
    ceiling = _ceiling(ledger)
    cells, seeds, marks = [], [], []
    for place, line in enumerate(lines):
        cells += list(_cell_rows(line))
        seeds += list(_seed_rows(line, ceiling))
        marks += [{**row, "place": place} for row in _mark_rows(line, ceiling)]
    # Marks of several lines at the same learning rate are stacked.
    places = sorted({row["place"] for row in marks})
    band = min(len(places) * _MARK_HEIGHT, _MOST_BAND)
    for row in marks:
        row["y"] = (places.index(row["place"]) + 0.5) * band / len(places)
    values = [row["value"] for row in seeds]
    name = axis_name(ledger.axis)
    with unchecked():
        chart = _chart(ledger, lines, ceiling, _domain(values, ceiling, band))
    return finish(
        chart,
        name=name.replace(" ", "-"),
        title=f"Validation loss against {name}",
        caption="Lines join the means over seeds of the values at which every seed finished; bars go from "
        "the lowest to the highest seed, dots are single runs. A ring marks the best of an optimizer, for "
        "each model, batch or length. At the top: a cross for each run that diverged, a triangle for each "
        "that ended above the chart.",
        datasets={"cells": cells, "seeds": seeds, "marks": marks},
    )


def _ceiling(ledger: Ledger) -> float:
    """The highest loss that is drawn to scale."""
    losses = [run.validation_loss for cell in ledger.cells for run in cell.outcome.finished]
    finished = [loss for loss in losses if loss is not None]
    if not finished:
        return 1.0
    most = sorted(finished)[2 * (len(finished) - 1) // 3]
    wanted = [most]
    for optimizer in ledger.optimizers:
        for best in ledger.bests(optimizer):
            around = [best.cell, *filter(None, best.neighbours)]
            wanted += [max(cell.loss.values) for cell in around if cell.loss is not None]
    lowest, highest = min(finished), max(finished)
    # A neighbour of a best cell may be far off too: then the losses of most runs decide.
    enough = min(max(wanted), lowest + _FAR * (most - lowest)) if most > lowest else max(wanted)
    return highest if highest - lowest <= _FAR * (enough - lowest) else enough


def _domain(values: Sequence[float], ceiling: float, band: int) -> tuple[float, float]:
    """The range of the y axis: all values, with the band above them."""
    lowest = min(values, default=ceiling - 1.0)
    height = max(ceiling - lowest, 1e-3 * abs(ceiling), 1e-6)
    top = ceiling + height * (band + 8) / (_HEIGHT - band - 8)
    return lowest - 0.05 * height, top + 0.02 * height


def _cell_rows(line: Line) -> Iterator[dict[str, Any]]:
    for cell in line.cells:
        if (loss := cell.whole_loss) is not None:
            yield {
                "series": line.label,
                "x": cell.number(line.axis),
                "value": loss.mean,
                "low": min(loss.values),
                "high": max(loss.values),
            }


def _seed_rows(line: Line, ceiling: float) -> Iterator[dict[str, Any]]:
    for cell in line.cells:
        for run in cell.outcome.finished:
            assert run.validation_loss is not None
            if run.validation_loss <= ceiling:
                x = cell.number(line.axis)
                yield {"series": line.label, "x": x, "value": run.validation_loss, "run": run.name}


def _mark_rows(line: Line, ceiling: float) -> Iterator[dict[str, Any]]:
    for cell in line.cells:
        row = {"series": line.label, "x": cell.number(line.axis)}
        for run in cell.outcome.diverged:
            yield {**row, "run": run.name, "kind": "diverged", "what": f"diverged at step {run.step}"}
        for run in cell.outcome.finished:
            assert run.validation_loss is not None
            if run.validation_loss > ceiling:
                yield {**row, "run": run.name, "kind": "above", "what": f"{run.validation_loss:.3f}"}


def _chart(ledger: Ledger, lines: Sequence[Line], ceiling: float, domain: tuple[float, float]) -> Any:
    import altair as alt

    look = Look.of({line.label: line.optimizer for line in lines})
    legend = alt.Legend(
        orient="top", direction="horizontal", labelLimit=300, symbolType="stroke", symbolOpacity=1
    )
    colour, dash = by_series(look, look.colours, legend)
    x = _x(ledger.axis, [value for line in lines for value in line.values])
    scale = alt.Scale(domain=list(domain), nice=False, zero=False)
    above = f"datum.value > {ceiling:.9g}"  # the axis has no meaning in the band
    axis = alt.Axis(
        labelExpr=f"{above} ? '' : datum.label",
        gridOpacity={"condition": {"test": above, "value": 0}, "value": 1},
    )
    y = alt.Y("value:Q", title="validation loss (nats per token)", scale=scale, axis=axis)
    where = alt.Tooltip("x:Q", title=axis_name(ledger.axis), format="~g")
    loss = alt.Tooltip("value:Q", title="loss", format=".4f")

    cells = alt.Chart(alt.NamedData(name="cells"))
    below = cells.transform_filter(alt.datum.value <= ceiling)
    seeds = alt.Chart(alt.NamedData(name="seeds"))
    marks = alt.Chart(alt.NamedData(name="marks"))
    layers: list[alt.Chart] = [
        cells.mark_line(clip=True, strokeWidth=2.2).encode(x, y, colour, dash),
        below.mark_rule(clip=True, strokeWidth=1.6, opacity=0.5).encode(
            x, alt.Y("low:Q", scale=scale), alt.Y2("high"), colour
        ),
        seeds.mark_circle(size=24, opacity=0.6).encode(
            x, y, colour, tooltip=[alt.Tooltip("run:N"), where, loss]
        ),
        below.mark_point(size=60, filled=True, opacity=1).encode(
            x, y, colour, tooltip=[alt.Tooltip("series:N"), where, loss]
        ),
    ]
    bests = alt.InlineData(values=list(_best_rows(ledger, ceiling)))
    ring = alt.Chart(bests).mark_point(size=260, strokeWidth=1.6, opacity=1, filled=False)
    layers.append(ring.encode(x, y, colour))
    height = alt.Y("y:Q", scale=None)
    for kind, shape, size in (("diverged", "cross", 90), ("above", "triangle-up", 60)):
        chosen = marks.transform_filter(alt.datum.kind == kind)
        point = chosen.mark_point(
            shape=shape, angle=45 if shape == "cross" else 0, size=size, filled=True, opacity=0.9
        )
        layers.append(
            point.encode(x, height, colour, tooltip=[alt.Tooltip("run:N"), where, alt.Tooltip("what:N")])
        )
    return alt.layer(*layers).properties(height=_HEIGHT)


def _best_rows(ledger: Ledger, ceiling: float) -> Iterator[dict[str, Any]]:
    for optimizer in ledger.optimizers:
        for best in ledger.bests(optimizer):
            if best.loss.mean <= ceiling:
                yield {"series": best.line.label, "x": best.value, "value": best.loss.mean}


def _x(axis: str, values: Iterable[float]) -> Any:
    import altair as alt

    ticks = sorted(set(values))
    title = "peak learning rate" if axis == LR else axis_name(axis)
    axis_at_ticks = alt.Axis(
        values=ticks[:: math.ceil(len(ticks) / _MOST_TICKS)],
        format="~g",
        labelOverlap="greedy",
        labelSeparation=8,
    )
    scale = alt.Scale(zero=False, nice=False, padding=30)
    if ticks[0] > 0:
        margin = 1.25 if len(ticks) < 2 else math.sqrt(math.sqrt(ticks[1] / ticks[0]))
        scale = alt.Scale(type="log", domain=[ticks[0] / margin, ticks[-1] * margin], nice=False)
    return alt.X("x:Q", title=title, scale=scale, axis=axis_at_ticks)
