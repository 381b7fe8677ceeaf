"""Whole matrices of sharded weights: each is put together on one rank, its owner, and given back in parts.

Two messages for each process group and step, of all weights together: to the owners goes what whole matrices
are formed of, and back comes what was formed. What the ranks of a group send each other follows from shapes
and placements alone: a rank that has no gradient of a weight, or nothing of it at all, takes part all the
same. It sends zeros, and leaves what comes back.

An owner works on a matrix as one process would, so the bits are the same wherever it is worked on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from merit_optim.optim.algorithm import compute_dtype
from merit_optim.optim.directions import MatrixDirection, Sent, Traffic, direction_of
from merit_optim.optim.engines.part import Form, Formed, MatrixPart, Whole
from merit_optim.optim.engines.ranks.mail import Cut, Mail, Owned
from merit_optim.optim.engines.ranks.placements import (
    Cutting,
    Region,
    crossing_of,
    cutting_of,
    num_stacking,
    sharded_dims,
)
from merit_optim.optim.engines.ranks.process_groups import Ranks
from merit_optim.optim.matrices import View
from merit_optim.optim.refresh import in_turn, spread

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Group = dict[str, Any]


def matrix_direction(group: Group) -> MatrixDirection | None:
    """The direction of a parameter group, if it needs whole matrices."""
    if group.get("direction", "adam") == "adam":
        return None
    direction = direction_of(group)
    return direction if isinstance(direction, MatrixDirection) else None


class Matrix(NamedTuple):
    """One matrix, and what of it crosses ranks."""

    cutting: Cutting
    """With as many dimensions as the parameter has for it."""
    coordinates: tuple[tuple[int, ...], ...]
    """Of each rank of the process group on the mesh."""
    traffic: Traffic
    cost: int
    phase: int = 0
    """In which of the steps that take turns it costs more than in others."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cutting.shape

    def sent_to(self, owner: int) -> Owned:
        """What goes to the owner. Of what all ranks have whole, its own will do."""
        return Owned(owner, tuple(self._cut(sent, [owner]) for sent in self.traffic.gathered))

    def sent_by(self, owner: int) -> Owned:
        """What comes back from the owner."""
        all_ranks = range(len(self.coordinates))
        return Owned(owner, tuple(self._cut(sent, all_ranks) for sent in self.traffic.formed))

    def _cut(self, sent: Sent, ranks: Container[int]) -> Cut:
        """A tensor that is cut as the matrix is, or by rows, or that these ranks have whole."""
        if sent.shape is None:
            return Cut(self.shape, sent.dtype, _regions(self.cutting, self.coordinates))
        if sent.by_rows:
            regions = _regions(self.cutting.by_rows(sent.shape), self.coordinates)
            return Cut(sent.shape, sent.dtype, regions)
        everything, nothing = Region((0, 0), sent.shape), Region((0, 0), (0, 0))
        all_ranks = range(len(self.coordinates))
        return Cut(
            sent.shape, sent.dtype, tuple(everything if rank in ranks else nothing for rank in all_ranks)
        )


class Plan(NamedTuple):
    """Who owns each matrix, and what one rank of their process group sends and receives for it."""

    owners: tuple[int, ...]
    there: Mail
    back: Mail


def plan_of(matrices: Sequence[Matrix], rank: int, num_ranks: int) -> Plan:
    """Matrices go to the rank that has the least work so far, the heaviest first.

    Of those that weigh the same, first those of the first phase: so the ranks share the work of each phase.
    """
    order = sorted(range(len(matrices)), key=lambda i: matrices[i].phase)
    shared_out = zip(order, spread(tuple(matrices[i].cost for i in order), num_ranks), strict=True)
    owners = tuple(owner for _, owner in sorted(shared_out))
    owned = list(zip(matrices, owners, strict=True))
    there = Mail([matrix.sent_to(owner) for matrix, owner in owned], rank, num_ranks)
    back = Mail([matrix.sent_by(owner) for matrix, owner in owned], rank, num_ranks)
    return Plan(owners, there, back)


