"""An arena: several optimizers tuned alike, then each at its best with seeds that chose nothing.

Its runs say what they are by their names: CONTESTANT-tune007 and CONTESTANT-final007-seed3, where 7 is the
number of a point in the contestant's space (`space.py`). arena.json has the spaces.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import polars as pl

from merit_lab.checks import check_at_least, check_size
from merit_lab.data import Dataset
from merit_lab.json_values import build, decode, encode
from merit_lab.models import num_parameters
from merit_lab.results.page import Page, Section
from merit_lab.runs import durable, lock, table
from merit_lab.study.answer import LOSS, ranking
from merit_lab.study.command import StudyArguments, run_study, train_all
from merit_lab.study.compare import REPLACED
from merit_lab.study.contestant import Contestant, labels
from merit_lab.study.fields import with_values
from merit_lab.study.space import MOST_TRIALS, Axis, Space, check_changes, point, space_of
from merit_lab.study.trial import Trial, check_distinct, settings_of
from merit_lab.tables import NOTHING, Table
from merit_lab.text import join
from merit_lab.train import TrainConfig
from merit_lab.train.config import TOKENS_PER_PARAMETER

_DECLARED = "arena.json"
_RUNS_PER_AXIS = 2  # below this the settings after the first are hardly tuned
_NAME = r"^(?<slug>.+)-(?<kind>tune|final)(?<number>\d+)(?:-seed\d+)?$"


@dataclass(frozen=True, kw_only=True)
class Arguments(StudyArguments):
    """Tune several optimizers alike, and show which is best.

    Every contestant has BUDGET tuning runs at quasi-random points of its search space: learning rates,
    warm-up, momentum or betas, weight decay, as far as it has them. Then its best settings are trained with
    every seed of --seeds. The runs are in OUT, the page of all of them is OUT/report. To continue after an
    interruption, run the same command again: finished runs are not repeated.
    """

    optimizers: tuple[str, ...] = ("adamw", "lamb-uncorrected", "merit", "muon", "muon-merit")
    """The contestants, as NAME or NAME,OPTION=VALUE,... with rest=NAME for a second optimizer. What is given
    is not tuned."""
    add: tuple[str, ...] = ()
    """Contestants to add to those that OUT has, which stay as they are. Instead of --optimizers."""
    budget: int = 12
    """Tuning runs of each contestant; two for each setting tune all settings of ours."""
    space: tuple[str, ...] = ()
    """Changes of the search spaces: NAME.AXIS=LOW:HIGH, NAME.AXIS=VALUE, or AXIS=... for all contestants."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Seeds of the final runs."""
    tuning_seed: int = 0
    """Seed of the tuning runs and of their settings; none of --seeds."""


