"""The chart of a scaling study: steps to the target against batch size, both logarithmic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from merit_lab.results.figures import unchecked
from merit_lab.results.old_charts import Look, by_series
from merit_lab.scale.summary import ScalingResult
from merit_lab.study.charts import Axis, Chart, finish

_HEIGHT = 360
_MARGIN = 1.3  # beyond the smallest and the largest value
_CURVE_POINTS = 60


def make_chart(results: Sequence[ScalingResult], target: float) -> Chart:
    """Return the chart of results, of which at least one must have a run."""
    batches = [measurement.batch for result in results for measurement in result.measurements]
    ends = min(batches) / _MARGIN, max(batches) * _MARGIN
    datasets: dict[str, list[dict[str, Any]]] = {
        "means": [row for result in results for row in _mean_rows(result)],
        "runs": [row for result in results for row in _run_rows(result)],
        "missed": [row for result in results for row in _missed_rows(result)],
        "curves": [row for result in results for row in _curve_rows(result, ends)],
        "ideals": [row for result in results for row in _ideal_rows(result, ends[1])],
        "bends": [row for result in results for row in _bend_rows(result, ends)],
    }
    with unchecked():
        chart = _chart(results, sorted(set(batches)), ends, _vertical(datasets))
    return finish(
        chart,
        name="steps-to-target",
        title=f"Steps to a validation loss of {target:g}",
        caption="Points are means over seeds, bars go from the lowest to the highest, dots are single runs. "
        "Solid: the fitted curve S = S_min (1 + B_crit / B). Dashed: ideal scaling from the smallest batch, "
        "where twice the batch takes half the steps. The diamond is the critical batch, with its 95% "
        "interval. A triangle marks a run that did not reach the target, a cross one that diverged.",
        datasets=datasets,
    )


def _mean_rows(result: ScalingResult) -> Iterator[dict[str, Any]]:
    for measurement in result.reached:
        yield {
            "series": result.name,
            "batch": measurement.batch,
            "steps": measurement.mean,
            "low": min(measurement.steps),
            "high": max(measurement.steps),
            "lr": measurement.lr,
        }


def _run_rows(result: ScalingResult) -> Iterator[dict[str, Any]]:
    for measurement in result.measurements:
        for attempt in measurement.attempts:
            if attempt.steps is not None:
                yield {
                    "series": result.name,
                    "batch": measurement.batch,
                    "steps": attempt.steps,
                    "run": attempt.name,
                }


def _missed_rows(result: ScalingResult) -> Iterator[dict[str, Any]]:
    for measurement in result.measurements:
        for attempt in measurement.attempts:
            if attempt.steps is None:
                diverged = attempt.status == "diverged"
                yield {
                    "series": result.name,
                    "batch": measurement.batch,
                    "steps": max(attempt.last_step, 1),
                    "run": attempt.name,
                    "kind": "diverged" if diverged else "missed",
                    "what": f"diverged at step {attempt.last_step}"
                    if diverged
                    else f"not reached in {attempt.last_step} steps",
                }


def _curve_rows(result: ScalingResult, ends: tuple[float, float]) -> Iterator[dict[str, Any]]:
    if result.curve is not None:
        low, high = ends
        for place in range(_CURVE_POINTS + 1):
            batch = low * (high / low) ** (place / _CURVE_POINTS)
            yield {"series": result.name, "batch": batch, "steps": result.curve.steps(batch)}


def _ideal_rows(result: ScalingResult, end: float) -> Iterator[dict[str, Any]]:
    if result.reached:
        for batch in (result.reached[0].batch, end):
            yield {"series": result.name, "batch": batch, "steps": result.ideal_steps(batch)}


def _bend_rows(result: ScalingResult, ends: tuple[float, float]) -> Iterator[dict[str, Any]]:
    if result.curve is not None and result.curve.is_determined and result.is_bend_inside:
        bend = result.curve.critical_batch
        yield {
            "series": result.name,
            "batch": bend.value,
            "steps": result.curve.steps(bend.value),
            "low": max(bend.low, ends[0]),
            "high": min(bend.high, ends[1]),
        }


def _vertical(datasets: dict[str, list[dict[str, Any]]]) -> tuple[float, float]:
    """The range of the y axis: all measurements. Ideal lines that are far off may leave it."""
    steps = [row["steps"] for name in ("means", "runs", "missed") for row in datasets[name]]
    lowest = min(steps)
    ideal = [row["steps"] for row in datasets["ideals"]]
    if ideal:
        lowest = max(min(ideal + steps), lowest / 4)
    return lowest / _MARGIN, max(steps) * _MARGIN


def _chart(
    results: Sequence[ScalingResult],
    ticks: Sequence[int],
    ends: tuple[float, float],
    vertical: tuple[float, float],
) -> Any:
    import altair as alt

    look = Look.of({result.name: result.optimizer for result in results})
    legend = alt.Legend(orient="top", direction="horizontal", symbolType="stroke", symbolOpacity=1)
    colour, _ = by_series(look, look.colours, legend)
    across = alt.Scale(type="log", domain=list(ends), nice=False)
    x = alt.X(
        "batch:Q",
        title="batch (sequences)",
        scale=across,
        axis=alt.Axis(values=list(ticks), format=",d", labelOverlap="greedy", labelSeparation=8),
    )
    up = alt.Scale(type="log", domain=list(vertical), nice=False)
    y = alt.Y(
        "steps:Q",
        title="steps to the target",
        scale=up,
        axis=alt.Axis(values=Axis("", logarithmic=True).with_ticks(vertical).ticks, format=",~r"),
    )

    def rows(name: str) -> alt.Chart:
        return alt.Chart(alt.NamedData(name=name))

    batch = alt.Tooltip("batch:Q", format=",.3~r")
    critical = alt.Tooltip("batch:Q", title="critical batch", format=",.3~r")
    steps = alt.Tooltip("steps:Q", format=",.1f")
    run, series = alt.Tooltip("run:N"), alt.Tooltip("series:N")
    layers: list[alt.Chart] = [
        rows("ideals")
        .mark_line(clip=True, strokeWidth=1.4, strokeDash=[5, 4], opacity=0.7)
        .encode(x, y, colour),
        rows("curves").mark_line(clip=True, strokeWidth=2.2).encode(x, y, colour),
        rows("means")
        .mark_rule(strokeWidth=1.6, opacity=0.6)
        .encode(x, alt.Y("low:Q", scale=up), alt.Y2("high"), colour),
        rows("runs").mark_circle(size=24, opacity=0.6).encode(x, y, colour, tooltip=[run, batch, steps]),
        rows("means")
        .mark_point(size=64, filled=True, opacity=1)
        .encode(x, y, colour, tooltip=[series, batch, steps, alt.Tooltip("lr:Q", title="learning rate")]),
        rows("bends")
        .mark_rule(clip=True, strokeWidth=4, opacity=0.35)
        .encode(alt.X("low:Q", scale=across), y, alt.X2("high"), colour),
        rows("bends")
        .mark_point(shape="diamond", size=150, filled=True, opacity=1, stroke="white")
        .encode(x, y, colour, tooltip=[series, critical]),
    ]
    for kind, shape, angle in (("missed", "triangle-up", 0), ("diverged", "cross", 45)):
        chosen = rows("missed").transform_filter(alt.datum.kind == kind)
        mark = chosen.mark_point(shape=shape, angle=angle, size=110, filled=True, opacity=0.9)
        layers.append(mark.encode(x, y, colour, tooltip=[run, batch, alt.Tooltip("what:N")]))
    return alt.layer(*layers).properties(height=_HEIGHT)
