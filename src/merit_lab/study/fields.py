"""The fields of a training configuration by their dotted names, as `--set` takes them.

An option of an optimizer is a field too, as optimizer.options.momentum. Where a run does not state it, it has
its default, and None where the optimizer has no such option.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import tyro

from merit_lab.train import TrainConfig
from merit_lab.train.config import dataclasses_of
from merit_lab.train.optimizer_options import default_of, parse_options, write_option

LR = "optimizer.lr"
_OPTIONS, _REST_OPTIONS = "optimizer.options", "optimizer.rest_options"

# What a sweep has options of its own for.
_OWN_OPTIONS = {
    "data": "--data",
    "seed": "--seeds",
    "optimizer.name": "--optimizers",
    LR: "--lr",
}


def find_field(name: str) -> str:
    """The dotted name of a field that may be swept, from how a user wrote it.

    Example:
        >>> find_field("optimizer.weight-decay")
        'optimizer.weight_decay'
        >>> find_field("optimizer.options.momentum")
        'optimizer.options.momentum'
    """
    field = name.removeprefix("--").replace("-", "_")
    if field in _OWN_OPTIONS:
        raise ValueError(f"--set {name} is not needed: {_OWN_OPTIONS[field]} takes the values of {field}")
    if option_of(field):
        return field
    if field not in (types := _types()):
        nearest = difflib.get_close_matches(field, types, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise ValueError(
            f"--set {name}: there is no such field{hint} The fields are the long options of `merit train`, "
            "as in optimizer.weight_decay or batch, and those of optimizers, as in optimizer.options.momentum"
        )
    return field


def parse_value(field: str, text: str) -> object:
    """A field's value as `merit train` would read it; parts of a tuple are joined by commas.

    Example:
        >>> parse_value("optimizer.betas", "0.9,0.95")
        (0.9, 0.95)
        >>> parse_value("optimizer.options", "momentum=0.9,betas=0.9,0.95")
        ('momentum=0.9', 'betas=0.9,0.95')
        >>> parse_value("optimizer.options.momentum", "0.9")
        0.9
    """
    if own := option_of(field):
        group, option = own
        return parse_options([f"{option}={text}"], group)[option]
    kind = _types()[field]
    # A comma is also part of an option's value, and a part where a name follows.
    parts = re.split(r",(?=\w+=)", text) if field.endswith("options") else text.split(",")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            value: object = tyro.cli(kind, args=parts)
    except SystemExit:
        expected = getattr(kind, "__name__", None) or str(kind)
        raise ValueError(f"--set {field} {text}: {text!r} is no value of it; it takes {expected}") from None
    return value


def option_of(field: str) -> tuple[str, str] | None:
    """The field that holds an option of an optimizer, and the option; None for other fields.

    Example:
        >>> option_of("optimizer.options.momentum")
        ('optimizer.options', 'momentum')
    """
    group, _, option = field.rpartition(".")
    return (group, option) if group in (_OPTIONS, _REST_OPTIONS) and option.isidentifier() else None


def short(field: str) -> str:
    """A field's name without the group it is in; rest_NAME for an option of a second optimizer."""
    group, _, name = field.rpartition(".")
    return f"rest_{name}" if group == _REST_OPTIONS else name


def value_of(config: TrainConfig, field: str) -> object:
    """The value of a field; of an option that is not given, its default."""
    if own := option_of(field):
        group, option = own
        is_first, chosen = group == _OPTIONS, config.optimizer
        name = chosen.name if is_first else chosen.rest
        given = chosen.options_by_name() if is_first else chosen.rest_options_by_name()
        if option in given:
            return given[option]
        return None if name is None else default_of(name, option)
    value: Any = config
    for name in field.split("."):
        value = getattr(value, name)
    return value


def train_option(field: str, value: object) -> list[str]:
    """A field's value as `merit train` takes it.

    Example:
        >>> train_option("optimizer.betas", (0.9, 0.95)), train_option("model.qk_norm", False)
        (['--optimizer.betas', '0.9', '0.95'], ['--model.no-qk_norm'])
    """
    if _types()[field] is bool:  # a flag, which takes no value
        group, dot, name = field.rpartition(".")
        return [f"--{group}{dot}{name if value else f'no-{name}'}"]
    return [f"--{field}", *map(str, value if isinstance(value, tuple) else [value])]


def with_values(config: TrainConfig, values: Mapping[str, object]) -> TrainConfig:
    """A configuration with other values of some fields."""
    options = {field: own for field in values if (own := option_of(field))}
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
    for field, (group, option) in options.items():  # which mean something once the optimizer is known
        changed = _with_option(changed, group, option, values[field])
    return changed


def _with_option(config: TrainConfig, group: str, option: str, value: object) -> TrainConfig:
    """What has its default and is not stated stays so: it is the same run."""
    if value_of(config, f"{group}.{option}") == value:
        return config
    stated: Any = value_of(config, group)
    others = [text for text in stated if text.partition("=")[0] != option]
    return with_values(config, {group: (*others, write_option(option, value))})


@cache
def _types(kind: type = TrainConfig, prefix: str = "") -> dict[str, Any]:
    """Every field that holds a value and no further fields, with its type."""
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if members := dataclasses_of(hint):
            for own in reversed(members):  # of fields that several have, the first's
                types |= _types(own, f"{prefix}{name}.")
        else:
            types[f"{prefix}{name}"] = hint
    return types
