"""A contestant: an optimizer with options, and optionally a second one for all but hidden matrices."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from merit_lab.results.names import display_names
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_lab.train.optimizer_options import class_of, is_external
from merit_optim.settings import SETTINGS

FIELDS = ("lr", "rate_scale", "rest_lr", "warmup", "weight_decay")
"""What is a field of the optimizer's configuration, and not one of its options."""

# Learning rates near the best at 10M parameters, where the paper gives none (docs/results/optimizers.md).
_USUAL = {
    "muon": 1.6e-2,
    "normuon": 1.6e-2,
    "orscale": 1.6e-2,
    "soap": 4e-3,
    "maxlamb": 1e-2,
    "muon-merit": 4e-2,
    "soap-merit": 4e-2,
}
_REST = "rest."  # prefix of the options of the second optimizer


@dataclass(frozen=True)
class Contestant:
    """An optimizer with options; what is given is not tuned.

    Args:
        name: the optimizer, as in `merit train`.
        settings: its options and values of ``FIELDS``, as text; "rest" is a second optimizer for all but
            hidden matrices, and "rest.OPTION" an option of that.
    """

    name: str
    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse NAME,KEY=VALUE,... with rest=NAME and rest.OPTION=VALUE for a second optimizer.

        Example:
            >>> Contestant.parse("torch:Muon,momentum=0.9,lr=0.020,rest=adamw,rest.betas=0.9,0.95").text
            'torch:Muon,lr=0.02,momentum=0.9,rest=adamw,rest.betas=0.9,0.95'
        """
        name, *parts = re.split(r",(?=[\w.]+=)", text)  # a value may contain commas
        if "," in name or "=" in name or not name:
            raise ValueError(
                f"cannot parse the contestant {text!r}; write NAME,OPTION=VALUE,... as in "
                "torch:Muon,momentum=0.95,rest=adamw"
            )
        pairs = dict(sorted(part.split("=", 1) for part in parts))
        numbers = {key: f"{_number(text, key, pairs[key]):g}" for key in FIELDS if key in pairs}
        return cls(name, tuple((pairs | numbers).items()))

    @property
    def text(self) -> str:
        """The contestant in the form of ``parse``."""
        return ",".join([self.name, *map("=".join, self.settings)])

    @property
    def slug(self) -> str:
        """The text as part of a folder's name."""
        return self.text.replace(":", ".").replace("/", "_")

    @property
    def rest(self) -> str | None:
        """The second optimizer."""
        return dict(self.settings).get("rest")

    @property
    def given(self) -> dict[str, float]:
        """The values of ``FIELDS``."""
        return {key: float(value) for key, value in self.settings if key in FIELDS}

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the optimizer itself, as OPTION=VALUE."""
        others = ("rest", *self.given)
        pairs = (pair for pair in self.settings if pair[0] not in others and not pair[0].startswith(_REST))
        return tuple(map("=".join, pairs))

    def over(self, base: OptimizerConfig) -> OptimizerConfig:
        """The configuration of its optimizer; what it does not say is that of ``base``."""
        rest = self.rest or base.rest
        own = [f"{key}={value}".removeprefix(_REST) for key, value in self.settings if key.startswith(_REST)]
        is_same_rest = rest == base.rest
        config = dataclasses.replace(
            base,
            name=self.name,
            options=_merged(base.options, self.options),
            rest=rest,
            rest_lr=base.rest_lr if is_same_rest else None,
            rest_options=_merged(base.rest_options if is_same_rest else (), own),
        )
        given: dict[str, Any] = self.given
        return dataclasses.replace(config, **given)

    @property
    def _details(self) -> list[str]:
        pairs = (pair for pair in self.settings if pair[0] != "rest")
        return [" ".join(pair).replace("_", " ").replace(_REST, "rest ", 1) for pair in pairs]


def labels(contestants: Sequence[Contestant]) -> dict[Contestant, str]:
    """Display names: the optimizers, and the settings of contestants with the same optimizers.

    Example:
        >>> texts = ["torch:SGD,momentum=0.9", "torch:SGD", "torch:Muon,rest=adamw"]
        >>> list(labels([Contestant.parse(text) for text in texts]).values())
        ['SGD, momentum 0.9', 'SGD', 'Muon + AdamW']
    """
    names = display_names(name for one in contestants for name in (one.name, one.rest) if name is not None)
    pairs = {one: names[one.name] + (f" + {names[one.rest]}" if one.rest else "") for one in contestants}
    num_alike = Counter(pairs.values())
    return {
        one: ", ".join([pair, *(one._details if num_alike[pair] > 1 else [])]) for one, pair in pairs.items()
    }


def usual_rate(config: TrainConfig, optimizer: str) -> float:
    """A learning rate to begin with: one known to be good, the paper's, or the default of the class."""
    if optimizer in _USUAL:
        return _USUAL[optimizer]
    if not is_external(optimizer) and SETTINGS[optimizer].learning_rates:
        resolved = OptimizerConfig(name=optimizer).resolve(config.model)
        assert resolved.lr is not None
        return resolved.lr
    argument = inspect.signature(class_of(optimizer)).parameters.get("lr")
    if argument is None or not isinstance(argument.default, int | float) or not argument.default > 0:
        raise ValueError(
            f"{optimizer} has no default learning rate; say between which rates to search, as in "
            f"--space {optimizer}.lr=1e-4:1e-2, or give one, as in {optimizer},lr=1e-3"
        )
    return float(argument.default)


def _merged(base: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Both, except those of ``base`` that ``options`` replace."""
    named = {text.partition("=")[0] for text in options}
    return (*(text for text in base if text.partition("=")[0] not in named), *options)


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (number == 0 and key.endswith("lr")):
        raise ValueError(
            f"the contestant {text!r} has {key}={value}; it must be a number above 0, as in {key}=0.01"
        )
    return number
