"""The tensors of a weight as the eager engine works on them: seen as matrices, and cut into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from merit_optim.optim.algorithm import Rule
from merit_optim.optim.directions import Adam, Direction
from merit_optim.optim.directions.adam import BiasCorrection
from merit_optim.optim.engines.part import Share
from merit_optim.optim.engines.plan import Piece, Slot
from merit_optim.optim.engines.work import Item
from merit_optim.optim.matrices import Matrices, View


class Tensors(NamedTuple):
    """A weight, or one of the matrices that it is split into, and its tensors, each seen as (N, R, C)."""

    item: Item
    rule: Rule
    slot: Slot
    weight: Tensor
    grad: Tensor
    state: tuple[Tensor, ...]
    correction: BiasCorrection | None
    d: Tensor | None = None
    """The direction, where it is formed of whole matrices and held; None where each block forms it anew."""


class Block(NamedTuple):
    """One piece of one weight."""

    tensors: Tensors
    piece: Piece

    def of(self, x_NRC: Tensor) -> Tensor:
        """The block of a tensor; the tensor itself where the block is all of it, for slicing costs time."""
        if self.is_whole:
            return x_NRC
        return x_NRC[self.piece.matrices, self.piece.rows]

    @property
    def is_whole(self) -> bool:
        num, rows, _ = self.tensors.slot.matrices.shape
        return self.piece == Piece(slice(0, num), slice(0, rows))


class Stored:
    """A weight and its tensors as they are stored, with what its group says of it."""

    def __init__(
        self, item: Item, direction: Direction, rule: Rule, view: View, share: Share | None = None
    ) -> None:
        self.item, self.direction, self.rule, self.share = item, direction, rule, share
        self.view = view if share is None else share.view
        self.tensors = (item.param.detach(), *item.state)
        # Views where strides allow them, else copies that return_copies writes back.
        self.seen = [view.seen(x, item.param.shape) for x in self.tensors]

    @property
    def parts(self) -> tuple[Matrices, ...]:
        """The matrices that have ratios of their own."""
        return self.view.parts(self.item.param.shape)

    def cut(self, slots: Iterator[Slot]) -> Iterator[Tensors]:
        """Its tensors, for each of those matrices."""
        shape, correction = self.item.param.shape, None
        if isinstance(self.direction, Adam) and self.direction.bias_correction:
            # A step count on the host is read; one on the device stays there.
            step = self.item.step
            correction = self.direction.correction(step.item() if step.is_cpu else step)
        weights, *states = map(self.cut_part, self.seen, self._is_own)
        grads = self.view.cut(self.item.grad, shape)
        for weight, grad, *state in zip(weights, grads, *states, strict=True):
            yield Tensors(self.item, self.rule, next(slots), weight, grad, tuple(state), correction)

    @property
    def _is_own(self) -> list[bool]:
        """Whether the weight, and each state tensor, has the weight's shape."""
        if self.view.split is None:
            return [True] * len(self.seen)  # nothing is cut
        shapes = self.direction.shapes(self.view.matrices(self.item.param.shape))
        return [True, *(shape is None for shape in shapes), *(False for _ in self.rule.keys)]

    def cut_part(self, x_NRC: Tensor, is_own: bool) -> tuple[Tensor, ...]:
        """A tensor for each of those matrices. One without the weight's shape has all rows on every rank."""
        if is_own or self.share is None:
            return self.view.cut_matrices(x_NRC, self.item.param.shape)
        lengths = [extent.num_rows for extent in self.share.extents]
        return (x_NRC,) if self.view.split is None else x_NRC.split(lengths, 1)

    def return_copies(self) -> None:
        for x, x_NRC in zip(self.tensors, self.seen, strict=True):
            if x_NRC.data_ptr() != x.data_ptr():
                x.copy_(x_NRC.view(x.shape))
