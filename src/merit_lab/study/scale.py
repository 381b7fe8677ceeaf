"""`merit scale`: the steps that growing batches need to reach a loss, and the critical batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl

from merit_lab.checks import check_at_least
from merit_lab.data import Dataset
from merit_lab.results.names import display_name
from merit_lab.results.page import Page, Section
from merit_lab.runs import table
from merit_lab.runs.find import places
from merit_lab.study.command import StudyArguments, conclude, exit_status, parse, train_all
from merit_lab.study.compare import check_rates, parse_learning_rates
from merit_lab.study.contestant import Contestant
from merit_lab.study.fields import LR, with_values
from merit_lab.study.fit import Estimate, ScalingCurve, fit_curve
from merit_lab.study.reach import steps_to_reach
from merit_lab.study.trial import Trial, check_distinct
from merit_lab.tables import NOTHING, Table
from merit_lab.text import join
from merit_lab.train import OptimizerConfig, TrainConfig

RateRule = Literal["list", "sqrt", "linear", "sweep"]

_POWERS = {"sqrt": 0.5, "linear": 1.0}
_SLACK = 1.25  # limit of a larger batch, in multiples of the steps that the next smaller one needed
_VALIDATIONS = 50  # per run; steps are interpolated between them
_CURVE_POINTS = 40


@dataclass(frozen=True, kw_only=True)
class Arguments(StudyArguments):
    """Measure the steps that growing batch sizes need to reach a loss, and fit the critical batch.

    Each run is a directory in OUT, the page is OUT/report. To continue after an interruption, run the same
    command again: finished runs are not repeated. A run ends at the target. --steps is its limit; a larger
    batch gets at most 1.25 times the steps that the next smaller one needed. Unless --optimizer.final is
    set, the learning rate stays at its peak after the warm-up: then the planned length of a run affects the
    steps to the target only through the length of its warm-up.
    """

    target: float
    """Validation loss to reach, in nats per token."""
    batches: tuple[int, ...]
    """Batch sizes in sequences; powers of two are enough."""
    lr: tuple[str, ...]
    """Peak learning rates: RATE for all optimizers, OPTIMIZER=RATE for one; see --rule."""
    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit")
    """The optimizers, in order, as NAME or NAME,OPTION=VALUE,..."""
    rule: RateRule = "sqrt"
    """sqrt, linear: scale one rate from --base-batch; list: one rate per batch; sweep: the best per batch."""
    base_batch: int | None = None
    """The batch to which the rate of sqrt and linear applies. None: the smallest."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the initial weights and of the data order."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""

    def work() -> int:
        replaced = {
            "--seed": "--seeds 0 1 2",
            "--optimizer.name": "--optimizers lamb merit",
            "--optimizer.lr": "--lr merit=9e-3",
            "--batch": "--batches 64 128 256",
            "--tokens": "--steps 4000, the limit of every run",
            "--measure.validation-every": "nothing: each run is validated fifty times",
        }
        arguments, folder = parse(
            Arguments,
            argv,
            command="scale",
            study="a scaling study",
            optimizer=OptimizerConfig(final=1.0),
            replaced=replaced,
        )
        _check(arguments)
        rates = choose_rates(arguments)
        for batch in sorted(arguments.batches):
            train_all(plan(arguments, folder, rates, batch), folder, arguments)
        return conclude("merit scale", lambda: answer(folder, arguments.target), folder)

    return exit_status("merit scale", work)


def _check(arguments: Arguments) -> None:
    check_distinct("seeds", arguments.seeds)
    check_distinct("batches", arguments.batches)
    check_distinct("optimizers", arguments.optimizers)
    if not (math.isfinite(arguments.target) and arguments.target > 0):
        raise ValueError(f"the target is {arguments.target}; it must be a validation loss in nats, above 0")
    if arguments.config.steps is None:
        raise ValueError(
            "the maximum number of steps is not given; pass --steps, with more than the smallest batch is "
            "expected to need"
        )


def choose_rates(arguments: Arguments) -> dict[str, dict[int, list[float]]]:
    """Learning rates by optimizer and batch, by the chosen rule."""
    smallest = min(arguments.batches)
    base_batch = smallest if arguments.base_batch is None else arguments.base_batch
    for option, size in (("a batch", smallest), ("--base-batch", base_batch)):
        check_at_least(option, size, 1)
    by_optimizer = parse_learning_rates(arguments.lr, everyone=arguments.optimizers)
    check_rates(by_optimizer, [Contestant.parse(text) for text in arguments.optimizers])
    if missing := [name for name in arguments.optimizers if not by_optimizer.get(name)]:
        raise ValueError(f"{missing[0]} has no learning rate; write for example --lr {missing[0]}=1e-3")
    return {
        name: rates_by_batch(arguments.rule, by_optimizer[name], arguments.batches, base_batch, name)
        for name in arguments.optimizers
    }


