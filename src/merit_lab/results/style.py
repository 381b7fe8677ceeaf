"""Colours and strokes: an optimizer looks the same in all figures of all reports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

# Based on the colour-blind safe palette of Okabe and Ito. The three with the best contrast on white and on
# black go to the optimizers that are compared most.
_COLOURS = {
    "adamw": "#009e73",
    "lamb": "#d55e00",
    "merit": "#0072b2",
    "maxlamb": "#e69f00",
    "lion": "#cc79a7",
    "sophiag": "#56b4e9",
    "muon": "#999933",
    "muon-merit": "#882255",
    "normuon": "#6699cc",
    "orscale": "#8c6d31",
    "soap": "#44aa99",
    "soap-merit": "#b2182b",
}
_OTHER_COLOURS = ("#8c8c8c", "#b59f00", "#7a5195")
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2))  # for several series of one colour

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# Text and axes use currentColor: black in an SVG file, the text colour on the page, light or dark. The page's
# background shows through; files get a white one.
CONFIG: dict[str, Any] = {
    "font": FONT,
    "background": None,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "currentColor",
        "labelFontSize": 11,
        "labelOpacity": 0.75,
        "titleColor": "currentColor",
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "titleOpacity": 0.75,
        "titlePadding": 8,
        "domainColor": "currentColor",
        "domainOpacity": 0.35,
        "tickColor": "currentColor",
        "tickOpacity": 0.35,
        "gridColor": "currentColor",
        "gridOpacity": 0.1,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
    "legend": {
        "labelColor": "currentColor",
        "labelFontSize": 11,
        "titleColor": "currentColor",
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "titleOpacity": 0.75,
        "symbolStrokeWidth": 2.5,
        "symbolSize": 220,
    },
    "title": {"color": "currentColor", "fontSize": 13, "anchor": "start", "offset": 10},
}


def colours(optimizers: Mapping[str, str]) -> dict[str, str]:
    """Each series' colour by label, given its optimizer by label."""
    unlisted = [optimizer for optimizer in dict.fromkeys(optimizers.values()) if optimizer not in _COLOURS]
    others = dict(zip(unlisted, itertools.cycle(_OTHER_COLOURS), strict=False))
    return {label: (_COLOURS | others)[optimizer] for label, optimizer in optimizers.items()}


def dashes(optimizers: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Each series' stroke by label: solid for the first series of a colour, then dashed."""
    by_label = colours(optimizers)
    strokes = {colour: itertools.cycle(_DASHES) for colour in by_label.values()}
    return {label: next(strokes[colour]) for label, colour in by_label.items()}
