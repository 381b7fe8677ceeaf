"""A scaling study's page: steps against batch, the critical batch of each optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from merit_lab.report.summary import count_seeds
from merit_lab.scale import words
from merit_lab.scale.measure import Measurement
from merit_lab.scale.picture import make_chart
from merit_lab.scale.words import Result
from merit_lab.study.page import Page, Record, TableSection
from merit_lab.train import TrainConfig


def make_page(
    measurements: Sequence[Measurement], base: TrainConfig, target: float, seeds: Sequence[int]
) -> Page:
    """The page of what was measured."""
    found, context = words.results(measurements), base.model.context
    steps = TableSection(
        "Steps to the target",
        "The first time the validation loss is at the target, on a straight line between two validations; "
        "mean over seeds, ± their standard deviation. The ideal speed-up is that of the smallest batch: "
        "twice the batch, half the steps.",
        words.steps_table(found, context),
    )
    return Page(
        title="Batch-size scaling",
        facts=[
            ", ".join(result.name for result in found),
            f"target {target:g}",
            count_seeds(len(seeds)),
        ],
        summary=words.summarise(found, target),
        warnings=words.warnings(found, measurements),
        charts=[make_chart(found, target)],
        tables=[
            TableSection(
                "Critical batch",
                "Below it, twice the batch nearly halves the steps; above it, it buys little. Fitted to the "
                "single runs by least squares of relative errors; intervals from the covariance of the fit.",
                words.curve_table(found, context),
            ),
            steps,
        ],
        settings=_settings(base, seeds),
        printed=[steps],
        rows=_rows(measurements, found),
        record=Record(
            "scale.json",
            "the fitted curves",
            {"target": target, "optimizers": {own.optimizer: _curve(own) for own in found}},
        ),
    )


def _settings(base: TrainConfig, seeds: Sequence[int]) -> list[tuple[str, str]]:
    """What a reader asks for first; the run directories have all of it."""
    model, optimizer = base.model, base.optimizer
    return [
        ("model", f"{model.family}, {model.layers} layers of width {model.width}"),
        ("context", str(model.context)),
        ("most steps", f"{base.steps:,}"),
        ("learning rate at the end", f"{optimizer.final:g} of the peak"),
        ("warm-up", f"{optimizer.warmup:g} of the steps"),
        ("validation sequences", str(base.measure.validation_sequences)),
        ("seeds", ", ".join(map(str, seeds))),
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