def rates_by_batch(
    rule: RateRule, rates: Sequence[float], batches: Sequence[int], base_batch: int, optimizer: str
) -> dict[int, list[float]]:
    """The learning rates of each batch size.

    "list" uses ``rates`` unchanged, one for each batch in its order or one for all; "sqrt" and "linear" scale
    one rate, that of ``base_batch``; "sweep" tries every rate at every batch.

    Example:
        >>> rates_by_batch("sqrt", [0.01], [16, 64], 16, "merit")
        {16: [0.01], 64: [0.02]}
    """
    if rule == "sweep":
        return {batch: sorted(rates) for batch in batches}
    if rule == "list":
        if len(rates) not in (1, len(batches)):
            raise ValueError(
                f"{optimizer} has {len(rates)} learning rates for {len(batches)} batch sizes; --rule list "
                "takes one for each batch in its order, or one for all"
            )
        by_batch = rates if len(rates) > 1 else [*rates] * len(batches)
        return {batch: [rate] for batch, rate in zip(batches, by_batch, strict=True)}
    if len(rates) != 1:
        raise ValueError(
            f"{optimizer} has {len(rates)} learning rates; --rule {rule} takes one, that of the batch of "
            f"{base_batch}. To try several at each batch, use --rule sweep."
        )
    power = _POWERS[rule]
    return {batch: [float(f"{rates[0] * (batch / base_batch) ** power:.4g}")] for batch in batches}


def plan(
    arguments: Arguments, folder: Path, rates: Mapping[str, Mapping[int, Sequence[float]]], batch: int
) -> list[Trial]:
    """The trials with one batch; those with smaller ones are done, and say how long these may be.

    A run that is there is used as it is if it reached the target, diverged, or is long enough.
    """
    base, vocab_size = arguments.config, Dataset.open(arguments.config.data).vocab_size
    there = attempts(folder, arguments.target) if _holds_runs(folder) else None
    trials = []
    for seed in arguments.seeds:
        for text in arguments.optimizers:
            one = Contestant.parse(text)
            steps = _limit(base, there, one, batch)
            for lr in rates[text][batch]:
                name = f"{one.slug}-batch{batch}-lr{lr:g}-to{arguments.target:g}-seed{seed}"
                found = () if there is None else there.filter(pl.col("stem") == name).to_dicts()
                enough = [run for run in found if _is_enough(run, steps)]
                planned = enough[0]["steps"] if enough else steps
                values = {f"optimizer.{field}": value for field, value in one.given}
                values |= {LR: lr, "batch": batch, "seed": seed, "steps": planned, "target": arguments.target}
                values["measure.validation_every"] = math.ceil(planned / _VALIDATIONS)
                start = dataclasses.replace(base, optimizer=one.over(base.optimizer))
                config = with_values(start, values).resolve(vocab_size)
                trials.append(Trial(folder / f"{name}-steps{planned}", config))
    return trials


def _holds_runs(folder: Path) -> bool:
    """Whether a folder, which may be yet to make, holds runs."""
    return bool(places(folder))


def _limit(base: TrainConfig, there: pl.DataFrame | None, one: Contestant, batch: int) -> int:
    """The most steps of a run: 1.25 times those that the next smaller batch needed."""
    assert base.steps is not None
    if there is None:
        return base.steps
    mine = chosen(there).filter(pl.col("contestant") == one.slug, pl.col("batch") < batch)
    if mine.is_empty():
        return base.steps
    (most,) = mine.filter(pl.col("batch") == pl.col("batch").max()).select(pl.col("reached").max()).row(0)
    return base.steps if most is None else min(base.steps, math.ceil(_SLACK * most))


def _is_enough(run: Mapping[str, object], steps: int) -> bool:
    if run["reached"] is not None or run["status"] == "diverged":
        return True
    planned = run["steps"]
    assert isinstance(planned, int)
    return planned >= steps


