"""`merit sweep`: a grid of learning rates and other settings, and the best point for each optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import polars as pl
import tyro

from merit_lab.results.names import display_names
from merit_lab.results.page import Page, Section
from merit_lab.runs import table
from merit_lab.runs.settings import show
from merit_lab.study import compare
from merit_lab.study.answer import LOSS
from merit_lab.study.command import run_study, train_all
from merit_lab.study.fields import LR, find_field, option_of, parse_value, short
from merit_lab.study.trial import check_distinct
from merit_lab.tables import NOTHING, Table
from merit_lab.text import count_seeds, join
from merit_lab.train import TrainConfig

_AROUND_THE_PAPER = (0.25, 0.5, 1.0, 2.0, 4.0)  # the default rates, as factors of the paper's
_OF_SIZE = ("model.", "batch", "steps")  # a best point for each of these, and not among them
_NO_SETTINGS = ("optimizer.name", "loss", "seeds", "run")


@dataclass(frozen=True, kw_only=True)
class Arguments(compare.Arguments):
    """Train one model at many learning rates or other settings, and show which are best.

    Each run is a directory in OUT, the page is OUT/report. To continue after an interruption, run the same
    command again: finished runs are not repeated. The same command with other values adds them: all runs in
    OUT are on the page.
    """

    lr: tuple[str, ...] = ()
    """Peak learning rates: RATE for all, OPTIMIZER=RATE for one. Default: five around the paper's."""
    fields: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.arg(name="set", metavar="FIELD VALUE ..."),
        tyro.conf.UseAppendAction,
    ] = ()
    """Another field of the configuration and its values, as in: optimizer.weight-decay 0 0.1."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""

    def work(arguments: Arguments, folder: Path) -> Callable[[], Page]:
        fields = parse_fields(arguments.fields, arguments.config)
        grid = [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]
        trials = compare.plan(arguments, folder, _around_the_paper, grid)
        train_all(trials, folder, arguments)
        return lambda: answer(folder, list(fields))

    replaced = {**compare.REPLACED, "--optimizer.lr": "--lr 1e-3 2e-3 4e-3"}
    return run_study("sweep", Arguments, argv, work, replaced=replaced)


def parse_fields(texts: Iterable[Sequence[str]], config: TrainConfig) -> dict[str, list[object]]:
    """Parse the fields and values of `--set`, as in ("optimizer.weight-decay", "0", "0.1")."""
    fields: dict[str, list[object]] = {}
    for name, *values in texts:
        field = find_field(name, config)
        if not values or field in fields:
            problem = "has no values" if not values else "is given twice"
            raise ValueError(f"--set {name} {problem}; write for example --set {name} VALUE VALUE")
        fields[field] = [parse_value(field, value) for value in values]
        check_distinct(f"values of {field}", fields[field])
    for field in fields:
        if option_of(field) and (whole := field.rpartition(".")[0]) in fields:
            raise ValueError(
                f"--set {whole} sets all options and --set {field} one of them; use only one of the two"
            )
    return fields


def _around_the_paper(config: TrainConfig) -> list[float | None]:
    """The rate that a contestant gives, or some around the paper's."""
    if (given := config.optimizer.lr) is not None:
        return [given]
    lr = config.optimizer.resolve(config.model).lr
    assert lr is not None
    return [float(f"{lr * factor:.6g}") for factor in _AROUND_THE_PAPER]


def points(runs: pl.DataFrame, fields: Sequence[str] = ()) -> pl.DataFrame:
    """The points of runs: optimizer, its settings, loss (the mean over seeds), seeds, and the first run.

    A setting is a column if its values differ among the runs of an optimizer, or if it is one of ``fields``.
    The loss of a point is infinite if a seed diverged there. Runs that are not over are left out.
    """
    runs = runs.with_columns(LOSS.alias("loss")).drop_nulls("loss")
    kept = [name for name in runs.columns if name.startswith(("optimizer.", *_OF_SIZE))]
    kept.remove("optimizer.name")
    counts = runs.group_by("optimizer.name").agg(pl.col(kept).n_unique())
    varied = [name for name in kept if (counts[name] > 1).any()]
    settings = list(dict.fromkeys([LR, *varied, *(name for name in fields if name in kept)]))
    by_point = runs.group_by("optimizer.name", *settings, maintain_order=True)
    found = by_point.agg(pl.col("loss").mean(), pl.len().alias("seeds"), pl.col("run").first())
    return found.sort("optimizer.name", *settings)


