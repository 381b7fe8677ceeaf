"""What is tuned of an optimizer, and between which values: its search space, found from its signature.

Every space has the same axes as far as the optimizer has them, each as wide as that of any other; its points
are those of one quasi-random sequence. So optimizers are tuned alike: the learning rate of trial 7 lies as
far into its range with one optimizer as with another.

    lr            four times below and above the usual rate
    rest_lr       the same, of a second optimizer
    rate_scale    what the weights that take AdamW multiply lr by: 0.2 to 3.2
    warmup        share of the steps: 10% and 20 steps at least, 50% at most
    momentum      0.8 to 0.975; for an optimizer with betas, beta1
    beta2         0.8 to 0.99
    weight_decay  0.02 to 0.5
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from merit_lab.study.contestant import FIELDS, Contestant, usual_rate
from merit_lab.text import join
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_lab.train.optimizer_options import class_of, default_of, option_names, takes

# An axis has the same place in the sequence for every optimizer.
_PLACES = {"lr": 0, "rest_lr": 1, "rate_scale": 1, "warmup": 2, "momentum": 3, "beta1": 3, "beta2": 4}
_PLACES |= {"weight_decay": 5}
_NUM_PLACES, _MOST_OPTIONS = 6, 4  # after these places are those of options that the user names
_FROM_ONE = ("momentum", "beta1", "beta2")  # logarithmic in the distance from 1
_FACTOR = 4.0  # of a learning rate, down and up
_SCALES, _MOMENTA, _BETA2, _DECAYS = (0.2, 3.2), (0.8, 0.975), (0.8, 0.99), (0.02, 0.5)
_WARMUP, _LONGEST_WARMUP, _WARMUP_STEPS = 0.1, 0.5, 20
_NEAR_EDGE = 0.05  # share of an axis
MOST_TRIALS = 10_000


@dataclass(frozen=True)
class Axis:
    """A setting that is tuned on a logarithmic scale, with its first value; fixed if low equals high."""

    name: str
    low: float
    high: float
    start: float

    @property
    def is_fixed(self) -> bool:
        return self.low == self.high

    @property
    def is_rate(self) -> bool:
        """Whether it is a learning rate, or a share of one."""
        return self.name in ("lr", "rest_lr", "rate_scale")

    def at(self, unit: float) -> float:
        """The value at a place from 0 to 1."""
        if self.is_fixed:
            return self.low
        if self.name in _FROM_ONE:
            return _rounded(1 - (1 - self.low) * ((1 - self.high) / (1 - self.low)) ** unit)
        return _rounded(self.low * (self.high / self.low) ** unit)

    def is_edge(self, value: float) -> bool:
        """Whether a value is at an end of what is searched."""
        return not self.at(_NEAR_EDGE) < value < self.at(1 - _NEAR_EDGE)

    @property
    def words(self) -> str:
        """Between what it is searched, as text."""
        return "fixed" if self.is_fixed else f"{self.low:g} to {self.high:g}"


def point(axes: Sequence[Axis], seed: int, number: int) -> dict[str, float]:
    """The values of a trial by axis. They depend on the seed and the number alone; 0 is the start."""
    if number == 0:
        return {axis.name: axis.start for axis in axes}
    unit = _sequence(seed, 1 << number.bit_length())[number - 1]
    others = [axis.name for axis in axes if axis.name not in _PLACES]
    places = _PLACES | {name: _NUM_PLACES + place for place, name in enumerate(others)}
    return {axis.name: axis.at(float(unit[places[axis.name]])) for axis in axes}


@dataclass(frozen=True)
class Space:
    """The search space of a contestant in runs of one configuration."""

    contestant: Contestant
    base: TrainConfig
    axes: tuple[Axis, ...]

    @property
    def is_tuned(self) -> bool:
        """Whether anything is left to tune."""
        return not all(axis.is_fixed for axis in self.axes)

    @property
    def never(self) -> tuple[str, ...]:
        """The options of its class that stay at their defaults."""
        known = {axis.name for axis in self.axes} | self.base.optimizer.options_by_name().keys()
        known |= {"betas"} if "beta1" in known else set()
        known |= {"kinds"} if "rate_scale" in known else set()
        return tuple(name for name in option_names(class_of(self.contestant.name)) if name not in known)

    def settings(self, values: Mapping[str, float]) -> dict[str, object]:
        """The fields of a configuration, by dotted name, for values by axis."""
        fields: dict[str, object] = {}
        betas = _betas(self.base.optimizer)
        for name, value in values.items():
            if name in ("beta1", "beta2"):
                assert betas is not None
                betas = (value, *betas[1:]) if name == "beta1" else (*betas[:-1], value)
                key = "optimizer.betas" if len(betas) == 2 else "optimizer.options.betas"
                fields[key] = betas
            else:
                fields[f"optimizer.{name}" if name in FIELDS else f"optimizer.options.{name}"] = value
        return fields


def space_of(contestant: Contestant, base: TrainConfig, changes: Sequence[str] = ()) -> Space:
    """The space of a contestant: what it does not give itself is tuned.

    Args:
        contestant: the contestant.
        base: the configuration of all runs, resolved but for the optimizer.
        changes: ranges and values as NAME.AXIS=LOW:HIGH, NAME.AXIS=VALUE, or AXIS=... for all contestants.
    """
    config = replace(base, optimizer=contestant.over(base.optimizer))
    given, changed = contestant.given, _changes_of(contestant, changes)
    axes: dict[str, Axis] = {}

    def add(name: str, low: float, high: float, start: float) -> None:
        axes[name] = Axis(name, low, high, min(max(start, low), high))

    for name, optimizer in (("lr", config.optimizer.name), ("rest_lr", config.optimizer.rest)):
        if optimizer is not None:
            # A rate that is given needs no usual one, which an optimizer may lack.
            known = given.get(name) or changed.get(name, (None, None))[0]
            usual = known or usual_rate(config, optimizer)
            add(name, _rounded(usual / _FACTOR), _rounded(usual * _FACTOR), usual)
    options = config.optimizer.options_by_name()
    from merit_lab.train.by_kind import rest_of  # imports torch, which help does not need

    for scale in set(rest_of(config.optimizer.name).values()):
        add("rate_scale", *_SCALES, scale)
    assert config.steps is not None
    least = min(_LONGEST_WARMUP, max(_WARMUP, _WARMUP_STEPS / config.steps))
    add("warmup", _rounded(least), _LONGEST_WARMUP, least)
    momentum = default_of(config.optimizer.name, "momentum")
    if isinstance(momentum, int | float) and 0 <= momentum < 1 and "momentum" not in options:
        add("momentum", *_MOMENTA, momentum)
    if (betas := _betas(config.optimizer)) is not None:
        add("beta1", *_MOMENTA, betas[0])
        add("beta2", *_BETA2, betas[-1])
    names = [name for name in (config.optimizer.name, config.optimizer.rest) if name is not None]
    if any(takes(class_of(name), "weight_decay") for name in names):
        add("weight_decay", *_DECAYS, config.optimizer.weight_decay)
    for name, value in given.items():
        axes[name] = Axis(name, value, value, value)
    if len(set(changed) - set(_PLACES)) > _MOST_OPTIONS:
        raise ValueError(f"--space names {join(list(changed))}; at most {_MOST_OPTIONS} can be options")
    for name, (low, high) in changed.items():
        if name not in axes and (name in FIELDS or not takes(class_of(contestant.name), name)):
            if any(parse_change(text)[:2] == ("", name) for text in changes):
                continue  # it is for those that have it
            raise ValueError(
                f"--space changes {name}, which {contestant.text} does not have; it has {join(list(axes))}, "
                "and the options of its class"
            )
        middle = Axis(name, low, high, low).at(0.5)
        start = axes[name].start if name in axes and not name.endswith("lr") else middle
        add(name, low, high, start)
    return Space(contestant, config, tuple(axes.values()))


def check_changes(changes: Sequence[str], contestants: Sequence[Contestant]) -> None:
    """Raise if a change names none of the contestants."""
    known = {name: None for one in contestants for name in (one.name, one.text)}
    for text in changes:
        name = parse_change(text)[0]
        if name not in ("", *known):
            raise ValueError(
                f"--space {text} names {name}, which is none of the contestants: {join(list(known))}"
            )


def _changes_of(contestant: Contestant, changes: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The ranges that apply to a contestant, by axis; its own after those for all."""
    parsed = sorted(map(parse_change, changes), key=lambda change: change[0] != "")
    names = ("", contestant.name, contestant.text)
    return {axis: (low, high) for name, axis, low, high in parsed if name in names}