@dataclass(frozen=True)
class Arena:
    """The trials of an arena in a folder."""

    arguments: Arguments
    folder: Path

    def __post_init__(self) -> None:
        given = self.arguments
        check_distinct("optimizers", [one.text for one in self.contestants])
        check_distinct("seeds", given.seeds)
        check_size("--budget", given.budget, MOST_TRIALS)
        for name, seed in (("--tuning-seed", given.tuning_seed), *(("--seeds", one) for one in given.seeds)):
            check_at_least(name, seed, 0)
        check_changes(given.space, self.contestants)
        if given.tuning_seed in given.seeds:
            raise ValueError(
                f"--seeds has {given.tuning_seed}, which is --tuning-seed; final runs need other seeds than "
                "the one that chose their settings and would flatter them"
            )

    @cached_property
    def contestants(self) -> list[Contestant]:
        """The contestants of this call."""
        return [Contestant.parse(text) for text in self.arguments.add or self.arguments.optimizers]

    @cached_property
    def config(self) -> TrainConfig:
        """The configuration of all runs, with its length; a quarter of what is compute-optimal."""
        base = self.arguments.config
        model, steps = base.fitted_model(Dataset.open(base.data).vocab_size), base.steps
        if steps is None:
            tokens = base.tokens or TOKENS_PER_PARAMETER // 4 * num_parameters(model)
            steps = math.ceil(tokens / (base.batch * model.context))
        return replace(base, model=model, steps=steps, tokens=None)

    @cached_property
    def spaces(self) -> dict[str, Space]:
        """The space of each contestant, by its slug."""
        return {one.slug: space_of(one, self.config, self.arguments.space) for one in self.contestants}

    def tuning(self) -> list[Trial]:
        """All tuning runs; those of all contestants with the same number together."""
        return [
            self._trial(slug, number, self.arguments.tuning_seed, f"{slug}-tune{number:03d}")
            for number in range(self.arguments.budget)
            for slug, space in self.spaces.items()
            if number == 0 or space.is_tuned
        ]

    def finals(self) -> list[Trial]:
        """The final runs of the best settings; none where no tuning run finished."""
        best = dict(best_of(read(self.folder).runs).select("slug", "number").iter_rows())
        return [
            self._trial(slug, best[slug], seed, f"{slug}-final{best[slug]:03d}-seed{seed}")
            for seed in self.arguments.seeds
            for slug in self.spaces
            if slug in best
        ]

    def _trial(self, slug: str, number: int, seed: int, name: str) -> Trial:
        space = self.spaces[slug]
        values = space.settings(point(space.axes, self.arguments.tuning_seed, number))
        config = with_values(replace(space.base, seed=seed), values)
        return Trial(self.folder / name, config.resolve(config.model.vocab_size))

    def declare(self) -> None:
        """Write down the spaces, beside those of contestants that are there. Another arena is refused."""
        seed, text = self.arguments.tuning_seed, Dataset.open(self.config.data)
        of = f"{settings_of(self.config)} {text.fingerprint} {seed}"
        way_out = "give the same, or another folder with --out"
        with lock(self.folder, patience=120):
            has_some = (self.folder / _DECLARED).exists()
            declared = read_declared(self.folder) if has_some else Declared(of, seed, {}, {})
            if declared.of != of:
                raise ValueError(
                    f"{self.folder} holds an arena with another model, text, batch, length, tuning seed "
                    f"or shared options; {way_out}"
                )
            for slug, space in self.spaces.items():
                name = space.contestant.text
                is_begun = any(self.folder.glob(f"{glob.escape(slug)}-tune*"))
                if is_begun and declared.contestants.get(name, space.axes) != space.axes:
                    raise ValueError(f"{self.folder} holds {name} with another search space; {way_out}")
                declared.contestants[name], declared.never[name] = space.axes, space.never
            durable.write(self.folder / _DECLARED, encode(asdict(declared), indent=1) + "\n")


@dataclass(frozen=True)
class Declared:
    """The content of arena.json: whose arena it is, its tuning seed, and what is tuned of each contestant."""

    of: str
    seed: int
    contestants: dict[str, tuple[Axis, ...]]
    never: dict[str, tuple[str, ...]]
    """The options of each that stay at their defaults."""

    @property
    def axes(self) -> dict[Contestant, tuple[Axis, ...]]:
        """The axes by contestant."""
        return {Contestant.parse(text): axes for text, axes in self.contestants.items()}


def read_declared(folder: Path) -> Declared:
    """Read the arena.json of a folder."""
    path = folder / _DECLARED
    try:
        declared = build(Declared, decode(path.read_bytes()))
        for text in declared.contestants:
            Contestant.parse(text)
        return declared
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no arena; `merit arena ... --out {folder}` makes one") from None
    except ValueError:
        raise ValueError(
            f"{path} is not as `merit arena` wrote it; restore it, or choose another --out"
        ) from None


def read(folder: Path) -> table.Table:
    """The table of an arena, its runs with slug, kind, number, and loss: infinite if they diverged."""
    runs, steps = table.read(folder)
    name = pl.col("run").str.split("/").list.last()
    runs = runs.with_columns(name.str.extract_groups(_NAME).alias("name")).unnest("name")
    runs = runs.filter(pl.col("slug").is_not_null())
    return table.Table(runs.with_columns(LOSS.alias("loss"), pl.col("number").cast(pl.Int64)), steps)


def best_of(runs: pl.DataFrame) -> pl.DataFrame:
    """The tuning run with the lowest loss of each slug; the first of equal ones."""
    tuned = runs.filter((pl.col("kind") == "tune") & pl.col("loss").is_finite())
    return tuned.sort("loss", "number").unique("slug", keep="first", maintain_order=True)


