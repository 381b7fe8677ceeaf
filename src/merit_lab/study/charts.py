"""The charts of studies, made with altair in the report's style.

A chart contains its data. On the page it fills the width of its container, shows values in tooltips, and
highlights a series when its legend entry is clicked. In a file it has a fixed width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from merit_lab.results.curves import mean_curve, thin
from merit_lab.results.old_charts import (
    FEW_POINTS,
    Look,
    by_series,
    focus,
    is_wide,
    logarithmic_ticks,
    rounded,
)

if TYPE_CHECKING:
    import altair as alt

_HEIGHT = 260
_MAX_POINTS = 200

Row = dict[str, Any]
Line = tuple[str, Sequence[tuple[float, float]], bool]
"""A run, its points, and whether it diverged."""

Lines = Mapping[str, Sequence[Line]]
"""Lines by series."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A Vega-Lite chart with its data, title and caption. Its container sets the width."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """An axis: title, number format, scale, visible range and ticks."""

    title: str
    format: str = ".3~g"
    logarithmic: bool = False
    from_zero: bool = False
    shown: tuple[float, float] | None = None
    ticks: tuple[float, ...] = ()

    def with_ticks(self, values: Iterable[float]) -> Axis:
        """Return the axis with round ticks for these values, if its scale is logarithmic.

        Example:
            >>> Axis("steps", logarithmic=True).with_ticks([0.3, 12.0]).ticks
            (0.5, 1.0, 2.0, 5.0, 10.0)
        """
        values = list(values)
        if self.ticks or not self.logarithmic or not values:
            return self
        return replace(self, ticks=tuple(logarithmic_ticks(min(values), max(values))))


def curve_chart(
    lines: Lines,
    optimizers: Mapping[str, str],
    y: Axis,
    *,
    name: str,
    title: str,
    caption: str,
    is_loss: bool = False,
    over_tokens: bool = False,
) -> Chart:
    """A measured curve over steps or tokens: thin lines for runs, thick lines for means, a cross where a run
    diverged."""
    everything = [points for group in lines.values() for _, points, _ in group]
    if is_loss and everything:
        kept = [points for group in lines.values() for _, points, diverged in group if not diverged]
        # A diverged run would flatten the others.
        y = Axis(y.title, y.format, shown=focus(kept or everything))
    elif everything:
        values = [value for points in everything for _, value in points]
        y = Axis(y.title, y.format, is_wide(min(values), max(values)), y.from_zero)
    x = Axis("tokens", ".2~s", from_zero=True) if over_tokens else Axis("steps", ",d", from_zero=True)
    return line_chart(lines, optimizers, x, y, name=name, title=title, caption=caption)


def line_chart(
    lines: Lines,
    optimizers: Mapping[str, str],
    x: Axis,
    y: Axis,
    *,
    name: str,
    title: str,
    caption: str,
    ideal: Sequence[tuple[float, float]] = (),
    average: bool = True,
) -> Chart:
    """Lines by series, with their mean if there are several.

    Args:
        lines: the lines.
        optimizers: the optimizer of each series, which decides its colour.
        x: the horizontal axis.
        y: the vertical axis.
        name: name of the chart's file.
        title: above the chart.
        caption: below the title.
        ideal: points of a dotted reference line.
        average: whether to draw the mean of a series; False draws all its lines equally thick.
    """
    import altair as alt

    lines = {series: group for series, group in lines.items() if group}
    runs: list[Row] = []
    means: list[Row] = []
    ends: list[Row] = []
    for series, group in lines.items():
        thinned = thin([list(points) for _, points, _ in group], _MAX_POINTS, fmean)  # type: ignore[arg-type]
        for (run, _, diverged), points in zip(group, thinned, strict=True):
            runs += [{"series": series, "run": run, "x": at, "value": rounded(value)} for at, value in points]
            if diverged and points:
                at, value = points[-1]
                low, high = y.shown or (value, value)
                ends.append({"series": series, "run": run, "x": at, "value": min(max(value, low), high)})
        thick = (
            [(series, mean_curve(thinned))]
            if average
            else zip((name for name, _, _ in group), thinned, strict=True)
        )
        for run, points in thick:
            means += [
                {"series": series, "run": run, "x": at, "value": rounded(value)} for at, value in points
            ]
    colour, dash = _by_series(list(lines), optimizers)
    pick = alt.selection_point(name="pick", fields=["series"], bind="legend")
    shown = [*runs, *({"x": at, "value": value} for at, value in ideal)]
    horizontal = _position(alt.X, "x", x.with_ticks(row["x"] for row in shown))
    vertical = _position(alt.Y, "value", y.with_ticks(row["value"] for row in shown))
    few = max((len(points) for group in lines.values() for _, points, _ in group), default=0) <= FEW_POINTS

    def faded(opacity: float) -> Any:
        return alt.OpacityValue(0.06, condition={"param": "pick", "value": opacity})

    layers: list[alt.Chart] = []
    if average and any(len(group) > 1 for group in lines.values()):
        thin_lines = alt.Chart(alt.InlineData(values=runs)).mark_line(clip=True, strokeWidth=1)
        layers.append(
            thin_lines.encode(
                horizontal, vertical, colour, dash, detail=alt.Detail("run:N"), opacity=faded(0.35)
            )
        )
    thick_lines = alt.Chart(alt.InlineData(values=means)).mark_line(
        clip=True, strokeWidth=2.2, point={"size": 24} if few else False
    )
    layers.append(
        thick_lines.encode(
            horizontal,
            vertical,
            colour,
            dash,
            detail=alt.Detail("run:N"),
            opacity=faded(1.0),
            tooltip=[
                alt.Tooltip("series:N", title=" "),
                alt.Tooltip("x:Q", title=x.title, format=x.format),
                alt.Tooltip("value:Q", title=y.title, format=y.format),
            ],
        ).add_params(pick)
    )
    if ends:
        crosses = alt.Chart(alt.InlineData(values=ends)).mark_point(
            clip=True, shape="cross", angle=45, size=110, filled=True, opacity=1
        )
        layers.append(
            crosses.encode(horizontal, vertical, colour, tooltip=[alt.Tooltip("run:N", title="diverged")])
        )
    if ideal:
        dots = alt.Chart(alt.InlineData(values=[{"x": at, "value": value} for at, value in ideal])).mark_line(
            strokeDash=[2, 4], strokeWidth=1.5, color="currentColor", opacity=0.5
        )
        layers.append(dots.encode(horizontal, vertical))
    return finish(alt.layer(*layers).properties(height=_HEIGHT), name, title, caption)


