"""A page of figures and tables in one HTML file that needs no other and no network.

Studies fill one each; it looks like the pages of `merit report`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merit_lab.report.charts import write_svg
from merit_lab.report.style import CONFIG
from merit_lab.report.tables import Table
from merit_lab.report.template import render


@dataclass(frozen=True)
class Figure:
    """A Vega-Lite chart of a fixed width, the words above it, and its data by name."""

    key: str
    title: str
    caption: str
    chart: Mapping[str, Any]
    datasets: Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class TableSection:
    """A table with the words above it."""

    title: str
    caption: str
    table: Table


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page says, from top to bottom; ``files`` lie beside it, each with a few words."""

    title: str
    facts: Sequence[str]
    summary: str
    warnings: Sequence[str]
    figures: Sequence[Figure]
    tables: Sequence[TableSection]
    settings: Sequence[tuple[str, str]]
    files: Mapping[str, str] = field(default_factory=dict)
    lead: Sequence[TableSection] = ()
    """Tables that come before the figures."""


def write_page(page: Page, folder: Path) -> Path:
    """Write index.html and each figure as SVG into a folder; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for figure in page.figures:
        write_svg(folder / f"{figure.key}.svg", _whole(figure), figure.title)
    path = folder / "index.html"
    path.write_text(_render(page), encoding="utf-8")
    return path


def _render(page: Page) -> str:
    charts = {
        figure.key: {**_whole(figure), "width": "container", "autosize": {"type": "fit-x", "resize": True}}
        for figure in page.figures
    }
    return render("study/page.html", **vars(page), data={"config": CONFIG, "charts": charts})


def _whole(figure: Figure) -> dict[str, Any]:
    """A chart with its data, beside those it brought itself."""
    return {**figure.chart, "datasets": {**figure.chart.get("datasets", {}), **figure.datasets}}
