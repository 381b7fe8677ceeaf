"""A report's files: index.html, figures/*.svg, table.md, table.csv, metrics.csv."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from merit_lab.report.charts import write_svg
from merit_lab.report.curves import tokens_per_step
from merit_lab.report.figures import Figure, is_figure, make_figures
from merit_lab.report.gather import MeasuredRun
from merit_lab.report.outcome import SeriesOutcome, read_outcomes
from merit_lab.report.page import render_page
from merit_lab.report.series import Series, group
from merit_lab.report.summary import summarise
from merit_lab.report.tables import series_table
from merit_lab.report.terminal import print_outcomes

# Whose pages have no mark: a report's, a sweep's, a scaling study's, an arena's.
_OF_EARLIER_VERSIONS = (
    {"figures", "table.csv", "metrics.csv"},
    {"index.html", "best.json"},
    {"index.html", "scale.json"},
    {"index.html", "board.json"},
)
_HEAD = 2000  # characters of a page in which the mark stands


@dataclass(frozen=True)
class Report:
    """What runs came to, and the files that say so."""

    series: tuple[Series, ...]
    outcomes: tuple[SeriesOutcome, ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun]) -> Report:
        """The report of runs that have measured something."""
        if not any(run.curves for run in runs):
            names = ", ".join(run.name for run in runs)
            raise ValueError(f"nothing to report: no measurement has been recorded yet by {names}")
        series = group(runs)
        return cls(tuple(series), tuple(read_outcomes(series)))

    @cached_property
    def summary(self) -> str:
        """Who did best, and how sure that is."""
        return summarise(self.outcomes)

    def show(self) -> None:
        """Print one row for each series."""
        print_outcomes(self.outcomes)

    def write(self, folder: Path) -> Path:
        """Write the report into ``folder``, over an earlier one; return the page's path."""
        refuse_folder(folder)
        figures = make_figures(self.series)
        folder.mkdir(parents=True, exist_ok=True)
        # First, for it is what the folder is known by: a report that was cut short can be written over.
        page = folder / "index.html"
        page.write_text(render_page(self.series, self.outcomes, figures, self.summary), encoding="utf-8")
        _write_figures(figures, folder / "figures")
        (folder / "table.md").write_text(series_table(self.outcomes).markdown(), encoding="utf-8")
        write_csv(folder / "table.csv", _table_rows(self.outcomes))
        write_csv(folder / "metrics.csv", _metric_rows(self.series))
        return page


def refuse_folder(folder: Path) -> None:
    """Raise where a folder holds files and none of our pages: a report's, or that of a study."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    holds_files = any(not name.startswith(".") for name in names)
    is_older = any(names >= own for own in _OF_EARLIER_VERSIONS)
    if holds_files and not is_older and not _is_marked(folder / "index.html"):
        raise FileExistsError(
            f"{folder} holds files that merit did not write, and they are left as they are; choose another "
            "folder with --out, or move them away"
        )


def _is_marked(page: Path) -> bool:
    """Whether a page is one of ours, by its head."""
    if not page.is_file():
        return False
    with page.open(encoding="utf-8", errors="replace") as file:
        return '<meta name="generator" content="merit-optim' in file.read(_HEAD)


def _write_figures(figures: Sequence[Figure], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.svg"):
        if is_figure(path.stem):
            path.unlink()  # an earlier report's, of other runs; not all are written over
    for figure in figures:
        for name, chart in figure.in_files.items():
            write_svg(folder / f"{name}.svg", {**chart, "datasets": figure.datasets}, figure.title)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows that have the same keys, at least one."""
    rows = iter(rows)
    first = next(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, first)
        writer.writeheader()
        writer.writerow(first)
        writer.writerows(rows)


def _table_rows(outcomes: Sequence[SeriesOutcome]) -> Iterator[dict[str, Any]]:
    """One row for each run: a mean or a spread is quickly taken, but not taken apart again."""
    for own in outcomes:
        names = {"series": own.label, "optimizer": own.series.optimizer, "lr": own.series.lr}
        for run in own.runs:
            yield names | asdict(run)


def _metric_rows(series: Sequence[Series]) -> Iterator[dict[str, Any]]:
    for own in series:
        for run in own.runs:
            scale = tokens_per_step(run.rows)
            for name, points in run.curves.items():
                for step, value in points:
                    tokens = step * scale if step else 0.0
                    yield {
                        "run": run.name,
                        "series": own.label,
                        "seed": run.seed,
                        "metric": name,
                        "step": step,
                        "tokens": round(tokens) if math.isfinite(tokens) else None,
                        "value": value,
                        "of_steps": run.thinned.steps[name] if run.thinned else 1,
                    }
