"""A contestant to be tuned at one batch size: its settings, and where their searches start."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from merit_lab.arena.contestant import Contestant, usual_rate
from merit_lab.arena.search import Point, SearchAxis, rounded
from merit_lab.results.gather import short_name
from merit_lab.study.fields import LR, short
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_lab.train.optimizer_names import class_of
from merit_lab.train.optimizer_options import default_of, takes
from merit_optim.optim.hidden import HiddenMatrixOptimizer

# The learning rate of the rest, in a second optimizer or as an option of the first. Tuned as a share of the
# learning rate, so that both change together.
_REST, _REST_OPTION = "optimizer.rest_lr", "optimizer.options.rest_lr"
WARMUP, DECAY = "optimizer.warmup", "optimizer.weight_decay"
# Tuned as its distance from 1: that doubles from 0.95 to 0.9 and from 0.9 to 0.8.
MOMENTUM = "optimizer.options.momentum"
_LEAST_DISTANCE = 1e-4  # much nearer to 1, a momentum of six digits would be 1


@dataclass(frozen=True)
class TuningTask:
    """A contestant to be tuned at one batch size.

    ``optimizer`` has the settings that are not tuned.
    """

    contestant: Contestant
    optimizer: OptimizerConfig
    batch: int

    @cached_property
    def axes(self) -> list[SearchAxis]:
        """The settings to tune, the learning rate first."""
        rest = [SearchAxis(self.rest_field, 2.0)] if self.rest_field is not None else []
        decay = (
            [SearchAxis(DECAY, 4.0)]
            if any(takes(class_of(name), "weight_decay") for name in self.names)
            else []
        )
        momentum = (
            [SearchAxis(MOMENTUM, 2.0, least=_LEAST_DISTANCE, most=1.0)]
            if self.default_momentum is not None
            else []
        )
        return [SearchAxis(LR, 2.0), *rest, SearchAxis(WARMUP, 2.0, most=0.5), *momentum, *decay]

    @property
    def names(self) -> list[str]:
        """The names of its optimizer and, if there is one, of the second."""
        return [name for name in (self.optimizer.name, self.optimizer.rest) if name is not None]

    @property
    def has_merits_ratios(self) -> bool:
        """Whether one of its optimizers uses MERIT's ratios."""
        return any("merit" in short_name(name).lower() for name in self.names)

    @property
    def rest_field(self) -> str | None:
        """The field with the learning rate of the rest, if it has a separate one."""
        if self.optimizer.rest is not None:
            return _REST
        return None if _rest_share(self.optimizer.name) is None else _REST_OPTION

    @cached_property
    def default_momentum(self) -> float | None:
        """The momentum at which its search starts; None if its optimizer has none, or if it is given."""
        if short(MOMENTUM) in self.optimizer.options_by_name():
            return None
        default = default_of(self.optimizer.name, short(MOMENTUM))
        return default if isinstance(default, int | float) and 0 <= default < 1 else None

    def settings(self, point: Point) -> dict[str, float]:
        """The settings at a point, by dotted name."""
        values = dict(zip((axis.field for axis in self.axes), point.values, strict=True))
        if (rest := self.rest_field) is not None:
            values[rest] = rounded(values[rest] * values[LR])
        if MOMENTUM in values:
            values[MOMENTUM] = rounded(1 - values[MOMENTUM])
        return values

    def start(self, base: TrainConfig) -> dict[str, float]:
        """The starts of its searches, for the batch of ``base``."""
        lr = self.contestant.begin("lr") or usual_rate(base, self.optimizer.name)
        begins = {LR: lr, WARMUP: base.optimizer.warmup, DECAY: base.optimizer.weight_decay}
        begins |= {f"optimizer.{key}": value for key, value in self.contestant.begins if key != "rest_lr"}
        if self.default_momentum is not None:
            begins[MOMENTUM] = 1 - self.default_momentum
        rest_lr = self.contestant.begin("rest_lr") or self.optimizer.options_by_name().get("rest_lr")
        if self.optimizer.rest is not None:
            rest_lr = rest_lr or self.optimizer.rest_lr
            begins[_REST] = (rest_lr or usual_rate(base, self.optimizer.rest)) / begins[LR]
        elif (share := _rest_share(self.optimizer.name)) is not None:
            begins[_REST_OPTION] = share if rest_lr is None else rest_lr / begins[LR]
        elif rest_lr is not None:
            raise ValueError(
                f"{self.contestant.text} has only one learning rate, but rest_lr={rest_lr:g} sets a "
                f"second; add a second optimizer, as in {self.contestant.text},rest=adamw"
            )
        return begins


def _rest_share(optimizer: str) -> float | None:
    """The default rate of the rest as a share, for an optimizer that handles all kinds of weights itself."""
    kind = class_of(optimizer)
    if isinstance(kind, type) and issubclass(kind, HiddenMatrixOptimizer):
        return kind.REST_SHARE
    return None
