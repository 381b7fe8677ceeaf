"""A report's files: index.html, figures/*.svg, table.md, table.csv, metrics.csv."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from merit_lab.report.charts import write_svg
from merit_lab.report.curves import tokens_per_step
from merit_lab.report.figures import Figure, is_figure, make_figures
from merit_lab.report.gather import MeasuredRun, Series, group
from merit_lab.report.outcome import SeriesOutcome, read_outcomes
from merit_lab.report.page import render_page
from merit_lab.report.summary import summarise
from merit_lab.report.tables import series_table


@dataclass(frozen=True)
class Report:
    """What was written, and what it comes to."""

    page: Path
    summary: str
    outcomes: tuple[SeriesOutcome, ...]


def write_report(runs: Sequence[MeasuredRun], folder: Path) -> Report:
    """Write the report of ``runs`` into ``folder``, over an earlier one."""
    series = group(runs)
    if not any(run.curves for run in runs):
        names = ", ".join(run.name for run in runs)
        raise ValueError(f"nothing to report: no measurement has been recorded yet by {names}")
    outcomes = read_outcomes(series)
    figures = make_figures(series)
    summary = summarise(outcomes)
    _write_figures(figures, folder / "figures")
    (folder / "table.md").write_text(series_table(outcomes).markdown(), encoding="utf-8")
    write_csv(folder / "table.csv", _table_rows(outcomes))
    write_csv(folder / "metrics.csv", _metric_rows(series))
    page = folder / "index.html"
    page.write_text(render_page(series, outcomes, figures, summary), encoding="utf-8")
    return Report(page, summary, tuple(outcomes))


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
                    }
