"""Recommendations for another model or batch from the boards of arenas: an optimizer and its learning rate.

The best learning rate is assumed to follow a power law in the batch and in the number of parameters:

    log lr = a + b*log(batch) + c*log(parameters)

Each board is an observation of it, with a precision that follows from the curvature of the loss around its
best rate. If all boards have the same batch or size, the exponent comes from the prior: the square root of
the batch, and no dependence on the size, both with an uncertainty. The estimate is that of linear regression
with a normal prior.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from merit_lab.models import num_parameters
from merit_lab.study.fields import LR
from merit_lab.study.valley import Valley
from merit_lab.train import TrainConfig

# Prior of b and c: means and standard deviations. a is determined by the boards.
PRIOR_MEAN, PRIOR_DEVIATION = (0.5, 0.0), (0.25, 0.3)
_UNKNOWN = 100.0  # prior deviation of a, in natural logarithms: no information
_LEAST_SPREAD = 0.01  # nats; smaller differences of losses are not significant
_WIDTH = 1.2816  # standard deviations on both sides for 80%


@dataclass(frozen=True)
class RateObservation:
    """The best learning rate of an optimizer on one board, all in natural logarithms."""

    batch: float
    parameters: float
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
    batch: int
    parameters: int
    setting: Mapping[str, float]
    tuning: Sequence[tuple[Mapping[str, float], float | None]]
    deviation: float
    config: TrainConfig

    def distance(self, batch: int, parameters: int) -> float:
        """Distance of its batch and size, in natural logarithms."""
        return abs(math.log(batch / self.batch)) + abs(math.log(parameters / self.parameters))


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
        for board in json.loads(path.read_text()):
            standings += [_read_standing(board, standing) for standing in board["standings"]]
    finite = [standing for standing in standings if math.isfinite(standing.mean)]
    if not finite:
        raise ValueError(
            "no contestant of these arenas finished with every seed, so there is nothing to recommend"
        )
    return finite


def _read_standing(board: Mapping[str, Any], standing: Mapping[str, Any]) -> StandingRecord:
    losses = [float(loss) for loss in standing["losses"].values()]
    config = TrainConfig.from_dict(standing["config"])
    return StandingRecord(
        standing["optimizer"],
        statistics.fmean(losses),
        board["batch"],
        num_parameters(config.model),
        standing["setting"],
        [(run["setting"], None if run["loss"] is None else float(run["loss"])) for run in standing["tuning"]],
        statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else 0.0,
        config,
    )


def rank(standings: Sequence[StandingRecord], batch: int, parameters: int) -> list[str]:
    """The optimizers of the board nearest to a batch and a size, the best first."""
    nearest = min(standing.distance(batch, parameters) for standing in standings)
    near = [standing for standing in standings if standing.distance(batch, parameters) == nearest]
    return [standing.optimizer for standing in sorted(near, key=lambda standing: standing.mean)]


def advise(standings: Sequence[StandingRecord], optimizer: str, batch: int, parameters: int) -> Advice:
    """Recommend settings of an optimizer for a batch and a size."""
    known = [one for one in standings if one.optimizer == optimizer]
    mean, deviation = predict([observe(one) for one in known], math.log(batch), math.log(parameters))
    nearest = min(known, key=lambda one: one.distance(batch, parameters))
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
    where = math.log(standing.batch), math.log(standing.parameters)
    for losses in line.values():
        places = [centre + shift for shift in (-factor, 0.0, factor)]
        around = [(place, loss) for place in places if (loss := _nearest(losses, place)) is not None]
        if len(around) == 3 and (valley := Valley.through(*around)):
            spread = max(standing.deviation, _LEAST_SPREAD)
            deviation = min(factor, math.sqrt(spread / valley.curvature))
            return RateObservation(*where, max(places[0], min(places[-1], valley.place)), deviation)
    return RateObservation(*where, centre, factor)


def _shares(setting: Mapping[str, float]) -> dict[str, float]:
    """The other settings, with rates as shares of the learning rate, rounded to four digits."""
    return {
        field: float(f"{value / setting[LR]:.4g}") if field.endswith("lr") else value
        for field, value in setting.items()
        if field != LR
    }


def _nearest(losses: Mapping[float, float], where: float) -> float | None:
    return next((loss for at, loss in losses.items() if math.isclose(at, where, abs_tol=1e-3)), None)


def predict(observations: Sequence[RateObservation], batch: float, parameters: float) -> tuple[float, float]:
    """The mean and the standard deviation of the best rate's logarithm."""
    prior_mean = np.array([0.0, *PRIOR_MEAN])
    precision = np.diag([_UNKNOWN**-2, *(1 / d**2 for d in PRIOR_DEVIATION)])
    weighted = precision @ prior_mean
    for seen in observations:
        features = np.array([1.0, seen.batch, seen.parameters])
        precision = precision + np.outer(features, features) / seen.deviation**2
        weighted = weighted + features * seen.rate / seen.deviation**2
    covariance = np.linalg.inv(precision)
    wanted = np.array([1.0, batch, parameters])
    return float(wanted @ covariance @ weighted), float(np.sqrt(wanted @ covariance @ wanted))
