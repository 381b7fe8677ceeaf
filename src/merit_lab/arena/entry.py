"""Who takes part in an arena: an optimizer with its options, and a second one for the rest of the weights."""

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
from merit_lab.report.gather import display_names
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_lab.train.optimizer_names import class_of, is_external
from merit_optim.optim.registry import OPTIMIZERS

TUNED = ("lr", "rest_lr", "warmup", "weight_decay")
"""What is searched for. Values of these that an entry has are where its searches begin."""

# Where searches begin for want of a rate in the paper: near the best at 10M parameters (docs/results.md).
_BEGIN = {"muon": 1.6e-2, "normuon": 1.6e-2, "orscale": 1.6e-2, "soap": 4e-3, "maxlamb": 1e-2}
_REST = "rest."  # before the name of an option of the second optimizer


@dataclass(frozen=True)
class Entry:
    """An optimizer as it takes part.

    Args:
        name: the optimizer, as `merit train` has it.
        options: its arguments, as OPTION=VALUE.
        rest: a second optimizer for all but hidden matrices.
        rest_options: its arguments.
        begins: where searches begin, by the names in ``TUNED``.
    """

    name: str
    options: tuple[str, ...] = ()
    rest: str | None = None
    rest_options: tuple[str, ...] = ()
    begins: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read NAME,KEY=VALUE,... with rest=NAME and rest.OPTION=VALUE for a second optimizer.

        Example:
            >>> Entry.parse("torch:Muon,momentum=0.9,lr=0.02,rest=adamw,rest.betas=0.9,0.95").text
            'torch:Muon,momentum=0.9,rest=adamw,rest.betas=0.9,0.95'
        """
        name, *parts = re.split(r",(?=[\w.]+=)", text)  # a comma is also part of a value
        if "," in name or "=" in name:
            raise ValueError(
                f"the contestant {text!r} is not understood; write NAME,OPTION=VALUE,... as in "
                "torch:Muon,momentum=0.95,rest=adamw"
            )
        own: dict[str, list[str]] = {"options": [], "rest_options": []}
        rest: str | None = None
        begins = {}
        for part in parts:
            key, _, value = part.partition("=")
            if key == "rest":
                rest = value
            elif key in TUNED:
                begins[key] = _number(text, key, value)
            elif key.startswith(_REST):
                own["rest_options"].append(part.removeprefix(_REST))
            else:
                own["options"].append(part)
        sorted_options = {field: tuple(sorted(texts)) for field, texts in own.items()}
        return cls(name=name, rest=rest, begins=tuple(begins.items()), **sorted_options)

    @property
    def text(self) -> str:
        """What tells it from others: all but where its searches begin."""
        rest = [] if self.rest is None else [f"rest={self.rest}"]
        return ",".join([self.name, *self.options, *rest, *(_REST + own for own in self.rest_options)])

    def begin(self, key: str) -> float | None:
        """Where the search of a setting begins, if the entry says so."""
        return dict(self.begins).get(key)

    def over(self, base: OptimizerConfig) -> OptimizerConfig:
        """The settings of its optimizer; what it does not say itself is as in ``base``."""
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
    def words(self) -> list[str]:
        """Its options as they are read."""
        options = [*self.options, *(f"rest {own}" for own in self.rest_options)]
        return [own.replace("_", " ").replace("=", " ", 1) for own in options]


def labels(entries: Sequence[Entry]) -> dict[Entry, str]:
    """How entries are written: their optimizers, and the options in which those that are alike differ.

    Example:
        >>> entries = map(Entry.parse, ["torch:SGD,momentum=0.9", "torch:SGD", "torch:Muon,rest=adamw"])
        >>> list(labels(list(entries)).values())
        ['SGD, momentum 0.9', 'SGD', 'Muon + AdamW']
    """
    names = display_names(name for own in entries for name in (own.name, own.rest) if name is not None)
    pairs = {own: names[own.name] + (f" + {names[own.rest]}" if own.rest else "") for own in entries}
    words = Counter((pairs[own], word) for own in entries for word in own.words)
    alike = Counter(pairs.values())
    return {
        own: ", ".join([pair, *(word for word in own.words if words[pair, word] < alike[pair])])
        for own, pair in pairs.items()
    }


def with_rates(entries: Sequence[Entry], texts: Iterable[str]) -> list[Entry]:
    """Entries whose searches begin at rates that are given as NAME=RATE; an entry's own goes before."""
    given = parse_learning_rates(texts)
    names = list(dict.fromkeys(own.name for own in entries))
    for name, rates in given.items():
        if name not in names or len(rates) > 1:
            raise ValueError(
                f"--lr has {len(rates)} for {name}; a search begins at one rate, of a contestant: "
                f"{', '.join(names)}"
            )
    return [
        dataclasses.replace(own, begins=(("lr", given[own.name][0]), *own.begins))
        if own.name in given
        else own
        for own in entries
    ]


def usual_rate(config: TrainConfig, optimizer: str) -> float:
    """Where the search of a learning rate begins: the paper's, one known to be good, or its default."""
    if optimizer in _BEGIN:
        return _BEGIN[optimizer]
    if not is_external(optimizer) and OPTIMIZERS[optimizer].learning_rates:
        resolved = OptimizerConfig(name=optimizer).resolve(config.model)
        assert resolved.lr is not None
        return resolved.lr
    argument = inspect.signature(class_of(optimizer)).parameters.get("lr")
    if argument is None or not isinstance(argument.default, int | float) or not argument.default > 0:
        raise ValueError(
            f"{optimizer} has no learning rate by default; say where to begin, as in {optimizer},lr=1e-3 or, "
            "for a second optimizer, rest_lr=1e-3"
        )
    return float(argument.default)


def _merged(base: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """Options of which the later ones take the place of those of their name."""
    named = {text.partition("=")[0] for text in own}
    return (*(text for text in base if text.partition("=")[0] not in named), *own)


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (number == 0 and key.endswith("lr")):
        raise ValueError(
            f"the contestant {text!r} has {key}={value}; a search begins at a number above 0, as {key}=0.01"
        )
    return number
