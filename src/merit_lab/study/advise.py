"""`merit advise`: an optimizer, its rates and its batch for another run, from records of runs.

The best learning rate is assumed to follow a power law in the batch, the number of parameters and the steps:

    log lr = a + b*log(batch) + c*log(parameters) + d*log(steps)

Each group of runs that may be compared is an observation of it, as sharp as the losses around its best rate
are steep. Exponents that the records do not determine come from a prior, with an uncertainty: this is linear
regression with a normal prior. Where a size was measured itself, its own best rate is the answer.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import polars as pl
import polars.selectors as cs
import tyro

from merit_lab.checks import check_size
from merit_lab.command_line import rules
from merit_lab.json_values import build
from merit_lab.results.names import display_name, display_names, short_name
from merit_lab.results.series import with_series
from merit_lab.runs import Run, table
from merit_lab.study.command import exit_status
from merit_lab.study.fields import LR
from merit_lab.tables import NOTHING, Table, print_table
from merit_lab.text import amount, join
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_lab.train.config import TOKENS_PER_PARAMETER

MOST_BEYOND = 10.0
"""How many times beyond the records a size, a length or a batch may lie."""
_PRIOR_DEVIATION = 0.25  # of every exponent
_WITH_RATIOS = ("lamb", "lars", "merit", "orscale")  # the names of optimizers with trust ratios contain one
_UNKNOWN = 100.0  # prior deviation of a, in natural logarithms: no information
_LEAST_SPREAD = 0.01  # nats; smaller differences of losses decide nothing
_WIDTH = 1.2816  # standard deviations on both sides for 80%
_BATCH_COST = 0.05  # nats that a larger batch may cost where it is recommended


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Recommend an optimizer and its settings for a run, from the records of other runs.

    The best learning rate is assumed to follow a power law in the batch, the model size and the steps.
    """

    records: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs or their archives: of arenas, sweeps, or any other, with the same model family."""
    model: str
    """The model to train, as in `merit train`."""
    batch: int | None = None
    """Batch size in sequences. None: the largest that costs little, if the records tell."""
    steps: int | None = None
    """Length of the run in steps."""
    tokens: int | None = None
    """Length of the run in tokens. Default: 20 for each parameter."""
    hours: bool = False
    """Also say how long the run takes here."""


class Size(NamedTuple):
    """What the best learning rate depends on."""

    batch: int
    parameters: int
    steps: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """The size of a run, from its row."""
        return cls(row["batch"], row["parameters"], row["steps"])

    def distance(self, other: Size) -> float:
        """The factors between two sizes together, in natural logarithms."""
        return sum(abs(math.log(mine / theirs)) for mine, theirs in zip(self, other, strict=True))


@dataclass(frozen=True, kw_only=True)
class Advice:
    """An optimizer's recommended settings: those of its nearest best run, with the rates for this one."""

    settings: OptimizerConfig
    loss: float
    """At the nearest size, the mean over seeds of its best settings."""
    low: float
    high: float
    """The best rate is between these with a probability of 80%, if the power law holds."""
    is_measured: bool
    """Whether the rate was the best of runs of this very size."""

    @property
    def name(self) -> str:
        """The optimizer."""
        return self.settings.name

    @property
    def lr(self) -> float:
        """The learning rate."""
        assert self.settings.lr is not None
        return self.settings.lr

    @property
    def rate_scale(self) -> float | None:
        """What the rest multiplies ``lr`` by, if the run says so."""
        second = self.settings.rest_lr
        return self.settings.rate_scale if second is None else second / self.lr


def read_records(*folders: Path | str) -> pl.DataFrame:
    """The runs in folders that finished with a validation loss: with series, conditions and parameters."""
    runs = with_series(table.read(*folders).runs)
    finished = pl.col("validation_loss").is_finite() & (pl.col("status") == "finished")
    runs = runs.filter(finished & pl.col("left_out").is_null() & (pl.col(LR) > 0))
    if runs.is_empty():
        raise ValueError(f"no run in {join(list(map(str, folders)))} finished with a validation loss")
    models = runs.unique(cs.starts_with("model."))
    known = models.select(
        cs.starts_with("model."), pl.col("folder").map_elements(_parameters, pl.Int64).alias("parameters")
    )
    return runs.join(known, on=known.columns[:-1], how="left", nulls_equal=True, maintain_order="left")


