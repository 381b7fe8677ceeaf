"""The fields of a training configuration by their dotted names, as `--set` takes them.

Options of an optimizer are fields too, as in optimizer.options.momentum. If a run does not set one, its value
is the default, or None if the optimizer has no such option.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import tyro

from merit_lab.json_values import dataclasses_of
from merit_lab.results.series import makes_a_series
from merit_lab.train import TrainConfig
from merit_lab.train.optimizer_options import default_of, parse_options, write_option
from merit_optim.spelling import did_you_mean

LR = "optimizer.lr"
_OPTIONS, _REST_OPTIONS = "optimizer.options", "optimizer.rest_options"

# Fields that have a dedicated option in a sweep.
_DEDICATED_OPTIONS = {
    "data": "--data",
    "seed": "--seeds",
    "optimizer.name": "--optimizers",
    LR: "--lr",
}


def find_field(name: str) -> str:
    """Return the dotted name of a field that may be swept, from the user's spelling.

    Example:
        >>> find_field("optimizer.weight-decay")
        'optimizer.weight_decay'
        >>> find_field("optimizer.options.momentum")
        'optimizer.options.momentum'
    """
    field = name.removeprefix("--").replace("-", "_")
    if field in _DEDICATED_OPTIONS:
        raise ValueError(
            f"--set {name} is not needed: {_DEDICATED_OPTIONS[field]} takes the values of {field}"
        )
    if option_of(field):
        return field
    if field not in (types := _types()):
        hint = did_you_mean(field, types)
        raise ValueError(
            f"--set {name}: there is no such field{hint} The fields are the long options of `merit train`, "
            "as in optimizer.weight_decay or batch, and those of optimizers, as in optimizer.options.momentum"
        )
    if not makes_a_series(field):
        raise ValueError(
            f"--set {name}: {field} changes no result, so there is nothing to compare; give it once, for all "
            f"runs: --{field.replace('_', '-')} VALUE"
        )
    return field


def parse_value(field: str, text: str) -> object:
    """Parse a field's value as `merit train` does; commas separate the items of a tuple.

    Example:
        >>> parse_value("optimizer.betas", "0.9,0.95")
        (0.9, 0.95)
        >>> parse_value("optimizer.options", "momentum=0.9,betas=0.9,0.95")
        ('momentum=0.9', 'betas=0.9,0.95')
        >>> parse_value("optimizer.overrides", "*norm*:lr=0.01,*:betas=[0.9,0.95]")
        ('*norm*:lr=0.01', '*:betas=[0.9,0.95]')
        >>> parse_value("optimizer.options.momentum", "0.9")
        0.9
    """
    if path := option_of(field):
        group, option = path
        option_value: object = parse_options([f"{option}={text}"], group)[option]
        if not _is_hashable(option_value):
            raise ValueError(
                f"--set {field} {text}: the values of one option must be numbers, words or lists; vary the "
                f"options as a whole, as in --set {group} '{option}={text}'"
            )
        return option_value
    kind = _types()[field]
    # A comma may also be part of an option's value: split only before a name.
    has_names = field.endswith(("options", "overrides"))
    parts = re.split(r",(?=[^,]*=)", text) if has_names else text.split(",")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            value: object = tyro.cli(kind, args=parts)
    except SystemExit:
        expected = getattr(kind, "__name__", None) or str(kind)
        raise ValueError(
            f"--set {field} {text}: {text!r} is not a valid value; the field takes {expected}"
        ) from None
    return value


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def option_of(field: str) -> tuple[str, str] | None:
    """Split the name of an optimizer's option into its field and the option; None for other fields.

    Example:
        >>> option_of("optimizer.options.momentum")
        ('optimizer.options', 'momentum')
    """
    group, _, option = field.rpartition(".")
    return (group, option) if group in (_OPTIONS, _REST_OPTIONS) and option.isidentifier() else None


def short(field: str) -> str:
    """A field's name without its group; rest_NAME for an option of a second optimizer."""
    group, _, name = field.rpartition(".")
    return f"rest_{name}" if group == _REST_OPTIONS else name


def value_of(config: TrainConfig, field: str) -> object:
    """The value of a field; the default of an option that is not set."""
    if path := option_of(field):
        group, option = path
        is_first, chosen = group == _OPTIONS, config.optimizer
        name = chosen.name if is_first else chosen.rest
        options = chosen.options_by_name() if is_first else chosen.rest_options_by_name()
        if option in options:
            return options[option]
        return None if name is None else default_of(name, option)
    value: Any = config
    for name in field.split("."):
        value = getattr(value, name)
    return value


def train_option(field: str, value: object) -> list[str]:
    """Format a field and its value as arguments of `merit train`.

    Example:
        >>> train_option("optimizer.betas", (0.9, 0.95)), train_option("model.qk_norm", False)
        (['--optimizer.betas', '0.9', '0.95'], ['--model.no-qk_norm'])
    """
    if _types()[field] is bool:  # a flag takes no value
        group, dot, name = field.rpartition(".")
        return [f"--{group}{dot}{name if value else f'no-{name}'}"]
    return [f"--{field}", *map(str, value if isinstance(value, tuple) else [value])]


def with_values(config: TrainConfig, values: Mapping[str, object]) -> TrainConfig:
    """Return a copy of a configuration with other values of some fields."""
    options = {field: path for field in values if (path := option_of(field))}
    settings = config.to_dict()
    for field in values.keys() - options:
        *groups, name = field.split(".")
        inner = settings
        for group in groups:
            inner = inner[group]
        if groups == ["model"] and name not in inner:
            raise ValueError(
                f"{field}: a {config.model.family} model has no such field; it has {', '.join(inner)}"
            )
        inner[name] = values[field]
    changed = TrainConfig.from_dict(settings)
    for field, (group, option) in options.items():  # the optimizer must be set first
        changed = _with_option(changed, group, option, values[field])
    return changed


def _with_option(config: TrainConfig, group: str, option: str, value: object) -> TrainConfig:
    """Set an option, unless it already has that value by default: then it is the same run."""
    if value_of(config, f"{group}.{option}") == value:
        return config
    options: Any = value_of(config, group)
    others = [text for text in options if text.partition("=")[0] != option]
    return with_values(config, {group: (*others, write_option(option, value))})


@cache
def _types(kind: type = TrainConfig, prefix: str = "") -> dict[str, Any]:
    """The type of every leaf field."""
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if members := dataclasses_of(hint):
            for member in reversed(members):  # a field of several members has the type of the first
                types |= _types(member, f"{prefix}{name}.")
        else:
            types[f"{prefix}{name}"] = hint
    return types