def best_points(found: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """The lowest point of each optimizer, for each model, batch and length, and what lies at an edge.

    At an edge is a number that is the lowest or the highest that was tried there.
    """
    settings = [name for name in found.columns if name not in _NO_SETTINGS]
    key = ["optimizer.name", *(name for name in settings if name.startswith(_OF_SIZE))]
    tried = [name for name in settings if name not in key and found[name].dtype.is_numeric()]
    ends = [end(name).over(key).alias(f"{side} {name}") for name in tried for side, end in _ENDS.items()]
    rows = found.with_columns(ends).filter(pl.col("loss").is_finite())
    best = rows.sort("loss").unique(key, keep="first", maintain_order=True).sort(key)
    edges = [
        f"{row['optimizer.name']}: its best {_words(name)} {show(row[name])} is the {side} that was tried, "
        "and the best may lie beyond. The same command with more values adds them."
        for row in best.to_dicts()
        for name in tried
        for side in _ENDS
        if row[name] and row[name] == row[f"{side} {name}"] and row[f"lowest {name}"] < row[f"highest {name}"]
    ]
    return best.select(found.columns), edges


_ENDS = {"lowest": pl.min, "highest": pl.max}


def answer(folder: Path, fields: Sequence[str] = ()) -> Page:
    """The best point of each optimizer among all runs in a folder."""
    runs = table.read(folder).runs
    names = display_names(runs["optimizer.name"].unique(maintain_order=True).to_list())
    found = points(runs.with_columns(pl.col("optimizer.name").replace(names)), fields)
    best, warnings = best_points(found)
    if missing := [name for name in names.values() if name not in best["optimizer.name"]]:
        warnings.append(f"{join(missing)}: no run finished, so there is no best point.")
    if left := runs.height - int(found["seeds"].sum()):
        warnings.append(f"{left} of the runs are not finished and do not count.")
    caption = "The mean loss over seeds, in nats per token. RUN/config.json in this folder has the settings."
    sections = [
        Section("The best", _table(best), caption),
        Section("Every point", _table(found), folded=True),
    ]
    if not best.is_empty():
        from merit_lab.results import charts  # altair takes a second to import

        axis = next((name for name in fields if name in runs.columns and runs[name].dtype.is_numeric()), LR)
        axis = LR if runs[LR].n_unique() > 1 else axis
        drawn = charts.rates(runs, axis, name="rates", title=f"Loss against {_words(axis)}")
        sections.insert(1, Section("Where the loss is lowest", drawn))
    return Page(
        title="Sweep",
        facts=[f"{runs.height} runs", count_seeds(runs["seed"].n_unique())],
        summary=_summary(best),
        warnings=warnings,
        sections=sections,
        runs=runs,
    )


def _summary(best: pl.DataFrame) -> str:
    if best.is_empty():
        return "No run finished, so there is no best point."
    settings = [name for name in best.columns if name not in _NO_SETTINGS]
    found = []
    for row in best.sort("loss").to_dicts():
        where = join([f"{_words(name)} {show(row[name])}" for name in settings if row[name] is not None])
        seeds = count_seeds(row["seeds"])
        found.append(f"{row['optimizer.name']} was best at {where}: {row['loss']:.3f} ({seeds})")
    return f"{'; '.join(found)}."


def _words(name: str) -> str:
    return short(name).replace("_", " ")


def _table(found: pl.DataFrame) -> Table:
    settings = [name for name in found.columns if name not in _NO_SETTINGS]
    head = ("Optimizer", "Run", *(_words(name).capitalize() for name in settings), "Loss", "Seeds")
    rows = (
        (
            row["optimizer.name"],
            row["run"],
            *(NOTHING if row[name] is None else show(row[name]) for name in settings),
            f"{row['loss']:.3f}" if math.isfinite(row["loss"]) else "diverged",
            str(row["seeds"]),
        )
        for row in found.to_dicts()
    )
    return Table(head, tuple(rows), num_text=2)
