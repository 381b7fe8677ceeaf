"""Quantities that claims and tables are about: each gives a number for each seed from the frames of runs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import polars as pl
import torch

from merit_lab.measure.evaluate.sets import PAPER_SETS
from merit_lab.models import build, flops_per_token
from merit_lab.models.names import AnyModelConfig
from merit_lab.paper.plan import Data, OneRun
from merit_lab.study.reach import steps_to_reach
from merit_lab.tables import NOTHING

BySeed = Mapping[int, float]
Point = tuple[int, float]

_BLOCK = re.compile(r"blocks\.(\d+)\.")
_PERPLEXITIES = {"lambada": "perplexity", "wikitext": "word_perplexity"}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What is measured: a number for each seed, from an entry's runs of one series."""

    name: str
    of: Callable[[Data], BySeed]
    """Infinite where a run diverged and counts as the worst; without a seed that says nothing."""
    number: str = ".3f"
    """The format of the number."""
    unit: str = ""
    silent: str = ""
    """Why no seed may say anything."""
    infinite: str = ""
    """What an infinite number of a run that did not diverge means."""

    def text(self, data: Data) -> str:
        """Mean and standard deviation of the finite numbers, and how many are infinite if that means more."""
        values = list(self.of(data).values())
        finite = [value for value in values if math.isfinite(value)]
        parts = [f"{len(values) - len(finite)} {self.infinite}"] if self.infinite and finite != values else []
        if finite:
            parts.append(f"{statistics.fmean(finite):{self.number}}")
            if len(finite) > 1:
                parts[-1] += f" ± {statistics.stdev(finite):{self.number}}"
        return "; ".join(parts) or NOTHING


def per_run(
    name: str,
    of: Callable[[OneRun], float | None],
    *,
    diverged: float | None = math.inf,
    number: str = ".3f",
    unit: str = "",
    infinite: str = "",
) -> Quantity:
    """A quantity of single runs, none of those that have not ended: they have only their first steps.

    ``diverged`` is that of a run that diverged: infinite where it counts as worse than any other, NaN where
    it says nothing, None where it is measured like those of others.
    """

    def by_seed(data: Data) -> BySeed:
        values = {}
        for run in data.all:
            if run.row["status"] == "diverged" and diverged is not None:
                values[run.row["seed"]] = diverged
            elif run.row["status"] in ("finished", "diverged") and (value := of(run)) is not None:
                values[run.row["seed"]] = value
        return {seed: value for seed, value in values.items() if not math.isnan(value)}

    silent = "it diverged, with every seed" if diverged is not None and math.isnan(diverged) else ""
    return Quantity(name=name, of=by_seed, number=number, unit=unit, silent=silent, infinite=infinite)


def constant(value: float) -> Quantity:
    """The same number for every seed of whatever it is compared with."""
    return Quantity(name=f"{value:.3g}", of=lambda data: dict.fromkeys(data.values("seed"), value))


def at_rate(data: Data, rate: float) -> Data:
    """The runs with this peak learning rate."""
    return Data(data.runs.filter(pl.col("lr") == rate), data.steps, data.configs)


# Losses and learning rates.

LOSS = per_run("validation loss", lambda run: run.row["final"], unit="nats")


def best_rate(data: Data) -> float | None:
    """The rate with the fewest diverged runs and, among those, the lowest mean final loss.

    Only seeds that all rates have count. None if no run has a finite loss.
    """
    by_rate, seeds = _losses_by_rate(data)
    ranks = {}
    for rate, losses in by_rate.items():
        finite = [losses[seed] for seed in seeds if math.isfinite(losses.get(seed, math.inf))]
        if finite:
            ranks[rate] = len(seeds) - len(finite), statistics.fmean(finite)
    return min(ranks, key=ranks.__getitem__, default=None)


def _losses_by_rate(data: Data) -> tuple[dict[float, BySeed], set[int]]:
    """The final losses at each rate, ascending; and the seeds that ended at each rate where any did."""
    by_rate = {rate: LOSS.of(at_rate(data, rate)) for rate in sorted(data.values("lr"))}
    ended = [set(losses) for losses in by_rate.values() if losses]
    return by_rate, set.intersection(*ended) if ended else set()