def parse_change(text: str) -> tuple[str, str, float, float]:
    """Parse NAME.AXIS=LOW:HIGH or NAME.AXIS=VALUE into name, axis, low and high.

    Example:
        >>> parse_change("torch:SGD.lr=0.01:1"), parse_change("warmup=0.1")
        (('torch:SGD', 'lr', 0.01, 1.0), ('', 'warmup', 0.1, 0.1))
    """
    left, _, values = text.rpartition("=")
    name, _, axis = left.rpartition(".")
    first, _, second = values.partition(":")
    try:
        if not axis.isidentifier():
            raise ValueError
        low, high = float(first), float(second or first)
    except ValueError:
        raise ValueError(
            f"cannot parse --space {text!r}; write NAME.AXIS=LOW:HIGH to search between two values, or "
            "NAME.AXIS=VALUE for one, as in muon.lr=0.004:0.06"
        ) from None
    below = " and below 1" if axis in _FROM_ONE else " and at most 1" if axis == "warmup" else ""
    most = math.nextafter(1.0, 0.0) if axis in _FROM_ONE else 1.0 if axis == "warmup" else sys.float_info.max
    may_be_zero = low == high and not axis.endswith("lr")
    if not 0 <= low <= high <= most or (low == 0 and not may_be_zero):
        raise ValueError(
            f"--space has {axis} from {low:g} to {high:g}; the values must be above 0{below}, the lower first"
        )
    return name, axis, low, high


def _betas(optimizer: OptimizerConfig) -> tuple[float, ...] | None:
    """The betas from which the search starts; None if the optimizer has none, or if they are given."""
    default = default_of(optimizer.name, "betas")
    is_given = optimizer.betas is not None or "betas" in optimizer.options_by_name()
    if is_given or not isinstance(default, tuple) or len(default) < 2:
        return None
    is_decay = all(isinstance(one, int | float) and 0 <= one < 1 for one in default)
    return tuple(map(float, default)) if is_decay else None


@cache
def _sequence(seed: int, num: int) -> np.ndarray:
    """The first points of Halton's sequence, scrambled by the seed. A longer one begins with a shorter."""
    from scipy.stats import qmc  # type: ignore[import-untyped]  # takes seconds

    points: np.ndarray = qmc.Halton(_NUM_PLACES + _MOST_OPTIONS, scramble=True, rng=seed).random(num)
    return points


def _rounded(value: float) -> float:
    """A value with four digits, as many as are tried.

    Example:
        >>> 1 - 0.95, _rounded(1 - 0.95)
        (0.050000000000000044, 0.05)
    """
    return float(f"{value:.4g}")
