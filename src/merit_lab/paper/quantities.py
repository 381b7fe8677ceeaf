"""Quantities that claims and tables are about: queries of runs that give a number for each seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import polars as pl
import torch

from merit_lab.models import build, flops_per_token
from merit_lab.models.transformers_config import AnyModelConfig
from merit_lab.paper.records import ENDED, Data
from merit_lab.results.series import layer_logits
from merit_lab.study.fit import steps_to_reach
from merit_lab.tables import NOTHING

BySeed = Mapping[int, float]
Query = Callable[[Data], pl.DataFrame]
"""From runs to a frame with the columns run and value, and step if it is a curve."""

VALUE, LAYERS, WIDTH = pl.col("value"), pl.col("model.layers"), pl.col("model.width")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What is measured: a number for each seed, from an entry's runs of one series."""

    name: str
    of: Callable[[Data], BySeed]
    """Infinite where a run diverged and counts as the worst; without a seed that says nothing."""
    number: str = ".3f"
    """The format of the number."""
    silent: str = ""
    """Why no seed may say anything."""
    infinite: str = ""
    """What an infinite number of a run that did not diverge means."""

    @property
    def head(self) -> str:
        """Its name at the head of a column."""
        return self.name[0].upper() + self.name[1:]

    def text(self, data: Data) -> str:
        """Mean and standard deviation of the finite numbers, and how many are infinite if that means more."""
        values = list(self.of(data).values())
        finite = [value for value in values if math.isfinite(value)]
        parts = [f"{len(values) - len(finite)} {self.infinite}"] if self.infinite and finite != values else []
        if finite:
            deviation = f" ± {statistics.stdev(finite):{self.number}}" if len(finite) > 1 else ""
            parts.append(f"{statistics.fmean(finite):{self.number}}{deviation}")
        return "; ".join(parts) or NOTHING


def per_run(
    name: str, value: pl.Expr | Query, *, diverged: float | None = math.inf, **about: Any
) -> Quantity:
    """A quantity of single runs: an expression over the frame of runs, or a query that gives each a value.

    Runs that have not ended have only their first steps and none. ``diverged`` is that of a run that
    diverged: infinite where it counts as worse than any other, NaN where it says nothing, None where it is
    measured like those of others.
    """

    def by_seed(data: Data) -> BySeed:
        runs = data.runs.filter(pl.col("status").is_in(ENDED))
        if not isinstance(value, pl.Expr):
            values = value(replace(data, runs=runs)).select("run", VALUE)
            runs = runs.join(values, on="run", how="left", maintain_order="left")
        else:
            is_known = set(value.meta.root_names()) <= set(runs.columns)  # measured of some run
            runs = runs.with_columns(value=value if is_known else pl.lit(None, pl.Float64))
        if diverged is not None:
            runs = runs.with_columns(value=pl.when(status="diverged").then(pl.lit(diverged)).otherwise(VALUE))
        return dict(runs.select("seed", VALUE.cast(pl.Float64)).drop_nulls().drop_nans().rows())

    silent = "it diverged, with every seed" if diverged is not None and math.isnan(diverged) else ""
    return Quantity(name=name, of=by_seed, silent=silent, **about)


def constant(value: float) -> Quantity:
    """The same number for every seed of whatever it is compared with."""
    return Quantity(name=f"{value:.3g}", of=lambda data: dict.fromkeys(data.values("seed"), value))


def _of_each_run(curve: Query, value: pl.Expr) -> Query:
    """A number for each run from its curve, by an expression over the curve's values."""
    return lambda data: curve(data).group_by("run", maintain_order=True).agg(value=value)


# Losses and learning rates.

LOSS = per_run("validation loss", pl.col("final"))


def losses(data: Data) -> pl.DataFrame:
    """The validation loss over the steps and the tokens."""
    tokens = pl.col("step") * pl.col("batch") * pl.col("model.context")
    curve = data.measured("validation_loss", "batch", "model.context")
    return curve.select("run", "step", tokens.alias("tokens"), value="validation_loss")


def _of_common_seeds(data: Data) -> pl.DataFrame:
    """The runs that ended, of the seeds that ended at each rate at which any did."""
    ended = data.runs.filter(pl.col("final").is_not_nan())
    return ended.filter(pl.col("lr").n_unique().over("seed") == ended["lr"].n_unique())


def best_rate(data: Data) -> float | None:
    """The rate with the fewest diverged runs and, among those, the lowest mean final loss.

    Only seeds that all rates have count. None if no run has a finite loss.
    """
    final = pl.col("final")
    by_rate = (
        _of_common_seeds(data)
        .group_by("lr")
        .agg(lost=final.is_infinite().sum(), mean=final.filter(final.is_finite()).mean())
    )
    return next(iter(by_rate.drop_nulls().sort("lost", "mean", "lr")["lr"]), None)


def _loss_at_best(data: Data) -> BySeed:
    best = best_rate(data)
    if best is None:  # all diverged
        return dict.fromkeys(_of_common_seeds(data)["seed"].sort(), math.inf)
    return LOSS.of(data.where(lr=best))


