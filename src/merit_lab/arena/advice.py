"""What the boards of arenas say about another model or batch: an optimizer, its rate, and how sure that is.

The best learning rate is taken to follow a power law in the batch and in the number of parameters:

    log lr = a + b*log(batch) + c*log(parameters)

Each board is an observation of it, as sharp as the losses around its best rate are steep. What boards do not
tell, because all have one batch or one size, comes from what is known before: the square root of the batch,
and no dependence on the size, both give or take. The answer is the usual one of linear regression with a
normal prior.
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
from merit_lab.train import TrainConfig

# b and c, and their standard deviations. a is left to the boards.
PRIOR_MEAN, PRIOR_DEVIATION = (0.5, 0.0), (0.25, 0.3)
_UNKNOWN = 100.0  # the deviation of a, in natural logarithms: all that is thinkable
_LEAST_SPREAD = 0.01  # nats: two losses that differ by less are the same
_WIDTH = 1.2816  # standard deviations on both sides that hold four of five


@dataclass(frozen=True)
class Observation:
    """The best learning rate of an optimizer on one board, all in natural logarithms."""

    batch: float
    parameters: float
    rate: float
    deviation: float


@dataclass(frozen=True)
class Advice:
    """What to train with."""

    optimizer: str
    lr: float
    low: float
    high: float
    """Four times of five the best rate is between these, if the power law holds."""
    settings: Mapping[str, float]
    """All that was tuned: this rate, other rates as shares of it, and the rest, as on the nearest board."""
    config: TrainConfig
    """That of the nearest board."""
    num_boards: int


@dataclass(frozen=True)
class Known:
    """One standing of one board. ``optimizer`` is the entry's text."""

    optimizer: str
    mean: float
    batch: int
    parameters: int
    setting: Mapping[str, float]
    tuning: Sequence[tuple[Mapping[str, float], float | None]]
    deviation: float
    config: TrainConfig

    def distance(self, batch: int, parameters: int) -> float:
        """How far away its batch and size are."""
        return abs(math.log(batch / self.batch)) + abs(math.log(parameters / self.parameters))


def read_boards(folders: Sequence[Path]) -> list[Known]:
    """The standings in the reports of arenas."""
    found: list[Known] = []
    for folder in folders:
        path = folder / "report" / "board.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no report of an arena; `merit arena ... --out {folder}` writes one"
            )
        found += [_known(board, own) for board in json.loads(path.read_text()) for own in board["standings"]]
    finite = [own for own in found if math.isfinite(own.mean)]
    if not finite:
        raise ValueError(
            "no contestant of these arenas finished with every seed, so there is nothing to go by"
        )
    return finite


def _known(board: Mapping[str, Any], standing: Mapping[str, Any]) -> Known:
    losses = [float(loss) for loss in standing["losses"].values()]
    config = TrainConfig.from_dict(standing["config"])
    return Known(
        standing["optimizer"],
        statistics.fmean(losses),
        board["batch"],
        num_parameters(config.model),
        standing["setting"],
        [(own["setting"], None if own["loss"] is None else float(own["loss"])) for own in standing["tuning"]],
        statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else 0.0,
        config,
    )


def rank(known: Sequence[Known], batch: int, parameters: int) -> list[str]:
    """The optimizers as the board nearest to a batch and a size has them, the best first."""
    nearest = min(own.distance(batch, parameters) for own in known)
    near = [own for own in known if own.distance(batch, parameters) == nearest]
    return [own.optimizer for own in sorted(near, key=lambda own: own.mean)]


def advise(known: Sequence[Known], optimizer: str, batch: int, parameters: int) -> Advice:
    """What an optimizer wants with a batch and a size."""
    own = [one for one in known if one.optimizer == optimizer]
    mean, deviation = predict([observe(one) for one in own], math.log(batch), math.log(parameters))
    nearest = min(own, key=lambda one: one.distance(batch, parameters))
    lr = math.exp(mean)
    settings = {
        field: float(f"{value * lr / nearest.setting[LR]:.2g}") if field.endswith("lr") else value
        for field, value in nearest.setting.items()
    }
    low, high = (mean + sign * _WIDTH * deviation for sign in (-1, 1))
    return Advice(optimizer, lr, math.exp(low), math.exp(high), settings, nearest.config, len(own))


def observe(known: Known) -> Observation:
    """The lowest point of a parabola through the best rate and its neighbours, and how well that is known.

    A loss that differs from the lowest by less than seeds do may as well be the lowest.
    """
    best = known.setting
    line: dict[tuple[tuple[str, float], ...], dict[float, float]] = {}
    for setting, loss in known.tuning:
        rest = tuple(_shares(setting).items())
        if loss is not None and math.isfinite(loss):
            line.setdefault(rest, {})[math.log(setting[LR])] = loss
    centre, factor = math.log(best[LR]), math.log(2)
    where = math.log(known.batch), math.log(known.parameters)
    for losses in line.values():
        around = [_nearest(losses, centre + shift) for shift in (-factor, 0.0, factor)]
        if None not in around:
            below, at, above = (loss for loss in around if loss is not None)
            curvature = (below + above - 2 * at) / 2
            if curvature > 0:
                shift = (below - above) / (4 * curvature)
                spread = max(known.deviation, _LEAST_SPREAD)
                deviation = factor * min(1.0, math.sqrt(spread / curvature))
                return Observation(*where, centre + factor * max(-1.0, min(1.0, shift)), deviation)
    return Observation(*where, centre, factor)


def _shares(setting: Mapping[str, float]) -> dict[str, float]:
    """The other settings; rates as shares of the learning rate, six digits."""
    return {
        field: float(f"{value / setting[LR]:.4g}") if field.endswith("lr") else value
        for field, value in setting.items()
        if field != LR
    }


def _nearest(losses: Mapping[float, float], where: float) -> float | None:
    return next((loss for at, loss in losses.items() if math.isclose(at, where, abs_tol=1e-3)), None)


def predict(observations: Sequence[Observation], batch: float, parameters: float) -> tuple[float, float]:
    """The mean and the standard deviation of the best rate's logarithm."""
    prior_mean = np.array([0.0, *PRIOR_MEAN])
    precision = np.diag([_UNKNOWN**-2, *(1 / d**2 for d in PRIOR_DEVIATION)])
    weighted = precision @ prior_mean
    for own in observations:
        features = np.array([1.0, own.batch, own.parameters])
        precision = precision + np.outer(features, features) / own.deviation**2
        weighted = weighted + features * own.rate / own.deviation**2
    covariance = np.linalg.inv(precision)
    wanted = np.array([1.0, batch, parameters])
    return float(wanted @ covariance @ weighted), float(np.sqrt(wanted @ covariance @ wanted))