def strip_chart(
    rows: Sequence[Row],
    optimizers: Mapping[str, str],
    y: Axis,
    *,
    name: str,
    title: str,
    caption: str,
) -> Chart:
    """Values in groups: a point for each seed and a tick at their mean. Rows have group, series and value."""
    import altair as alt

    names = list(dict.fromkeys(row["series"] for row in rows))
    groups = list(dict.fromkeys(row["group"] for row in rows))
    colour, _ = _by_series(names, optimizers, symbol="circle")
    x = alt.X("group:N", title=None, sort=groups, axis=alt.Axis(labelAngle=0, labelLimit=160))
    offset = alt.XOffset("series:N", sort=names)
    y = y.with_ticks(row["value"] for row in rows)
    vertical = _position(alt.Y, "value", y)
    tooltip = [
        alt.Tooltip("series:N"),
        alt.Tooltip("group:N"),
        alt.Tooltip("value:Q", title=y.title, format=y.format),
    ]
    base = alt.Chart(alt.InlineData(values=list(rows)))
    layers: list[alt.Chart] = [
        base.mark_circle(size=54, opacity=0.75, clip=True).encode(
            x, vertical, colour, xOffset=offset, tooltip=tooltip
        ),
        base.mark_tick(thickness=2.5, size=22, clip=True).encode(
            x,
            alt.Y("mean(value):Q", title=y.title, scale=_scale(y), axis=_axis(y)),
            colour,
            xOffset=offset,
        ),
    ]
    return finish(alt.layer(*layers).properties(height=_HEIGHT), name, title, caption)


def finish(
    chart: Any, name: str, title: str, caption: str, datasets: Mapping[str, Sequence[Row]] | None = None
) -> Chart:
    """Add title, caption and named datasets to an altair chart."""
    spec = chart.to_dict(validate=False)
    spec["datasets"] = {**spec.get("datasets", {}), **(datasets or {})}
    return Chart(name=name, title=title, caption=caption, spec=spec)


def _by_series(
    names: Sequence[str], optimizers: Mapping[str, str], symbol: str = "stroke"
) -> tuple[alt.Color, alt.StrokeDash]:
    import altair as alt

    legend = alt.Legend(
        orient="top",
        direction="horizontal",
        labelLimit=240,
        columnPadding=24,  # fonts in browsers are wider than the one used to measure widths
        symbolType=symbol,
        symbolOpacity=1,
    )
    look = Look.of({name: optimizers.get(name, name) for name in names})
    return by_series(look, names, legend)


def _position(kind: Any, field: str, axis: Axis) -> Any:
    return kind(f"{field}:Q", title=axis.title, scale=_scale(axis), axis=_axis(axis))


def _axis(axis: Axis) -> alt.Axis:
    import altair as alt

    return alt.Axis(format=axis.format, **({"values": axis.ticks} if axis.ticks else {"tickCount": 5}))


def _scale(axis: Axis) -> alt.Scale:
    import altair as alt

    if axis.logarithmic:
        return alt.Scale(type="log", nice=False, padding=8)
    if axis.shown is not None:
        return alt.Scale(zero=False, nice=False, domain=list(axis.shown))
    return alt.Scale(zero=axis.from_zero, nice=True)
