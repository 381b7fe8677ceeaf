"""`merit scale`: the steps that growing batches need to reach a loss, and the critical batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl

from merit_lab.checks import check_at_least
from merit_lab.data import Dataset
from merit_lab.results.names import DISPLAY_NAMES
from merit_lab.results.page import Page, Section
from merit_lab.runs import table
from merit_lab.runs.find import places
from merit_lab.study.command import StudyArguments, run_study, train_all
from merit_lab.study.compare import REPLACED, rates_of
from merit_lab.study.contestant import Contestant
from merit_lab.study.fields import LR, with_values
from merit_lab.study.fit import ScalingCurve, fit_curve, steps_to_reach
from merit_lab.study.trial import Trial, check_distinct
from merit_lab.tables import NOTHING, Table
from merit_lab.text import join
from merit_lab.train import OptimizerConfig, TrainConfig

Rule = Literal["sqrt", "linear", "same"]

_POWERS: dict[Rule, float] = {"sqrt": 0.5, "linear": 1.0, "same": 0.0}
_SLACK = 1.25  # limit of a larger batch, in multiples of the steps that the next smaller one needed
_VALIDATIONS = 50  # per run; steps are interpolated between them
_CURVE_POINTS = 40
_NAME = r"^(?<stem>(?<contestant>.+)-batch\d+-lr.+-to.+-seed-?\d+)-steps\d+$"


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
    """Peak learning rates of the smallest batch: RATE for all, OPTIMIZER=RATE for one. The best of several
    counts at each batch."""
    rule: Rule = "sqrt"
    """How rates grow with the batch: by its square root, linear, or not at all (same)."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""

    def work(arguments: Arguments, folder: Path) -> Callable[[], Page]:
        _check(arguments)
        for batch in sorted(arguments.batches):
            train_all(plan(arguments, folder, batch), folder, arguments)
        return lambda: answer(folder, arguments.target)

    replaced = {
        **REPLACED,
        "--batch": "--batches 64 128 256",
        "--tokens": "--steps 4000, the limit of every run",
        "--measure.validation-every": "nothing: each run is validated fifty times",
    }
    return run_study("scale", Arguments, argv, work, replaced=replaced, optimizer=OptimizerConfig(final=1.0))


def _check(arguments: Arguments) -> None:
    for noun in ("seeds", "batches", "optimizers"):
        check_distinct(noun, getattr(arguments, noun))
    check_at_least("a batch", min(arguments.batches), 1)
    if not (math.isfinite(arguments.target) and arguments.target > 0):
        raise ValueError(f"the target is {arguments.target}; it must be a validation loss in nats, above 0")
    if arguments.config.steps is None:
        raise ValueError(
            "the maximum number of steps is not given; pass --steps, with more than the smallest batch is "
            "expected to need"
        )


def plan(arguments: Arguments, folder: Path, batch: int) -> list[Trial]:
    """The trials with one batch; those with smaller ones are done, and say how long these may be.

    A run that is there is used as it is if it reached the target, diverged, or is long enough.
    """
    base, vocab_size = arguments.config, Dataset.open(arguments.config.data).vocab_size
    there = attempts(folder, arguments.target) if places(folder) else None
    contestants = [Contestant.parse(text) for text in arguments.optimizers]
    rates = rates_of(arguments.lr, contestants)
    growth = (batch / min(arguments.batches)) ** _POWERS[arguments.rule]
    trials = []
    for seed, one in itertools.product(arguments.seeds, contestants):
        start = dataclasses.replace(base, optimizer=one.over(base.optimizer))
        limit = _limit(base, there, one, batch)
        if not rates[one.text]:
            raise ValueError(f"{one.text} has no learning rate; write for example --lr {one.text}=1e-3")
        for rate in rates[one.text]:
            lr = float(f"{rate * growth:.4g}")
            name = f"{one.slug}-batch{batch}-lr{lr:g}-to{arguments.target:g}-seed{seed}"
            steps = limit if there is None else _enough(there.filter(pl.col("stem") == name), limit)
            values = {LR: lr, "batch": batch, "seed": seed, "steps": steps, "target": arguments.target}
            values["measure.validation_every"] = math.ceil(steps / _VALIDATIONS)
            config = with_values(start, values).resolve(vocab_size)
            trials.append(Trial(folder / f"{name}-steps{steps}", config))
    return trials


def _limit(base: TrainConfig, there: pl.DataFrame | None, one: Contestant, batch: int) -> int:
    """The most steps of a run: 1.25 times those that the next smaller batch needed."""
    assert base.steps is not None
    if there is None:
        return base.steps
    smaller = chosen(there).filter(pl.col("contestant") == one.slug, pl.col("batch") < batch)
    most = smaller.filter(pl.col("batch") == pl.col("batch").max())["reached"].max()
    assert most is None or isinstance(most, float)
    return base.steps if most is None else min(base.steps, math.ceil(_SLACK * most))


