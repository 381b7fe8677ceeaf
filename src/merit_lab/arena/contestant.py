"""A contestant of an arena: an optimizer with options, and optionally a second one for the rest."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from merit_lab.compare.plan import parse_learning_rates
from merit_lab.results.gather import display_names
from merit_lab.sweep.grid import check_rates
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_lab.train.optimizer_names import class_of, is_external
from merit_optim.optim.registry import OPTIMIZERS

TUNED = ("lr", "rest_lr", "warmup", "weight_decay")
"""The settings of which a contestant's values are the starts of its searches.

A momentum is tuned too, but one that is given stays: contestants may differ in it.
"""

# Starts of learning rates that the paper does not give: near the best at 10M (docs/results/optimizers.md).
_STARTS = {
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
    """An optimizer with options.

    Args:
        name: the optimizer, as in `merit train`.
        options: its options, as OPTION=VALUE.
        rest: a second optimizer for the rest: all parameters except hidden matrices.
        rest_options: the options of the second optimizer.
        begins: starts of the searches, by the names in ``TUNED``.
    """

    name: str
    options: tuple[str, ...] = ()
    rest: str | None = None
    rest_options: tuple[str, ...] = ()
    begins: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse NAME,KEY=VALUE,... with rest=NAME and rest.OPTION=VALUE for a second optimizer.

        Example:
            >>> Contestant.parse("torch:Muon,momentum=0.9,lr=0.02,rest=adamw,rest.betas=0.9,0.95").text
            'torch:Muon,momentum=0.9,rest=adamw,rest.betas=0.9,0.95'
        """
        name, *parts = re.split(r",(?=[\w.]+=)", text)  # a value may contain commas
        if "," in name or "=" in name:
            raise ValueError(
                f"cannot parse the contestant {text!r}; write NAME,OPTION=VALUE,... as in "
                "torch:Muon,momentum=0.95,rest=adamw"
            )
        options: dict[str, list[str]] = {"options": [], "rest_options": []}
        rest: str | None = None
        begins = {}
        for part in parts:
            key, _, value = part.partition("=")
            if key == "rest":
                rest = value
            elif key in TUNED:
                begins[key] = _number(text, key, value)
            elif key.startswith(_REST):
                options["rest_options"].append(part.removeprefix(_REST))
            else:
                options["options"].append(part)
        sorted_options = {field: tuple(sorted(texts)) for field, texts in options.items()}
        return cls(name=name, rest=rest, begins=tuple(begins.items()), **sorted_options)

    @property
    def text(self) -> str:
        """The contestant without the starts of its searches, in the form of ``parse``."""
        rest = [] if self.rest is None else [f"rest={self.rest}"]
        return ",".join([self.name, *self.options, *rest, *(_REST + option for option in self.rest_options)])

    def begin(self, key: str) -> float | None:
        """The start of the search for a setting, if the contestant has one."""
        return dict(self.begins).get(key)

    def over(self, base: OptimizerConfig) -> OptimizerConfig:
        """The configuration of its optimizer; settings that it does not have are those of ``base``."""
        rest = base.rest if self.rest is None else self.rest
        is_same_rest = rest == base.rest
        return dataclasses.replace(
            base,
            name=self.name,
            options=_merged(base.options, self.options),
            rest=rest,
            rest_lr=base.rest_lr if is_same_rest else None,
            rest_options=_merged(base.rest_options if is_same_rest else (), self.rest_options),
        )

    @property
    def option_labels(self) -> list[str]:
        """Its options for display."""
        options = [*self.options, *(f"rest {option}" for option in self.rest_options)]
        return [option.replace("_", " ").replace("=", " ", 1) for option in options]


def labels(contestants: Sequence[Contestant]) -> dict[Contestant, str]:
    """Display names: the optimizers, and the options that distinguish contestants with the same optimizers.

    Example:
        >>> texts = ["torch:SGD,momentum=0.9", "torch:SGD", "torch:Muon,rest=adamw"]
        >>> list(labels([Contestant.parse(text) for text in texts]).values())
        ['SGD, momentum 0.9', 'SGD', 'Muon + AdamW']
    """
    names = display_names(name for one in contestants for name in (one.name, one.rest) if name is not None)
    pairs = {one: names[one.name] + (f" + {names[one.rest]}" if one.rest else "") for one in contestants}
    num_with = Counter((pairs[one], label) for one in contestants for label in one.option_labels)
    num_alike = Counter(pairs.values())
    return {
        one: ", ".join(
            [pair, *(label for label in one.option_labels if num_with[pair, label] < num_alike[pair])]
        )
        for one, pair in pairs.items()
    }


def with_rates(contestants: Sequence[Contestant], texts: Iterable[str]) -> list[Contestant]:
    """Start searches at rates given as NAME=RATE, except for contestants that have a start already."""
    starts = parse_learning_rates(texts)
    names = list(dict.fromkeys(contestant.name for contestant in contestants))
    for name, rates in starts.items():
        if name not in names or len(rates) > 1:
            raise ValueError(
                f"--lr has {len(rates)} for {name}; give one rate for each contestant, of: {', '.join(names)}"
            )
        check_rates(name, rates)
    return [
        dataclasses.replace(contestant, begins=(("lr", starts[contestant.name][0]), *contestant.begins))
        if contestant.name in starts
        else contestant
        for contestant in contestants
    ]


def usual_rate(config: TrainConfig, optimizer: str) -> float:
    """The default start of a learning rate: one known to be good, the paper's, or the optimizer's default."""
    if optimizer in _STARTS:
        return _STARTS[optimizer]
    if not is_external(optimizer) and OPTIMIZERS[optimizer].learning_rates:
        resolved = OptimizerConfig(name=optimizer).resolve(config.model)
        assert resolved.lr is not None
        return resolved.lr
    argument = inspect.signature(class_of(optimizer)).parameters.get("lr")
    if argument is None or not isinstance(argument.default, int | float) or not argument.default > 0:
        raise ValueError(
            f"{optimizer} has no default learning rate; give a start, as in {optimizer},lr=1e-3 or, for a "
            "second optimizer, rest_lr=1e-3"
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
            f"the contestant {text!r} has {key}={value}; a search starts at a number above 0, as in "
            f"{key}=0.01"
        )
    return number
