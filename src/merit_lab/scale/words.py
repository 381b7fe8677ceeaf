"""What a scaling study found, in words and in rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from merit_lab.report.gather import display_names
from merit_lab.report.summary import join
from merit_lab.report.tables import NOTHING, Table
from merit_lab.scale.fit import Estimate, ScalingCurve
from merit_lab.scale.measure import Measurement, choose, fit


@dataclass(frozen=True)
class Result:
    """An optimizer's chosen measurements, batches rising, and the curve through them.

    ``name`` is how the optimizer is written.
    """

    name: str
    optimizer: str
    measurements: tuple[Measurement, ...]
    curve: ScalingCurve | None

    @property
    def reached(self) -> list[Measurement]:
        """The batches with which every seed got there."""
        return [own for own in self.measurements if own.is_reached]

    @property
    def is_bend_inside(self) -> bool:
        """Whether the critical batch lies among the batches that the curve was fitted to."""
        batches = [own.batch for own in self.reached]
        return self.curve is not None and batches[0] <= self.curve.critical_batch.value <= batches[-1]

    def ideal_steps(self, batch: float) -> float:
        """Steps at a batch if they fell as the batch grows, from the smallest batch on."""
        first = self.reached[0]
        return first.mean * first.batch / batch


def results(measurements: Sequence[Measurement]) -> list[Result]:
    """One result for each optimizer, in the order of the measurements."""
    chosen = choose(measurements)
    names = display_names(own.optimizer for own in chosen)
    return [
        Result(
            name,
            optimizer,
            tuple(own for own in chosen if own.optimizer == optimizer),
            fit(chosen, optimizer),
        )
        for optimizer, name in names.items()
    ]


def summarise(found: Sequence[Result], target: float) -> str:
    """Say what each optimizer needed at either end, and where its critical batch is."""
    return f"To a validation loss of {target:g}: " + "; ".join(map(_describe, found)) + "."


def _describe(result: Result) -> str:
    if not result.reached:
        return f"{result.name} did not get there with any batch"
    first, last = result.reached[0], result.reached[-1]
    needed = f"{result.name} needed {first.mean:,.0f} steps with a batch of {first.batch} sequences"
    if last is not first:
        needed += f" and {last.mean:,.0f} with {last.batch}"
    return f"{needed}; {_describe_curve(result)}"


def _describe_curve(result: Result) -> str:
    if result.curve is None:
        return "with so few batches no curve can be fitted"
    if not result.curve.is_told:
        return "where its critical batch is, these batches do not tell"
    estimate = f"{_whole(result.curve.critical_batch.value)} sequences ({_interval(result.curve)})"
    if not result.is_bend_inside:
        return f"its critical batch lies outside the batches tried, by extrapolation at {estimate}"
    return f"its critical batch is {estimate}"


def warnings(found: Sequence[Result], measurements: Sequence[Measurement]) -> list[str]:
    """What a reader must know before using the numbers."""
    remarks = []
    for result in found:
        missed = [own for own in result.measurements if not own.is_reached]
        if missed:
            where = join([f"{own.batch} ({_why(own)})" for own in missed])
            remarks.append(
                f"{result.name} did not reach the target with every seed at a batch of {where}: left out of "
                "the curve."
            )
        for own in result.measurements:
            rates = sorted(
                other.lr
                for other in measurements
                if (other.optimizer, other.batch) == (own.optimizer, own.batch)
            )
            if len(rates) > 1 and own.lr in (rates[0], rates[-1]):
                edge = "lowest" if own.lr == rates[0] else "highest"
                remarks.append(
                    f"{result.name}'s best learning rate with a batch of {own.batch}, {own.lr:g}, is the "
                    f"{edge} that was tried: fewer steps may do."
                )
    return remarks


def _why(own: Measurement) -> str:
    missing = [attempt for attempt in own.attempts if attempt.steps is None]
    diverged = [attempt for attempt in missing if attempt.status == "diverged"]
    words = []
    if diverged:
        words.append(f"{len(diverged)} of {len(own.attempts)} diverged")
    if rest := [attempt.last_step for attempt in missing if attempt not in diverged]:
        words.append(f"{len(rest)} of {len(own.attempts)} not reached in {max(rest):,} steps")
    return join(words)


def steps_table(found: Sequence[Result], context: int) -> Table:
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
    for result in found:
        for own in result.measurements:
            row = [result.name, f"{own.batch:,}", f"{own.batch * context:,}", f"{own.lr:g}"]
            if own.is_reached:
                row += [_mean(own.steps), f"{own.mean * own.batch:,.0f}"]
                row.append(f"{result.ideal_steps(own.batch) / own.mean:.0%}")
            else:
                row += [_why(own), NOTHING, NOTHING]
            rows.append(tuple(row))
    return Table(head, tuple(rows))


def curve_table(found: Sequence[Result], context: int) -> Table:
    """One row for each optimizer: the fitted curve."""
    head = ("Optimizer", "Critical batch", "95% interval", "In tokens", "Least steps", "95% interval", "Runs")
    rows = []
    for result in found:
        num_runs = str(sum(len(own.steps) for own in result.reached))
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


def _mean(steps: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(steps):,.0f}" if len(steps) > 1 else ""
    return f"{statistics.fmean(steps):,.0f}{spread}"


def _interval(curve: ScalingCurve) -> str:
    return f"95% interval {_ends(curve.critical_batch)}"


def _ends(estimate: Estimate) -> str:
    return f"{_whole(estimate.low)} to {_whole(estimate.high)}"


def _whole(value: float) -> str:
    """Two or three digits and no more than whole numbers."""
    if not 0.1 <= value < 1e12:
        return f"{value:.0e}"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"