def _enough(runs: pl.DataFrame, limit: int) -> int:
    """The length of one of these runs that needs no repetition; the limit if there is none."""
    is_enough = (
        pl.col("reached").is_not_null() | (pl.col("status") == "diverged") | (pl.col("steps") >= limit)
    )
    lengths = runs.filter(is_enough)["steps"]
    return limit if lengths.is_empty() else int(lengths[0])


def attempts(folder: Path, target: float) -> pl.DataFrame:
    """The runs towards a target, with contestant, stem (the name without its limit), and ``reached``.

    ``reached`` are the steps to the target, interpolated between validations; null if it was not reached.
    """
    runs, steps = table.read(folder)
    runs = runs.filter(pl.col("target") == target) if "target" in runs.columns else runs.clear()
    names = pl.col("run").str.split("/").list.last().str.extract_groups(_NAME)
    runs = runs.with_columns(names.alias("name")).unnest("name").drop_nulls("contestant")
    losses = steps.drop_nulls("validation_loss").sort("step")
    reached = []
    for run in runs["run"]:
        points = list(losses.filter(pl.col("run") == run).select("step", "validation_loss").iter_rows())
        reached.append(steps_to_reach(target, points))
        if reached[-1] == 0:
            raise ValueError(
                f"the target {target:g} is not below the initial loss, {points[0][1]:.3f} in {run}; choose a "
                "lower target"
            )
    return runs.with_columns(pl.Series("reached", reached, dtype=pl.Float64))


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
    best = chosen(runs).with_columns(pl.col("contestant").replace(DISPLAY_NAMES).alias("series"))
    # The curve is that of the batches at which every seed reached the target.
    whole = best.filter(pl.col("reached").is_not_null().all().over("series", "batch"))
    names = best["series"].unique(maintain_order=True)
    by_series = {name: whole.filter(pl.col("series") == name) for name in names}
    curves = {
        name: fit_curve(mine["batch"].to_list(), mine["reached"].to_list())
        for name, mine in by_series.items()
    }
    context = int(runs["model.context"][0])
    caption = "At the best rate of each batch."
    said = "; ".join(_describe(name, mine, curves[name]) for name, mine in by_series.items())
    return Page(
        title=f"Steps to a loss of {target:g}",
        facts=[f"{runs.height} runs", f"{context} tokens a sequence"],
        summary=f"To a validation loss of {target:g}: {said}.",
        warnings=_warnings(runs, best),
        sections=[
            Section("Steps to the target", _steps_table(best, context), caption),
            *_chart(best, curves, target),
        ],
        runs=runs,
    )


def _describe(name: str, whole: pl.DataFrame, curve: ScalingCurve | None) -> str:
    if whole.is_empty():
        return f"{name} did not reach it with any batch"
    if curve is None:
        return f"{name} has too few batches to fit a curve"
    if not curve.is_determined:
        return f"the batches of {name} do not determine its critical batch"
    critical = curve.critical_batch
    is_above = whole["batch"] >= critical.value
    where = ", which lies outside the batches tried" if is_above.n_unique() == 1 else ""
    batch, least = (
        f"{_digits(one.value)} {unit} (95% interval {_digits(one.low)} to {_digits(one.high)})"
        for one, unit in ((critical, "sequences"), (curve.least_steps, "steps at least"))
    )
    return f"{name} has a critical batch of {batch}{where}, and takes {least}"


def _warnings(runs: pl.DataFrame, best: pl.DataFrame) -> list[str]:
    remarks = []
    for row in best.filter(pl.col("reached").is_null()).to_dicts():
        why = "it diverged" if row["status"] == "diverged" else f"not in {row['last_step']:,} steps"
        remarks.append(
            f"{row['series']} did not reach the target with seed {row['seed']} at a batch of {row['batch']} "
            f"({why}); this batch is left out of the curve."
        )
    key = ["contestant", "batch"]
    tried = runs.group_by(key).agg(pl.col(LR).min().alias("lowest"), pl.col(LR).max().alias("highest"))
    ends = best.unique(key, maintain_order=True).join(tried, on=key, maintain_order="left")
    for row in ends.filter(pl.col("lowest") < pl.col("highest")).to_dicts():
        remarks += [
            f"{row['series']}'s best learning rate with a batch of {row['batch']}, {row[LR]:g}, is the "
            f"{side} that was tried: fewer steps may suffice."
            for side in ("lowest", "highest")
            if row[LR] == row[side]
        ]
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
        caption="Dots are runs; lines are the fitted curves S = S_min (1 + B_crit / B), or join the means; a "
        "triangle did not reach it. At the critical batch a run takes twice the least steps and data.",
        fits=pl.DataFrame(fits) if fits else None,
        missed=missed if not missed.is_empty() else None,
    )
    return [Section("Steps against the batch", chart)]


def _digits(value: float) -> str:
    """Two or three digits, without decimals from 10 on."""
    if not 0.1 <= value < 1e12:
        return f"{value:.0e}"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"