def attempts(folder: Path, target: float) -> pl.DataFrame:
    """The runs towards a target, with contestant, stem (the name without its limit), and ``reached``.

    ``reached`` are the steps to the target, interpolated between validations; null if it was not reached.
    """
    runs, steps = table.read(folder)
    pattern = r"^(?<stem>(?<contestant>.+)-batch\d+-lr[^-]+(?:-\d+)?-to[0-9.e+]+-seed-?\d+)-steps\d+$"
    name = pl.col("run").str.split("/").list.last()
    runs = runs.filter(pl.col("target") == target) if "target" in runs.columns else runs.clear()
    runs = runs.with_columns(name.str.extract_groups(pattern).alias("name")).unnest("name")
    losses = steps.drop_nulls("validation_loss").sort("step")
    reached = []
    for run in runs["run"]:
        points = list(losses.filter(pl.col("run") == run).select("step", "validation_loss").iter_rows())
        needed = steps_to_reach(target, points)
        if needed == 0:
            raise ValueError(
                f"the target {target:g} is not below the initial loss, {points[0][1]:.3f} in {run}; choose a "
                "lower target"
            )
        reached.append(needed)
    return runs.with_columns(pl.Series("reached", reached, dtype=pl.Float64)).drop_nulls("contestant")


def chosen(runs: pl.DataFrame) -> pl.DataFrame:
    """The runs at the best rate of each contestant and batch: most seeds that reach it, then fewest steps.

    Of several runs with the same settings and seed, the longest counts.
    """
    over = runs.filter(pl.col("status").is_in(["finished", "diverged"]) | pl.col("reached").is_not_null())
    once = over.sort("steps", descending=True).unique("stem", keep="first", maintain_order=True)
    key = ["contestant", "batch"]
    rates = once.group_by(*key, LR).agg(
        pl.col("reached").count().alias("count"), pl.col("reached").mean().alias("mean")
    )
    best = rates.sort("count", "mean", LR, descending=[True, False, False]).unique(key, keep="first")
    return once.join(best.select(*key, LR), on=[*key, LR]).sort("contestant", "batch", "seed")


def answer(folder: Path, target: float) -> Page:
    """The steps at each batch, and the curve fitted to them, of all runs in a folder."""
    runs = attempts(folder, target)
    best = chosen(runs)
    names = {
        slug: display_name(name) for slug, name in runs.select("contestant", "optimizer.name").iter_rows()
    }
    if len(set(names.values())) < len(names):
        names = {slug: slug for slug in names}
    best = best.with_columns(
        pl.col("contestant").replace_strict(names, return_dtype=pl.String).alias("series")
    )
    curves = {name: _fit(best.filter(pl.col("series") == name)) for name in names.values()}
    context = int(runs["model.context"][0])
    sections = [
        Section("Steps to the target", _steps_table(best, context), "At the best rate of each batch."),
        Section(
            "The critical batch",
            _curve_table(curves, best, context),
            "Fitted: S = S_min (1 + B_crit / B). At the critical batch a run takes twice the least steps and "
            "twice the least data.",
        ),
        *_chart(best, curves, target),
    ]
    return Page(
        title=f"Steps to a loss of {target:g}",
        facts=[f"{runs.height} runs", f"{context} tokens a sequence"],
        summary=f"To a validation loss of {target:g}: "
        + "; ".join(
            _describe(name, best.filter(pl.col("series") == name), curve) for name, curve in curves.items()
        )
        + ".",
        warnings=_warnings(runs, best),
        sections=sections,
        runs=runs,
    )


def _whole(best: pl.DataFrame) -> pl.DataFrame:
    """The batches at which every seed reached the target."""
    return best.filter(pl.col("reached").is_not_null().all().over("series", "batch"))


def _fit(mine: pl.DataFrame) -> ScalingCurve | None:
    whole = _whole(mine)
    return fit_curve(whole["batch"].cast(pl.Float64).to_list(), whole["reached"].to_list())


def _describe(name: str, mine: pl.DataFrame, curve: ScalingCurve | None) -> str:
    means = _whole(mine).group_by("batch").agg(pl.col("reached").mean()).sort("batch").rows()
    if not means:
        return f"{name} did not reach it with any batch"
    (first, needed), (last, fewer) = means[0], means[-1]
    text = f"{name} needed {needed:,.0f} steps with a batch of {first} sequences"
    text += f" and {fewer:,.0f} with {last}" if last != first else ""
    if curve is None:
        return f"{text}; too few batches to fit a curve"
    if not curve.is_determined:
        return f"{text}; these batches do not determine its critical batch"
    critical = curve.critical_batch
    estimate = f"{_digits(critical.value)} sequences (95% interval {_ends(critical)})"
    if not first <= critical.value <= last:
        return f"{text}; its critical batch lies outside the batches tried; extrapolated, it is {estimate}"
    return f"{text}; its critical batch is {estimate}"


