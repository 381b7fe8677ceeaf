"""The fields of a training configuration by their dotted names, as `--set` takes them."""

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

LR = "optimizer.lr"

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
    """
    field = name.removeprefix("--").replace("-", "_")
    if field in _OWN_OPTIONS:
        raise ValueError(f"--set {name} is not needed: {_OWN_OPTIONS[field]} takes the values of {field}")
    if field not in (types := _types()):
        nearest = difflib.get_close_matches(field, types, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise ValueError(
            f"--set {name}: there is no such field{hint} The fields are the long options of `merit train`, "
            "as in optimizer.weight_decay or batch"
        )
    return field


def parse_value(field: str, text: str) -> object:
    """A field's value as `merit train` would read it; parts of a tuple are joined by commas.

    Example:
        >>> parse_value("optimizer.betas", "0.9,0.95")
        (0.9, 0.95)
        >>> parse_value("optimizer.options", "momentum=0.9,betas=0.9,0.95")
        ('momentum=0.9', 'betas=0.9,0.95')
    """
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
    settings = config.to_dict()
    for field, value in values.items():
        *groups, name = field.split(".")
        inner = settings
        for group in groups:
            inner = inner[group]
        if groups == ["model"] and name not in inner:
            raise ValueError(
                f"{field}: a {config.model.family} model has no such field; it has {', '.join(inner)}"
            )
        inner[name] = value
    return TrainConfig.from_dict(settings)


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
