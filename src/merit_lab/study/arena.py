"""An arena: several optimizers tuned alike, then each at its best with seeds that chose nothing.

Its runs say what they are by their names: CONTESTANT-tune007 and CONTESTANT-final007-seed3, where 7 is the
number of a point in the contestant's space (`space.py`). arena.json has the spaces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from merit_lab.checks import check_at_least, check_size
from merit_lab.data import Dataset
from merit_lab.models import num_parameters
from merit_lab.results import statistic
from merit_lab.results.page import Page, Section
from merit_lab.runs import durable, lock, table
from merit_lab.study.command import StudyArguments, conclude, exit_status, parse, train_all
from merit_lab.study.contestant import Contestant, labels
from merit_lab.study.fields import LR, with_values
from merit_lab.study.space import MOST_TRIALS, Axis, Space, check_changes, point, space_of
from merit_lab.study.trial import Trial, check_distinct
from merit_lab.tables import NOTHING, Table
from merit_lab.text import amount, count_seeds, join
from merit_lab.train import CheckpointConfig, MeasureConfig, TrainConfig
from merit_lab.train.config import TOKENS_PER_PARAMETER

_DECLARED = "arena.json"
_RUNS_PER_AXIS = 2  # below this the settings after the first are hardly tuned
_NAME = r"^(?<slug>.+)-(?<kind>tune|final)(?<number>\d+)(?:-seed\d+)?$"


@dataclass(frozen=True, kw_only=True)
class Arena:
    """The trials of an arena.

    Args:
        base: configuration that all runs share; by default they have five tokens for each parameter.
        folder: folder of the runs.
        contestants: the contestants.
        budget: tuning runs of each.
        seeds: seeds of the final runs.
        tuning_seed: seed of the tuning runs, and of the points of the spaces.
        changes: changes of the spaces, as in ``space_of``.
    """

    base: TrainConfig
    folder: Path
    contestants: Sequence[Contestant]
    budget: int
    seeds: Sequence[int]
    tuning_seed: int = 0
    changes: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_distinct("optimizers", [contestant.text for contestant in self.contestants])
        check_distinct("seeds", self.seeds)
        check_size("--budget", self.budget, MOST_TRIALS)
        check_at_least("--tuning-seed", self.tuning_seed, 0)
        check_changes(self.changes, self.contestants)
        if self.tuning_seed in self.seeds:
            raise ValueError(
                f"--seeds has {self.tuning_seed}, which is --tuning-seed; final runs need other seeds than "
                "the one that chose their settings and would flatter them"
            )
        if self.base.measure.validation_every == 0:
            raise ValueError("measure.validation_every is 0; an arena compares validation losses")

    @cached_property
    def config(self) -> TrainConfig:
        """The configuration of all runs, with its length; a quarter of what is compute-optimal."""
        vocab_size = Dataset.open(self.base.data).vocab_size
        tokens, steps = self.base.tokens, self.base.steps
        model = self.base.fitted_model(vocab_size)
        if steps is None:
            tokens = tokens or TOKENS_PER_PARAMETER // 4 * num_parameters(model)
            steps = math.ceil(tokens / (self.base.batch * model.context))
        return replace(self.base, model=model, steps=steps, tokens=None)

    @cached_property
    def spaces(self) -> dict[str, Space]:
        """The space of each contestant, by its slug."""
        return {one.slug: space_of(one, self.config, self.changes) for one in self.contestants}

    def tuning(self) -> list[Trial]:
        """All tuning runs; those of all contestants with the same number together."""
        return [
            self._trial(slug, number, self.tuning_seed, f"{slug}-tune{number:03d}")
            for number in range(self.budget)
            for slug, space in self.spaces.items()
            if number == 0 or space.is_tuned
        ]

    def finals(self) -> list[Trial]:
        """The final runs of the best settings; none where no tuning run finished."""
        best = best_of(read(self.folder))
        return [
            self._trial(slug, best[slug], seed, f"{slug}-final{best[slug]:03d}-seed{seed}")
            for seed in self.seeds
            for slug in self.spaces
            if slug in best
        ]

    def _trial(self, slug: str, number: int, seed: int, name: str) -> Trial:
        space = self.spaces[slug]
        values = space.settings(point(space.axes, self.tuning_seed, number))
        config = with_values(replace(space.base, seed=seed), values)
        return Trial(self.folder / name, config.resolve(config.model.vocab_size))

    def declare(self) -> None:
        """Write down the spaces, beside those of contestants that are there. Another arena is refused."""
        shared = replace(self.config, measure=MeasureConfig(), checkpoint=CheckpointConfig())
        of = f"{shared.fingerprint} {Dataset.open(self.base.data).fingerprint} {self.tuning_seed}"
        with lock(self.folder, patience=120):
            spaces = {}
            if (self.folder / _DECLARED).exists():
                declared = read_declared(self.folder)
                if declared["of"] != of:
                    raise ValueError(
                        f"{self.folder} holds an arena with another model, text, batch, length, tuning seed "
                        "or shared options; give the same, or another folder with --out"
                    )
                spaces = declared["contestants"]
            for space in self.spaces.values():
                spaces[space.contestant.text] = [asdict(axis) for axis in space.axes]
            content = {"of": of, "seed": self.tuning_seed, "contestants": spaces}
            durable.write(self.folder / _DECLARED, json.dumps(content, indent=1) + "\n")


def read_declared(folder: Path) -> dict[str, Any]:
    """What arena.json says: the tuning seed, and the axes of each contestant by its text."""
    path = folder / _DECLARED
    try:
        declared = json.loads(path.read_text(encoding="utf-8"))
        spaces = {
            Contestant.parse(text).text: tuple(Axis(**axis) for axis in axes)
            for text, axes in declared["contestants"].items()
        }
        assert all(
            isinstance(end, int | float)
            for axes in spaces.values()
            for axis in axes
            for end in (axis.low, axis.high)
        )
        return {
            "of": str(declared["of"]),
            "seed": int(declared["seed"]),
            "contestants": declared["contestants"],
            "axes": spaces,
        }
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no arena; `merit arena ... --out {folder}` makes one") from None
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError):
        raise ValueError(
            f"{path} is not as `merit arena` wrote it; restore it, or choose another --out"
        ) from None


def read(folder: Path) -> pl.DataFrame:
    """The runs of an arena: those of the table with slug, kind, number, and loss, infinite if diverged."""
    runs = table.read(folder).runs
    name = pl.col("run").str.split("/").list.last()
    runs = runs.with_columns(name.str.extract_groups(_NAME).alias("name")).unnest("name")
    loss = pl.when(pl.col("status") == "diverged").then(math.inf).when(pl.col("status") == "finished")
    return runs.filter(pl.col("slug").is_not_null()).with_columns(
        loss.then(pl.col("validation_loss")).alias("loss"), pl.col("number").cast(pl.Int64)
    )


def best_of(runs: pl.DataFrame) -> dict[str, int]:
    """The number of the tuning run with the lowest loss, by slug; the first of equal ones."""
    tuned = runs.filter((pl.col("kind") == "tune") & pl.col("loss").is_finite())
    best = tuned.sort("loss", "number").group_by("slug", maintain_order=True).first()
    return dict(best.select("slug", "number").iter_rows())


def answer(folder: Path) -> Page:
    """What all runs in a folder say: which contestant ends lowest, how surely, and how each was tuned."""
    declared = read_declared(folder)
    contestants = [Contestant.parse(text) for text in declared["contestants"]]
    names = {one.slug: label for one, label in labels(contestants).items()}
    axes = {one.slug: declared["axes"][one.text] for one in contestants}
    runs = read(folder).filter(pl.col("slug").is_in(list(names)))
    runs = runs.with_columns(pl.col("slug").replace_strict(names).alias("series"))
    best = best_of(runs)
    chosen = pl.DataFrame(
        {"slug": list(best), "number": list(best.values())}, schema={"slug": pl.String, "number": pl.Int64}
    )
    finals = runs.filter(pl.col("kind") == "final", pl.col("loss").is_not_null()).join(
        chosen, on=["slug", "number"]
    )
    finals = finals.with_columns(pl.lit("").alias("conditions"), pl.lit(None, pl.String).alias("left_out"))
    order = (
        finals.group_by("slug", "series").agg(pl.col("loss").mean()).sort("loss", "slug")["series"].to_list()
    )
    differences = statistic.differences(finals)
    tuned = runs.filter(pl.col("kind") == "tune")
    tuning = [
        _tuning(
            names[one.slug], one, tuned.filter(pl.col("slug") == one.slug), axes[one.slug], declared["seed"]
        )
        for one in contestants
    ]
    one = runs.row(0, named=True)
    sections = [
        Section("Leaderboard", _leaderboard(order, finals, differences), _LEADERBOARD),
        Section("All pairs", _matrix(order, differences), _PAIRS),
        Section(
            "How each was tuned",
            Table(_TUNING_HEAD, tuple(row for rows, _ in tuning for row in rows)),
            _TUNING,
        ),
        *_charts(runs, finals, table.read(folder).steps),
    ]
    return Page(
        title="Optimizers tuned alike",
        facts=[
            f"{one['steps']:,} steps of {one['batch']:,} sequences",
            f"{tuned.height} tuning runs",
            f"{finals.height} final runs",
        ],
        summary=_summary(order, finals, differences),
        warnings=[*(remark for _, remarks in tuning for remark in remarks), *_lost(finals, names, order)],
        sections=sections,
        runs=runs.drop("slug", "kind", "number"),
    )


_LEADERBOARD = (
    "Mean final validation loss of seeds that chose nothing, in nats per token, and the difference to the "
    "first with its interval; all intervals of a page hold at once with 95% confidence."
)
_PAIRS = "The row minus the column, with the interval."
_TUNING = (
    "The best values found, and between which they were searched. An optimizer does not have what is not "
    "listed, or has it at its default."
)
_TUNING_HEAD = ("Optimizer", "Runs", "Setting", "Best", "Searched")


def _summary(order: Sequence[str], finals: pl.DataFrame, differences: pl.DataFrame) -> str:
    if not order:
        return "No contestant is tuned and trained yet."
    first = order[0]
    losses = finals.filter(pl.col("series") == first)["loss"].to_list()
    mean = math.fsum(losses) / len(losses)
    if not math.isfinite(mean):
        return "No contestant has settings with which all seeds finish."
    text = f"{first} ends lowest, at {mean:.3f} ({count_seeds(len(losses))})"
    ties = [row["second"] for row in differences.to_dicts() if row["first"] == first and not row["high"] < 0]
    ties = [name for name in ties if math.isfinite(finals.filter(pl.col("series") == name)["loss"].mean())]  # type: ignore[arg-type]
    if ties:
        return f"{text}; {join(ties)} cannot be told from it by these seeds."
    return f"{text}, below all others." if len(order) > 1 else f"{text}."


def _lost(finals: pl.DataFrame, names: dict[str, str], order: Sequence[str]) -> list[str]:
    remarks = []
    for name in order:
        seeds = finals.filter(pl.col("series") == name, pl.col("loss").is_infinite())["seed"].to_list()
        if seeds:
            remarks.append(f"{name} diverged with seed {join([str(seed) for seed in sorted(seeds)])}.")
    if missing := [name for name in names.values() if name not in order]:
        remarks.append(f"{join(missing)} {'has' if len(missing) == 1 else 'have'} no final runs yet.")
    return remarks


def _leaderboard(order: Sequence[str], finals: pl.DataFrame, differences: pl.DataFrame) -> Table:
    by_pair = {(row["first"], row["second"]): row for row in differences.to_dicts()}
    rows = []
    for name in order:
        own = finals.filter(pl.col("series") == name)
        pair = by_pair.get((order[0], name))
        speed: Any = own["tokens_per_second"].median()
        logit: Any = own["largest_logit"].max()
        rows.append(
            (
                name,
                _loss(own["loss"].to_list()),
                NOTHING if pair is None else _interval(pair, -1.0),
                str(own.height),
                NOTHING if speed is None else amount(speed),
                NOTHING if logit is None else f"{logit:.3g}",
            )
        )
    head = ("Optimizer", "Loss", "Above the first", "Seeds", "Tokens/s", "Largest logit")
    return Table(head, tuple(rows))


def _matrix(order: Sequence[str], differences: pl.DataFrame) -> Table:
    cells = {}
    for row in differences.to_dicts():
        cells[row["first"], row["second"]] = _interval(row, 1.0)
        cells[row["second"], row["first"]] = _interval(row, -1.0)
    rows = tuple((name, *(cells.get((name, other), NOTHING) for other in order)) for name in order)
    return Table(("", *order), rows)


def _interval(row: dict[str, Any], sign: float) -> str:
    """A difference and its interval; of the second to the first with a sign of -1."""
    mean = sign * row["mean"]
    if not math.isfinite(mean):
        return "diverged"
    if not math.isfinite(row["high"]):
        return f"{mean:+.3f}"
    low, high = sorted((sign * row["low"], sign * row["high"]))
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def _loss(values: Sequence[float]) -> str:
    mean = math.fsum(values) / len(values)
    return f"{mean:.3f}" if math.isfinite(mean) else "diverged"


def _tuning(
    name: str, contestant: Contestant, runs: pl.DataFrame, axes: Sequence[Axis], seed: int
) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rows of the table of tuning, and what ran out."""
    done = runs.filter(pl.col("loss").is_not_null())
    lost = done.filter(pl.col("loss").is_infinite()).height
    num = f"{done.height}" + (f", {lost} diverged" if lost else "")
    best = best_of(runs).get(contestant.slug)
    if best is None:
        return [(name, num, NOTHING, NOTHING, NOTHING)], [
            f"{name}: no tuning run finished, so it has no best settings."
        ]
    free = [axis for axis in axes if not axis.is_fixed]
    values = point(axes, seed, best)
    rows: list[tuple[str, ...]] = [
        (name, num, axis.name, f"{values[axis.name]:g}", axis.words) for axis in axes
    ]
    rows += [
        (name, num, key, value, "given")
        for key, _, value in (one.partition("=") for one in contestant.options)
    ]
    at_edge = [axis.name for axis in free if axis.edge(values[axis.name])]
    remarks = []
    if edges := [f"{key} {values[key]:g}" for key in at_edge if key in ("lr", "rest_lr", "rest_share")]:
        remarks.append(
            f"{name}: its best {join(edges)} is at the edge of its range; widen that with --space."
        )
    if done.height < (needed := _RUNS_PER_AXIS * len(free)):
        remarks.append(
            f"{name}: {done.height} runs for {join([axis.name for axis in free])}; the budget ran out before "
            f"all were tuned, which takes {needed} or more."
        )
    return rows, remarks