def _parameters(folder: str) -> int:
    """The number of parameters of a run's model. The rest of its configuration may be another program's."""
    from merit_lab.models import num_parameters

    config = TrainConfig.from_dict({"data": "", "model": Run.open(folder).config["model"]})
    return num_parameters(config.model)


def advise(records: pl.DataFrame, size: Size) -> list[Advice]:
    """Recommend settings of each optimizer of the records, the best of the nearest size first.

    Raises ValueError if the run lies more than ten times beyond all records.
    """
    if far := beyond(records, size, MOST_BEYOND):
        raise ValueError(
            f"the run lies more than {MOST_BEYOND:g} times beyond these records: {join(far)}. Run an arena "
            "nearer to it, on a smaller model with as many steps, and give its folder too"
        )
    loss = pl.col("validation_loss").mean().over("series").alias("loss")
    near = _nearest(records, size).with_columns(loss)
    lowest = near.group_by("optimizer.name").agg(pl.col("loss").min()).sort("loss", "optimizer.name")
    per_optimizer = [
        (records.filter(pl.col("optimizer.name") == name), loss) for name, loss in lowest.iter_rows()
    ]
    return [_advice(mine, size, loss) for mine, loss in per_optimizer if not beyond(mine, size, MOST_BEYOND)]


def _advice(mine: pl.DataFrame, size: Size, loss: float) -> Advice:
    observations = [observe(group) for _, group in mine.group_by("conditions", maintain_order=True)]
    nearest = min(observations, key=lambda one: (one.size.distance(size), one.deviation))
    best = build(OptimizerConfig, Run.open(nearest.row["folder"]).config["optimizer"])
    assert best.lr is not None
    is_measured = nearest.size == size
    mean, deviation = nearest.rate, nearest.deviation
    if not is_measured:
        mean, deviation = predict(observations, size, _prior(best.name))
    lr = best.lr if is_measured else math.exp(mean)
    low, high = (math.exp(mean + sign * _WIDTH * deviation) for sign in (-1, 1))
    return Advice(
        settings=best if is_measured else _scaled(best, lr / best.lr),
        loss=loss,
        low=min(low, lr),
        high=max(high, lr),
        is_measured=is_measured,
    )


def _scaled(best: OptimizerConfig, factor: float) -> OptimizerConfig:
    """The same settings with other rates, of two digits."""

    def times(value: float | None) -> float | None:
        return None if value is None else float(f"{value * factor:.2g}")

    return dataclasses.replace(best, lr=times(best.lr), rest_lr=times(best.rest_lr))


def _nearest(records: pl.DataFrame, size: Size) -> pl.DataFrame:
    """The records of the size nearest to this one; of several, those with most optimizers and runs."""
    groups = records.partition_by("conditions", maintain_order=True)

    def rank(group: pl.DataFrame) -> tuple[float, int, int]:
        distance = Size.of(group.row(0, named=True)).distance(size)
        return distance, -group["optimizer.name"].n_unique(), -group.height

    return min(groups, key=rank)


def beyond(records: pl.DataFrame, size: Size, most: float) -> list[str]:
    """In what a run lies more than ``most`` times beyond the records, as text."""
    found = []
    for name, value in size._asdict().items():
        low, high = records.select(pl.col(name).min(), pl.col(name).max().alias("high")).row(0)
        if value > most * high or value * most < low:
            show = amount if name == "parameters" else "{:,}".format
            range_ = show(low) if low == high else f"{show(low)} to {show(high)}"
            what = f"a batch of {show(value)}" if name == "batch" else f"{show(value)} {name}"
            found.append(f"{what} (they have {range_})")
    return found


