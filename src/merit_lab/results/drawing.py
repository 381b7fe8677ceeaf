"""What charts are drawn with: one style, the colour of each series, scales, and the way to SVG."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from xml.sax.saxutils import escape, quoteattr

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
    "lamb": "#d55e00",
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
_LONGEST = 64  # letters of a series in a legend
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
    rows = named(frame if "series" in frame.columns else frame.with_columns(series=pl.lit(y)))
    rows = rows.select(
        "series", pl.col(x).cast(pl.Float64).alias("x"), pl.col(y).cast(pl.Float64).alias("y"), *others
    )
    return rows.filter(pl.col("x").is_finite() & pl.col("y").is_finite())


def named(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with names that a legend has room for."""
    if "series" not in frame.columns:
        return frame.with_columns(series=pl.lit(""))
    return frame.with_columns(
        pl.col("series").map_elements(partial(clean, longest=_LONGEST), return_dtype=pl.String)
    )


def look(frame: pl.DataFrame, *, legend: bool = True) -> tuple[alt.Color, alt.StrokeDash]:
    """The colour and the stroke of each series: colours by optimizer if there are several."""
    frame = named(frame)
    optimizer = pl.col("optimizer.name" if "optimizer.name" in frame.columns else "series").alias("optimizer")
    rows = frame.select("series", optimizer).unique("series", maintain_order=True)
    names, optimizers = rows["series"].to_list(), rows["optimizer"].to_list()
    if len(set(optimizers)) == 1:
        optimizers = names if len(names) > 1 else optimizers
    unlisted = [one for one in dict.fromkeys(optimizers) if one not in _COLOURS]
    colours = _COLOURS | dict(zip(unlisted, itertools.cycle(_OTHERS), strict=False))
    strokes = {colour: itertools.cycle(_STROKES) for colour in colours.values()}
    chosen = [colours[one] for one in optimizers]
    columns = max(1, int(_WIDTH // (max((len(name) for name in names), default=1) * _LETTER + _SYMBOL)))
    symbols = alt.Legend(
        orient="bottom",
        direction="horizontal",
        columns=columns,
        symbolType="stroke",
        symbolOpacity=1,
        title=None,
    )
    dashes = [list(next(strokes[colour])) for colour in chosen]
    return (
        alt.Color(
            "series:N", scale=alt.Scale(domain=names, range=chosen), legend=symbols if legend else None
        ),
        alt.StrokeDash(
            "series:N", scale=alt.Scale(domain=names, range=dashes), legend=symbols if legend else None
        ),
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


def row_names(names: Sequence[str]) -> alt.Y:
    """The names of rows, top down; long ones on several lines."""
    lines = "split(datum.label, '\\n')"
    return alt.Y("y:N", title=None, sort=list(names), axis=alt.Axis(labelExpr=lines, labelLimit=300))


def height_of(names: Sequence[str]) -> int:
    most = max((name.count("\n") for name in names), default=0)
    return max(60, (24 + 13 * most) * len(names))


def wrapped(column: str) -> pl.Expr:
    """A column as names of rows, on lines that leave room for what is drawn."""

    def wrap(name: object) -> str:
        return "\n".join(textwrap.wrap(clean(str(name)), _ROW_NAME))

    return pl.col(column).map_elements(wrap, return_dtype=pl.String)


def crosses(chart: alt.Chart) -> Any:
    """Where runs diverged."""
    return chart.mark_point(clip=False, shape="cross", angle=45, size=90, filled=True, opacity=1)


def data(frame: pl.DataFrame) -> alt.Chart:
    """A chart of the rows of a frame; six digits are more than can be seen."""
    kept = frame.select(name for name, kind in frame.schema.items() if not kind.is_nested())
    kept = kept.with_columns(
        cs.float().round_sig_figs(6), cs.string().map_elements(readable, return_dtype=pl.String)
    )
    # As text: altair would look at each value of rows, and copy them, again and again.
    return alt.Chart(alt.InlineData(values=kept.write_json(), format=alt.JsonDataFormat(type="json")))


def picture(layers: Sequence[Any], name: str, title: str, caption: str, *, height: int = HEIGHT) -> Chart:
    """The picture of layers, all of the same width."""

    with debug_mode(False):  # checks against Vega-Lite's schema take seconds; tests make them
        spec = alt.layer(*layers).properties(width=_WIDTH, height=height).to_dict(validate=False)
    spec |= {"config": _CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}
    # Fonts of browsers are wider than the one that widths are measured with.
    spec["padding"] = {"left": 18, "right": 14, "top": 6, "bottom": 6}
    svg = vl_convert.vegalite_to_svg(_safe(spec))
    numbers: dict[str, int] = {}  # Vega counts elements across all pictures of a process

    def renumber(match: re.Match[str]) -> str:
        return f"{match[1]}{name}-{match[2]}{numbers.setdefault(match[2] + match[3], len(numbers) + 1)}"

    svg = re.sub(r'(id="|url\(#)(clip|gradient_)(\d+)', renumber, svg)
    # The attribute counts for less than a rule of the page's style.
    heading = f"<title>{escape(clean(title))}</title>"
    svg = re.sub(
        r"<svg([^>]*)>", rf'<svg\1 color="{_GREY}" role="img" aria-label={_attribute(title)}>', svg, count=1
    )
    svg = re.sub(r"(<svg[^>]*>)", lambda match: match[1] + heading, svg, count=1)
    return Chart(name, title, caption, svg)


def _attribute(text: str) -> str:
    return quoteattr(clean(text)).replace("\\", "\\\\")


def _safe(value: Any) -> Any:
    """The specification without characters that end the program that draws it."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {key: _safe(one) for key, one in value.items()}
    return [_safe(one) for one in value] if isinstance(value, list) else value
