"""The findings of a scaling study as sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merit_lab.results.gather import display_names
from merit_lab.results.outcome import Spread
from merit_lab.scale.fit import Estimate, ScalingCurve
from merit_lab.scale.measure import Measurement, choose, fit
from merit_lab.tables import NOTHING, Table
from merit_lab.text import join


@dataclass(frozen=True)
class ScalingResult:
    """An optimizer's chosen measurements in order of batch size, and the curve fitted to them.

    ``name`` is the display name of the optimizer.
    """

    name: str
    optimizer: str
    measurements: tuple[Measurement, ...]
    curve: ScalingCurve | None

    @property
    def reached(self) -> list[Measurement]:
        """The measurements in which every seed reached the target."""
        return [measurement for measurement in self.measurements if measurement.is_reached]

    @property
    def is_bend_inside(self) -> bool:
        """Whether the critical batch lies within the batch sizes that the curve was fitted to."""
        batches = [measurement.batch for measurement in self.reached]
        return self.curve is not None and batches[0] <= self.curve.critical_batch.value <= batches[-1]

    def ideal_steps(self, batch: float) -> float:
        """Steps at a batch size with ideal scaling from the smallest one: twice the batch, half the steps."""
        first = self.reached[0]
        return first.mean * first.batch / batch


def fit_results(measurements: Sequence[Measurement]) -> list[ScalingResult]:
    """Return a result for each optimizer, in the order of the measurements."""
    chosen = choose(measurements)
    names = display_names(measurement.optimizer for measurement in chosen)
    return [
        ScalingResult(
            name,
            optimizer,
            tuple(measurement for measurement in chosen if measurement.optimizer == optimizer),
            fit(chosen, optimizer),
        )
        for optimizer, name in names.items()
    ]


def summarise(results: Sequence[ScalingResult], target: float) -> str:
    """State the steps of each optimizer at its smallest and largest batch, and its critical batch."""
    return f"To a validation loss of {target:g}: " + "; ".join(map(_describe, results)) + "."


def _describe(result: ScalingResult) -> str:
    if not result.reached:
        return f"{result.name} did not reach it with any batch"
    first, last = result.reached[0], result.reached[-1]
    needed = f"{result.name} needed {first.mean:,.0f} steps with a batch of {first.batch} sequences"
    if last is not first:
        needed += f" and {last.mean:,.0f} with {last.batch}"
    return f"{needed}; {_describe_curve(result)}"


def _describe_curve(result: ScalingResult) -> str:
    if result.curve is None:
        return "too few batches to fit a curve"
    if not result.curve.is_determined:
        return "these batches do not determine its critical batch"
    estimate = f"{_whole(result.curve.critical_batch.value)} sequences ({_interval(result.curve)})"
    if not result.is_bend_inside:
        return f"its critical batch lies outside the batches tried; extrapolated, it is {estimate}"
    return f"its critical batch is {estimate}"


def warnings(results: Sequence[ScalingResult], measurements: Sequence[Measurement]) -> list[str]:
    """Caveats that a reader must know before using the numbers."""
    remarks = []
    for result in results:
        missed = [measurement for measurement in result.measurements if not measurement.is_reached]
        for seeds, group in (
            ("any seed", [measurement for measurement in missed if not measurement.steps]),
            ("every seed", [measurement for measurement in missed if measurement.steps]),
        ):
            if group:
                where = join([f"{measurement.batch} ({_why(measurement)})" for measurement in group])
                remarks.append(
                    f"{result.name} did not reach the target with {seeds} at a batch of {where}; it is left "
                    "out of the curve."
                )
        for measurement in result.measurements:
            rates = sorted(
                other.lr
                for other in measurements
                if (other.optimizer, other.batch) == (measurement.optimizer, measurement.batch)
            )
            if len(rates) > 1 and measurement.lr in (rates[0], rates[-1]):
                edge = "lowest" if measurement.lr == rates[0] else "highest"
                remarks.append(
                    f"{result.name}'s best learning rate with a batch of {measurement.batch}, "
                    f"{measurement.lr:g}, is the {edge} that was tried: fewer steps may suffice."
                )
    return remarks


def _why(measurement: Measurement) -> str:
    """Why a measurement did not reach the target."""
    missing = [attempt for attempt in measurement.attempts if attempt.steps is None]
    diverged = [attempt for attempt in missing if attempt.status == "diverged"]
    reasons = []
    if diverged:
        reasons.append(f"{len(diverged)} of {len(measurement.attempts)} diverged")
    if rest := [attempt.last_step for attempt in missing if attempt not in diverged]:
        reasons.append(f"{len(rest)} of {len(measurement.attempts)} not reached in {max(rest):,} steps")
    return join(reasons)


def steps_table(results: Sequence[ScalingResult], context: int) -> Table:
    """One row for each optimizer and batch."""
    head = (
        "Optimizer",
        "Batch",
        "Tokens a step",
        "Learning rate",
        "Steps to the target",
        "Sequences seen",
        "Of the ideal speed-up",
    )
    rows = []
    for result in results:
        for measurement in result.measurements:
            row = [
                result.name,
                f"{measurement.batch:,}",
                f"{measurement.batch * context:,}",
                f"{measurement.lr:g}",
            ]
            if measurement.is_reached:
                row += [
                    Spread(measurement.steps).text(",.0f"),
                    f"{measurement.mean * measurement.batch:,.0f}",
                ]
                row.append(f"{result.ideal_steps(measurement.batch) / measurement.mean:.0%}")
            else:
                row += [_why(measurement), NOTHING, NOTHING]
            rows.append(tuple(row))
    return Table(head, tuple(rows))


def curve_table(results: Sequence[ScalingResult], context: int) -> Table:
    """One row for each optimizer: the fitted curve."""
    head = ("Optimizer", "Critical batch", "95% interval", "In tokens", "Least steps", "95% interval", "Runs")
    rows = []
    for result in results:
        num_runs = str(sum(len(measurement.steps) for measurement in result.reached))
        if result.curve is None:
            rows.append((result.name, *[NOTHING] * 5, num_runs))
            continue
        critical, least = result.curve.critical_batch, result.curve.least_steps
        rows.append(
            (
                result.name,
                _whole(critical.value),
                _ends(critical),
                _whole(critical.value * context),
                _whole(least.value),
                _ends(least),
                num_runs,
            )
        )
    return Table(head, tuple(rows))


def _interval(curve: ScalingCurve) -> str:
    return f"95% interval {_ends(curve.critical_batch)}"


def _ends(estimate: Estimate) -> str:
    return f"{_whole(estimate.low)} to {_whole(estimate.high)}"


def _whole(value: float) -> str:
    """Round to two or three digits, without decimals from 10 on."""
    if not 0.1 <= value < 1e12:
        return f"{value:.0e}"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"
