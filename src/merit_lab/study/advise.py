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
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import polars as pl
import tyro

from merit_lab.checks import check_size
from merit_lab.command_line import rules
from merit_lab.results import statistic
from merit_lab.results.names import display_name, display_names, short_name
from merit_lab.results.series import with_series
from merit_lab.runs import Run, table
from merit_lab.study.fields import LR, train_option
from merit_lab.study.valley import Valley
from merit_lab.tables import NOTHING, Table, print_table
from merit_lab.text import amount, join
from merit_lab.train import OptimizerConfig, TrainConfig

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

    The best learning rate is assumed to follow a power law in the batch, the model size and the steps. Where
    the records do not determine an exponent, a prior does, with an uncertainty: rates grow a little with the
    batch and fall a little with the size. With trust ratios, as MERIT and MuonMERIT have, they fall as the
    square root of the steps.
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

    def distance(self, other: Size) -> float:
        """The factors between two sizes together, in natural logarithms."""
        return sum(abs(math.log(mine / theirs)) for mine, theirs in zip(self, other, strict=True))


@dataclass(frozen=True, kw_only=True)
class Advice:
    """An optimizer's recommended rate, with the nearest run whose other settings it takes."""

    optimizer: str
    loss: float
    """At the nearest size, the mean over seeds of its best settings."""
    lr: float
    low: float
    high: float
    """The best rate is between these with a probability of 80%, if the power law holds."""
    is_measured: bool
    """Whether the rate was the best of runs of this very size."""
    nearest: Mapping[str, Any]
    """The row of the best run at the nearest size that this optimizer has."""

    @property
    def config(self) -> TrainConfig:
        """The configuration of the nearest best run, with the rates for this one."""
        config = TrainConfig.from_dict(Run.open(self.nearest["folder"]).config)
        assert config.optimizer.lr is not None
        factor = self.lr / config.optimizer.lr

        def scaled(text: str) -> str:
            name, _, value = text.partition("=")
            return (
                f"{name}={_digits(float(value) * factor)}" if name == "rest_lr" and value != "null" else text
            )

        rest_lr = None if config.optimizer.rest_lr is None else _digits(config.optimizer.rest_lr * factor)
        optimizer = dataclasses.replace(
            config.optimizer,
            lr=_digits(self.lr),
            rest_lr=rest_lr,
            options=tuple(map(scaled, config.optimizer.options)),
        )
        return dataclasses.replace(config, optimizer=optimizer)


def read_records(*folders: Path | str) -> pl.DataFrame:
    """The runs in folders that finished with a validation loss: with series, conditions and parameters."""
    runs = with_series(table.read(*folders).runs)
    known = pl.col("validation_loss").is_finite() & (pl.col("status") == "finished")
    runs = runs.filter(known & pl.col("left_out").is_null() & pl.col(LR).is_not_null() & (pl.col(LR) > 0))
    if runs.is_empty():
        raise ValueError(f"no run in {join(list(map(str, folders)))} finished with a validation loss")
    return runs.with_columns(_parameters(runs))


def _parameters(runs: pl.DataFrame) -> pl.Series:
    from merit_lab.models import num_parameters

    names = [name for name in runs.columns if name.startswith("model.")]
    known: dict[str, int] = {}
    numbers = []
    for row in runs.select("folder", *names).to_dicts():
        key = repr([row[name] for name in names])
        if key not in known:
            known[key] = num_parameters(TrainConfig.from_dict(Run.open(row["folder"]).config).model)
        numbers.append(known[key])
    return pl.Series("parameters", numbers, dtype=pl.Int64)


def size_of(row: Mapping[str, Any]) -> Size:
    return Size(row["batch"], row["parameters"], row["steps"])


def advise(records: pl.DataFrame, size: Size) -> list[Advice]:
    """Recommend settings of each optimizer of the records, the best of the nearest size first.

    Raises ValueError if the run lies more than ten times beyond all records.
    """
    check_reach(records, size)
    nearest = _nearest_conditions(records, size)
    there = records.filter(pl.col("conditions") == nearest)
    losses: dict[str, float] = {}
    optimizers = dict(records.select("series", "optimizer.name").iter_rows())
    for (_, series), values in statistic.by_seed(there).items():
        loss = math.fsum(values.values()) / len(values)
        name = optimizers[series]
        losses[name] = min(loss, losses.get(name, math.inf))
    advice = []
    for name in sorted(losses, key=lambda name: losses[name]):
        mine = records.filter(pl.col("optimizer.name") == name)
        if not beyond(mine, size, MOST_BEYOND):
            advice.append(_advice(mine, name, size, losses[name]))
    return advice