def answer(folder: Path) -> Page:
    """What all runs in a folder say: which contestant ends lowest, how surely, and how each was tuned."""
    declared = read_declared(folder)
    names = {one.slug: label for one, label in labels(list(declared.axes)).items()}
    runs, steps = read(folder)
    series = pl.col("slug").replace_strict(names).alias("series")
    unsorted = [pl.lit("").alias("conditions"), pl.lit(None, pl.String).alias("left_out")]
    runs = runs.filter(pl.col("slug").is_in(list(names))).with_columns(series, *unsorted)
    tuned = runs.filter(pl.col("kind") == "tune")
    finals = runs.filter(pl.col("kind") == "final").join(best_of(runs), on=["slug", "number"], how="semi")
    sections, summary = ranking(finals, steps)
    if missing := [name for name in names.values() if name not in finals["series"]]:
        summary += f" {join(missing)} {'has' if len(missing) == 1 else 'have'} no final runs yet."
    tuning: list[tuple[str, ...]] = []
    warnings: list[str] = []
    for one, axes in declared.axes.items():
        rows, remarks = _tuning(one, axes, tuned.filter(pl.col("slug") == one.slug), declared.seed)
        tuning += [(names[one.slug], *row) for row in rows]
        warnings += [f"{names[one.slug]}: {remark}" for remark in remarks]
    head = ("Optimizer", "Runs", "Setting", "Best", "Searched")
    rest = tuple((names[one.slug], ", ".join(declared.never[one.text])) for one in declared.axes)
    sections += [
        Section("How each was tuned", Table(head, tuple(tuning)), _TUNING),
        Section("What was never tuned", Table(("Optimizer", "At their defaults"), rest, 2), folded=True),
    ]
    if tuned["loss"].is_finite().any():
        from merit_lab.results import charts  # altair takes a second to import

        points = tuned.filter(pl.col("loss").is_finite())
        drawn = charts.points(points, "loss", name="tuning", title="Losses of the tuning runs")
        sections.append(Section("Tuning runs", drawn, "One seed each; all their settings differ."))
    first = runs.row(0, named=True)
    return Page(
        title="Optimizers tuned alike",
        facts=[
            f"{first['steps']:,} steps of {first['batch']:,} sequences",
            f"{tuned.height} tuning runs",
            f"{finals.height} final runs",
        ],
        summary=summary.strip(),
        warnings=warnings,
        sections=sections,
        runs=runs.drop("slug", "kind", "number", "conditions", "left_out"),
    )


_TUNING = "The best values found, and between which they were searched. What is not listed was never tuned."


def _tuning(
    contestant: Contestant, axes: Sequence[Axis], runs: pl.DataFrame, seed: int
) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rows of the table of tuning, and what ran out."""
    done = runs.drop_nulls("loss")
    lost = done.filter(pl.col("loss").is_infinite()).height
    num = f"{done.height}" + (f", {lost} diverged" if lost else "")
    best = best_of(runs)
    if best.is_empty():
        remark = "no tuning run finished, so it has no best settings."
        return [(num, NOTHING, NOTHING, NOTHING)], [remark]
    values = point(axes, seed, best["number"][0])
    rows: list[tuple[str, ...]] = [(num, axis.name, f"{values[axis.name]:g}", axis.words) for axis in axes]
    for option in contestant.options:
        key, _, value = option.partition("=")
        rows.append((num, key, value, "given"))
    free = [axis for axis in axes if not axis.is_fixed]
    remarks = []
    at_edge = [axis.name for axis in free if axis.is_rate and axis.is_edge(values[axis.name])]
    if at_edge:
        edges = join([f"{name} {values[name]:g}" for name in at_edge])
        remarks.append(f"its best {edges} is at the edge of its range; widen that with --space.")
    if done.height < (needed := _RUNS_PER_AXIS * len(free)):
        remarks.append(
            f"{done.height} runs for {join([axis.name for axis in free])}; the budget ran out before all "
            f"were tuned, which takes {needed} or more."
        )
    return rows, remarks


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""

    def work(arguments: Arguments, folder: Path) -> Callable[[], Page]:
        if arguments.add:
            read_declared(folder)  # there must be an arena to add to
        arena = Arena(arguments, folder)
        trials = arena.tuning()
        arena.declare()
        train_all(trials, folder, arguments)
        train_all(arena.finals(), folder, arguments)
        return lambda: answer(folder)

    replaced = {
        **REPLACED,
        "--optimizer.lr": "--space merit.lr=2e-3:3e-2",
        "--optimizer.warmup": "--space warmup=0.1:0.4",
    }
    return run_study("arena", Arguments, argv, work, replaced=replaced)
