"""What charts are drawn with: one style, the colour of each series, scales, and the way to SVG."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

import altair as alt
import polars as pl
import polars.selectors as cs
import vl_convert
from altair.utils.schemapi import debug_mode

from merit_lab.results.names import DISPLAY_NAMES, clean, readable
from merit_lab.results.page import Chart

# Each with a contrast of 3 or more to white and to the dark page.
_COLOURS = {
    "adamw": "#00875f",
    "lamb-uncorrected": "#d55e00",
    "merit": "#1f77c9",
    "maxlamb": "#b07d00",
    "lion": "#c0589f",
    "sophiag": "#3a8fc2",
    "muon": "#7f8420",
    "muon-merit": "#b3407a",
    "normuon": "#8a63c9",
    "orscale": "#96702f",
    "soap": "#1f8f86",
    "soap-merit": "#c8323f",
}
_COLOURS |= {DISPLAY_NAMES[name]: colour for name, colour in _COLOURS.items()}
_OTHERS = ("#7a7a7a", "#5b7fd6", "#a8742a", "#4f9d4f", "#b35c8a", "#3f8f9f", "#c46a4a", "#8f7fb8")
_STROKES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2), (12, 3))
_GREY = "#7a7a7a"  # of text in a file
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_WIDTH, HEIGHT = 480, 270
_LETTER, _SYMBOL = 7.2, 36  # of a legend, in pixels; fonts differ in width
_ROW_NAME = 26  # letters of a line in the name of a row
FEW_POINTS = 30  # up to this many, each point is marked
MOST_TICKS = 10
NUMBER = "replace(format(datum.value, abs(datum.value) >= 10000 ? '.3~s' : '.6~g'), 'G', 'B')"

_faint = {"Color": "currentColor", "FontSize": 12, "FontWeight": "normal"}
_CONFIG: dict[str, Any] = {
    "font": _FONT,
    "background": None,
    "aria": False,
    "view": {"stroke": None},
    "axis": {
        **{f"label{key}": value for key, value in _faint.items()},
        **{f"title{key}": value for key, value in _faint.items()},
        **{f"{part}Color": "currentColor" for part in ("domain", "tick", "grid")},
        **{f"{part}Opacity": 0.4 for part in ("domain", "tick")},
        "gridOpacity": 0.12,
        "titlePadding": 8,
        "labelExpr": NUMBER,
        "labelLimit": 200,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
    "axisDiscrete": {"labelExpr": "datum.label"},
    "legend": {
        "labelColor": "currentColor",
        "labelFontSize": 12,
        "titleColor": "currentColor",
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "symbolStrokeWidth": 2.5,
        "symbolSize": 200,
        "labelLimit": _WIDTH - _SYMBOL - 10,
    },
}


def columns(frame: pl.DataFrame, x: str, y: str, *others: str) -> pl.DataFrame:
    """The columns to draw, named series, x and y, without rows that have no finite value."""
    rows = frame.select("series", pl.col(x).alias("x"), pl.col(y).alias("y"), *others)
    numbers = pl.col("x", "y").cast(pl.Float64)
    return rows.with_columns(numbers).filter(pl.all_horizontal(numbers.is_finite()))


Look = tuple[alt.Color, alt.StrokeDash]


def look(frame: pl.DataFrame, *, legend: bool = True) -> Look:
    """The colour and the stroke of each series: colours by optimizer if there are several."""
    optimizer = pl.col("optimizer.name" if "optimizer.name" in frame.columns else "series").alias("optimizer")
    rows = frame.select("series", optimizer).unique("series", maintain_order=True)
    names, optimizers = rows["series"].to_list(), rows["optimizer"].to_list()
    if len(set(optimizers)) == 1:
        optimizers = names if len(names) > 1 else optimizers
    unlisted = [one for one in dict.fromkeys(optimizers) if one not in _COLOURS]
    colours = _COLOURS | dict(zip(unlisted, itertools.cycle(_OTHERS), strict=False))
    strokes = {colour: itertools.cycle(_STROKES) for colour in colours.values()}
    chosen = [colours[one] for one in optimizers]
    dashes = [list(next(strokes[colour])) for colour in chosen]
    longest = max((len(name) for name in names), default=1)
    symbols = alt.Legend(
        orient="bottom",
        direction="horizontal",
        columns=max(1, int(_WIDTH // (longest * _LETTER + _SYMBOL))),
        symbolType="stroke",
        symbolOpacity=1,
        title=None,
    )
    shown = symbols if legend else None
    return (
        alt.Color("series:N", scale=alt.Scale(domain=names, range=chosen), legend=shown),
        alt.StrokeDash("series:N", scale=alt.Scale(domain=names, range=dashes), legend=shown),
    )


def position(
    kind: Any,
    values: pl.Series,
    title: str,
    *,
    log: bool = False,
    zero: bool = False,
    domain: tuple[float, float] | None = None,
    ticks: Iterable[float] | None = None,
) -> Any:
    """The x or y of rows, with a scale that holds all values."""
    field = "x:Q" if kind is alt.X else "y:Q"
    lowest, highest = ends(values)
    log = log and lowest > 0
    axis: dict[str, Any] = {"tickCount": 5}
    if ticks is not None:
        axis = {"values": list(ticks), "labelOverlap": "greedy", "labelSeparation": 6}
    elif log:
        axis = {"values": _logarithmic_ticks(lowest / 1.1, highest * 1.1), "labelOverlap": "greedy"}
    if log:
        scale = alt.Scale(type="log", nice=False, padding=12, domain=[lowest, highest])
    elif domain is not None:
        scale = alt.Scale(zero=False, nice=False, domain=list(domain))
    elif zero:
        scale = alt.Scale(nice=kind is alt.Y, domain=[min(0.0, lowest), max(highest, 1e-12)])
    else:
        scale = alt.Scale(zero=False, nice=True, domain=[lowest, highest], padding=4)
    return kind(field, title=title, scale=scale, axis=alt.Axis(**axis))


def _logarithmic_ticks(lowest: float, highest: float) -> list[float]:
    """Powers of ten, and 2 and 5 times each unless those are too many."""
    powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    ticks: list[float] = []
    for factors in ("125", "1"):
        ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        ticks = [tick for tick in ticks if lowest <= tick <= highest]
        if len(ticks) <= MOST_TICKS:
            break
    return ticks


def ends(values: pl.Series) -> tuple[float, float]:
    """The smallest and the largest finite value."""
    numbers = values.cast(pl.Float64)
    numbers = numbers.filter(numbers.is_finite())
    return (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 1.0)  # type: ignore[arg-type]


def title_of(column: str) -> str:
    """A column's name for readers.

    Example:
        >>> title_of("optimizer.lr"), title_of("validation_loss")
        ('peak learning rate', 'validation loss (nats per token)')
    """
    last = column.rpartition(".")[2]
    known = {"lr": "peak learning rate", "validation_loss": "validation loss (nats per token)"}
    return known.get(last, last.replace("_", " "))


def named_rows(names: pl.Series) -> tuple[pl.Series, alt.Y, int]:
    """Names of rows on lines that leave room for what is drawn, their axis, and the height of a picture."""
    lines = {name: "\n".join(textwrap.wrap(clean(str(name)), _ROW_NAME)) for name in names.unique()}
    wrapped = names.cast(pl.String).replace(lines)
    axis = alt.Axis(labelExpr="split(datum.label, '\\n')", labelLimit=300)
    order = wrapped.unique(maintain_order=True).to_list()
    most = max((name.count("\n") for name in order), default=0)
    return wrapped, alt.Y("y:N", title=None, sort=order, axis=axis), max(60, (24 + 13 * most) * len(order))


@dataclass
class Plot:
    """The layers of one picture: marks for the rows of frames with columns x, y and series."""

    x: Any
    y: Any
    look: Look
    layers: list[Any] = field(default_factory=list)

    def marks(self, rows: pl.DataFrame, kind: Any, encodings: Mapping[str, Any] = {}, **how: Any) -> None:
        """A mark of Vega-Lite for each row, in the colour of its series, with other encodings besides."""
        if not rows.is_empty():
            chart = alt.Chart(_data(rows), mark=alt.MarkDef(type=kind, **{"clip": True, **how}))
            shared = {"x": self.x, "y": self.y, "color": self.look[0]}
            self.layers.append(chart.encode(**{**shared, **encodings}))

    def lines(self, rows: pl.DataFrame, encodings: Mapping[str, Any] = {}, **how: Any) -> None:
        """A line for each series, with its stroke."""
        self.marks(rows, "line", {"strokeDash": self.look[1], **encodings}, **{"strokeWidth": 2.2, **how})

    def triangles(self, rows: pl.DataFrame) -> None:
        """Runs whose value lies outside the picture, or was not reached."""
        self.marks(rows, "point", shape="triangle-up", size=65, filled=True)

    def crosses(self, rows: pl.DataFrame) -> None:
        """Runs that diverged."""
        self.marks(rows, "point", clip=False, shape="cross", angle=45, size=90, filled=True, opacity=1)

    def picture(self, name: str, title: str, caption: str, *, height: int = HEIGHT) -> Chart:
        """The picture of the layers, as wide as all others."""
        with debug_mode(False):  # checks against Vega-Lite's schema take seconds; tests make them
            spec = alt.layer(*self.layers).properties(width=_WIDTH, height=height).to_dict(validate=False)
        spec |= {"config": _CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}
        # Fonts of browsers are wider than the one that widths are measured with.
        spec["padding"] = {"left": 18, "right": 14, "top": 6, "bottom": 6}
        svg = vl_convert.vegalite_to_svg(_readable(spec))
        numbers: dict[str, int] = {}  # Vega counts elements across all pictures of a process

        def renumber(match: re.Match[str]) -> str:
            return f"{match[1]}{name}-{match[2]}{numbers.setdefault(match[2] + match[3], len(numbers) + 1)}"

        svg = re.sub(r'(id="|url\(#)(clip|gradient_)(\d+)', renumber, svg)
        # The colour counts for less than a rule of the page's style.
        heading = f' color="{_GREY}" role="img"><title>{escape(clean(title))}</title>'
        return Chart(name, title, caption, svg.replace(">", heading, 1))


def _data(frame: pl.DataFrame) -> alt.InlineData:
    """The rows of a frame; six digits are more than can be seen."""
    kept = frame.select(name for name, kind in frame.schema.items() if not kind.is_nested())
    kept = kept.with_columns(
        cs.float().round_sig_figs(6), cs.string().map_elements(readable, return_dtype=pl.String)
    )
    # As text: altair would look at each value of rows, and copy them, again and again.
    return alt.InlineData(values=kept.write_json(), format=alt.JsonDataFormat(type="json"))


def _readable(value: Any) -> Any:
    """The specification without characters that end the program that draws it."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {key: _readable(one) for key, one in value.items()}
    return [_readable(one) for one in value] if isinstance(value, list) else value
