"""Write a report's files: index.html, figures/*.svg, table.md, table.csv, metrics.csv.

If runs were evaluated, also evaluations.md and evaluations.csv.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from merit_lab.folders import refuse_file
from merit_lab.results import health
from merit_lab.results.curves import tokens_per_step
from merit_lab.results.figures import Figure, is_figure, make_figures
from merit_lab.results.gather import MeasuredRun
from merit_lab.results.old_charts import write_svg
from merit_lab.results.old_page import render_page
from merit_lab.results.old_series import Series, group
from merit_lab.results.outcome import SeriesOutcome, read_outcomes
from merit_lab.results.summary import summarise
from merit_lab.results.tables import evaluation_table, series_table
from merit_lab.runs import durable
from merit_lab.tables import print_table

# Files of earlier versions, whose pages have no mark: of a report, a sweep, a scaling study, an arena.
_UNMARKED = (
    {"figures", "table.csv", "metrics.csv"},
    {"index.html", "best.json"},
    {"index.html", "scale.json"},
    {"index.html", "board.json"},
)
_HEAD = 2000  # characters of a page that contain the mark
_PARTIAL_PAGE = re.compile(r"index\.html\.\w+\.partial")  # a process was killed while it wrote it


_IN_A_TERMINAL = (  # the columns that fit into eighty letters
    "Optimizer",
    "Runs",
    "Peak learning rate",
    "Validation loss",
    "Bits per byte",
    "Largest logit at the end",
)


@dataclass(frozen=True)
class Report:
    """The outcomes of runs, and the files that they are written to."""

    series: tuple[Series, ...]
    outcomes: tuple[SeriesOutcome, ...]

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun]) -> Report:
        """The report of runs; at least one of them must have measurements."""
        if not any(run.curves for run in runs):
            names = ", ".join(run.name for run in runs)
            raise ValueError(f"nothing to report: no measurements recorded yet by {names}")
        series = group(runs)
        return cls(tuple(series), tuple(read_outcomes(series)))

    @cached_property
    def summary(self) -> str:
        """Which series did best, and how certain that is."""
        return summarise(self.outcomes)

    @cached_property
    def warnings(self) -> list[str]:
        """Signs of trouble in the runs."""
        return health.warnings({series.label: series.runs for series in self.series})

    def show(self) -> None:
        """Print one row for each series."""
        print_table(series_table(self.outcomes).only(_IN_A_TERMINAL))

    def write(self, folder: Path) -> Path:
        """Write the report into ``folder``, replacing an earlier one; return the page's path."""
        refuse_folder(folder)
        figures = make_figures(self.series)
        folder.mkdir(parents=True, exist_ok=True)
        # First, because it marks the folder: an incomplete report can then be replaced.
        page = folder / "index.html"
        text = render_page(self.series, self.outcomes, figures, self.summary, self.warnings)
        durable.write(page, text)
        _write_figures(figures, folder / "figures")
        (folder / "table.md").write_text(series_table(self.outcomes).markdown(), encoding="utf-8")
        write_csv(folder / "table.csv", _table_rows(self.outcomes))
        _write_evaluations(self.series, folder)
        write_csv(folder / "metrics.csv", _metric_rows(self.series))
        return page


def refuse_folder(folder: Path) -> None:
    """Raise if a folder is a file, or holds files but no page of a report or a study."""
    refuse_file(folder)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    holds_files = any(not name.startswith(".") and not _PARTIAL_PAGE.fullmatch(name) for name in names)
    is_older = any(names >= files for files in _UNMARKED)
    if holds_files and not is_older and not _is_marked(folder / "index.html"):
        raise FileExistsError(
            f"{folder} holds files that merit did not write and will not overwrite; choose another folder "
            "with --out, or move them away"
        )


def _is_marked(page: Path) -> bool:
    """Whether merit wrote this page, according to its head."""
    if not page.is_file():
        return False
    with page.open(encoding="utf-8", errors="replace") as file:
        return '<meta name="generator" content="merit-optim' in file.read(_HEAD)


def _write_figures(figures: Sequence[Figure], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.svg"):
        if is_figure(path.stem):
            path.unlink()  # of an earlier report, which may have had other figures
    for figure in figures:
        for name, chart in figure.in_files.items():
            write_svg(folder / f"{name}.svg", {**chart, "datasets": figure.datasets}, figure.title)


def _write_evaluations(all_series: Sequence[Series], folder: Path) -> None:
    markdown, values = folder / "evaluations.md", folder / "evaluations.csv"
    table = evaluation_table(all_series)
    if table is None:
        for path in (markdown, values):
            path.unlink(missing_ok=True)  # of an earlier report
        return
    markdown.write_text(table.markdown(), encoding="utf-8")
    write_csv(values, _evaluation_rows(all_series))


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with the same keys; there must be at least one."""
    rows = iter(rows)
    first = next(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, first)
        writer.writeheader()
        writer.writerow(first)
        writer.writerows(rows)


def _table_rows(outcomes: Sequence[SeriesOutcome]) -> Iterator[dict[str, Any]]:
    """One row for each run: means can be computed from them, but not the other way round."""
    for outcome in outcomes:
        names = {"series": outcome.label, "optimizer": outcome.series.optimizer, "lr": outcome.series.lr}
        for run in outcome.runs:
            yield names | asdict(run)


def _evaluation_rows(all_series: Sequence[Series]) -> Iterator[dict[str, Any]]:
    for series in all_series:
        for run in series.runs:
            for result in run.evaluations:
                for name, metric in result.metrics.items():
                    yield {
                        "run": run.name,
                        "series": series.label,
                        "seed": run.seed,
                        "step": result.step,
                        "set": result.name,
                        "items": result.num_items,
                        "measure": name,
                        **asdict(metric),
                    }


def _metric_rows(all_series: Sequence[Series]) -> Iterator[dict[str, Any]]:
    for series in all_series:
        for run in series.runs:
            scale = tokens_per_step(run.rows)
            for name, points in run.curves.items():
                for step, value in points:
                    tokens = step * scale if step else 0.0
                    yield {
                        "run": run.name,
                        "series": series.label,
                        "seed": run.seed,
                        "metric": name,
                        "step": step,
                        "tokens": round(tokens) if math.isfinite(tokens) else None,
                        "value": value,
                        "of_steps": run.thinned.steps[name] if run.thinned else 1,
                    }
