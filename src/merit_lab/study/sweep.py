"""`merit sweep`: a grid of learning rates and other settings, and the best point for each optimizer."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import tyro

from merit_lab.data import Dataset
from merit_lab.results.names import display_names
from merit_lab.results.page import Page, Section
from merit_lab.runs import durable, table
from merit_lab.runs.settings import show
from merit_lab.study.command import StudyArguments, conclude, exit_status, parse, train_all
from merit_lab.study.compare import check_rates, parse_learning_rates
from merit_lab.study.contestant import Contestant
from merit_lab.study.fields import LR, find_field, option_of, parse_value, short, value_of, with_values
from merit_lab.study.trial import Trial, check_distinct
from merit_lab.study.valley import Valley
from merit_lab.tables import NOTHING, Table
from merit_lab.text import count_seeds, join
from merit_lab.train import TrainConfig

_AROUND_THE_PAPER = (0.25, 0.5, 1.0, 2.0, 4.0)  # the default rates, as factors of the paper's
# Fields whose value may be replaced when a run starts, so that they could not distinguish runs.
_REPLACED = {
    "steps": "every run has a length; give numbers",
    "tokens": "a run's length is kept in steps; use --set steps",
    "model.vocab_size": "the data decide it; add --no-fit-vocab",
    "optimizer.rest_lr": "every second optimizer has a rate; give numbers",
}
_OF_SIZE = ("model.", "batch", "steps", "data")  # a best point for each of these, and not among them


@dataclass(frozen=True, kw_only=True)
class Arguments(StudyArguments):
    """Train one model at many learning rates or other settings, and show which are best.

    Each run is a directory in OUT, the page is OUT/report. To continue after an interruption, run the same
    command again: finished runs are not repeated. The same command with other values adds them: all runs in
    OUT are on the page.
    """

    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit")
    """The optimizers, in order, as NAME or NAME,OPTION=VALUE,..."""
    lr: tuple[str, ...] = ()
    """Peak learning rates: RATE for all, OPTIMIZER=RATE for one. Default: five around the paper's."""
    fields: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.arg(name="set", metavar="FIELD VALUE ..."),
        tyro.conf.UseAppendAction,
    ] = ()
    """Another field of the configuration and its values, as in: optimizer.weight-decay 0 0.1."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the initial weights and of the data order."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""

    def work() -> int:
        replaced = {"--seed": "--seeds 0 1 2", "--optimizer.name": "--optimizers lamb merit"}
        replaced["--optimizer.lr"] = "--lr 1e-3 2e-3 4e-3"
        arguments, folder = parse(Arguments, argv, command="sweep", study="a sweep", replaced=replaced)
        if arguments.config.measure.validation_every == 0:
            raise ValueError("measure.validation_every is 0; a sweep compares final validation losses")
        fields = parse_fields(arguments.fields)
        trials = plan(arguments, folder, fields)
        train_all(trials, folder, arguments)
        return conclude("merit sweep", lambda: answer(folder, list(fields)), folder)

    return exit_status("merit sweep", work)


def parse_fields(texts: Iterable[Sequence[str]]) -> dict[str, list[object]]:
    """Parse the fields and values of `--set`.

    Example:
        >>> parse_fields([("optimizer.weight-decay", "0", "0.1")])
        {'optimizer.weight_decay': [0.0, 0.1]}
    """
    fields: dict[str, list[object]] = {}
    for name, *values in texts:
        field = find_field(name)
        if not values or field in fields:
            problem = "has no values" if not values else "is given twice"
            raise ValueError(f"--set {name} {problem}; write for example --set {name} VALUE VALUE")
        fields[field] = [parse_value(field, value) for value in values]
        check_distinct(f"values of {field}", fields[field])
    for field in fields:
        if (path := option_of(field)) and path[0] in fields:
            raise ValueError(
                f"--set {path[0]} sets all options and --set {field} one of them; use only one of the two"
            )
    return fields


def plan(arguments: Arguments, folder: Path, fields: Mapping[str, Sequence[object]]) -> list[Trial]:
    """All points of the grid, ordered by seed, so that there is a complete grid after the first one."""
    check_distinct("seeds", arguments.seeds)
    check_distinct("optimizers", arguments.optimizers)
    contestants = [Contestant.parse(text) for text in arguments.optimizers]
    rates = parse_learning_rates(arguments.lr, everyone=arguments.optimizers)
    check_rates(rates, contestants)
    base, vocab_size = arguments.config, Dataset.open(arguments.config.data).vocab_size
    grid = [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]
    return [
        _trial(base, folder, one, {LR: lr, **values}, seed, vocab_size)
        for seed in arguments.seeds
        for one in contestants
        for values in grid
        for lr in sorted(rates.get(one.text, rates.get(one.name, []))) or _paper_rates(base, one)
    ]


def _trial(
    base: TrainConfig,
    folder: Path,
    one: Contestant,
    values: dict[str, Any],
    seed: int,
    vocab_size: int | None,
) -> Trial:
    given = {f"optimizer.{name}": value for name, value in one.given}
    start = replace(base, optimizer=one.over(base.optimizer), seed=seed)
    config = with_values(start, {**given, **values}).resolve(vocab_size)
    for field, value in values.items():
        if value_of(config, field) != value:
            raise ValueError(f"--set {field} {show(value)}: {_REPLACED[field]}")
    parts = [one.slug, f"lr{show(values[LR])}"]
    parts += [f"{short(field)}={show(value)}" for field, value in values.items() if field != LR]
    name = "-".join([*parts, f"seed{seed}"]).replace(", ", ",").replace("/", "_")
    return Trial(folder / name, config)


def _paper_rates(base: TrainConfig, one: Contestant) -> list[float]:
    lr = replace(one.over(base.optimizer), lr=None).resolve(base.model).lr
    assert lr is not None
    return [float(f"{lr * factor:.6g}") for factor in _AROUND_THE_PAPER]


def points(folder: Path, fields: Sequence[str] = ()) -> pl.DataFrame:
    """The points of all runs in a folder: optimizer, its settings, loss (the mean over seeds) and seeds.

    A setting is a column if its values differ among the runs, or if it is one of ``fields``. The loss of a
    point is infinite if a seed diverged there. Runs that are neither finished nor diverged are left out.
    """
    runs = table.read(folder).runs.filter(pl.col("status").is_in(["finished", "diverged"]))
    settings = [LR, *(name for name in _varied(runs) if name != LR)]
    settings += [name for name in fields if name in runs.columns and name not in settings]
    lost = pl.col("status") == "diverged"
    loss = pl.when(lost).then(math.inf).otherwise(pl.col("validation_loss").fill_nan(math.inf))
    return (
        runs.with_columns(loss.alias("loss"))
        .group_by("optimizer.name", *settings, maintain_order=True)
        .agg(pl.col("loss").mean(), pl.len().alias("seeds"), pl.col("folder").first())
        .sort("optimizer.name", *settings)
    )


def _varied(runs: pl.DataFrame) -> list[str]:
    """The settings that differ among runs of one optimizer."""
    kept = [
        name
        for name in runs.columns
        if name.startswith(("optimizer.", "model.")) or name in ("batch", "steps")
    ]
    names = [name for name in kept if name != "optimizer.name"]
    counts = runs.group_by("optimizer.name").agg(pl.col(names).n_unique())
    return [name for name in names if counts[name].max() > 1]  # type: ignore[operator]


def best_points(found: pl.DataFrame) -> pl.DataFrame:
    """The point with the lowest loss of each optimizer, for each model, batch and length; with its edges.

    ``edges`` names the numeric settings whose best value is the lowest or the highest that was tried with
    all others as they are; ``between`` is the lowest point of a parabola through the best rate and its
    neighbours, null if it has not both.
    """
    settings = [name for name in found.columns if name not in ("optimizer.name", "loss", "seeds", "folder")]
    sizes = [name for name in settings if name.startswith(_OF_SIZE) and name != LR]
    tried = [name for name in settings if name not in sizes]
    rows = []
    for _, group in found.group_by("optimizer.name", *sizes, maintain_order=True):
        finite = group.filter(pl.col("loss").is_finite())
        if finite.is_empty():
            continue
        best = finite.sort("loss").row(0, named=True)
        edges, around = [], None
        for name in tried:
            if not group[name].dtype.is_numeric():
                continue
            same = [pl.col(other).eq_missing(best[other]) for other in tried if other != name]
            line = group.filter(*same).sort(name) if same else group.sort(name)
            values = line[name].drop_nulls().unique().sort().to_list()
            if len(values) > 1 and best[name] and best[name] in (values[0], values[-1]):
                side = "lowest" if best[name] == values[0] else "highest"
                edges.append(f"{short(name).replace('_', ' ')} {show(best[name])} is the {side}")
            if name == LR:
                around = _between(line, best[LR])
        rows.append({**best, "edges": edges, "between": around})
    return pl.DataFrame(rows, infer_schema_length=None)


def _between(line: pl.DataFrame, best: float) -> float | None:
    """The lowest point of a parabola through the best rate and its neighbours."""
    pairs = [
        (rate, loss) for rate, loss in line.select(LR, "loss").iter_rows() if rate and math.isfinite(loss)
    ]
    place = [rate for rate, _ in pairs].index(best)
    if not 0 < place < len(pairs) - 1:
        return None
    valley = Valley.through(*((math.log(rate), loss) for rate, loss in pairs[place - 1 : place + 2]))
    return math.exp(valley.place) if valley else None


def answer(folder: Path, fields: Sequence[str] = ()) -> Page:
    """The best point of each optimizer among all runs in a folder; best.json there has its configuration."""
    from merit_lab.results import charts  # altair takes a second to import

    runs = table.read(folder).runs
    found = points(folder, fields)
    best = best_points(found) if not found.is_empty() else pl.DataFrame()
    names = display_names(runs["optimizer.name"].unique(maintain_order=True).to_list())
    record = [
        {
            "optimizer": row["optimizer.name"],
            "validation_loss": row["loss"],
            "config": json.loads((Path(row["folder"]) / "config.json").read_text("utf-8")),
        }
        for row in best.to_dicts()
        if (Path(row["folder"]) / "config.json").is_file()
    ]
    if record:
        durable.write(folder / "best.json", json.dumps(record, indent=2) + "\n")
    warnings = [
        f"{names[row['optimizer.name']]}: its best {edge} that was tried, and the best may lie beyond. The "
        "same command with more values adds them."
        for row in best.to_dicts()
        for edge in row["edges"]
    ]
    if missing := [
        name for key, name in names.items() if best.is_empty() or key not in best["optimizer.name"]
    ]:
        warnings.append(f"{join(missing)}: no run finished, so there is no best point.")
    left = runs.height - int(found["seeds"].sum()) if not found.is_empty() else runs.height
    if left:
        warnings.append(f"{left} of the runs are not finished and do not count.")
    sections = [
        Section("The best", _table(best, names), "The mean loss over seeds, in nats per token."),
        Section("Every point", _table(found, names), folded=True),
    ]
    if not found.filter(pl.col("loss").is_finite()).is_empty():
        axis = next((name for name in fields if name in runs.columns and runs[name].dtype.is_numeric()), LR)
        axis = LR if runs[LR].n_unique() > 1 else axis
        drawn = charts.rates(runs, axis, name="rates", title=f"Loss against {short(axis).replace('_', ' ')}")
        sections.insert(1, Section("Where the loss is lowest", drawn))
    return Page(
        title="Sweep",
        facts=[f"{runs.height} runs", count_seeds(runs["seed"].n_unique())],
        summary=_summary(best, names),
        warnings=warnings,
        sections=sections,
        runs=runs,
    )


def _summary(best: pl.DataFrame, names: Mapping[str, str]) -> str:
    if best.is_empty():
        return "No run finished, so there is no best point."
    settings = [name for name in best.columns if name not in _NO_SETTINGS]
    found = []
    for row in best.sort("loss").to_dicts():
        where = join(
            [
                f"{short(name).replace('_', ' ')} {show(row[name])}"
                for name in settings
                if row[name] is not None
            ]
        )
        seeds = count_seeds(row["seeds"])
        found.append(f"{names[row['optimizer.name']]} was best at {where}: {row['loss']:.3f} ({seeds})")
    return "; ".join([*found, *_powers(best, names)]) + "."


def _powers(best: pl.DataFrame, names: Mapping[str, str]) -> list[str]:
    """The power of a size that each optimizer's best rates follow, where the rates have neighbours."""
    sizes = [name for name in best.columns if name.startswith(_OF_SIZE) and best[name].dtype.is_numeric()]
    texts = []
    for (optimizer,), group in best.group_by("optimizer.name", maintain_order=True):
        known = group.drop_nulls("between")
        if len(sizes) == 1 and known.height == group.height > 1:
            sized, rates = known[sizes[0]].log(), known["between"].log()
            slope = float((sized - sized.mean()).dot(rates) / (sized - sized.mean()).dot(sized))  # type: ignore[operator]
            texts.append(
                f"the best rate of {names[str(optimizer)]} goes about as {short(sizes[0])}^{slope:.2f}"
            )
    return texts


_NO_SETTINGS = ("optimizer.name", "loss", "seeds", "folder", "edges", "between")


def _table(found: pl.DataFrame, names: Mapping[str, str]) -> Table:
    settings = [name for name in found.columns if name not in _NO_SETTINGS]
    head = ["Optimizer", *(short(name).replace("_", " ").capitalize() for name in settings)]
    has_parabola = "between" in found.columns
    rows = [
        (
            names[row["optimizer.name"]],
            *(NOTHING if row[name] is None else show(row[name]) for name in settings),
            *([NOTHING if row["between"] is None else f"{row['between']:.3g}"] if has_parabola else []),
            f"{row['loss']:.3f}" if math.isfinite(row["loss"]) else "diverged",
            str(row["seeds"]),
        )
        for row in found.to_dicts()
    ]
    return Table((*head, *(["Rate by a parabola"] if has_parabola else []), "Loss", "Seeds"), tuple(rows))
