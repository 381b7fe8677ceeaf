"""Vega-Lite charts, made with altair: one definition serves the page and the SVG file.

A chart refers to its data by name, so charts can share data. On the page it fills its container and shows
values under the pointer; the parameter ``hidden`` lists the series to hide, and ``whole`` switches from the
interesting part of y to all of it. In a file (``standalone``) it has a legend instead.

Encodings are altair's own objects, not strings: to find the class for a string takes it most of a second for
each report.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from merit_lab.results import style

if TYPE_CHECKING:
    import altair as alt

XQuantity = Literal["step", "tokens"]
_AXIS_TITLES = {"step": "steps", "tokens": "tokens"}
_LINE_HEIGHT = 240
_LAYER_HEIGHT = 15
FILE_WIDTH = 640
_LETTER_WIDTH, _SYMBOL_WIDTH = 6.4, 34  # of a legend, in pixels
FEW_POINTS = 30  # up to this many, each point is marked
_MOST_TICKS = 10  # three decades with 1, 2 and 5
_FOCUS_FROM = 0.2  # the loss is shown from its value after this share of the steps


@dataclass(frozen=True)
class Look:
    """Colour and stroke of each series, by label."""

    colours: Mapping[str, str]
    dashes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, optimizers: Mapping[str, str]) -> Look:
        """The look of series, from their optimizers by label."""
        return cls(style.colours(optimizers), style.dashes(optimizers))


@dataclass(frozen=True)
class Horizontal:
    """The x axis: steps or tokens, from 0 to ``end``."""

    axis: XQuantity
    end: float


@dataclass(frozen=True)
class Vertical:
    """The y axis: its title, formats and scale.

    ``whole`` is all of y and ``focus`` the part shown at first; by default the data decide.
    """

    title: str
    format: str
    ticks: str
    logarithmic: bool = False
    from_zero: bool = False
    focus: tuple[float, float] | None = None
    whole: tuple[float, float] | None = None


def line_chart(
    name: str,
    look: Look,
    horizontal: Horizontal,
    vertical: Vertical,
    *,
    labels: Sequence[str],
    num_points: int,
    kinds: Collection[str],
    standalone: bool = False,
) -> dict[str, Any]:
    """Lines over steps or tokens: thin for runs, thick for means, a cross where a run diverged.

    Its data are ``<name>-runs``, ``<name>-means`` and ``<name>-ends``: rows with series, run, step, tokens
    and value. ``labels`` are the series that have data, ``kinds`` the datasets that have rows.
    """
    import altair as alt

    x, tooltip = _x(horizontal), _x_tooltip(horizontal)
    y = alt.Y(
        "value:Q",
        title=vertical.title,
        scale=_vertical_scale(vertical),
        axis=_vertical_axis(vertical),
    )
    legend = alt.Legend(orient="top", direction="horizontal", symbolType="stroke", symbolOpacity=1)
    series, dash = by_series(look, labels, legend if standalone else None)

    def rows(kind: str) -> alt.Chart:
        source = alt.Chart(alt.NamedData(name=f"{name}-{kind}"))
        return source.transform_filter("indexof(hidden, datum.series) < 0")

    marked = {"size": 22} if num_points <= FEW_POINTS else False
    runs = rows("runs").mark_line(clip=True, strokeWidth=1, opacity=0.4)
    means = rows("means").mark_line(clip=True, strokeWidth=2.2, point=marked)
    ends = rows("ends").mark_point(clip=True, shape="cross", angle=45, size=110, strokeWidth=2, filled=True)
    by_kind: dict[str, alt.Chart] = {
        "runs": runs.encode(x, y, series, dash, alt.Detail("run:N")),
        "means": means.encode(x, y, series, dash),
        "ends": ends.encode(x, y, series, tooltip=[alt.Tooltip("run:N"), tooltip, alt.Tooltip("message:N")]),
    }
    layers = [layer for kind, layer in by_kind.items() if kind in kinds]
    if not standalone:
        layers.append(_pointer(rows("means"), horizontal, labels, vertical.format))
    spec: dict[str, Any] = alt.layer(*layers).to_dict(validate=False)
    # By hand: altair would copy all of it for each of these.
    params = [*spec.get("params", []), {"name": "hidden", "value": []}, {"name": "whole", "value": False}]
    return {**spec, "params": params, "width": _width(standalone), "height": _LINE_HEIGHT}


def by_series(
    look: Look, labels: Iterable[str], legend: alt.Legend | None
) -> tuple[alt.Color, alt.StrokeDash]:
    """The colour and stroke of rows by their ``series``, one of ``labels``."""
    import altair as alt

    domain = list(labels)
    if legend is not None:
        legend = legend.copy()
        legend.columns = _fitting_columns(domain)
    colours = alt.Scale(domain=domain, range=[look.colours[label] for label in domain])
    dashes = alt.Scale(domain=domain, range=[list(look.dashes[label]) for label in domain])
    return (
        alt.Color("series:N", title=None, scale=colours, legend=legend),
        alt.StrokeDash("series:N", title=None, scale=dashes, legend=legend),
    )


def _fitting_columns(labels: Sequence[str]) -> Any:
    """The number of legend columns that fit into the width of the chart."""
    import altair as alt

    widest = max(map(len, labels), default=1) * _LETTER_WIDTH + _SYMBOL_WIDTH
    return alt.ExprRef(f"min({max(1, len(labels))}, max(1, floor(width / {widest:g})))")


def is_wide(lowest: float, highest: float) -> bool:
    """Whether values from ``lowest`` to ``highest`` need a logarithmic scale, and can have one."""
    return lowest > 0 and highest > 20 * lowest


def logarithmic_ticks(lowest: float, highest: float) -> list[float]:
    """Powers of ten, and 2 and 5 times each unless those are too many.

    Example:
        >>> logarithmic_ticks(0.3, 12.0)
        [0.5, 1.0, 2.0, 5.0, 10.0]
        >>> logarithmic_ticks(0.3, 1200.0)
        [1.0, 10.0, 100.0, 1000.0]
    """
    powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    ticks: list[float] = []
    for factors in ("125", "1"):
        ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        ticks = [tick for tick in ticks if lowest <= tick <= highest]
        if len(ticks) <= _MOST_TICKS:
            break
    return ticks


def focus(
    curves: Sequence[Sequence[tuple[float, float]]], finished: Collection[int] = ()
) -> tuple[float, float]:
    """The range of a loss to show: the steep beginning would flatten the rest.

    It has the ends of the longest curves and of those of ``finished`` runs, given by their indices, and where
    half of all curves are soon after the start.
    """
    last = max(points[-1][0] for points in curves)
    early = [
        next((value for at, value in points if at >= _FOCUS_FROM * last), points[-1][1]) for points in curves
    ]
    ends = [
        points[-1][1] for place, points in enumerate(curves) if points[-1][0] == last or place in finished
    ]
    lowest = min(value for points in curves for _, value in points)
    upper = max(statistics.median(early), *ends)
    margin = 0.04 * (upper - lowest) or 0.1
    return lowest - margin, upper + margin


def rounded(value: float) -> float | None:
    """Round to six significant digits, which is more than can be seen and keeps the page small."""
    return float(f"{value:.6g}") if math.isfinite(value) else None  # JSON has no NaN


def check_charts() -> None:
    """Raise ModuleNotFoundError if a library that draws charts is missing, before hours of training."""
    import altair  # noqa: F401
    import vl_convert  # noqa: F401


def write_svg(path: Path, chart: Mapping[str, Any], title: str) -> None:
    """Write a chart with its data as SVG; the same chart always gives the same bytes."""
    import vl_convert

    spec = {**chart, "title": title, "background": "white", "config": style.CONFIG}
    numbers: dict[str, int] = {}  # of element ids, which Vega counts across all pictures of a process

    def renumber(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}{numbers.setdefault(match[2] + match[3], len(numbers) + 1)}"

    svg = re.sub(r'(id="|url\(#)(clip|gradient_)(\d+)', renumber, vl_convert.vegalite_to_svg(spec))
    path.write_text(svg, encoding="utf-8")


def _pointer(means: alt.Chart, horizontal: Horizontal, labels: Sequence[str], number: str) -> alt.Chart:
    """A line at the step nearest to the pointer, with the values of all series there."""
    import altair as alt

    nearest = alt.selection_point(
        name="nearest",
        fields=[horizontal.axis],
        nearest=True,
        on="pointermove",
        clear="pointerout",
        empty=False,
    )
    values = [alt.Tooltip(f"s{place}:Q", title=label, format=number) for place, label in enumerate(labels)]
    rule = means.transform_pivot("key", value="value", groupby=["step", "tokens"]).mark_rule(
        strokeWidth=1, color="currentColor"
    )
    chart: alt.Chart = rule.encode(
        x=_x(horizontal),
        opacity=alt.OpacityValue(0, condition={"param": "nearest", "empty": False, "value": 0.4}),
        tooltip=[_x_tooltip(horizontal), *values],
    ).add_params(nearest)
    return chart


def layer_chart(
    name: str,
    horizontal: Horizontal,
    *,
    num_layers: int,
    domain: tuple[float, float],
    logarithmic: bool,
    standalone: bool = False,
) -> dict[str, Any]:
    """A heatmap of one series: layers upwards, steps or tokens to the right.

    Its data are ``<name>``: rows with layer, value, and the begin and end of step and tokens.
    """
    import altair as alt

    every = -(-num_layers // 12)
    layers = alt.Axis(values=[layer for layer in range(1, num_layers + 1) if layer % every == 0])
    chart = cells(alt.NamedData(name=name)).encode(
        x=_x(horizontal, suffix="_begin"),
        x2=alt.X2(f"{horizontal.axis}_end"),
        y=alt.Y("layer:O", title="layer", sort="descending", axis=layers),
        color=heat("logit", domain, logarithmic=logarithmic),
        tooltip=[
            _x_tooltip(horizontal, suffix="_end"),
            alt.Tooltip("layer:O"),
            alt.Tooltip("value:Q", title="largest logit", format=".3g"),
        ],
    )
    height = max(_LAYER_HEIGHT * num_layers, 80)
    spec: dict[str, Any] = chart.properties(width=_width(standalone), height=height).to_dict(validate=False)
    return spec


def cells(data: Any) -> alt.Chart:
    """The rectangles of a heatmap; a stroke of the same colour closes gaps that antialiased edges leave."""
    import altair as alt

    stroke = alt.ExprRef("scale('color', datum.value)")
    chart: alt.Chart = alt.Chart(data).mark_rect(strokeWidth=0.6, stroke=stroke)
    return chart


def heat(title: str, domain: tuple[float, float], *, logarithmic: bool) -> alt.Color:
    """The colours of a heatmap's values; those outside of ``domain`` are clamped."""
    import altair as alt

    kind: Literal["log", "linear"] = "log" if logarithmic else "linear"
    return alt.Color(
        "value:Q",
        title=title,
        scale=alt.Scale(type=kind, scheme="viridis", domain=list(domain), clamp=True),
        legend=alt.Legend(orient="right", gradientThickness=10, tickCount=4, format=".6~g"),
    )


