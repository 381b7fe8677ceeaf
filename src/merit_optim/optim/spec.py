"""What a step does to the weights of a parameter group, apart from its rates: read from the options once.

Engines get this and never a group's dict. It is built again when an option changes; ``lr`` and
``weight_decay``, which schedules change in every step, are beside it in the ``Work``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from merit_optim.optim.axes.choice import Choice
from merit_optim.optim.axes.directions import Adam, Direction, MatrixDirection, Soap
from merit_optim.optim.axes.holds import Decay, Hold
from merit_optim.optim.axes.ratios import Ratio, Unscaled
from merit_optim.optim.axes.registered import AXES, chosen
from merit_optim.optim.matrices import Matrices, View

_ANY_MATRICES = Matrices(1, 1, 1, is_vector=False)


class Spec(NamedTuple):
    """A direction, a ratio, a hold, how a weight is seen as matrices, and which engine is wanted."""

    direction: Direction = Adam()
    ratio: Ratio = Unscaled()
    hold: Hold = Decay()
    view: View = View()
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    differentiable: bool = False

    @staticmethod
    def of(group: Mapping[str, Any]) -> Spec:
        """The spec that a parameter group's options describe."""
        engine = {name: group[name] for name in ("maximize", "foreach", "fused", "differentiable")}
        return Spec(view=View.of(group), **{axis: chosen(group, axis) for axis in AXES}, **engine)

    @property
    def choices(self) -> tuple[Choice, Choice, Choice]:
        """One of each axis, in the order of their state."""
        return self.direction, self.ratio, self.hold

    @property
    def fixed(self) -> Spec:
        """The same whatever a schedule did: what is kept between steps is made anew when this changes."""
        return self._replace(
            direction=self.direction.unscheduled(),
            ratio=self.ratio.unscheduled(),
            hold=self.hold.unscheduled(),
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the state tensors."""
        return self.direction.keys + self.ratio.keys + self.hold.keys

    def shapes(self, matrices: Matrices) -> dict[str, tuple[int, ...] | None]:
        """The shape of each state tensor; None for the parameter's shape."""
        shapes = (shape for choice in self.choices for shape in choice.shapes(matrices, self.view))
        return dict(zip(self.keys, shapes, strict=True))

    @property
    def stacked_keys(self) -> dict[str, bool]:
        """The state tensors with one item per stacked matrix, and whether ranks split their rows."""
        by_rows = {key for choice in self.choices for key in choice.keys_by_rows}
        shapes = self.shapes(_ANY_MATRICES)
        return {key: key in by_rows for key, shape in shapes.items() if shape is not None}

    @property
    def is_element_wise(self) -> bool:
        """Whether no element depends on others, so that any part of a weight can be updated alone."""
        return not (
            self.ratio.measures
            or isinstance(self.direction, MatrixDirection)
            or self.hold.WHOLE_ROWS
            or self.hold.line_dim(self.view)
        )

    def divided(self, state: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        """The state tensors of the direction, of the ratio, and of the hold."""
        first = len(self.direction.keys)
        second = first + len(self.ratio.keys)
        return tuple(state[:first]), tuple(state[first:second]), tuple(state[second:])

    def in_turn(self, phase: int | None) -> Spec:
        """The spec of weights whose bases are improved in this phase of the cycle."""
        if phase is None:
            return self
        assert isinstance(self.direction, Soap), "others have no bases"
        return self._replace(direction=replace(self.direction, refresh_phase=phase))


ELEMENT_WISE = Spec()
"""For optimizers outside the family, which need no matrix, row or column as a whole."""
