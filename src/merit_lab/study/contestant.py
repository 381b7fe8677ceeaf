"""A contestant: an optimizer with options, and optionally a second one for all but hidden matrices."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from merit_lab.results.names import display_names
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_lab.train.optimizer_names import class_of, is_external
from merit_optim.settings import SETTINGS

FIELDS = ("lr", "rest_lr", "warmup", "weight_decay")
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
        options: its options, as OPTION=VALUE.
        rest: a second optimizer for all but hidden matrices.
        rest_options: the options of the second optimizer.
        given: values of ``FIELDS``.
    """

    name: str
    options: tuple[str, ...] = ()
    rest: str | None = None
    rest_options: tuple[str, ...] = ()
    given: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse NAME,KEY=VALUE,... with rest=NAME and rest.OPTION=VALUE for a second optimizer.

        Example:
            >>> Contestant.parse("torch:Muon,momentum=0.9,lr=0.02,rest=adamw,rest.betas=0.9,0.95").text
            'torch:Muon,lr=0.02,momentum=0.9,rest=adamw,rest.betas=0.9,0.95'
        """
        name, *parts = re.split(r",(?=[\w.]+=)", text)  # a value may contain commas
        if "," in name or "=" in name or not name:
            raise ValueError(
                f"cannot parse the contestant {text!r}; write NAME,OPTION=VALUE,... as in "
                "torch:Muon,momentum=0.95,rest=adamw"
            )
        options: dict[str, list[str]] = {"options": [], "rest_options": []}
        rest: str | None = None
        given = {}
        for part in sorted(parts):
            key, _, value = part.partition("=")
            if key == "rest":
                rest = value
            elif key in FIELDS:
                given[key] = _number(text, key, value)
            elif key.startswith(_REST):
                options["rest_options"].append(part.removeprefix(_REST))
            else:
                options["options"].append(part)
        if "rest_lr" in given and rest is None:  # an option of the optimizer itself
            options["options"].append(f"rest_lr={given.pop('rest_lr'):g}")
        return cls(
            name, tuple(options["options"]), rest, tuple(options["rest_options"]), tuple(given.items())
        )

    @property
    def text(self) -> str:
        """The contestant in the form of ``parse``."""
        given = [f"{key}={value:g}" for key, value in self.given]
        rest = [] if self.rest is None else [f"rest={self.rest}"]
        options = (*given, *self.options, *rest, *(_REST + option for option in self.rest_options))
        return ",".join([self.name, *options])

    @property
    def slug(self) -> str:
        """The text as part of a folder's name."""
        return self.text.replace(":", ".").replace("/", "_")

    def over(self, base: OptimizerConfig) -> OptimizerConfig:
        """The configuration of its optimizer; what it does not say is that of ``base``."""
        rest = base.rest if self.rest is None else self.rest
        is_same_rest = rest == base.rest
        config = dataclasses.replace(
            base,
            name=self.name,
            options=_merged(base.options, self.options),
            rest=rest,
            rest_lr=base.rest_lr if is_same_rest else None,
            rest_options=_merged(base.rest_options if is_same_rest else (), self.rest_options),
        )
        given: dict[str, Any] = dict(self.given)
        return dataclasses.replace(config, **given)

    @property
    def _details(self) -> list[str]:
        given = (f"{key} {value:g}" for key, value in self.given)
        options = [*self.options, *(f"rest {option}" for option in self.rest_options)]
        return [text.replace("_", " ").replace("=", " ", 1) for text in (*given, *options)]


def labels(contestants: Sequence[Contestant]) -> dict[Contestant, str]:
    """Display names: the optimizers, and what tells contestants with the same optimizers apart.

    Example:
        >>> texts = ["torch:SGD,momentum=0.9", "torch:SGD", "torch:Muon,rest=adamw"]
        >>> list(labels([Contestant.parse(text) for text in texts]).values())
        ['SGD, momentum 0.9', 'SGD', 'Muon + AdamW']
    """
    names = display_names(name for one in contestants for name in (one.name, one.rest) if name is not None)
    pairs = {one: names[one.name] + (f" + {names[one.rest]}" if one.rest else "") for one in contestants}
    num_with = Counter((pairs[one], detail) for one in contestants for detail in one._details)
    num_alike = Counter(pairs.values())
    return {
        one: ", ".join(
            [pair, *(detail for detail in one._details if num_with[pair, detail] < num_alike[pair])]
        )
        for one, pair in pairs.items()
    }


def usual_rate(config: TrainConfig, optimizer: str, known: Mapping[str, float] = _USUAL) -> float:
    """A learning rate to begin with: one known to be good, the paper's, or the default of the class."""
    if optimizer in known:
        return known[optimizer]
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
