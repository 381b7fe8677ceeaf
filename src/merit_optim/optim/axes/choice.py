"""What the choices on all axes have in common: a name, options, checks, and the state that they keep."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from merit_optim.optim.matrices import Matrices, View


@dataclass(frozen=True, kw_only=True)
class Choice(ABC):
    """A choice on an axis, with its options, which have the same names in a parameter group."""

    AXIS: ClassVar[str]
    """"direction", "ratio" or "hold": the key of its name in a parameter group."""
    NAME: ClassVar[str]
    """Set by ``register``."""
    NEEDS_MATRICES: ClassVar[bool] = False
    """Whether it is for hidden matrices alone, so that an optimizer with it leaves other weights to AdamW."""
    SCHEDULED: ClassVar[tuple[str, ...]] = ()
    """Options that may change from step to step: nothing depends on them that is kept between steps."""

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def options(self) -> dict[str, Any]:
        """The options of a parameter group with this choice."""
        return {self.AXIS: self.NAME, **{name: getattr(self, name) for name in self.option_names()}}

    def unscheduled(self) -> Self:
        """The same with the defaults of scheduled options."""
        return replace(self, **{name: getattr(type(self), name) for name in self.SCHEDULED})

    def check(self) -> None:
        """Raise if an option is not allowed."""
        return

    def refusal(self, view: View, shape: torch.Size) -> str | None:
        """Why a parameter of this shape cannot have this choice, or None."""
        return None

    def refused_options(self, group: dict[str, Any]) -> str | None:
        """Why this choice does not support another option of the group, or None."""
        return None

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its state tensors, the same for every parameter of a group."""
        return ()

    @property
    def keys_that_can_begin(self) -> tuple[str, ...]:
        """State that begins at zero where another optimizer's state, which is continued, does not have it."""
        return ()

    @property
    def keys_by_rows(self) -> tuple[str, ...]:
        """State that does not have the parameter's shape and whose rows are split among ranks.

        Of other such state, each rank that shares a matrix holds all.
        """
        return ()

    def shapes(self, matrices: Matrices, view: View) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of each state tensor; None for the parameter's shape."""
        return (None,) * len(self.keys)
