"""Heatmaps: layers over steps, and weight matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merit_lab.paper.records import Records
from merit_lab.results.curves import layer_name, mean_curve, thin
from merit_lab.results.old_charts import cells, heat, is_wide, rounded
from merit_lab.study.charts import Chart, finish

_HEIGHT = 260
_LAYER_HEIGHT = 16
_MAX_COLUMNS = 64


def layer_chart(
    records: Records, domain: tuple[float, float], *, name: str, title: str, caption: str
) -> Chart:
    """A heatmap of the mean over the records: layers upwards, steps to the right."""
    import altair as alt

    num_layers = max(record.config.model.layers for record in records.all)
    rows: list[dict[str, Any]] = []
    for layer in range(1, num_layers + 1):
        curves = [record.points(layer_name(layer)) for record in records.all]
        thinned = thin([points for points in curves if points], _MAX_COLUMNS, max)
        points = mean_curve(thinned)
        ends = [step for step, _ in points[1:]] + [2 * points[-1][0] - points[-2][0]] if points[1:] else []
        rows += [
            {"layer": layer, "from": step, "to": end, "value": rounded(value)}
            for (step, value), end in zip(points, ends, strict=False)
        ]
    chart = cells(alt.InlineData(values=rows)).encode(
        x=alt.X("from:Q", title="steps", scale=alt.Scale(nice=False)),
        x2=alt.X2("to"),
        y=alt.Y("layer:O", title="layer", sort="descending"),
        color=heat("logit", domain, logarithmic=is_wide(*domain)),
        tooltip=[
            alt.Tooltip("from:Q", title="step"),
            alt.Tooltip("layer:O"),
            alt.Tooltip("value:Q", format=".3g"),
        ],
    )
    return finish(chart.properties(height=max(_LAYER_HEIGHT * num_layers, 80)), name, title, caption)


def matrix_chart(
    values: Sequence[Sequence[float]], *, name: str, title: str, caption: str, rows: str, columns: str
) -> Chart:
    """A heatmap of a matrix, first row at the top."""
    import altair as alt

    elements = [
        {"row": i, "column": j, "value": rounded(value)}
        for i, line in enumerate(values)
        for j, value in enumerate(line)
    ]
    flat = sorted(value for line in values for value in line)
    chart = cells(alt.InlineData(values=elements)).encode(
        x=alt.X("column:O", title=columns, axis=alt.Axis(labels=False, ticks=False)),
        y=alt.Y("row:O", title=rows, axis=alt.Axis(labels=False, ticks=False)),
        # Clamped: the few largest values would leave all others dark.
        color=heat("|w|", (flat[0], flat[int(0.995 * (len(flat) - 1))]), logarithmic=False),
        tooltip=[alt.Tooltip("row:O"), alt.Tooltip("column:O"), alt.Tooltip("value:Q", format=".3g")],
    )
    return finish(chart.properties(height=_HEIGHT), name, title, caption)