def _width(standalone: bool) -> int | Literal["container"]:
    return FILE_WIDTH if standalone else "container"


def _vertical_axis(vertical: Vertical) -> alt.Axis:
    import altair as alt

    if not vertical.logarithmic or vertical.whole is None:
        return alt.Axis(format=vertical.ticks, tickCount=5)
    return alt.Axis(format=vertical.ticks, values=logarithmic_ticks(*vertical.whole))


def _vertical_scale(vertical: Vertical) -> alt.Scale:
    import altair as alt

    if vertical.logarithmic and vertical.whole is not None:
        return alt.Scale(type="log", nice=False, domain=list(vertical.whole))
    if vertical.focus is None or vertical.whole is None:
        return alt.Scale(zero=vertical.from_zero, nice=True)
    ends = [
        alt.ExprRef(f"whole ? {whole:.6g} : {focus:.6g}")
        for focus, whole in zip(vertical.focus, vertical.whole, strict=True)
    ]
    return alt.Scale(zero=False, nice=False, domainMin=ends[0], domainMax=ends[1])


def _x(horizontal: Horizontal, suffix: str = "") -> alt.X:
    import altair as alt

    return alt.X(
        f"{horizontal.axis}{suffix}:Q",
        title=_AXIS_TITLES[horizontal.axis],
        scale=alt.Scale(nice=False, domain=[0, horizontal.end]),
        axis=alt.Axis(
            tickCount=alt.ExprRef("ceil(width / 90)"),
            # Token counts use B where SI has G.
            labelExpr="replace(format(datum.value, '~s'), 'G', 'B')",
        ),
    )


def _x_tooltip(horizontal: Horizontal, suffix: str = "") -> alt.Tooltip:
    import altair as alt

    number = ",d" if horizontal.axis == "step" else ".4~s"
    return alt.Tooltip(f"{horizontal.axis}{suffix}:Q", title=horizontal.axis, format=number)
