"""Whole matrices of sharded weights: each is gathered on one rank, its owner, and the result is scattered.

Each process group exchanges two messages per step for all weights together: the inputs of whole matrices go
to their owners, and the results come back. The messages depend only on shapes and placements: a rank that has
no gradient for a weight, or no part of it, takes part too. It sends zeros and ignores what comes back.

An owner processes a matrix as a single process would, so the bits do not depend on the rank.
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
from merit_optim.optim.axes.directions import MatrixDirection, Sent, Traffic
from merit_optim.optim.engines.part import Form, Formed, MatrixPart, Whole
from merit_optim.optim.engines.ranks.mail import Cut, Mail, Owned
from merit_optim.optim.engines.ranks.placements import (
    Cutting,
    Region,
    crossing_of_param,
    cutting_of,
)
from merit_optim.optim.engines.ranks.process_groups import MeshRanks
from merit_optim.optim.matrices import View, num_stacking
from merit_optim.optim.refresh import spread
from merit_optim.optim.spec import Spec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Matrix(NamedTuple):
    """One matrix, and its tensors that cross ranks."""

    cutting: Cutting
    """Of the parameter's dimensions that form the matrix."""
    coordinates: tuple[tuple[int, ...], ...]
    """The mesh coordinates of each rank of the process group."""
    traffic: Traffic
    cost: int
    phase: int = 0
    """The step of the refresh cycle in which it costs more."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cutting.shape

    def sent_to(self, owner: int) -> Owned:
        """The tensors sent to the owner. Of tensors that all ranks have whole, it uses its own copy."""
        return Owned(owner, tuple(self._cut(sent, [owner]) for sent in self.traffic.gathered))

    def sent_by(self, owner: int) -> Owned:
        """The tensors sent back by the owner."""
        all_ranks = range(len(self.coordinates))
        return Owned(owner, tuple(self._cut(sent, all_ranks) for sent in self.traffic.formed))

    def _cut(self, sent: Sent, ranks: Container[int]) -> Cut:
        """A tensor that is cut like the matrix, or by rows, or that these ranks have whole."""
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


class OwnershipPlan(NamedTuple):
    """The owner of each matrix, and what one rank of the process group sends and receives."""

    owners: tuple[int, ...]
    there: Mail
    back: Mail


def plan_of(matrices: Sequence[Matrix], rank: int, num_ranks: int) -> OwnershipPlan:
    """Assign each matrix to the rank with the least work so far, the most expensive matrix first.

    Matrices of equal cost are assigned in the order of their phases, so that ranks share each phase's work.
    """
    order = sorted(range(len(matrices)), key=lambda i: matrices[i].phase)
    shared_out = zip(order, spread(tuple(matrices[i].cost for i in order), num_ranks), strict=True)
    owners = tuple(owner for _, owner in sorted(shared_out))
    owned = list(zip(matrices, owners, strict=True))
    there = Mail([matrix.sent_to(owner) for matrix, owner in owned], rank, num_ranks)
    back = Mail([matrix.sent_by(owner) for matrix, owner in owned], rank, num_ranks)
    return OwnershipPlan(owners, there, back)


def matrix_of(
    cutting: Cutting,
    coordinates: tuple[tuple[int, ...], ...],
    direction: MatrixDirection,
    view: View,
    dtype: torch.dtype,
    phase: int = 0,
) -> Matrix:
    """One of the matrices of a parameter with this cutting, for the ranks at these coordinates."""
    num_batch_dims = num_stacking(len(cutting.shape), view.matrix_dims)
    whole = view.matrices(cutting.shape)
    traffic = direction.traffic(whole.rows, whole.columns, dtype)
    cost = sum(
        direction.num_operations(part.rows, part.columns) for part in view.split_matrices(cutting.shape)
    )
    return Matrix(cutting.since(num_batch_dims), coordinates, traffic, cost, phase)


@lru_cache  # many weights have the same shape, and there may be many ranks
def _regions(cutting: Cutting, coordinates: tuple[tuple[int, ...], ...]) -> tuple[Region, ...]:
    return tuple(map(cutting.region, coordinates))


class GatheredWeight(NamedTuple):
    """A parameter whose matrices are gathered."""

    param: DTensor
    group_index: int
    numbers: range
    """The indices of its matrices among all that the process group gathers."""


class Turn(NamedTuple):
    """A weight's spec, with its phase if it has one, and its step count."""

    spec: Spec
    step: float | Tensor


TurnOf = Callable[[GatheredWeight], Turn]