def _loss_at_best(data: Data) -> BySeed:
    best = best_rate(data)
    if best is None:  # all diverged
        return dict.fromkeys(_losses_by_rate(data)[1], math.inf)
    return LOSS.of(at_rate(data, best))


def _best_rates(data: Data) -> BySeed:
    """The best rate of each seed whose runs have all ended, if it is between two worse ones.

    A best rate on the edge depends on where the grid was placed, not on which rate is best.
    """
    by_rate, _ = _losses_by_rate(data)
    rates, best = list(by_rate), {}
    for seed in sorted(set[int]().union(*by_rate.values())):
        losses = [by_rate[rate].get(seed, math.nan) for rate in rates]
        if not any(map(math.isnan, losses)):
            place = losses.index(min(losses))
            if 0 < place < len(rates) - 1 and losses[place] < losses[place + 1]:
                best[seed] = math.log10(rates[place])
    return best


LOSS_AT_BEST = Quantity(name="validation loss at the best rate", of=_loss_at_best, unit="nats")
BEST_RATE = Quantity(
    name="best rate", of=_best_rates, unit="powers of ten", silent="no seed has its best rate inside its grid"
)


def losses(run: OneRun) -> list[Point]:
    """The validation loss over the steps."""
    return run.points("validation_loss")


# Steps to a loss, against the batch.


def _steps_to_target(run: OneRun) -> float | None:
    target = run.row["target"]
    steps = None if target is None else steps_to_reach(target, losses(run))
    return math.inf if steps is None else steps


STEPS = per_run("steps to the target", _steps_to_target, number=".0f", unit="steps", infinite="not reached")


def _at_batch(data: Data, batch: int) -> BySeed:
    return STEPS.of(data.where(batch=batch))


def _efficiency(data: Data) -> BySeed:
    """Tokens to the target with the smallest batch over those with the largest; 1 is ideal.

    None for a seed that did not reach it with the smallest batch, or was there before the first step.
    """
    smallest, *_, largest = sorted(data.values("batch"))
    few, many = _at_batch(data, smallest), _at_batch(data, largest)
    return {
        seed: few[seed] * smallest / (many[seed] * largest)
        for seed in sorted(few.keys() & many.keys())
        if math.isfinite(few[seed]) and many[seed] > 0
    }


STEPS_AT_LARGEST = Quantity(
    name="steps with the largest batch",
    of=lambda data: _at_batch(data, max(data.values("batch"))),
    unit="steps",
)
EFFICIENCY = Quantity(
    name="share of ideal scaling",
    of=_efficiency,
    silent="the smallest batch missed the target with every seed",
)


# Attention.

Layers = Callable[[int], range]
"""Some layers of a number of layers; the first is 1."""


def first(_: int) -> range:
    """The first layer."""
    return range(1, 2)


