"""Each matrix, or each row, stays on the sphere on which it began."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.holds.hold import Hold, Move
from merit_optim.optim.axes.registered import register
from merit_optim.optim.matrices import Extent, Matrices, View

SphereOf = Literal["matrix", "row"]
SPHERES: tuple[SphereOf, ...] = ("matrix", "row")


@register("sphere")
@dataclass(frozen=True, kw_only=True)
class Sphere(Hold):
    """w <- R w1/|w1|  with  w1 = w - lr*R*c/|c|.  Only the angle of a step is left, which is ``lr``.

    R is the norm of w before its first update. It is state, so a weight that is loaded later does not change
    it. |w1| follows from <w, w>, <w, c> and <c, c>, so the weight is read once.

    Others call it Hyperball, or MuonH with Muon's direction.
    """

    NEEDS_MATRICES: ClassVar[bool] = True
    USES_DECAY: ClassVar[bool] = False

    sphere_of: SphereOf = "matrix"
    """"row": each output has a sphere of its own; outputs are columns where a group is ``transposed``."""
    gain: float | None = None
    """R is that of elements of root mean square gain / sqrt(inputs); None for the norm at the start."""
    transposed: bool = False

    def check(self) -> None:
        validate.one_of("sphere_of", self.sphere_of, SPHERES)
        if self.gain is not None:
            validate.positive("gain", self.gain, "None for the norm at the start")

    def refusal(self, view: View, shape: torch.Size) -> str | None:
        if self.sphere_of == "row" and view.split is not None and view.split_dim != self.transposed:
            line = "column" if self.transposed else "row"
            return (
                f"sphere_of='row' keeps a radius for each {line}, and split_dim={view.split_dim} cuts the "
                f"{line}s: use sphere_of='matrix' or split=None"
            )
        return None

    def blank(self, weight: Tensor) -> str | None:
        if self.gain is None and weight.numel() and not weight.any():
            return (
                "it is all zero, and a sphere keeps the norm at the start: initialise it "
                "(merit_optim.init_hidden), or name the radius by gain"
            )
        return None

    def line_dim(self, view: View) -> int:
        # A matrix's lines lie across the cut of a split weight, so that each part has its own.
        is_columns = self.transposed if self.sphere_of == "row" else view.split is not None and view.split_dim
        return 2 if is_columns else 1

    @property
    def keys(self) -> tuple[str, ...]:
        return ("radius",)

    def shapes(self, matrices: Matrices, view: View) -> tuple[tuple[int, ...] | None, ...]:
        """A radius for each line, so that it is cut like the lines; those of a matrix are equal."""
        if self.line_dim(view) == 2:
            return ((matrices.num, 1, matrices.columns),)
        return ((matrices.num, matrices.rows, 1),)

    def apply(
        self, weight_NRC: Tensor, change_NRC: Tensor, state: tuple[Tensor, ...], move: Move
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (stored,), products, line_dim = state, move.products, move.line_dim
        assert products is not None and line_dim is not None
        if self.sphere_of == "matrix":
            products = products.of_matrices(line_dim)
        first = products.weight_sq.sqrt() if self.gain is None else self.named_radius(move.extent)
        radius = torch.where(stored == 0, first, stored)
        rests = (products.change_sq == 0) | (move.lr == 0)
        # A weight of zeros has no sphere to be on, and takes the step as it is.
        share = (
            torch.where(radius == 0, 1, radius / products.change_sq.masked_fill(rests, 1).sqrt()) * move.lr
        )
        moved_sq = products.weight_sq - 2 * share * products.weight_change + share**2 * products.change_sq
        shrinking = torch.where(radius == 0, 1, radius / moved_sq.masked_fill(rests, 1).sqrt())
        here = (slice(None), *((move.extent.rows,) if line_dim == 1 else (slice(None), move.extent.columns)))
        moved_NRC = weight_NRC * shrinking[here] - change_NRC * (shrinking * share)[here]
        new_NRC = torch.where(rests.expand_as(radius)[here], weight_NRC, moved_NRC)
        return new_NRC, (torch.where(rests, stored, radius),)

    def named_radius(self, extent: Extent) -> float:
        """The norm of a matrix, or of an output, whose elements have the named root mean square."""
        assert self.gain is not None
        outputs, inputs = extent.num_rows, extent.num_columns
        if self.transposed:
            outputs, inputs = inputs, outputs
        return self.gain * (math.sqrt(outputs) if self.sphere_of == "matrix" else 1.0)
