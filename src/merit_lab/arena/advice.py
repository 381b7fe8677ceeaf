"""Recommendations for another run from the boards of arenas: an optimizer and its learning rate.

The best learning rate is assumed to follow a power law in the batch, the number of parameters and the steps:

    log lr = a + b*log(batch) + c*log(parameters) + d*log(steps)

Each board is an observation of it, with a precision that follows from the curvature of the loss around its
best rate. Exponents that the boards do not determine come from a prior, with an uncertainty. The estimate is
that of linear regression with a normal prior.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from merit_lab.models import num_parameters
from merit_lab.results.gather import short_name
from merit_lab.study.fields import LR
from merit_lab.study.valley import Valley
from merit_lab.train import TrainConfig

PRIOR_DEVIATION = 0.25  # of every exponent
# The names of optimizers with trust ratios contain one of these.
_WITH_RATIOS = ("lamb", "lars", "merit", "orscale")
_UNKNOWN = 100.0  # prior deviation of a, in natural logarithms: no information
_LEAST_SPREAD = 0.01  # nats; smaller differences of losses are not significant
_WIDTH = 1.2816  # standard deviations on both sides for 80%


class Exponents(NamedTuple):
    """The powers that the best learning rate follows."""

    batch: float
    parameters: float
    steps: float


# What docs/results/learning-rates.md measured, and docs/paper-results.md: at a constant number of steps the
# batch hardly matters, and theory has its square root for Adam; most rates fall with the size. With trust
# ratios a step is a share of the weights, and shares multiply over the steps; other steps add up.
PRIOR_WITH_RATIOS = Exponents(batch=0.25, parameters=-0.25, steps=-0.5)
PRIOR_WITHOUT = Exponents(batch=0.25, parameters=-0.25, steps=0.0)


class RunSize(NamedTuple):
    """What the best learning rate depends on."""

    batch: int
    parameters: int
    steps: int

    @property
    def logarithms(self) -> list[float]:
        return [math.log(number) for number in self]

    def distance(self, other: RunSize) -> float:
        """The factors between two sizes together, in natural logarithms."""
        return sum(abs(math.log(mine / theirs)) for mine, theirs in zip(self, other, strict=True))


@dataclass(frozen=True)
class RateObservation:
    """The best learning rate of an optimizer on one board; ``rate`` and ``deviation`` are logarithms."""

    size: RunSize
    rate: float
    deviation: float


@dataclass(frozen=True)
class Advice:
    """Recommended settings of an optimizer."""

    optimizer: str
    lr: float
    low: float
    high: float
    """The best rate is between these with a probability of 80%, if the power law holds."""
    settings: Mapping[str, float]
    """All tuned settings: this rate, other rates in proportion, and the others of the nearest board."""
    config: TrainConfig
    """The configuration on the nearest board."""
    num_boards: int


@dataclass(frozen=True)
class StandingRecord:
    """One standing of one board, as recorded in board.json. ``optimizer`` is the contestant's text."""

    optimizer: str
    mean: float
    size: RunSize
    setting: Mapping[str, float]
    tuning: Sequence[tuple[Mapping[str, float], float | None]]
    deviation: float
    config: TrainConfig


def read_boards(folders: Sequence[Path]) -> list[StandingRecord]:
    """Read the standings in the reports of arenas."""
    if not folders:
        raise ValueError(
            "no arena is given; name the folders that `merit arena` wrote, as in runs/arena-tiny"
        )
    standings: list[StandingRecord] = []
    for folder in folders:
        path = folder / "report" / "board.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no report of an arena; `merit arena ... --out {folder}` writes one"
            )
        try:
            for board in json.loads(path.read_text(encoding="utf-8")):
                standings += [_read_standing(board, standing) for standing in board["standings"]]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is not as `merit arena` writes it ({error!r}); run the same arena again: it repeats "
                "no run, and writes the file anew"
            ) from None
    finite = [standing for standing in standings if math.isfinite(standing.mean)]
    if not finite:
        raise ValueError(
            "no contestant of these arenas finished with every seed, so there is nothing to recommend"
        )
    return finite


def _read_standing(board: Mapping[str, Any], standing: Mapping[str, Any]) -> StandingRecord:
    losses = [float(loss) for loss in standing["losses"].values()]
    config = TrainConfig.from_dict(standing["config"])
    assert config.steps is not None, "a run's configuration is resolved"
    return StandingRecord(
        standing["optimizer"],
        statistics.fmean(losses),
        RunSize(board["batch"], num_parameters(config.model), config.steps),
        standing["setting"],
        [(run["setting"], None if run["loss"] is None else float(run["loss"])) for run in standing["tuning"]],
        statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else 0.0,
        config,
    )


