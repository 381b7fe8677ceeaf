"""The fields of a training configuration by their dotted names, as `--set` takes them.

Options of an optimizer are fields too, as in optimizer.options.momentum. If a run does not set one, its value
is the default, or None if the optimizer has no such option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from merit_lab.results.series import makes_a_series
from merit_lab.runs.settings import flatten
from merit_lab.train import TrainConfig
from merit_lab.train.optimizer_options import default_of, parse_options, write_option
from merit_optim.spelling import did_you_mean

LR = "optimizer.lr"
_OPTIONS = "optimizer.options"
_TEXTS = (_OPTIONS, "optimizer.rest_options", "optimizer.overrides")  # whose items are OPTION=VALUE
_DEDICATED_OPTIONS = {"data": "--data", "seed": "--seeds", "optimizer.name": "--optimizers", LR: "--lr"}


def find_field(name: str, config: TrainConfig) -> str:
    """The dotted name of a field that may be swept, from the user's spelling.

    Example:
        >>> from pathlib import Path
        >>> find_field("optimizer.weight-decay", TrainConfig(data=Path("data")))
        'optimizer.weight_decay'
    """
    field = name.removeprefix("--").replace("-", "_")
    if field in _DEDICATED_OPTIONS:
        raise ValueError(
            f"--set {name} is not needed: {_DEDICATED_OPTIONS[field]} takes the values of {field}"
        )
    if option_of(field):
        return field
    if field not in (known := flatten(config.to_dict())):
        raise ValueError(
            f"--set {name}: there is no such field{did_you_mean(field, known)} The fields are the long "
            "options of `merit train`, as in optimizer.weight_decay or batch, and those of optimizers, as in "
            "optimizer.options.momentum"
        )
    if not makes_a_series(field):
        raise ValueError(
            f"--set {name}: {field} changes no result, so there is nothing to compare; give it once, for all "
            f"runs: --{field.replace('_', '-')} VALUE"
        )
    return field


def parse_value(field: str, text: str) -> object:
    """A field's value from text; commas separate the items of a tuple.

    Example:
        >>> parse_value("optimizer.betas", "0.9,0.95"), parse_value("optimizer.options.momentum", "0.9")
        ((0.9, 0.95), 0.9)
        >>> parse_value("optimizer.options", "momentum=0.9,betas=0.9,0.95")
        ('momentum=0.9', 'betas=0.9,0.95')
    """
    if field in _TEXTS:  # a comma may also be part of an option's value: split only before a name
        return tuple(re.split(r",(?=[^,]*=)", text))
    name = field.rpartition(".")[2]
    value = parse_options([f"value={text}"], field)["value"]
    if isinstance(value, dict):
        raise ValueError(
            f"--set {field} {text}: the values must be numbers, words or lists; vary the options as a whole, "
            f"as in --set {_OPTIONS} '{name}={text}'"
        )
    return (value,) if name == "without" and not isinstance(value, tuple) else value


def option_of(field: str) -> str | None:
    """The optimizer's option that a field is; None for other fields.

    Example:
        >>> option_of("optimizer.options.momentum")
        'momentum'
    """
    group, _, option = field.rpartition(".")
    return option if group == _OPTIONS and option.isidentifier() else None


def short(field: str) -> str:
    """A field's name without its group."""
    return field.rpartition(".")[2]


def value_of(config: TrainConfig, field: str) -> object:
    """The value of a field; the default of an option that is not set."""
    if option := option_of(field):
        options = config.optimizer.options_by_name()
        return options[option] if option in options else default_of(config.optimizer.name, option)
    value: Any = config
    for name in field.split("."):
        value = getattr(value, name)
    return value


def with_values(config: TrainConfig, values: Mapping[str, object]) -> TrainConfig:
    """Return a copy of a configuration with other values of some fields."""
    settings = config.to_dict()
    for field, value in values.items():
        if not option_of(field):
            *groups, name = field.split(".")
            inner = settings
            for group in groups:
                inner = inner[group]
            inner[name] = value
    changed = TrainConfig.from_dict(settings)
    for field, value in values.items():  # the optimizer is set by now
        # An option that has the value by default is left out: then it is the same run.
        if (option := option_of(field)) and value_of(changed, field) != value:
            given = changed.optimizer.options
            others = [text for text in given if text.partition("=")[0] != option]
            optimizer = replace(changed.optimizer, options=(*others, write_option(option, value)))
            changed = replace(changed, optimizer=optimizer)
    return changed
