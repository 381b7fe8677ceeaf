"""The optimizers by name; those of the MERIT paper have its settings.

``create`` and ``optimizer_class`` take a name as it stands in ``OPTIMIZERS`` or as its class: "muon-merit" or
"MuonMERIT". Hyphens and the case of letters do not matter. The lab's commands, whose records are compared by
name, take the names of ``OPTIMIZERS`` alone, and torchtitan's configurations those of classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from merit_optim.optim.family import Family
from merit_optim.optim.presets import (
    LAMB,
    MERIT,
    SOAP,
    SOAPMERIT,
    Lion,
    MaxLAMB,
    Muon,
    MuonMERIT,
    MuonSphere,
    Muown,
    NorMuon,
    NorMuonSphere,
    OrScale,
    SOAPMuon,
)
from merit_optim.optim.sophia import SophiaG
from merit_optim.settings import PAPERS_MODELS, SETTINGS, Settings
from merit_optim.spelling import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Preset(Settings):
    """An optimizer with the paper's settings, or with its defaults if it is not in the paper."""

    optimizer: Callable[..., Optimizer]


_CLASSES: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "sophiag": SophiaG,
    "lamb-uncorrected": LAMB,
    "lamb": LAMB,
    "maxlamb": MaxLAMB,
    "merit": MERIT,
    "muon": Muon,
    "normuon": NorMuon,
    "orscale": OrScale,
    "soap": SOAP,
    "muon-merit": MuonMERIT,
    "muon-sphere": MuonSphere,
    "normuon-sphere": NorMuonSphere,
    "muown": Muown,
    "soap-muon": SOAPMuon,
    "soap-merit": SOAPMERIT,
}

OPTIMIZERS: Mapping[str, Preset] = {
    name: Preset(optimizer=_CLASSES[name], options=settings.options, learning_rates=settings.learning_rates)
    for name, settings in SETTINGS.items()
}
"""The names that ``create`` accepts: the paper's optimizers, with its settings, and others with defaults."""

FAMILY: Mapping[str, type[Family]] = {
    preset.optimizer.__name__: preset.optimizer
    for preset in OPTIMIZERS.values()
    if isinstance(preset.optimizer, type) and issubclass(preset.optimizer, Family)
}
"""The trust-ratio family by class name."""


def create(name: str, params: ParamsT, *, model: str | None = None, **options: Any) -> Optimizer:
    """Create an optimizer by name, with the paper's settings unless ``options`` override them.

    Args:
        name: a key of ``OPTIMIZERS``, or the name of its class: "muon-merit" or "MuonMERIT".
        params: parameters, named parameters, or parameter groups.
        model: "gpt2-small", "gpt2-medium" or "gpt2-large", for the paper's peak learning rate. Optimizers for
            which the paper gives none have their class's default.
        options: arguments of the optimizer; an ``lr`` here needs no ``model``.

    Examples:
        >>> import torch
        >>> optimizer = create("merit", torch.nn.Linear(4, 4).parameters(), model="gpt2-large")
        >>> optimizer.param_groups[0]["lr"]
        0.006
    """
    preset: Preset = _lookup(name, OPTIMIZERS)
    settings = {**preset.options, **options}
    rates = preset.learning_rates
    if model is not None and model not in PAPERS_MODELS:
        raise unknown("model", model, PAPERS_MODELS)
    if "lr" not in settings and rates:
        if model is None:
            known = ", ".join(rates)
            raise ValueError(f"{name} needs a learning rate: pass lr=..., or model= one of {known}")
        settings["lr"] = rates[model]
    return preset.optimizer(params, **settings)


def optimizer_class(name: str) -> Callable[..., Family]:
    """Return a class of this package by name, for scripts that leave the choice to their users.

    The class has its own defaults; use ``create`` for the paper's settings. These classes are interchangeable
    in a training loop. SophiaG, which needs estimates of the curvature, is not included.

    Args:
        name: "MERIT", "MuonMERIT", "MuonSphere", ..., or the name for ``create``, as "muon-merit".

    Examples:
        >>> import torch
        >>> from merit_optim import param_groups
        >>> model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16)
        >>> optimizer = optimizer_class("MuonMERIT")(param_groups(model, weight_decay=0.1), max_grad_norm=1.0)
        >>> optimizer.param_groups[0]["lr"]
        0.01
    """
    optimizer: Callable[..., Family] = _lookup(name, FAMILY)
    return optimizer


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for an unknown name, with the nearest known one."""
    known = list(known)
    return ValueError(
        f"unknown {kind} {name!r}{did_you_mean(name, known)} Known {kind}s: {', '.join(known)}."
    )


def _lookup(name: str, table: Mapping[str, Any]) -> Any:
    """The entry of this name, which may be spelt as a key of ``OPTIMIZERS`` or as a class."""
    by_letters = {_letters(known): value for known, value in table.items()}
    if _letters(name) not in by_letters:
        raise unknown("optimizer", name, table)
    return by_letters[_letters(name)]


def _letters(name: str) -> str:
    return name.lower().replace("-", "")