class Observation(NamedTuple):
    """The best rate of an optimizer in runs of one size: logarithm, its deviation, and the best run."""

    size: Size
    rate: float
    deviation: float
    row: Mapping[str, Any]


def observe(group: pl.DataFrame) -> Observation:
    """The best rate of comparable runs: the minimum of a parabola through it and half and twice of it.

    Losses that differ by less than the spread of seeds are not told apart.
    """
    best = group.sort("validation_loss", LR).row(0, named=True)
    centre, factor = math.log(best[LR]), math.log(2)
    octaves = (pl.col(LR).log() - centre) / factor
    near = group.filter((octaves - octaves.round()).abs() < 0.15).group_by(octaves.round().alias("octave"))
    losses = dict(near.agg(pl.col("validation_loss").min()).iter_rows())
    if {-1, 0, 1} <= losses.keys():
        curvature = (losses[-1] - 2 * losses[0] + losses[1]) / 2 / factor**2
        if curvature > 0:
            same = group.filter(pl.col("series") == best["series"])["validation_loss"]
            spread = max(float(same.std() or 0.0), _LEAST_SPREAD)  # type: ignore[arg-type]
            lowest = centre + (losses[-1] - losses[1]) / (4 * curvature * factor)
            return Observation(Size.of(best), lowest, min(factor, math.sqrt(spread / curvature)), best)
    return Observation(Size.of(best), centre, factor, best)


def _prior(optimizer: str) -> tuple[float, float, float]:
    """The exponents of batch, parameters and steps that are assumed before records are seen.

    What docs/results/learning-rates.md measured: at a constant number of steps the batch hardly matters, and
    theory has its square root for Adam; most rates fall with the size. With trust ratios a step is a share of
    the weights, and shares multiply over the steps; other steps add up.
    """
    has_ratios = any(part in short_name(optimizer).lower() for part in _WITH_RATIOS)
    return 0.25, -0.25, -0.5 if has_ratios else 0.0


def predict(
    observations: Sequence[Observation], size: Size, prior: tuple[float, float, float]
) -> tuple[float, float]:
    """The mean and the standard deviation of the best rate's logarithm."""
    deviations = np.array([_UNKNOWN, *(_PRIOR_DEVIATION for _ in prior)])
    precision = np.diag(deviations**-2)
    weighted = precision @ np.array([0.0, *prior])
    for seen in observations:
        features = np.array([1.0, *map(math.log, seen.size)])
        precision = precision + np.outer(features, features) / seen.deviation**2
        weighted = weighted + features * seen.rate / seen.deviation**2
    covariance = np.linalg.inv(precision)
    wanted = np.array([1.0, *map(math.log, size)])
    return float(wanted @ covariance @ weighted), float(np.sqrt(wanted @ covariance @ wanted))


def advise_batch(records: pl.DataFrame, tokens: int) -> int:
    """The largest batch whose best loss is near the lowest, at the number of tokens nearest to this."""
    planned = pl.col("steps") * pl.col("batch") * pl.col("model.context")
    alike = ["length", "parameters", "environment.data.fingerprint"]
    seen = records.with_columns(planned.alias("planned"), planned.log().round(1).alias("length"))
    seen = seen.filter(pl.col("batch").n_unique().over(alike) > 1)
    if seen.is_empty():
        raise ValueError(
            "these records have no two batches with the same tokens, model and text, so they do not tell "
            "which batch is good; give --batch, or measure it: merit scale"
        )
    distance, count = (pl.col("planned") / tokens).log().abs(), pl.len().over(alike)
    seen = seen.sort(distance, count, descending=[False, True], maintain_order=True)
    near = seen.join(seen.head(1), on=alike, how="semi", nulls_equal=True)
    best = near.group_by("batch").agg(pl.col("validation_loss").min())
    good = best.filter(pl.col("validation_loss") <= pl.col("validation_loss").min() + _BATCH_COST)
    return int(good["batch"].max())  # type: ignore[arg-type]


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    arguments = tyro.cli(Arguments, args=list(argv), prog="merit advise", registry=rules())

    def work() -> None:
        for line in _answer(arguments):
            if isinstance(line, Table):
                print_table(line)
            else:
                print(line)

    return exit_status("merit advise", work)


