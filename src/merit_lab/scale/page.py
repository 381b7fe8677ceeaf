"""The page of a scaling study: steps against batch size, and the critical batch of each optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from merit_lab.scale import summary
from merit_lab.scale.charts import make_chart
from merit_lab.scale.measure import Measurement
from merit_lab.scale.summary import ScalingResult
from merit_lab.study.page import JsonFile, Page, TableSection
from merit_lab.text import count_seeds
from merit_lab.train import TrainConfig


def make_page(
    measurements: Sequence[Measurement], base: TrainConfig, target: float, seeds: Sequence[int]
) -> Page:
    """Return the page of a scaling study."""
    results, context = summary.fit_results(measurements), base.model.context
    steps = TableSection(
        "Steps to the target",
        "The first time the validation loss reaches the target, interpolated linearly between two "
        "validations; mean over seeds, ± their standard deviation. The ideal speed-up starts at the smallest "
        "batch: twice the batch, half the steps.",
        summary.steps_table(results, context),
    )
    return Page(
        title="Batch-size scaling",
        facts=[
            ", ".join(result.name for result in results),
            f"target {target:g}",
            count_seeds(len(seeds)),
        ],
        summary=summary.summarise(results, target),
        warnings=summary.warnings(results, measurements),
        charts=[make_chart(results, target)],
        tables=[
            TableSection(
                "Critical batch",
                "Below it, doubling the batch nearly halves the steps; above it, doubling gains little. "
                "Fitted to the single runs by least squares of relative errors; intervals from the "
                "covariance of the fit.",
                summary.curve_table(results, context),
            ),
            steps,
        ],
        settings=_settings(base, seeds),
        printed=[steps],
        rows=_rows(measurements, results),
        record=JsonFile(
            "scale.json",
            "the fitted curves",
            {"target": target, "optimizers": {result.optimizer: _curve(result) for result in results}},
        ),
    )


def _settings(base: TrainConfig, seeds: Sequence[int]) -> list[tuple[str, str]]:
    """The main settings; the run directories hold all of them."""
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


def _rows(measurements: Sequence[Measurement], results: Sequence[ScalingResult]) -> list[dict[str, Any]]:
    chosen = [measurement for result in results for measurement in result.measurements]
    return [
        {
            "optimizer": measurement.optimizer,
            "batch": measurement.batch,
            "lr": measurement.lr,
            "chosen": measurement in chosen,
            "seed": attempt.seed,
            "status": attempt.status,
            "reached": attempt.steps is not None,
            "steps": attempt.steps,
            "last_step": attempt.last_step,
            "run": attempt.name,
        }
        for measurement in measurements
        for attempt in measurement.attempts
    ]


def _curve(result: ScalingResult) -> dict[str, Any] | None:
    if result.curve is None:
        return None
    return {**asdict(result.curve), "is_told": result.curve.is_determined, "is_inside": result.is_bend_inside}
