"""The files of a study's findings: a self-contained HTML page, charts, tables, and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merit_lab.results.old_charts import FILE_WIDTH, write_svg
from merit_lab.results.style import CONFIG
from merit_lab.results.template import render
from merit_lab.results.write import write_csv
from merit_lab.runs import durable
from merit_lab.study.charts import Chart
from merit_lab.tables import Table, print_table


@dataclass(frozen=True)
class TableSection:
    """A table with its title and caption."""

    title: str
    caption: str
    table: Table


@dataclass(frozen=True)
class JsonFile:
    """The findings for programs: a file name, a short description, and the content."""

    name: str
    description: str
    content: Any


@dataclass(frozen=True, kw_only=True)
class Page:
    """The findings of a study, in the order in which the page shows them."""

    title: str
    facts: Sequence[str]
    summary: str
    warnings: Sequence[str]
    charts: Sequence[Chart]
    tables: Sequence[TableSection]
    settings: Sequence[tuple[str, str]]
    printed: Sequence[TableSection]
    """The tables that are printed to the terminal and written to table.md."""
    rows: Sequence[Mapping[str, Any]]
    """One row for each run."""
    record: JsonFile
    lead: Sequence[TableSection] = ()
    """Tables before the charts."""

    @property
    def files(self) -> dict[str, str]:
        """The files beside the page, each with a short description."""
        return {
            "table.csv": "one row for each run",
            "table.md": "tables in Markdown",
            self.record.name: self.record.description,
            **{f"{chart.name}.svg": "a picture" for chart in self.charts},
        }

    def show(self) -> None:
        """Print the tables."""
        for section in self.printed:
            print_table(section.table)

    def write(self, folder: Path) -> Path:
        """Write all files into a folder, overwriting earlier ones; return the path of the page."""
        folder.mkdir(parents=True, exist_ok=True)
        # The page first: it marks the folder as ours if we are stopped on the way.
        page = folder / "index.html"
        data = {"config": CONFIG, "charts": {chart.name: on_page(chart) for chart in self.charts}}
        text = render("study/page.html", **vars(self), files=self.files, data=data)
        durable.write(page, text)
        write_charts(self.charts, folder)
        write_csv(folder / "table.csv", self.rows)
        tables = "\n".join(f"{section.title}\n\n{section.table.markdown()}" for section in self.printed)
        (folder / "table.md").write_text(tables, encoding="utf-8")
        record = json.dumps(self.record.content, indent=2)
        (folder / self.record.name).write_text(record + "\n", encoding="utf-8")
        return page


def write_charts(charts: Sequence[Chart], folder: Path) -> None:
    """Write each chart as an SVG file."""
    for chart in charts:
        write_svg(folder / f"{chart.name}.svg", {"width": FILE_WIDTH, **chart.spec}, chart.title)


def on_page(chart: Chart) -> dict[str, Any]:
    """A chart's specification, as wide as its container."""
    return {**chart.spec, "width": "container", "autosize": {"type": "fit-x", "resize": True}}