def _advice(mine: pl.DataFrame, name: str, size: Size, loss: float) -> Advice:
    observations = [observe(group) for _, group in mine.group_by("conditions", maintain_order=True)]
    nearest = min(observations, key=lambda one: (one.size.distance(size), one.row["validation_loss"]))
    if nearest.size == size:
        mean, deviation = nearest.rate, nearest.deviation
    else:
        mean, deviation = predict(observations, size, _prior(name))
    low, high = (math.exp(mean + sign * _WIDTH * deviation) for sign in (-1, 1))
    measured = nearest.size == size
    lr = nearest.row[LR] if measured else math.exp(mean)
    return Advice(
        optimizer=name,
        loss=loss,
        lr=lr,
        low=min(low, lr),
        high=max(high, lr),
        is_measured=measured,
        nearest=nearest.row,
    )


def _nearest_conditions(records: pl.DataFrame, size: Size) -> str:
    """The conditions of the size nearest to this one; of several, those with most optimizers and runs."""
    groups = [
        (
            size_of(group.row(0, named=True)).distance(size),
            -group["optimizer.name"].n_unique(),
            -group.height,
            str(name),
        )
        for (name,), group in records.group_by("conditions", maintain_order=True)
    ]
    return min(groups)[-1]


def beyond(records: pl.DataFrame, size: Size, most: float) -> list[str]:
    """In what a run lies more than ``most`` times beyond the records, as text."""
    found = []
    for name, value in zip(("batch", "parameters", "steps"), size, strict=True):
        low, high = records[name].min(), records[name].max()
        assert isinstance(low, int) and isinstance(high, int)
        if value > most * high or value * most < low:
            show = amount if name == "parameters" else "{:,}".format
            noun = "a batch of " if name == "batch" else ""
            unit = "" if name == "batch" else f" {name}"
            range_ = show(low) if low == high else f"{show(low)} to {show(high)}"
            found.append(f"{noun}{show(value)}{unit} (they have {range_})")
    return found


def check_reach(records: pl.DataFrame, size: Size) -> None:
    """Raise ValueError if a run lies too far beyond the records."""
    if far := beyond(records, size, MOST_BEYOND):
        raise ValueError(
            f"the run lies more than {MOST_BEYOND:g} times beyond these records: {join(far)}. Run an arena "
            "nearer to it, on a smaller model with as many steps, and give its folder too"
        )


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
    lowest = group.group_by(LR).agg(pl.col("validation_loss").min()).sort(LR)
    losses = dict(lowest.iter_rows())
    best = group.sort("validation_loss", LR).row(0, named=True)
    centre, factor = math.log(best[LR]), math.log(2)
    places = [centre - factor, centre, centre + factor]
    near = [
        next((loss for rate, loss in losses.items() if abs(math.log(rate) - at) < 0.1), None) for at in places
    ]
    if None not in near and (valley := Valley.through(*zip(places, near, strict=True))):  # type: ignore[arg-type]
        same = group.filter(pl.col("series") == best["series"])["validation_loss"]
        spread = max(float(same.std() or 0.0), _LEAST_SPREAD)  # type: ignore[arg-type]
        deviation = min(factor, math.sqrt(spread / valley.curvature))
        return Observation(size_of(best), max(places[0], min(places[-1], valley.place)), deviation, best)
    return Observation(size_of(best), centre, factor, best)


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
    seen = records.with_columns(
        (pl.col("steps") * pl.col("batch") * pl.col("model.context")).alias("planned")
    )
    seen = seen.with_columns(pl.col("planned").log().round(1).alias("length"))
    text = [name for name in ("environment.data.fingerprint",) if name in seen.columns]
    groups = [
        group
        for _, group in seen.group_by("length", "parameters", *text, maintain_order=True)
        if group["batch"].n_unique() > 1
    ]
    if not groups:
        raise ValueError(
            "these records have no two batches with the same tokens, model and text, so they do not tell "
            "which batch is good; give --batch, or measure it: merit scale"
        )
    near = min(groups, key=lambda group: (abs(math.log(group["planned"][0] / tokens)), -group.height))
    best = near.group_by("batch").agg(pl.col("validation_loss").min()).sort("batch")
    good = best.filter(pl.col("validation_loss") <= pl.col("validation_loss").min() + _BATCH_COST)
    return int(good["batch"].max())  # type: ignore[arg-type]


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    arguments = tyro.cli(Arguments, args=list(argv), prog="merit advise", registry=rules())
    try:
        for line in _answer(arguments):
            if isinstance(line, Table):
                print_table(line)
            else:
                print(line)
    except (OSError, ValueError) as error:
        print(f"merit advise: {error}", file=sys.stderr)
        return 1
    return 0


