"""Optimizers by name: the rows of one table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optax  # type: ignore[import-untyped]

from merit_optim.jax.compose import AXES, compose, parameters_of

Optimizer = Callable[..., optax.GradientTransformationExtraArgs]
PRESETS: dict[str, Optimizer] = {}


def _preset(name: str, choices: str, says: str, **defaults: Any) -> Optimizer:
    """Return ``compose`` with these choices and defaults, and with a signature that shows all options."""
    row = {**dict(zip(AXES, choices.split(), strict=True)), **defaults}

    def optimizer(*args: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
        positional = dict(zip(("learning_rate", "weight_decay", "mask"), args, strict=False))
        return compose(**{**row, **positional, **options})

    shown = [p for p in inspect.signature(compose).parameters.values() if p.name not in (*AXES, "options")]
    shown += [parameter for axis in AXES for parameter in parameters_of(axis, row[axis])]
    signature = inspect.Signature([p.replace(default=defaults.get(p.name, p.default)) for p in shown])
    optimizer.__signature__ = signature  # type: ignore[attr-defined]
    optimizer.__name__ = optimizer.__qualname__ = name
    optimizer.__doc__ = f"{says}\n\nIt is ``compose`` with {row}; see there for the arguments."
    PRESETS[name] = optimizer
    return optimizer


merit = _preset(
    "merit", "adam merit decay", "MERIT: Luo et al., ICML 2025, https://arxiv.org/abs/2508.20577."
)
lamb = _preset(
    "lamb",
    "adam weight decay",
    "LAMB: You et al., ICLR 2020, https://arxiv.org/abs/1904.00962.",
    weight_decay=0.01,
    b2=0.999,
    bias_correction=True,
)
lamb_uncorrected = _preset(
    "lamb_uncorrected", "adam weight decay", "LAMB by the MERIT paper's equation, without bias correction."
)
maxlamb = _preset("maxlamb", "adam weight decay", "LAMB with the largest magnitude as norm.", norm="max")
muon = _preset(
    "muon",
    "muon none decay",
    "Orthogonalised momentum: Jordan et al., https://kellerjordan.github.io/posts/muon.",
    scale="match_rms_adamw",
)
normuon = _preset(
    "normuon",
    "normuon none decay",
    "Muon with outputs of equal sizes: Li et al., https://arxiv.org/abs/2510.05491.",
    scale="match_rms_adamw",
)
muon_merit = _preset(
    "muon_merit",
    "normuon merit decay",
    "MERIT's ratios on NorMuon's direction. Without their upper bound long runs diverge.",
    momentum=0.9,
    ratio_bounds=(0.0, 0.1),
    rest_scale=0.4,
)
muon_sphere = _preset(
    "muon_sphere", "muon none sphere", "Muon on spheres, also known as MuonH or Hyperball.", momentum=0.9
)
normuon_sphere = _preset("normuon_sphere", "normuon none sphere", "NorMuon on spheres.", momentum=0.9)