def middle(num: int) -> range:
    """The middle layer, for example the 12th of 24."""
    return range((num + 1) // 2, (num + 1) // 2 + 1)


def every(num: int) -> range:
    """All layers."""
    return range(1, num + 1)


def shallow(num: int) -> range:
    """The first third, as the paper calls 1 to 8 of 24 layers."""
    return range(1, max(1, num // 3) + 1)


def middle_third(num: int) -> range:
    """Those above, up to 17 of 24 layers."""
    begin = shallow(num)[-1] + 1
    return range(begin, max(begin, round(17 / 24 * num)) + 1)


def deep(num: int) -> range:
    """The others."""
    return range(middle_third(num)[-1] + 1, num + 1)


def layer_curve(run: OneRun, layer: int) -> list[Point]:
    """The largest logit of a layer over the steps, where it is finite."""
    if "max_logits" not in run.steps.columns:
        return []
    known = run.steps.select("step", "max_logits").drop_nulls().rows()
    points = [(step, _largest(layers[layer - 1])) for step, layers in known if layer <= len(layers)]
    return [point for point in points if math.isfinite(point[1])]


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def logit_curve(layers: Layers) -> Callable[[OneRun], list[Point]]:
    """That curve of the first of some layers."""
    return lambda run: layer_curve(run, layers(run.config.model.layers)[0])


def logit(name: str, layers: Layers) -> Quantity:
    """The mean over layers of the largest logit that each had at any step."""

    def of(run: OneRun) -> float | None:
        curves = [layer_curve(run, layer) for layer in layers(run.config.model.layers)]
        return statistics.fmean(max(value for _, value in curve) for curve in curves) if all(curves) else None

    return per_run(f"largest logit, {name}", of, number=".2f", unit="logit")


LARGEST_LOGIT = per_run("largest logit", lambda run: run.row["largest_logit"], diverged=None, number=".4g")


# Updates.


@cache
def _sizes(config: AnyModelConfig) -> dict[str, int]:
    """The number of elements of each parameter."""
    with torch.device("meta"):
        model = build(config)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def _layer_of(name: str) -> int | None:
    match = _BLOCK.search(name)
    return int(match[1]) + 1 if match else None


def _mean_of_updates(run: OneRun, quantity: str, wanted: Callable[[str, int], bool]) -> list[Point]:
    """The mean over the elements of the parameters that ``wanted`` selects by name and size."""
    sizes, points = _sizes(run.config.model), []
    updates = run.steps.select("step", "updates").drop_nulls() if "updates" in run.steps.columns else None
    for step, parameters in updates.rows() if updates is not None else []:
        chosen = [one for one in parameters if wanted(one["parameter"], sizes[one["parameter"]])]
        chosen = [one for one in chosen if one[quantity] is not None]
        if total := sum(sizes[one["parameter"]] for one in chosen):
            mean = sum(sizes[one["parameter"]] * one[quantity] for one in chosen) / total
            points.append((step, mean))
    return [
        point for point in points if math.isfinite(point[1])
    ]  # the last of a run that diverged may not be


def clipped(name: str, layer: Callable[[int], int]) -> Quantity:
    """The highest share of a layer's elements that were clipped, in percent."""

    def of(run: OneRun) -> float | None:
        points = clipped_curve(run, layer(run.config.model.layers))
        return max((100 * value for _, value in points), default=None)

    return per_run(f"share clipped, {name}", of, diverged=math.nan, unit="percent")


def clipped_curve(run: OneRun, layer: int) -> list[Point]:
    """The share of a layer's elements that were clipped."""
    return _mean_of_updates(run, "clipped", lambda name, _: _layer_of(name) == layer)


CLIPPED_LAYERS: Mapping[str, Callable[[int], int]] = {
    "first layer": lambda _: 1,
    "middle layer": lambda num: num // 2 or 1,
    "last layer": lambda num: num,
}
CLIPPED_CURVES = {
    name: lambda run, layer=layer: clipped_curve(run, layer(run.config.model.layers))
    for name, layer in CLIPPED_LAYERS.items()
}


def bounded_curve(run: OneRun) -> list[Point]:
    """The share of matrix elements where the weight-wise bound decided; vectors have no other ratio."""
    return _mean_of_updates(run, "bounded", lambda _, size: size > run.config.model.width)


def reach_curve(run: OneRun) -> list[Point]:
    """The relative change of the blocks' matrices in a step, as a multiple of the learning rate."""
    steps, optimizer, width = run.config.steps, run.config.optimizer, run.config.model.width
    assert steps is not None and optimizer.lr is not None, "the configuration is resolved"
    changes = _mean_of_updates(
        run, "relative_change", lambda name, size: size > width and _layer_of(name) is not None
    )
    return [(step, change / optimizer.rate(step - 1, steps, optimizer.lr)) for step, change in changes]


def _third(points: Sequence[Point], *, last: bool) -> float | None:
    """The mean over the first or the last third of the points, in percent."""
    length = len(points) // 3
    part = points[-length:] if last else points[:length]
    return 100 * statistics.fmean(value for _, value in part) if length else None


def bounded(*, last: bool) -> Quantity:
    """The share of elements where the weight-wise bound decided, early or late."""
    return per_run(
        f"share bounded, {'last' if last else 'first'} third",
        lambda run: _third(bounded_curve(run), last=last),
        diverged=math.nan,
        number=".2f",
        unit="percent",
    )


def reach(*, last: bool) -> Quantity:
    """How far the first or the last measured step went, as a multiple of the learning rate."""

    def of(run: OneRun) -> float | None:
        points = reach_curve(run)
        return points[-1 if last else 0][1] if points else None

    name = f"reach of the {'last' if last else 'first'} step"
    return per_run(name, of, diverged=math.nan, number=".2f", unit="times the rate")


# Speed.


def _seconds(run: OneRun) -> float | None:
    """The median time of a step, hardly affected by the steps that include measurements."""
    speed = run.row["tokens_per_second"]
    return None if speed is None else run.config.batch * run.config.model.context / speed


def _teraflops(run: OneRun) -> float | None:
    flops, speed = flops_per_token(run.config.model), run.row["tokens_per_second"]
    return None if flops is None or speed is None else flops * speed / 1e12


def _share(run: OneRun) -> float | None:
    shares = [value for _, value in run.points("optimizer_share")]
    return 100 * statistics.median(shares) if shares else None


SECONDS = per_run("seconds of a step", _seconds, diverged=None, number=".4f", unit="seconds")
TERAFLOPS = per_run("TFLOP/s", _teraflops, diverged=None, number=".1f")
OPTIMIZER_SHARE = per_run("optimizer's share, %", _share, diverged=None, number=".2f")


# Evaluations and curvature, which are columns of the runs.


def column(
    name: str, key: str, *, worst: float = math.inf, number: str = ".4g", times: float = 1
) -> Quantity:
    """A measurement after training, which is a column of the runs."""

    def of(run: OneRun) -> float | None:
        value = run.row.get(key)
        return None if value is None else times * float(value)

    return per_run(name, of, diverged=worst, number=number)


def score(name: str) -> Quantity:
    """The perplexity, or the accuracy in percent, on an evaluation set."""
    if name in _PERPLEXITIES:
        return column(name, f"evaluate.{name}.{_PERPLEXITIES[name]}")
    return column(name, f"evaluate.{name}.acc", worst=-math.inf, number=".2f", times=100)


def log_perplexity(name: str) -> Quantity:
    """The logarithm of a perplexity: a difference of two is a ratio."""
    values = score(name)

    def of(data: Data) -> BySeed:
        return {seed: math.log(value) for seed, value in values.of(data).items()}

    return Quantity(name=f"log perplexity on {name}", of=of)


def average(entry: str) -> Quantity:
    """The mean accuracy on an entry's sets, of runs that have all of them."""
    sets = PAPER_SETS[entry]

    def of(data: Data) -> BySeed:
        scores = [score(name).of(data) for name in sets]
        seeds = set(scores[0]).intersection(*scores)
        return {seed: statistics.fmean(one[seed] for one in scores) for seed in sorted(seeds)}

    return Quantity(name="average accuracy", of=of, number=".2f", unit="percent")


def wins(entry: str, rival: str) -> Quantity:
    """The sets on which MERIT is above the rival, less those on which it is below."""

    def of(data: Data) -> BySeed:
        won: dict[int, float] = {}
        for name in PAPER_SETS[entry]:
            ours, theirs = (score(name).of(data.where(series=one)) for one in ("MERIT", rival))
            for seed in sorted(ours.keys() & theirs.keys()):
                if ours[seed] != theirs[seed] or math.isfinite(ours[seed]):  # one of them did not diverge
                    sign = (ours[seed] > theirs[seed]) - (ours[seed] < theirs[seed])
                    won[seed] = won.get(seed, 0.0) + sign
        return won

    name = f"sets where MERIT is above {rival}, less those where it is below"
    return Quantity(name=name, of=of, unit="sets", silent="both diverged, with every seed")


def values_of(key: str, name: str, *, number: str = ".4g", log: bool = False) -> Quantity:
    """A column of rows that are no runs."""

    def of(data: Data) -> BySeed:
        pairs: Iterable[tuple[int, float]] = data.runs.select("seed", key).rows()
        return {seed: math.log10(value) if log else value for seed, value in pairs}

    return Quantity(name=name, of=of, number=number)
