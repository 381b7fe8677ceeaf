"""Render the page of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from merit_lab.results import style, tables
from merit_lab.results.curves import MOST_POINTS
from merit_lab.results.figures import Datasets, Figure
from merit_lab.results.old_charts import Look
from merit_lab.results.old_series import Series
from merit_lab.results.outcome import SeriesOutcome
from merit_lab.results.template import render
from merit_lab.runs.settings import differing, show
from merit_lab.text import join


def render_page(
    all_series: Sequence[Series],
    outcomes: Sequence[SeriesOutcome],
    figures: Sequence[Figure],
    summary: str,
    warnings: Sequence[str],
) -> str:
    """The page as text."""
    look = Look.of({series.label: series.optimizer for series in all_series})
    return render(
        "results/old_page.html",
        title=_title(all_series),
        facts=_facts(all_series),
        summary=summary,
        warnings=warnings,
        data=_charts(figures, look.colours),
        legend=[
            (label, look.colours[label], " ".join(map(str, dash))) for label, dash in look.dashes.items()
        ],
        sections=_sections(figures),
        outcomes=tables.series_table(outcomes),
        runs=tables.run_table(outcomes),
        has_trouble=any(len(outcome.finished) < len(outcome.runs) for outcome in outcomes),
        evaluations=tables.evaluation_table(all_series),
        several_seeds=any(len(outcome.finished) > 1 for outcome in outcomes),
        settings=tables.settings(all_series),
        environment=tables.environment(all_series),
        colours=look.colours,
        most_points=MOST_POINTS,
    )


def _charts(figures: Sequence[Figure], colours: Mapping[str, str]) -> dict[str, Any]:
    """The data for the script: each figure's chart for each axis, and all datasets once."""
    datasets: Datasets = {}
    for figure in figures:
        datasets |= figure.datasets
    return {
        "config": style.CONFIG,
        "colours": colours,
        "datasets": datasets,
        "charts": {figure.key: figure.on_page for figure in figures},
    }


def _sections(figures: Sequence[Figure]) -> dict[str, dict[str, list[Figure]]]:
    """Figures by section and row, in their order."""
    sections: dict[str, dict[str, list[Figure]]] = {}
    for figure in figures:
        sections.setdefault(figure.section, {}).setdefault(figure.row, []).append(figure)
    return sections


def _title(all_series: Sequence[Series]) -> str:
    return join(list(dict.fromkeys(series.name.partition(",")[0] for series in all_series)))


def _facts(all_series: Sequence[Series]) -> list[str]:
    """The most important settings, if all runs share them."""
    runs = [run for series in all_series for run in series.runs]
    tables = [run.settings | {"device": run.environment.get("device", {}).get("name")} for run in runs]
    common = {path: value for path, value in tables[0].items() if path not in differing(tables)}
    facts = (
        "{model.family}",
        "{model.settings.model_type}",  # Hugging Face
        "{model.options}",
        "{model.layers} layers of width {model.width}",
        "{batch} sequences of {model.context} tokens a step",
        "{steps} steps",
        "{device}",
    )
    shown = [_fill(fact, common) for fact in facts]
    return [fact for fact in shown if fact is not None]


def _fill(template: str, values: Mapping[str, object]) -> str | None:
    """A template with its {paths} filled in; None if one has no value."""
    for path in re.findall(r"{(.+?)}", template):
        if values.get(path) is None:
            return None
        template = template.replace(f"{{{path}}}", show(values[path]))
    return template
