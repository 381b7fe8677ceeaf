"""The page: one HTML file that needs no other and no network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from merit_optim.lab.report import style, tables
from merit_optim.lab.report.figures import Datasets, Figure
from merit_optim.lab.report.gather import Series, differing, show
from merit_optim.lab.report.outcome import SeriesOutcome
from merit_optim.lab.report.summary import join


def render_page(
    series: Sequence[Series], outcomes: Sequence[SeriesOutcome], figures: Sequence[Figure], summary: str
) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_read("page.html"))
    colours, dashes = style.colours(series), style.dashes(series)
    return template.render(
        title=_title(series),
        facts=_facts(series),
        summary=summary,
        style=Markup(_read("page.css")),
        # Of a chart library's text only what would end the element early must change.
        library=Markup(_library().replace("</script", "<\\/script")),
        script=Markup(_read("page.js")),
        data=Markup(_json(_charts(figures, colours))),
        legend=[(label, colours[label], " ".join(map(str, dashes[label]))) for label in colours],
        sections=_sections(figures),
        outcomes=tables.series_table(outcomes),
        runs=tables.run_table(outcomes),
        has_trouble=any(own.diverged or own.unfinished for own in outcomes),
        several_seeds=any(len(own.finished) > 1 for own in outcomes),
        settings=tables.settings(series),
        environment=tables.environment(series),
        colours=colours,
    )


def _charts(figures: Sequence[Figure], colours: Mapping[str, str]) -> dict[str, Any]:
    """What the script draws from: the chart of each figure for each axis, and all data once."""
    datasets: Datasets = {}
    for figure in figures:
        datasets |= figure.datasets
    return {
        "config": {**style.CONFIG, "background": None},
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


def _title(series: Sequence[Series]) -> str:
    return join(list(dict.fromkeys(own.label.partition(",")[0] for own in series)))


def _facts(series: Sequence[Series]) -> list[str]:
    """The settings a reader asks for first, as far as all runs share them."""
    runs = [run for own in series for run in own.runs]
    tables = [run.settings | {"device": run.environment.get("device", {}).get("name")} for run in runs]
    common = {path: value for path, value in tables[0].items() if path not in differing(tables)}
    facts = (
        "{model.family}",
        "{model.layers} layers of width {model.width}",
        "{batch} sequences of {model.context} tokens a step",
        "{steps} steps",
        "{device}",
    )
    shown = [_fill(fact, common) for fact in facts]
    return [fact for fact in shown if fact is not None]


def _fill(template: str, values: Mapping[str, object]) -> str | None:
    """A template with its {paths} filled in; None where one has no value."""
    for path in re.findall(r"{(.+?)}", template):
        if values.get(path) is None:
            return None
        template = template.replace(f"{{{path}}}", show(values[path]))
    return template


def _library() -> str:
    """The text of the chart library that draws in the browser."""
    import vl_convert

    return vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default


def _read(name: str) -> str:
    return (resources.files("merit_optim.lab.report") / name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    """JSON that can stand in a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