class Gathering:
    """The matrices that one process group gathers."""

    def __init__(self, ranks: MeshRanks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.weights: list[GatheredWeight] = []
        self.matrices: list[Matrix] = []
        self._under_way: tuple[Tensor, Tensor, Any] | None = None

    def add(self, param: DTensor, group_index: int, matrix: Matrix, num: int) -> None:
        """Add a parameter with ``num`` matrices."""
        numbers = range(len(self.matrices), len(self.matrices) + num)
        self.weights.append(GatheredWeight(param, group_index, numbers))
        self.matrices += [matrix] * num

    def share_out(self) -> None:
        """Assign an owner to every matrix, after all were added."""
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
        """Gather the matrices that this rank owns, process them, and send the results back."""
        arrived, mail = self._wait(), self.plan.back
        message = self._bytes(sum(mail.whole_splits))
        formed = iter(form(self._gathered(arrived, turn_of)))
        for weight, number in self._owned():
            view = turn_of(weight).spec.view
            parts = [next(formed) for _ in view.split_matrices(self.matrices[number].shape)]
            wholes = [_joined(tensors, view) for tensors in zip(*parts, strict=True)]
            mail.write_wholes(number, wholes, message)
        self._send(message, mail.whole_splits, mail.part_splits)

    def finish(self) -> dict[Tensor, Formed]:
        """Return this rank's parts of the results for each weight, as (N, R, C)."""
        arrived = self._wait()
        formed: dict[Tensor, Formed] = {}
        for weight in self.weights:
            of_matrices = (self.plan.back.read_parts(number, arrived) for number in weight.numbers)
            formed[weight.param] = tuple(map(_stacked, zip(*of_matrices, strict=True)))
        return formed

    def _owned(self) -> Iterator[tuple[GatheredWeight, int]]:
        owned = set(self.plan.there.owned)
        for weight in self.weights:
            for number in weight.numbers:
                if number in owned:
                    yield weight, number

    def _gathered(self, arrived: Tensor, turn_of: TurnOf) -> Iterator[Whole]:
        """Yield the matrices one by one, so that few are in memory at a time."""
        for weight, number in self._owned():
            spec, step = turn_of(weight)
            view, shape = spec.view, self.matrices[number].shape
            wholes = self.plan.there.read_wholes(number, arrived)
            parts = (view.cut_matrices(_stacked([whole]), shape) for whole in wholes)
            for tensors in zip(*parts, strict=True):
                gathered = tuple(x_NRC.contiguous() for x_NRC in tensors)
                yield Whole(spec, gathered, step)

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
    """Join the results for the matrices that a weight is split into; None if there are none."""
    present = [x_NRC for x_NRC in parts if x_NRC is not None]
    if not present:
        return None
    assert len(present) == len(parts), "matrices of one weight are in the same step"
    return present[0] if len(present) == 1 else torch.cat(present, 1 + view.split_dim)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Stack matrices of any number of dimensions as (N, R, C), without a copy if there is only one."""
    first = matrices[0]
    shape = len(matrices), first.shape[0], math.prod(first.shape[1:])
    return (first if len(matrices) == 1 else torch.stack(list(matrices))).view(shape)


class Owners:
    """All matrices of an optimizer that must be gathered, in the order of its parameters."""

    def __init__(self, phases: Mapping[Tensor, int]) -> None:
        self._phases = phases
        """The phase of each parameter whose bases are improved in turns."""
        self._gatherings: dict[tuple[tuple[int, ...], torch.device], Gathering] = {}
        """By ranks, because several process groups may have the same ones, and by device."""
        self._coordinates: dict[MeshRanks, tuple[tuple[int, ...], ...]] = {}

    def add(self, name: str, param: DTensor, group_index: int, spec: Spec) -> None:
        """Add a parameter if its direction needs whole matrices and no rank has them."""
        direction, view, mesh = spec.direction, spec.view, param.device_mesh
        if not isinstance(direction, MatrixDirection):
            return
        crossing = crossing_of_param(name, param, view.matrix_dims)
        if not crossing.whole or not param.numel():
            return
        shard, ranks = param.to_local(), MeshRanks(mesh, crossing.whole)
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

    def share_out(self) -> None:
        """Assign an owner to every matrix, after all parameters were added."""
        for gathering in self._gatherings.values():
            gathering.share_out()

    def start(self, parts: Sequence[MatrixPart]) -> None:
        """Run the first phase of weights that are cut, and send this rank's parts to the owners."""
        sent = {
            o: tensors for part in parts for o, tensors in zip(part.originals, part.before(), strict=True)
        }
        for gathering in self._gatherings.values():
            gathering.start(sent)

    def finish(
        self, specs: Sequence[Spec], step_of: Callable[[Tensor], float | Tensor], form: Form
    ) -> dict[Tensor, Formed]:
        """Process the matrices that this rank owns; return this rank's parts of the results per weight."""

        def turn_of(weight: GatheredWeight) -> Turn:
            spec = specs[weight.group_index].in_turn(self._phases.get(weight.param))
            return Turn(spec, step_of(weight.param))

        for gathering in self._gatherings.values():
            gathering.form(turn_of, form)
        formed: dict[Tensor, Formed] = {}
        for gathering in self._gatherings.values():
            formed |= gathering.finish()
        return formed