def _charts(runs: pl.DataFrame, finals: pl.DataFrame, steps: pl.DataFrame) -> list[Section]:
    from merit_lab.results import charts  # altair takes a second to import

    sections = []
    tuned = runs.filter(pl.col("kind") == "tune", pl.col("loss").is_finite())
    if finals["loss"].is_finite().any():
        drawn = [
            charts.curves(
                finals, steps, against=against, name=f"loss-{against}", title=f"Loss against {against}"
            )
            for against in ("step", "seconds")
        ]
        caption = "Thin lines are seeds, thick ones their means; a cross is where a run diverged."
        sections.append(Section("Final runs", drawn, caption))
    if not tuned.is_empty():
        drawn = [
            charts.points(tuned, "loss", name="tuning", title="Losses of the tuning runs"),
            charts.lines(tuned.sort(LR), LR, "loss", name="rates", title="Loss against the rate", log_x=True),
        ]
        sections.append(Section("Tuning runs", drawn, "Their other settings differ too."))
    return sections


@dataclass(frozen=True, kw_only=True)
class Arguments(StudyArguments):
    """Tune several optimizers alike, and show which is best.

    Every contestant has BUDGET tuning runs at quasi-random points of its search space: learning rates,
    warm-up, momentum or betas, weight decay, as far as it has them. Then its best settings are trained with
    every seed of --seeds. The runs are in OUT, the page of all of them is OUT/report. To continue after an
    interruption, run the same command again: finished runs are not repeated.
    """

    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit", "muon", "muon-merit")
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


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""

    def work() -> int:
        replaced = {
            "--seed": "--seeds 1 2 3",
            "--optimizer.name": "--optimizers lamb merit",
            "--optimizer.lr": "--space merit.lr=2e-3:3e-2",
            "--optimizer.warmup": "--space warmup=0.1:0.4",
        }
        arguments, folder = parse(Arguments, argv, command="arena", study="an arena", replaced=replaced)
        if arguments.add:
            read_declared(folder)  # there must be an arena to add to
        arena = Arena(
            base=arguments.config,
            folder=folder,
            contestants=[Contestant.parse(text) for text in arguments.add or arguments.optimizers],
            budget=arguments.budget,
            seeds=arguments.seeds,
            tuning_seed=arguments.tuning_seed,
            changes=arguments.space,
        )
        trials = arena.tuning()
        arena.declare()
        train_all(trials, folder, arguments)
        train_all(arena.finals(), folder, arguments)
        return conclude("merit arena", lambda: answer(folder), folder)

    return exit_status("merit arena", work)