def _answer(arguments: Arguments) -> Iterator[str | Table]:
    """The caveat, the table, and the command to begin with."""
    from merit_lab.models import find_model, num_parameters

    for name in ("batch", "steps", "tokens"):
        if (value := getattr(arguments, name)) is not None:
            check_size(f"--{name}", value, 2**62)
    _, model = find_model(arguments.model)
    if not arguments.records:
        raise ValueError("no records are given; name folders of runs, as in runs/arena-tiny")
    if arguments.batch is None and arguments.steps is not None:
        raise ValueError("--steps needs --batch; to ask for the batch, give the length as --tokens")
    records = read_records(*arguments.records)
    tokens = arguments.tokens or TOKENS_PER_PARAMETER * num_parameters(model)
    batch = arguments.batch or advise_batch(records, tokens)
    config = TrainConfig(
        data=Path(), model=model, batch=batch, steps=arguments.steps, tokens=arguments.tokens
    ).resolve(None)
    assert config.steps is not None
    size = Size(batch, num_parameters(model), config.steps)
    advice = advise(records, size)
    yield _caveat(records, size)
    if arguments.batch is None:
        yield f"Batch: {batch}, the largest within {_BATCH_COST:g} of the lowest loss with as many tokens."
    yield as_table(advice)
    missing = set(records["optimizer.name"]) - {one.name for one in advice}
    if missing:
        yield f"Not ranked, because it has no records there: {join(sorted(map(display_name, missing)))}."
    if arguments.hours:
        from merit_lab.study.cost import Cost, duration, find_speed

        speed = find_speed(config)
        yield f"Time: about {duration(Cost.of([(config, 0)]).seconds(speed))} here ({speed.source})."
    if advice:
        yield f"\nTo begin with {display_name(advice[0].name)}:"
        options = shlex.join(_train_options(advice[0].settings))
        length = f"--batch {size.batch} --steps {size.steps}"
        yield f"  merit train {arguments.model} --data FOLDER {length} {options}"


def as_table(advice: Sequence[Advice]) -> Table:
    """A row for each optimizer, the best at the nearest size first."""
    names = display_names([one.name for one in advice])
    head = (
        "Optimizer",
        "Learning rate",
        "80% interval",
        "rate_scale of the rest",
        "Warm-up",
        "Loss at the nearest",
    )
    rows = (
        (
            names[one.name],
            f"{one.lr:g}" + (" (measured)" if one.is_measured else ""),
            f"{one.low:.2g} to {one.high:.2g}",
            NOTHING if one.rate_scale is None else f"{one.rate_scale:.2g}",
            f"{one.settings.warmup:g}",
            f"{one.loss:.3f}",
        )
        for one in advice
    )
    return Table(head, tuple(rows))


def _caveat(records: pl.DataFrame, size: Size) -> str:
    """The one thing to know first."""
    nearest = Size.of(_nearest(records, size).row(0, named=True))
    what = (
        f"{amount(nearest.parameters)} parameters and {nearest.steps:,} steps of {nearest.batch:,} sequences"
    )
    if outside := beyond(records, size, 1.0):
        return (
            f"Beyond what was measured: {join(outside)}. The order is that of {what}; tune the rates first."
        )
    if nearest == size:
        return f"Measured, with {what}."
    return f"Between what was measured. The order is that of the nearest, {what}; it may be another here."


def _train_options(chosen: OptimizerConfig) -> Iterator[str]:
    """The options of `merit train` for an optimizer."""
    for field in dataclasses.fields(chosen):
        value = getattr(chosen, field.name)
        if field.name == "name" or value != getattr(OptimizerConfig(), field.name):
            yield f"--optimizer.{field.name.replace('_', '-')}"
            yield from map(str, value if isinstance(value, tuple) else [value])