def _best_rates(data: Data) -> BySeed:
    """The best rate of each seed whose runs have all ended, if it is between two worse ones.

    A best rate on the edge depends on where the grid was placed, not on which rate is best.
    """
    final, num_rates = pl.col("final"), data.runs["lr"].n_unique()
    ended = data.runs.filter(final.is_not_nan()).sort("seed", "lr")
    whole = ended.filter(pl.col("lr").n_unique().over("seed") == num_rates)
    below_neighbours = [final < final.shift(place).over("seed") for place in (1, -1)]
    best = whole.filter(final == final.min().over("seed"), *below_neighbours)
    return dict(best.select("seed", pl.col("lr").log10()).rows())


LOSS_AT_BEST = Quantity(name="validation loss at the best rate", of=_loss_at_best)
BEST_RATE = Quantity(name="best rate", of=_best_rates, silent="no seed has its best rate inside its grid")


# Steps to a loss, against the batch.


def _steps_to_target(data: Data) -> pl.DataFrame:
    """Infinite where the target was not reached."""
    rows = data.measured("validation_loss", "target").filter(pl.col("validation_loss").is_finite())
    reached = {
        run: steps_to_reach(target, of_run.select("step", "validation_loss").rows())
        for (run, target), of_run in rows.drop_nulls("target").group_by("run", "target", maintain_order=True)
    }
    runs = data.runs.select("run").unique()
    steps = [math.inf if (known := reached.get(run)) is None else known for run in runs["run"]]
    return runs.with_columns(value=pl.Series(steps, dtype=pl.Float64))


STEPS = per_run("steps to the target", _steps_to_target, number=".0f", infinite="not reached")


def _steps_at_largest(data: Data) -> BySeed:
    return STEPS.of(data.where(batch=max(data.values("batch"))))


def _efficiency(data: Data) -> BySeed:
    """Tokens to the target with the smallest batch over those with the largest; 1 is ideal.

    None for a seed that did not reach it with the smallest batch, or was there before the first step.
    """
    smallest, largest = min(data.values("batch")), max(data.values("batch"))
    few, many = STEPS.of(data.where(batch=smallest)), _steps_at_largest(data)
    return {
        seed: few[seed] * smallest / (many[seed] * largest)
        for seed in sorted(few.keys() & many.keys())
        if math.isfinite(few[seed]) and many[seed] > 0
    }


STEPS_AT_LARGEST = Quantity(name="steps with the largest batch", of=_steps_at_largest)
EFFICIENCY = Quantity(
    name="share of ideal scaling",
    of=_efficiency,
    silent="the smallest batch missed the target with every seed",
)


# Attention. The layers are counted from 1.