def rank(standings: Sequence[StandingRecord], size: RunSize) -> list[str]:
    """The optimizers of the board nearest to a size, the best first.

    Of several that are equally near, the first: losses of different sizes cannot be compared. Boards of the
    same size are averaged.
    """
    nearest = min(standings, key=lambda standing: standing.size.distance(size)).size
    losses: dict[str, list[float]] = {}
    for standing in standings:
        if standing.size == nearest:
            losses.setdefault(standing.optimizer, []).append(standing.mean)
    return sorted(losses, key=lambda optimizer: statistics.fmean(losses[optimizer]))


def prior_of(optimizer: str) -> Exponents:
    """What is assumed of an optimizer, by its name, before its boards are seen."""
    name = short_name(optimizer).lower()
    return PRIOR_WITH_RATIOS if any(part in name for part in _WITH_RATIOS) else PRIOR_WITHOUT


def determines_exponents(sizes: Sequence[RunSize]) -> bool:
    """Whether boards of these sizes determine every exponent without a prior."""
    features = np.array([[1.0, *size.logarithms] for size in sizes])
    return bool(np.linalg.matrix_rank(features) == features.shape[1])


def advise(standings: Sequence[StandingRecord], optimizer: str, size: RunSize) -> Advice:
    """Recommend settings of an optimizer for a run."""
    known = [one for one in standings if one.optimizer == optimizer]
    nearest = min(known, key=lambda one: one.size.distance(size))
    prior = prior_of(nearest.config.optimizer.name)
    mean, deviation = predict([observe(one) for one in known], size, prior)
    lr = math.exp(mean)
    settings = {
        field: float(f"{value * lr / nearest.setting[LR]:.2g}") if field.endswith("lr") else value
        for field, value in nearest.setting.items()
    }
    low, high = (mean + sign * _WIDTH * deviation for sign in (-1, 1))
    return Advice(optimizer, lr, math.exp(low), math.exp(high), settings, nearest.config, len(known))


def observe(standing: StandingRecord) -> RateObservation:
    """The minimum of a parabola through the best rate and its neighbours, with its standard deviation.

    Losses that differ from the minimum by less than the spread of seeds are not distinguished from it.
    """
    best = standing.setting
    line: dict[tuple[tuple[str, float], ...], dict[float, float]] = {}
    for setting, loss in standing.tuning:
        rest = tuple(_shares(setting).items())
        if loss is not None and math.isfinite(loss):
            line.setdefault(rest, {})[math.log(setting[LR])] = loss
    centre, factor = math.log(best[LR]), math.log(2)
    for losses in line.values():
        places = [centre + shift for shift in (-factor, 0.0, factor)]
        around = [(place, loss) for place in places if (loss := _nearest(losses, place)) is not None]
        if len(around) == 3 and (valley := Valley.through(*around)):
            spread = max(standing.deviation, _LEAST_SPREAD)
            deviation = min(factor, math.sqrt(spread / valley.curvature))
            return RateObservation(standing.size, max(places[0], min(places[-1], valley.place)), deviation)
    return RateObservation(standing.size, centre, factor)


def _shares(setting: Mapping[str, float]) -> dict[str, float]:
    """The other settings, with rates as shares of the learning rate, rounded to four digits."""
    return {
        field: float(f"{value / setting[LR]:.4g}") if field.endswith("lr") else value
        for field, value in setting.items()
        if field != LR
    }


def _nearest(losses: Mapping[float, float], where: float) -> float | None:
    return next((loss for at, loss in losses.items() if math.isclose(at, where, abs_tol=1e-3)), None)


def predict(observations: Sequence[RateObservation], size: RunSize, prior: Exponents) -> tuple[float, float]:
    """The mean and the standard deviation of the best rate's logarithm."""
    deviations = np.array([_UNKNOWN, *(PRIOR_DEVIATION for _ in prior)])
    precision = np.diag(deviations**-2)
    weighted = precision @ np.array([0.0, *prior])
    for seen in observations:
        features = np.array([1.0, *seen.size.logarithms])
        precision = precision + np.outer(features, features) / seen.deviation**2
        weighted = weighted + features * seen.rate / seen.deviation**2
    covariance = np.linalg.inv(precision)
    wanted = np.array([1.0, *size.logarithms])
    return float(wanted @ covariance @ weighted), float(np.sqrt(wanted @ covariance @ wanted))