def _warnings(runs: pl.DataFrame, best: pl.DataFrame) -> list[str]:
    remarks = []
    for row in best.filter(pl.col("reached").is_null()).to_dicts():
        why = "it diverged" if row["status"] == "diverged" else f"not in {row['last_step']:,} steps"
        remarks.append(
            f"{row['series']} did not reach the target with seed {row['seed']} at a batch of {row['batch']} "
            f"({why}); this batch is left out of the curve."
        )
    for row in best.unique(["series", "batch"], maintain_order=True).to_dicts():
        mine = runs.filter(pl.col("contestant") == row["contestant"], pl.col("batch") == row["batch"])
        rates = mine[LR].unique().sort().to_list()
        if len(rates) > 1 and row[LR] in (rates[0], rates[-1]):
            edge = "lowest" if row[LR] == rates[0] else "highest"
            remarks.append(
                f"{row['series']}'s best learning rate with a batch of {row['batch']}, {row[LR]:g}, is the "
                f"{edge} that was tried: fewer steps may suffice."
            )
    if left := runs.filter(~pl.col("status").is_in(["finished", "diverged"]))["run"].to_list():
        remarks.append(f"{join(left)} {'is' if len(left) == 1 else 'are'} not finished.")
    return remarks


def _steps_table(best: pl.DataFrame, context: int) -> Table:
    rows: list[tuple[str, ...]] = []
    first: dict[str, tuple[int, float]] = {}
    for row in best.group_by("series", "batch", LR, maintain_order=True).agg("reached").to_dicts():
        cells = [row["series"], f"{row['batch']:,}", f"{row['batch'] * context:,}", f"{row[LR]:g}"]
        if None in row["reached"]:
            rows.append((*cells, "not reached", NOTHING, NOTHING))
            continue
        mean = math.fsum(row["reached"]) / len(row["reached"])
        spread = (
            f" ({min(row['reached']):,.0f} to {max(row['reached']):,.0f})" if len(row["reached"]) > 1 else ""
        )
        batch, steps = first.setdefault(row["series"], (row["batch"], mean))
        ideal = steps * batch / row["batch"]
        rows.append((*cells, f"{mean:,.0f}{spread}", f"{mean * row['batch']:,.0f}", f"{ideal / mean:.0%}"))
    head = ("Optimizer", "Batch", "Tokens a step", "Learning rate", "Steps to the target", "Sequences seen")
    return Table((*head, "Of the ideal speed-up"), tuple(rows))


def _curve_table(curves: Mapping[str, ScalingCurve | None], best: pl.DataFrame, context: int) -> Table:
    rows = []
    for name, curve in curves.items():
        num = str(_whole(best.filter(pl.col("series") == name)).height)
        if curve is None:
            rows.append((name, *[NOTHING] * 5, num))
            continue
        critical, least = curve.critical_batch, curve.least_steps
        cells = [_digits(critical.value), _ends(critical), _digits(critical.value * context)]
        rows.append((name, *cells, _digits(least.value), _ends(least), num))
    head = ("Optimizer", "Critical batch", "95% interval", "In tokens", "Least steps", "95% interval", "Runs")
    return Table(head, tuple(rows))


def _chart(best: pl.DataFrame, curves: Mapping[str, ScalingCurve | None], target: float) -> list[Section]:
    from merit_lab.results import charts  # altair takes a second to import

    reached = best.drop_nulls("reached")
    if reached.is_empty():
        return []
    columns = [pl.col("series"), pl.col("optimizer.name"), pl.col("batch"), pl.col("reached").alias("steps")]
    missed = best.filter(pl.col("reached").is_null()).select(
        "series", "optimizer.name", "batch", pl.col("last_step").cast(pl.Float64).alias("steps")
    )
    low, high = float(reached["batch"].min()), float(reached["batch"].max())  # type: ignore[arg-type]
    sizes = [low * (high / low) ** (place / _CURVE_POINTS) for place in range(_CURVE_POINTS + 1)]
    kinds = dict(best.select("series", "optimizer.name").iter_rows())
    fits = [
        {"series": name, "optimizer.name": kinds[name], "batch": size, "steps": curve.steps(size)}
        for name, curve in curves.items()
        if curve is not None
        for size in sizes
    ]
    chart = charts.steps_to(
        reached.select(columns),
        name="steps-to-target",
        title=f"Steps to a validation loss of {target:g}",
        caption="Dots are runs; lines are the fitted curves, or join the means; a triangle did not reach it.",
        fits=pl.DataFrame(fits) if fits else None,
        missed=missed if not missed.is_empty() else None,
    )
    return [Section("Steps against the batch", chart)]


def _ends(estimate: Estimate) -> str:
    return f"{_digits(estimate.low)} to {_digits(estimate.high)}"


def _digits(value: float) -> str:
    """Two or three digits, without decimals from 10 on."""
    if not 0.1 <= value < 1e12:
        return f"{value:.0e}"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"
