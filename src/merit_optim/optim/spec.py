"""What a step does to the weights of a parameter group, apart from its rates: read from the options once.

Engines get this and never a group's dict. It is built again when an option changes; ``lr`` and
``weight_decay``, which schedules change in every step, are beside it in the ``Work``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from merit_optim.optim.algorithm import UNSCALED, Rule
from merit_optim.optim.directions import Adam, Direction, Soap, direction_of
from merit_optim.optim.matrices import View


class Spec(NamedTuple):
    """A direction, the ratios that scale it, how a weight is seen as matrices, and which engine is wanted."""

    direction: Direction
    rule: Rule
    view: View
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    differentiable: bool = False

    @staticmethod
    def of(group: dict[str, Any]) -> Spec:
        """The spec that a parameter group's options describe."""
        return Spec(
            direction_of(group),
            Rule.of(group),
            View.of(group),
            group.get("maximize", False),
            group.get("foreach"),
            group.get("fused"),
            group.get("differentiable", False),
        )

    @property
    def fixed(self) -> Spec:
        """The same whatever a schedule did: what is kept between steps is made anew when this changes."""
        return self._replace(direction=self.direction.unscheduled(), rule=self.rule._replace(clip=None))

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the state tensors."""
        return self.direction.keys + self.rule.keys

    def in_turn(self, phase: int | None) -> Spec:
        """The spec of weights whose bases are improved in this phase of the cycle."""
        if phase is None:
            return self
        assert isinstance(self.direction, Soap), "others have no bases"
        return self._replace(direction=replace(self.direction, refresh_phase=phase))


ELEMENT_WISE = Spec(Adam(), UNSCALED, View())
"""For optimizers outside the family, which need no matrix, row or column as a whole."""