def _answer(arguments: Arguments) -> Iterator[str | Table]:
    """The caveat, the table, and the command to begin with."""
    from merit_lab.models import find_model, num_parameters

    for name in ("batch", "steps", "tokens"):
        if (value := getattr(arguments, name)) is not None:
            check_size(f"--{name}", value, 2**62)
    _, model = find_model(arguments.model)
    if not arguments.records:
        raise ValueError("no records are given; name folders of runs, as in runs/arena-tiny")
    records = read_records(*arguments.records)
    if arguments.batch is None and arguments.steps is not None:
        raise ValueError("--steps needs --batch; to ask for the batch, give the length as --tokens")
    tokens = arguments.tokens or 20 * num_parameters(model)
    batch = arguments.batch or advise_batch(records, tokens)
    given = {"steps": arguments.steps, "tokens": arguments.tokens}
    config = TrainConfig(data=Path(), model=model, batch=batch, **given).resolve(None)  # type: ignore[arg-type]
    assert config.steps is not None
    size = Size(batch, num_parameters(model), config.steps)
    advice = advise(records, size)
    outside = beyond(records, size, 1.0)
    yield _caveat(records, size, outside)
    if arguments.batch is None:
        yield f"Batch: {batch}, the largest within {_BATCH_COST:g} of the lowest loss with as many tokens."
    names = display_names([one.optimizer for one in advice])
    yield Table(
        ("Optimizer", "Learning rate", "80% interval", "Rate of the rest", "Warm-up", "Loss at the nearest"),
        tuple(
            (
                names[one.optimizer],
                f"{_digits(one.lr):g}" + (" (measured)" if one.is_measured else ""),
                f"{one.low:.2g} to {one.high:.2g}",
                _rest(one),
                f"{one.config.optimizer.warmup:g}",
                f"{one.loss:.3f}",
            )
            for one in advice
        ),
    )
    if left := sorted(set(records["optimizer.name"].to_list()) - {one.optimizer for one in advice}):
        yield f"Not ranked, because it has no records there: {join([display_name(name) for name in left])}."
    if arguments.hours:
        yield _hours(config)
    if advice:
        yield f"\nTo begin with {names[advice[0].optimizer]}:"
        options = shlex.join(_train_options(advice[0].config.optimizer))
        length = f"--batch {size.batch} --steps {size.steps}"
        yield f"  merit train {arguments.model} --data FOLDER {length} {options}"


def _caveat(records: pl.DataFrame, size: Size, outside: Sequence[str]) -> str:
    """The one thing to know first."""
    nearest = size_of(
        records.filter(pl.col("conditions") == _nearest_conditions(records, size)).row(0, named=True)
    )
    what = (
        f"{amount(nearest.parameters)} parameters and {nearest.steps:,} steps of {nearest.batch:,} sequences"
    )
    if outside:
        return (
            f"Beyond what was measured: {join(outside)}. The order is that of {what}; tune the rates first."
        )
    if nearest == size:
        return f"Measured, with {what}."
    return f"Between what was measured. The order is that of the nearest, {what}; it may be another here."


def _rest(one: Advice) -> str:
    config = one.config.optimizer
    value = config.rest_lr if config.rest_lr is not None else config.options_by_name().get("rest_lr")
    return NOTHING if value is None else f"{value:g}"


def _hours(config: TrainConfig) -> str:
    from merit_lab.study.cost import Cost, duration, find_speed

    speed = find_speed(config)
    return f"Time: about {duration(Cost.of([(config, 0)]).seconds(speed))} here ({speed.source})."


def _train_options(chosen: OptimizerConfig) -> Iterator[str]:
    """The options of `merit train` for an optimizer."""
    for field in dataclasses.fields(chosen):
        value = getattr(chosen, field.name)
        if field.name == "name" or value != getattr(OptimizerConfig(), field.name):
            option, *values = train_option(f"optimizer.{field.name}", value)
            yield from (option.replace("_", "-"), *values)


def _digits(value: float) -> float:
    return float(f"{value:.2g}")
