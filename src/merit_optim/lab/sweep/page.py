"""A page of figures and tables in one HTML file that needs no other and no network.

`merit sweep` and `merit scale` fill one each; it looks like the pages of `merit report`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from merit_optim.lab.report.style import CONFIG
from merit_optim.lab.report.tables import Table


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


def write_page(page: Page, folder: Path) -> Path:
    """Write index.html and each figure as SVG into a folder; return the page's path."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    for figure in page.figures:
        spec = {**_whole(figure), "title": figure.title, "background": "white", "config": CONFIG}
        (folder / f"{figure.key}.svg").write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
    path = folder / "index.html"
    path.write_text(_render(page), encoding="utf-8")
    return path


def _render(page: Page) -> str:
    import jinja2
    import vl_convert
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    charts = {
        figure.key: {**_whole(figure), "width": "container", "autosize": {"type": "fit-x", "resize": True}}
        for figure in page.figures
    }
    library = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    data = {"config": {**CONFIG, "background": None}, "charts": charts}
    return environment.from_string(_read("merit_optim.lab.sweep", "page.html")).render(
        page=page,
        style=Markup(_read("merit_optim.lab.report", "page.css")),
        # Of a chart library's text only what would end the element early must change.
        library=Markup(library.replace("</script", "<\\/script")),
        data=Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")),
    )


def _whole(figure: Figure) -> dict[str, Any]:
    """A chart with its data, beside those it brought itself."""
    return {**figure.chart, "datasets": {**figure.chart.get("datasets", {}), **figure.datasets}}


def _read(package: str, name: str) -> str:
    return (resources.files(package) / name).read_text(encoding="utf-8")