def matrix_of(
    cutting: Cutting,
    coordinates: tuple[tuple[int, ...], ...],
    direction: MatrixDirection,
    view: View,
    dtype: torch.dtype,
    phase: int = 0,
) -> Matrix:
    """Each of the matrices of a parameter that is cut so, for the ranks at these coordinates."""
    num_batch_dims = num_stacking(len(cutting.shape), view.matrix_dims)
    whole = view.matrices(cutting.shape)
    traffic = direction.traffic(whole.rows, whole.columns, dtype)
    cost = sum(direction.num_operations(part.rows, part.columns) for part in view.parts(cutting.shape))
    return Matrix(cutting.since(num_batch_dims), coordinates, traffic, cost, phase)


@lru_cache  # most weights have the shape of another, and there may be many ranks
def _regions(cutting: Cutting, coordinates: tuple[tuple[int, ...], ...]) -> tuple[Region, ...]:
    return tuple(map(cutting.region, coordinates))


class Weight(NamedTuple):
    """A parameter whose matrices are put together."""

    param: DTensor
    group_index: int
    numbers: range
    """Of its matrices, among all that the process group puts together."""


class Turn(NamedTuple):
    """What a step has to know of a weight: its group, with its phase if it has one, and its count."""

    group: Group
    step: float | Tensor


TurnOf = Callable[[Weight], Turn]


class Gathering:
    """The matrices that one process group puts together."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.weights: list[Weight] = []
        self.matrices: list[Matrix] = []
        self._under_way: tuple[Tensor, Tensor, Any] | None = None

    def add(self, param: DTensor, group_index: int, matrix: Matrix, num: int) -> None:
        """Add a parameter of so many matrices."""
        numbers = range(len(self.matrices), len(self.matrices) + num)
        self.weights.append(Weight(param, group_index, numbers))
        self.matrices += [matrix] * num

    def share_out(self) -> None:
        """Give every matrix an owner, once all were added."""
        group = self.ranks.group
        self.plan = plan_of(self.matrices, dist.get_rank(group), dist.get_world_size(group))

    def start(self, sent: Mapping[Tensor, tuple[Tensor, ...]]) -> None:
        """Send this rank's parts of the weights, each as (N, R, C), to the owners."""
        mail = self.plan.there
        message = self._bytes(sum(mail.part_splits))
        for weight in self.weights:
            if (parts := sent.get(weight.param)) is not None:
                for i, number in enumerate(weight.numbers):
                    mail.write_parts(number, [x_NRC[i] for x_NRC in parts], message)
        self._send(message, mail.part_splits, mail.whole_splits)

    def form(self, turn_of: TurnOf, form: Form) -> None:
        """Put together what this rank owns, form what is asked of it, and send that back."""
        arrived, mail = self._wait(), self.plan.back
        message = self._bytes(sum(mail.whole_splits))
        formed = iter(form(self._put_together(arrived, turn_of)))
        for weight, number in self._owned():
            view = View.of(turn_of(weight).group)
            parts = [next(formed) for _ in view.parts(self.matrices[number].shape)]
            wholes = [_joined(own, view) for own in zip(*parts, strict=True)]
            mail.write_wholes(number, wholes, message)
        self._send(message, mail.whole_splits, mail.part_splits)

    def finish(self) -> dict[Tensor, Formed]:
        """This rank's parts of what was formed for each weight, as (N, R, C)."""
        arrived = self._wait()
        found: dict[Tensor, Formed] = {}
        for weight in self.weights:
            of_matrices = (self.plan.back.read_parts(number, arrived) for number in weight.numbers)
            found[weight.param] = tuple(map(_stacked, zip(*of_matrices, strict=True)))
        return found

    def _owned(self) -> Iterator[tuple[Weight, int]]:
        owned = set(self.plan.there.owned)
        for weight in self.weights:
            for number in weight.numbers:
                if number in owned:
                    yield weight, number

    def _put_together(self, arrived: Tensor, turn_of: TurnOf) -> Iterator[Whole]:
        """One after the other, so that few are there at a time."""
        for weight, number in self._owned():
            group, step = turn_of(weight)
            direction, view, shape = matrix_direction(group), View.of(group), self.matrices[number].shape
            assert direction is not None
            wholes = self.plan.there.read_wholes(number, arrived)
            parts = (view.cut_matrices(_stacked([whole]), shape) for whole in wholes)
            for own in zip(*parts, strict=True):
                gathered = tuple(x_NRC.contiguous() for x_NRC in own)
                yield Whole(group, direction, gathered, step)

    def _bytes(self, num: int) -> Tensor:
        return torch.zeros(num, dtype=torch.uint8, device=self.device)

    def _send(self, message: Tensor, splits: list[int], splits_to_come: list[int]) -> None:
        arriving = torch.empty(sum(splits_to_come), dtype=torch.uint8, device=self.device)
        group = self.ranks.group
        work = dist.all_to_all_single(arriving, message, splits_to_come, splits, group=group, async_op=True)
        self._under_way = message, arriving, work

    def _wait(self) -> Tensor:
        assert self._under_way is not None
        (_, arriving, work), self._under_way = self._under_way, None
        work.wait()
        return arriving


