"""The tensors of a weight as the eager engine sees them: as matrices, split if the weight is split."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.axes.directions import Adam
from merit_optim.optim.axes.directions.adam import BiasCorrection
from merit_optim.optim.engines.part import Share
from merit_optim.optim.engines.plan import Piece, Slot
from merit_optim.optim.engines.work import Item
from merit_optim.optim.matrices import Matrices, View
from merit_optim.optim.spec import Spec
from merit_optim.optim.torch_private import foreach_copy_, share_memory


class Tensors(NamedTuple):
    """A weight, or one of the matrices it is split into, with its gradient and state, all as (N, R, C)."""

    item: Item
    number: int
    """The index of its slot in the plan of its part."""
    slot: Slot
    weight: Tensor
    grad: Tensor
    state: tuple[Tensor, ...]
    correction: BiasCorrection | None


class Block(NamedTuple):
    """One piece of one weight."""

    tensors: Tensors
    piece: Piece

    def of(self, x_NRC: Tensor) -> Tensor:
        """Return this block of a tensor. A block that is the whole tensor needs no slicing."""
        return x_NRC if self.piece.is_whole else x_NRC[self.piece.matrices, self.piece.rows]


class Stored:
    """A weight with its tensors as stored, its spec, and its view."""

    def __init__(self, item: Item, share: Share | None = None) -> None:
        self.item, self.share = item, share
        self.spec: Spec = item.spec
        self.view = self.spec.view if share is None else share.view
        self.tensors = (item.param.detach(), *item.state)
        # Views if the strides allow it, else copies that return_copies writes back.
        shape = item.param.shape
        self.shape_NRC, self.matrices = shapes_of(self.view, shape)
        """Its shape before it is split, and the matrices that each have their own ratios."""
        has_its_shape = [True, *(shape is None for shape in self._state_shapes.values())]
        self.seen = [
            x.reshape(self.shape_NRC) if like_weight else x
            for x, like_weight in zip(self.tensors, has_its_shape, strict=True)
        ]

    @property
    def num_elements(self) -> int:
        return self.item.param.numel()

    def cut(self, slots: Iterator[tuple[int, Slot]]) -> Iterator[Tensors]:
        """Yield the tensors of each of these matrices."""
        shape, correction = self.item.param.shape, _correction(self.item)
        grad = self.item.grad.reshape(self.shape_NRC)
        if self.view.split is None:
            weight, *state = self.seen
            yield Tensors(self.item, *next(slots), weight, grad, tuple(state), correction)
            return
        weights, *states = map(self.cut_part, self.seen, self._like_weight)
        grads = self.view.cut_matrices(grad, shape)
        for weight, grad, *state in zip(weights, grads, *states, strict=True):
            yield Tensors(self.item, *next(slots), weight, grad, tuple(state), correction)

    @property
    def _state_shapes(self) -> dict[str, tuple[int, ...] | None]:
        return self.spec.shapes(self.view.matrices(self.item.param.shape))

    @property
    def _like_weight(self) -> list[bool]:
        """Whether the weight, and each state tensor, is cut like the weight: also the rows of a hold."""
        rows = self.spec.hold.keys_by_rows
        return [True, *(shape is None or key in rows for key, shape in self._state_shapes.items())]

    def cut_part(self, x_NRC: Tensor, like_weight: bool) -> tuple[Tensor, ...]:
        """Split a tensor into these matrices. If it lacks the weight's shape, every rank has all of it."""
        if like_weight or self.share is None:
            return self.view.cut_matrices(x_NRC, self.item.param.shape)
        dim = self.view.split_dim
        lengths = [(extent.num_rows, extent.num_columns)[dim] for extent in self.share.extents]
        return (x_NRC,) if self.view.split is None else x_NRC.split(lengths, 1 + dim)

    def return_copies(self) -> None:
        for x, x_NRC in zip(self.tensors, self.seen, strict=True):
            if not x.is_contiguous() and not share_memory(x_NRC, x):
                x.copy_(x_NRC.view(x.shape))


class Stack:
    """Small weights of one shape and group, copied into one stack of matrices and back.

    For a few thousand elements, the copies cost less than dozens of calls for each weight.
    """

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.spec: Spec = items[0].spec
        num, rows, columns, is_vector = self.spec.view.matrices(self.item.param.shape)
        self.matrices = (Matrices(len(items) * num, rows, columns, is_vector),)
        states = zip(*(item.state for item in items), strict=True)
        self.stored = [[item.param for item in items], *map(list, states)]

    @property
    def item(self) -> Item:
        return self.items[0]

    @property
    def num_elements(self) -> int:
        return len(self.items) * self.item.param.numel()

    def cut(self, slots: Iterator[tuple[int, Slot]]) -> Iterator[Tensors]:
        """Copy the weights into one. They have all taken the same number of steps."""
        correction = _correction(self.item)
        sources = *self.stored, [item.grad for item in self.items]
        *self.copies, grad = (torch.stack(tensors).reshape(self.matrices[0].shape) for tensors in sources)
        weight, *state = self.copies
        yield Tensors(self.item, *next(slots), weight, grad, tuple(state), correction)

    def return_copies(self) -> None:
        for tensors, x_NRC in zip(self.stored, self.copies, strict=True):
            foreach_copy_(tensors, list(x_NRC.view(-1, *tensors[0].shape).unbind(0)))


def _correction(item: Item) -> BiasCorrection | None:
    """Return Adam's bias correction. A step count on the host is read; one on a device stays there."""
    direction = item.spec.direction
    if type(direction) is not Adam or not direction.bias_correction:
        return None
    return direction.correction(item.step.item() if item.step.is_cpu else item.step)


@lru_cache(maxsize=4096)
def shapes_of(view: View, shape: torch.Size) -> tuple[tuple[int, int, int], tuple[Matrices, ...]]:
    """Return the shape of a weight seen as (N, R, C), and the matrices it is split into."""
    return view.matrices(shape).shape, view.split_matrices(shape)
