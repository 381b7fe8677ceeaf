"""The tensors of a weight as the eager engine works on them: seen as matrices, and cut into them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.algorithm import Rule
from merit_optim.optim.directions import Adam, Direction
from merit_optim.optim.directions.adam import BiasCorrection
from merit_optim.optim.engines.part import Share
from merit_optim.optim.engines.plan import Piece, Slot
from merit_optim.optim.engines.work import Item
from merit_optim.optim.matrices import Matrices, View
from merit_optim.optim.torch_private import foreach_copy_


class Tensors(NamedTuple):
    """A weight, or one of the matrices that it is split into, and its tensors, each seen as (N, R, C)."""

    item: Item
    rule: Rule
    number: int
    """Of its slot, in the plan of the part that works on it."""
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
        return x_NRC if self.piece.is_whole else x_NRC[self.piece.matrices, self.piece.rows]


class Stored:
    """A weight and its tensors as they are stored, with what its group says of it."""

    def __init__(
        self, item: Item, direction: Direction, rule: Rule, view: View, share: Share | None = None
    ) -> None:
        self.item, self.direction, self.rule, self.share = item, direction, rule, share
        self.view = view if share is None else share.view
        self.tensors = (item.param.detach(), *item.state)
        # Views where strides allow them, else copies that return_copies writes back.
        shape = item.param.shape
        self.shape_NRC, self.parts = shapes_of(self.view, shape)
        """Its shape before it is split, and the matrices that have ratios of their own."""
        self.seen = [x.reshape(self.shape_NRC) if x.shape == shape else x for x in self.tensors]

    @property
    def num_elements(self) -> int:
        return self.item.param.numel()

    def cut(self, slots: Iterator[tuple[int, Slot]]) -> Iterator[Tensors]:
        """Its tensors, for each of those matrices."""
        shape, correction = self.item.param.shape, _correction(self.item, self.direction)
        grad = self.item.grad.reshape(self.shape_NRC)
        if self.view.split is None:  # as most are: nothing is cut
            weight, *state = self.seen
            yield Tensors(self.item, self.rule, *next(slots), weight, grad, tuple(state), correction)
            return
        weights, *states = map(self.cut_part, self.seen, self._is_own)
        grads = self.view.cut_matrices(grad, shape)
        for weight, grad, *state in zip(weights, grads, *states, strict=True):
            yield Tensors(self.item, self.rule, *next(slots), weight, grad, tuple(state), correction)

    @property
    def _is_own(self) -> list[bool]:
        """Whether the weight, and each state tensor, has the weight's shape."""
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
            if not x.is_contiguous() and x_NRC.data_ptr() != x.data_ptr():
                x.copy_(x_NRC.view(x.shape))


class Stack:
    """Small weights of one shape and group, copied into one stack of matrices and back.

    For a weight of a few thousand elements copying is nothing beside the dozens of calls of its own.
    """

    def __init__(self, items: list[Item], direction: Direction, rule: Rule, view: View) -> None:
        self.item, self.direction, self.rule = items[0], direction, rule
        num, rows, columns, is_vector = view.matrices(self.item.param.shape)
        matrices = Matrices(len(items) * num, rows, columns, is_vector)
        self.parts = (matrices,)
        states = zip(*(item.state for item in items), strict=True)
        self.stored = [[item.param for item in items], *map(list, states)]
        self.weight, *self.state = (torch.stack(some).view(matrices.shape) for some in self.stored)
        self.grad = torch.stack([item.grad for item in items]).view(matrices.shape)

    @property
    def num_elements(self) -> int:
        return self.weight.numel()

    def cut(self, slots: Iterator[tuple[int, Slot]]) -> Iterator[Tensors]:
        """As one weight. They have taken equally many steps."""
        correction = _correction(self.item, self.direction)
        yield Tensors(
            self.item, self.rule, *next(slots), self.weight, self.grad, tuple(self.state), correction
        )

    def return_copies(self) -> None:
        for own, x_NRC in zip(self.stored, (self.weight, *self.state), strict=True):
            foreach_copy_(own, list(x_NRC.view(-1, *own[0].shape).unbind(0)))


def _correction(item: Item, direction: Direction) -> BiasCorrection | None:
    """A step count on the host is read; one on the device stays there."""
    if not (isinstance(direction, Adam) and direction.bias_correction):
        return None
    return direction.correction(item.step.item() if item.step.is_cpu else item.step)


@lru_cache(maxsize=4096)
def shapes_of(view: View, shape: torch.Size) -> tuple[tuple[int, int, int], tuple[Matrices, ...]]:
    """How a weight of this shape is seen, as one and in its parts: found once, for steps are many."""
    return view.matrices(shape).shape, view.parts(shape)
