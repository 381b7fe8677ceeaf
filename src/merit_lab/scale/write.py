"""A scaling study's files: index.html, the picture as SVG, table.csv, scale.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from merit_lab.report.summary import count_seeds
from merit_lab.report.write import write_csv
from merit_lab.scale import words
from merit_lab.scale.measure import Measurement
from merit_lab.scale.picture import make_figure
from merit_lab.scale.plan import Study
from merit_lab.scale.words import Result
from merit_lab.study.page import Page, TableSection, write_page


@dataclass(frozen=True)
class Findings:
    """What a scaling study found, and the files that say so."""

    results: tuple[Result, ...]
    summary: str
    warnings: tuple[str, ...]
    page: Path


def write_findings(study: Study, measurements: Sequence[Measurement], folder: Path) -> Findings:
    """Write all files of a study into ``folder``, over earlier ones."""
    found, context = words.results(measurements), study.base.model.context
    summary = words.summarise(found, study.target)
    warnings = words.warnings(found, measurements)
    figure = make_figure(found, study.target)
    page = Page(
        title="Batch-size scaling",
        facts=[
            ", ".join(result.name for result in found),
            f"target {study.target:g}",
            count_seeds(len(study.seeds)),
        ],
        summary=summary,
        warnings=warnings,
        figures=[figure],
        tables=[
            TableSection(
                "Critical batch",
                "Below it, twice the batch nearly halves the steps; above it, it buys little. Fitted to the "
                "single runs by least squares of relative errors; intervals from the covariance of the fit.",
                words.curve_table(found, context),
            ),
            TableSection(
                "Steps to the target",
                "The first time the validation loss is at the target, on a straight line between two "
                "validations; mean over seeds, ± their standard deviation. The ideal speed-up is that of "
                "the smallest batch: twice the batch, half the steps.",
                words.steps_table(found, context),
            ),
        ],
        settings=_settings(study),
        files={
            f"{figure.key}.svg": "the picture",
            "table.csv": "one row for each run",
            "scale.json": "the fitted curves",
        },
    )
    path = write_page(page, folder)
    write_csv(folder / "table.csv", _rows(measurements, found))
    text = json.dumps({"target": study.target, "optimizers": {own.optimizer: _curve(own) for own in found}})
    (folder / "scale.json").write_text(text + "\n", encoding="utf-8")
    return Findings(tuple(found), summary, tuple(warnings), path)


def _settings(study: Study) -> list[tuple[str, str]]:
    """What a reader asks for first; the run directories have all of it."""
    model, optimizer = study.base.model, study.base.optimizer
    return [
        ("model", f"{model.family}, {model.layers} layers of width {model.width}"),
        ("context", str(model.context)),
        ("most steps", f"{study.base.steps:,}"),
        ("learning rate at the end", f"{optimizer.final:g} of the peak"),
        ("warm-up", f"{optimizer.warmup:g} of the steps"),
        ("validation sequences", str(study.base.measure.validation_sequences)),
        ("seeds", ", ".join(map(str, study.seeds))),
    ]


def _rows(measurements: Sequence[Measurement], found: Sequence[Result]) -> list[dict[str, Any]]:
    chosen = [own for result in found for own in result.measurements]
    return [
        {
            "optimizer": own.optimizer,
            "batch": own.batch,
            "lr": own.lr,
            "chosen": own in chosen,
            "seed": attempt.seed,
            "status": attempt.status,
            "reached": attempt.steps is not None,
            "steps": attempt.steps,
            "last_step": attempt.last_step,
            "run": attempt.name,
        }
        for own in measurements
        for attempt in own.attempts
    ]


def _curve(result: Result) -> dict[str, Any] | None:
    if result.curve is None:
        return None
    return {**asdict(result.curve), "is_told": result.curve.is_told, "is_inside": result.is_bend_inside}
