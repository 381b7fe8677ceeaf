"""What a study found, as files: a page that needs no other and no network, pictures, tables, a record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merit_lab.report import print_table
from merit_lab.report.charts import write_svg
from merit_lab.report.style import CONFIG
from merit_lab.report.tables import Table
from merit_lab.report.template import render
from merit_lab.report.write import write_csv
from merit_lab.study.charts import FILE_WIDTH, Chart


@dataclass(frozen=True)
class TableSection:
    """A table with the words above it."""

    title: str
    caption: str
    table: Table


@dataclass(frozen=True)
class Record:
    """What programs read: the name of a JSON file, a few words about it, and what it holds."""

    name: str
    words: str
    content: Any


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a study found, from top to bottom."""

    title: str
    facts: Sequence[str]
    summary: str
    warnings: Sequence[str]
    charts: Sequence[Chart]
    tables: Sequence[TableSection]
    settings: Sequence[tuple[str, str]]
    printed: Sequence[TableSection]
    """Those of the tables that a terminal shows; a Markdown file has the same."""
    rows: Sequence[Mapping[str, Any]]
    """One for each run."""
    record: Record
    lead: Sequence[TableSection] = ()
    """Tables that come before the charts."""

    @property
    def files(self) -> dict[str, str]:
        """The files beside the page, each with a few words."""
        return {
            "table.csv": "one row for each run",
            "table.md": "tables in Markdown",
            self.record.name: self.record.words,
            **{f"{chart.name}.svg": "a picture" for chart in self.charts},
        }

    def show(self) -> None:
        """Print what it comes to."""
        for own in self.printed:
            print_table(own.table)

    def write(self, folder: Path) -> Path:
        """Write all files into a folder, over earlier ones; return the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        write_charts(self.charts, folder)
        write_csv(folder / "table.csv", self.rows)
        tables = "\n".join(f"{own.title}\n\n{own.table.markdown()}" for own in self.printed)
        (folder / "table.md").write_text(tables, encoding="utf-8")
        record = json.dumps(self.record.content, indent=2)
        (folder / self.record.name).write_text(record + "\n", encoding="utf-8")
        page = folder / "index.html"
        data = {"config": CONFIG, "charts": {chart.name: on_page(chart) for chart in self.charts}}
        text = render("study/page.html", **vars(self), files=self.files, data=data)
        page.write_text(text, encoding="utf-8")
        return page


def write_charts(charts: Sequence[Chart], folder: Path) -> None:
    """Write each chart as a picture."""
    for chart in charts:
        write_svg(folder / f"{chart.name}.svg", {"width": FILE_WIDTH, **chart.spec}, chart.title)


def on_page(chart: Chart) -> dict[str, Any]:
    """A chart's specification, as wide as its place."""
    return {**chart.spec, "width": "container", "autosize": {"type": "fit-x", "resize": True}}