def _joined(parts: Formed, view: View) -> Tensor | None:
    """What was formed of the matrices that a weight is split into, together; None if nothing was."""
    there = [x_NRC for x_NRC in parts if x_NRC is not None]
    if not there:
        return None
    assert len(there) == len(parts), "matrices of one weight are in the same step"
    return there[0] if len(there) == 1 else torch.cat(there, 1 + view.split_dim)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Matrices of any number of dimensions as (N, R, C), without a copy if it is one."""
    first = matrices[0]
    shape = len(matrices), first.shape[0], math.prod(first.shape[1:])
    return (first if len(matrices) == 1 else torch.stack(list(matrices))).view(shape)


class Owners:
    """All matrices that ranks have to put together, of an optimizer's parameters in their order."""

    def __init__(self, phases: Mapping[Tensor, int]) -> None:
        self._phases = phases
        """In which steps the bases of a parameter are improved, where they take turns."""
        self._gatherings: dict[tuple[tuple[int, ...], torch.device], Gathering] = {}
        """By the ranks of their process groups, of which several may be the same."""
        self._coordinates: dict[Ranks, tuple[tuple[int, ...], ...]] = {}
        self._params: set[Tensor] = set()

    def add(self, name: str, param: DTensor, group_index: int, group: Group) -> None:
        """Add a parameter, if its direction needs whole matrices and no rank has them."""
        direction, view, mesh = matrix_direction(group), View.of(group), param.device_mesh
        if direction is None:
            return
        crossing = crossing_of(param.ndim, view.matrix_dims, sharded_dims(name, param), mesh.shape)
        if not crossing.whole or not param.numel():
            return
        shard, ranks = param.to_local(), Ranks(mesh, crossing.whole)
        key = ranks.members, shard.device
        if key not in self._gatherings:
            self._gatherings[key] = Gathering(ranks, shard.device)
        if ranks not in self._coordinates:
            self._coordinates[ranks] = ranks.coordinates
        coordinates = self._coordinates[ranks]
        cutting, phase = cutting_of(name, param), self._phases.get(param, 0)
        matrix = matrix_of(cutting, coordinates, direction, view, compute_dtype(shard), phase)
        num = math.prod(shard.shape[: num_stacking(param.ndim, view.matrix_dims)])
        self._gatherings[key].add(param, group_index, matrix, num)
        self._params.add(param)

    def __contains__(self, param: object) -> bool:
        return param in self._params

    def share_out(self) -> None:
        """Give every matrix an owner, once all parameters were added."""
        for gathering in self._gatherings.values():
            gathering.share_out()

    def start(self, parts: Sequence[MatrixPart]) -> None:
        """The first phase of weights that are cut; send the owners what this rank has of them."""
        sent = {o: tensors for part in parts for o, tensors in zip(part.owners, part.before(), strict=True)}
        for gathering in self._gatherings.values():
            gathering.start(sent)

    def finish(
        self, groups: Sequence[Group], step_of: Callable[[Tensor], float | Tensor], form: Form
    ) -> dict[Tensor, Formed]:
        """Form what this rank owns; of each weight the part that this rank has of what was formed for it."""

        def turn_of(weight: Weight) -> Turn:
            group = in_turn(groups[weight.group_index], self._phases.get(weight.param))
            return Turn(group, step_of(weight.param))

        for gathering in self._gatherings.values():
            gathering.form(turn_of, form)
        formed: dict[Tensor, Formed] = {}
        for gathering in self._gatherings.values():
            formed |= gathering.finish()
        return formed
