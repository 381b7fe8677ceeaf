"""What an optimizer of the family is made of: a choice on each axis, its rates, and the weights it is for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from merit_optim.optim.axes.choice import Choice
from merit_optim.optim.axes.directions import Adam, Direction
from merit_optim.optim.axes.directions.muon import ProductDtype, Scale
from merit_optim.optim.axes.directions.newton_schulz import NSCoefficients
from merit_optim.optim.axes.holds import Decay, Hold
from merit_optim.optim.axes.holds.sphere import SphereOf
from merit_optim.optim.axes.ratios import Norm, Ratio, Unscaled
from merit_optim.optim.axes.registered import AXES, choice_class
from merit_optim.optim.kinds import Kind
from merit_optim.optim.options import ENGINE_DEFAULTS, EngineOptions

ADAMW: dict[str, Any] = {
    **Adam(betas=(0.9, 0.95), eps=1e-8, bias_correction=True).options,
    **Unscaled().options,
    **Decay().options,
}
"""AdamW expressed in this family's options: what weights get that a direction is not for."""

HIDDEN: tuple[Kind, ...] = ("hidden", "experts")
"""The matrices between embedding and head."""


class Options(EngineOptions, total=False):
    """All options of this package's choices, for type checkers; an optimizer has those of its own choices."""

    direction: str | Direction
    ratio: str | Ratio
    hold: str | Hold
    betas: tuple[float, float]
    eps: float
    bias_correction: bool
    momentum: float
    nesterov: bool
    ns_steps: int
    ns_coefficients: NSCoefficients
    ns_dtype: ProductDtype
    ns_eps: float
    scale: Scale
    neuron_beta: float | None
    shampoo_beta: float | None
    precondition_frequency: int
    max_precond_dim: int
    refresh_phase: int | None
    clip: float | None
    norm: Norm
    ratio_bounds: tuple[float, float] | None
    element_wise: bool
    weight_bound: bool
    calibrated: bool
    floor: float
    peak_lr: float | None
    radius: float
    sphere_of: SphereOf
    slow_beta: float
    slow_weight: float
    displacement_share: float
    displacement_beta: float
    angular: bool
    magnitude_betas: tuple[float, float]
    magnitude_eps: float
    gain: float | None


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A row of the table of optimizers (``presets.py``), or what ``compose`` was given."""

    name: str
    """What state dicts say they belong to."""
    direction: Direction
    ratio: Ratio = Unscaled()  # noqa: RUF009  # frozen
    hold: Hold = Decay()  # noqa: RUF009  # frozen
    lr: float
    weight_decay: float = 0.1
    kinds: tuple[Kind, ...] | None = None
    """The kinds of weights that these choices are for; the others take AdamW. None: all weights."""
    adamw: Mapping[str, Any] = field(default_factory=dict)
    """Options of that AdamW."""
    shared: tuple[str, ...] = ()
    """Options of the direction that AdamW takes too."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of a parameter group with these choices."""
        return self.direction.options | self.ratio.options | self.hold.options

    @property
    def adamw_options(self) -> dict[str, Any]:
        """The options of a group with other weights."""
        return {**ADAMW, **self.adamw, **{name: self.options[name] for name in self.shared}}

    def changed(self, options: Mapping[str, Any]) -> Composition:
        """With other choices, by name or as objects, and with options of the choices.

        A choice that is named has its own defaults.
        """
        new: dict[str, Any] = {}
        for axis in AXES:
            choice = _choice(axis, options.get(axis, getattr(self, axis)))
            given = {name: options[name] for name in choice.option_names() if name in options}
            new[axis] = replace(choice, **given)
        needs_matrices = any(choice.NEEDS_MATRICES for choice in new.values())
        return replace(self, **new, kinds=(self.kinds or HIDDEN) if needs_matrices else None)

    @property
    def signature(self) -> inspect.Signature:
        """The arguments of the optimizer's constructor."""
        keyword, positional = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        arguments = [inspect.Parameter("params", positional)]
        arguments += [
            inspect.Parameter(name, positional, default=getattr(self, name))
            for name in ("lr", "weight_decay")
        ]
        others = {name: value for name, value in self.options.items() if name not in ENGINE_DEFAULTS}
        for name, value in {**others, **ENGINE_DEFAULTS}.items():
            arguments.append(inspect.Parameter(name, keyword, default=value))
        return inspect.Signature(arguments)


def _choice(axis: str, value: Any) -> Any:
    """A choice that is given by its name or as an object."""
    if isinstance(value, Choice):
        if axis != value.AXIS:
            raise ValueError(f"{axis} is {value!r}, which is a {value.AXIS}: pass {value.AXIS}={value!r}")
        return value
    return choice_class(axis, value)()