_MIDDLE = (LAYERS + 1) // 2  # the 12th of 24
_SHALLOW = pl.max_horizontal(1, LAYERS // 3)  # the paper's are 1 to 8 of 24
_BETWEEN = pl.max_horizontal(_SHALLOW + 1, (17 / 24 * LAYERS).round())  # its middle ones end with 17 of 24
_SOME_LAYERS = {
    "first layer": (pl.lit(1), pl.lit(1)),
    "middle layer": (_MIDDLE, _MIDDLE),
    "all layers": (pl.lit(1), LAYERS),
    "shallow layers": (pl.lit(1), _SHALLOW),
    "middle layers": (_SHALLOW + 1, _BETWEEN),
    "deep layers": (_BETWEEN + 1, LAYERS),
}
"""The first and the last of some layers."""


def logits(layers: str) -> Query:
    """The largest logit of each of some layers over the steps, where it is finite."""
    chosen = pl.col("layer").is_between(*_SOME_LAYERS[layers])
    return lambda data: layer_logits(data.measured("max_logits", "model.layers")).filter(
        chosen, VALUE.is_finite()
    )


def _largest(layers: str) -> Query:
    """The mean over layers of the largest logit that each had at any step."""

    def of(data: Data) -> pl.DataFrame:
        largest = logits(layers)(data).group_by("run", "layer").agg(VALUE.max())
        return largest.group_by("run").agg(VALUE.mean())

    return of


FIRST, MIDDLE, ALL, SHALLOW, BETWEEN, DEEP = (
    per_run(f"largest logit, {layers}", _largest(layers), number=".2f") for layers in _SOME_LAYERS
)
LARGEST_LOGIT = per_run("largest logit", pl.col("largest_logit"), diverged=None, number=".4g")


# Updates.


@cache
def _sizes(config: AnyModelConfig) -> dict[str, int]:
    """The number of elements of each parameter."""
    with torch.device("meta"):
        model = build(config)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def updates(quantity: str, wanted: pl.Expr) -> Query:
    """The mean of a quantity over the elements of some parameters, chosen by ``size`` and ``layer``."""

    def curves(data: Data) -> pl.DataFrame:
        sizes = [
            {"run": run, "parameter": name, "size": size}
            for run in data.values("run")
            for name, size in _sizes(data.configs[run].model).items()
        ]
        schema = {"run": pl.String, "parameter": pl.String, "size": pl.Int64}
        layer = pl.col("parameter").str.extract(r"blocks\.(\d+)\.").cast(pl.Int64) + 1
        of_parameters = data.measured("updates", "model.layers", "model.width").explode("updates")
        chosen = (
            of_parameters.unnest("updates")
            .join(pl.DataFrame(sizes, schema=schema), on=["run", "parameter"], maintain_order="left")
            .with_columns(layer=layer)
            .filter(wanted, pl.col(quantity).is_not_null())
        )
        mean = (pl.col(quantity) * pl.col("size")).sum() / pl.col("size").sum()
        means = chosen.group_by("run", "step", maintain_order=True).agg(value=mean)
        return means.filter(VALUE.is_finite())  # the last of a run that diverged may not be

    return curves


_LAYER, _IS_MATRIX = pl.col("layer"), pl.col("size") > WIDTH
_CLIPPED: Mapping[str, Query] = {
    name: updates("clipped", layer == _LAYER)
    for name, layer in (
        ("first layer", pl.lit(1)),
        ("middle layer", pl.max_horizontal(1, LAYERS // 2)),
        ("last layer", LAYERS),
    )
}
CLIPPED = {
    name: per_run(f"highest % clipped, {name}", _of_each_run(curve, 100 * VALUE.max()), diverged=math.nan)
    for name, curve in _CLIPPED.items()
}
"""The highest share of a layer's elements that were clipped."""


def clipped_curves(data: Data) -> pl.DataFrame:
    """The share of clipped elements of each of these layers, told apart by ``series``."""
    return pl.concat([curve(data).with_columns(series=pl.lit(name)) for name, curve in _CLIPPED.items()])


bounded_curve = updates("bounded", _IS_MATRIX)
"""The share of matrix elements where the weight-wise bound decided; vectors have no other ratio."""


def _bounded_in(third: pl.Expr) -> Query:
    """The mean over the steps of a third of a run, interpolated between those that were measured."""

    def of(data: Data) -> pl.DataFrame:
        curve, step = bounded_curve(data), pl.col("step")
        steps = curve.group_by("run").agg(pl.int_range(step.min(), step.max() + 1)).explode("step")
        whole = steps.join(curve, on=["run", "step"], how="left").with_columns(
            value=VALUE.interpolate_by("step").over("run"),
            done=(step - step.min().over("run")) / (step.max() - step.min()).over("run"),
        )
        return whole.filter(third).group_by("run").agg(value=100 * VALUE.mean())

    return of


BOUNDED = {
    name: per_run(f"% bounded, {name}", _bounded_in(third), diverged=math.nan, number=".2f")
    for name, third in (("first third", pl.col("done") <= 1 / 3), ("last third", pl.col("done") >= 2 / 3))
}


def reach_curve(data: Data) -> pl.DataFrame:
    """The relative change of the blocks' matrices in a step, as a multiple of the learning rate."""
    changes = updates("relative_change", _IS_MATRIX & _LAYER.is_not_null())(data)
    rates = []
    for run, step in changes.select("run", "step").iter_rows():
        config = data.configs[run]
        assert config.steps is not None and config.optimizer.lr is not None, "the configuration is resolved"
        rates.append(config.optimizer.rate(step - 1, config.steps, config.optimizer.lr))
    return changes.with_columns(value=VALUE / pl.Series(rates, dtype=pl.Float64))


REACH = {
    name: per_run(f"reach of the {name}", _of_each_run(reach_curve, value), diverged=math.nan, number=".2f")
    for name, value in (("first step", VALUE.first()), ("last step", VALUE.last()))
}
"""How far the first and the last measured step went."""


# Speed.


def _teraflops(data: Data) -> pl.DataFrame:
    runs = data.runs.select("run", "tokens_per_second").unique("run")
    flops = [flops_per_token(data.configs[run].model) for run in runs["run"]]
    return runs.with_columns(value=pl.col("tokens_per_second") * pl.Series(flops, dtype=pl.Float64) / 1e12)


def _optimizer_share(data: Data) -> pl.DataFrame:
    shares = data.measured("optimizer_share").drop_nans().group_by("run")
    return shares.agg(value=100 * pl.col("optimizer_share").median())


_SECONDS = pl.col("batch") * pl.col("model.context") / pl.col("tokens_per_second")
SECONDS = per_run("seconds of a step", _SECONDS, diverged=None, number=".4f")
"""The median time of a step, hardly affected by the steps that include measurements."""


def longer(factor: float) -> Quantity:
    """The time of a step, times a factor."""
    return per_run(f"{factor:g} times the {SECONDS.name}", factor * _SECONDS, diverged=None)


TERAFLOPS = per_run("TFLOP/s", _teraflops, diverged=None, number=".1f")
OPTIMIZER_SHARE = per_run("optimizer's share, %", _optimizer_share, diverged=None, number=".2f")
