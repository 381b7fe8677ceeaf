"""Parameters that stand on several ranks: what crosses ranks, and the collectives that carry it.

A rank works on its own shard as if it were the whole parameter; only sizes are missing that other ranks
know. Splitting rows leaves each row's size whole and cuts columns; splitting columns does the reverse;
both cut the whole weight's. So between the phases of a step the parts of the sizes buffers that were cut
are reduced, all parameters together: one all-reduce for each process group. Everything else is local
and element-wise, which makes the step on many ranks equal to the step on one, bit for bit (for the max
norm; sums of squares are added in another order).

Every rank takes part in every all-reduce, in the same order, with the same number of elements, whether
it has gradients or not: what the ranks of a group share is known from shapes and placements alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from merit_optim.optim import algorithm
from merit_optim.optim.engines.plan import Slot, plan
from merit_optim.optim.engines.work import Work
from merit_optim.optim.statistics import Recorder, UpdateStatistics

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Crossing(NamedTuple):
    """The mesh dimensions over which a parameter's sizes are reduced."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    whole: tuple[int, ...]


def crossing_of(
    num_dims: int, matrix_dims: int | None, sharded_dims: Sequence[int | None], mesh_shape: Sequence[int]
) -> Crossing:
    """What crosses ranks, from which tensor dimension each mesh dimension shards (None: none).

    >>> crossing_of(2, None, [0], [4])  # FSDP2: rows are whole, columns are cut
    Crossing(rows=(), columns=(0,), whole=(0,))
    """
    num_batch_dims = 0 if matrix_dims is None else max(0, num_dims - matrix_dims)
    is_vector = num_dims - num_batch_dims < 2
    rows: list[int] = []
    columns: list[int] = []
    whole: list[int] = []
    for mesh_dim, (dim, size) in enumerate(zip(sharded_dims, mesh_shape, strict=True)):
        if dim is None or size == 1 or dim < num_batch_dims:
            continue  # a copy, or whole matrices
        whole.append(mesh_dim)
        if not is_vector:
            (columns if dim == num_batch_dims else rows).append(mesh_dim)
    return Crossing(tuple(rows), tuple(columns), tuple(whole))


def is_sharded(param: Tensor) -> TypeGuard[DTensor]:
    """Whether a parameter is a DTensor, without importing what defines it."""
    return hasattr(param, "placements")


def any_sharded(params: Iterable[Tensor]) -> bool:
    """Whether one of them is; asked of their few types, which is quicker."""
    return any(hasattr(kind, "placements") for kind in set(map(type, params)))


def sharded_dims(name: str, param: DTensor) -> list[int | None]:
    """For each mesh dimension the tensor dimension that it shards; raise for what has no such meaning."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    dims: list[int | None] = []
    for placement in param.placements:
        if isinstance(placement, (Shard, _StridedShard)):
            dims.append(placement.dim % max(1, param.ndim))
        elif isinstance(placement, Replicate):
            dims.append(None)
        else:
            raise TypeError(
                f"{name} is placed as {placement} on its mesh; a step can be exact for Shard and Replicate "
                "only. Redistribute the parameter before it is given to the optimizer."
            )
    return dims


def local(work: Work) -> Work:
    """The same work on each rank's own tensors. A gradient is first brought to its parameter's placement."""
    if not any_sharded(work.params):
        return work
    grads = [_as_placed(grad, param) for param, grad in zip(work.params, work.grads, strict=True)]
    return work._replace(
        params=_locals(work.params), grads=_locals(grads), states=[_locals(x) for x in work.states]
    )


def _as_placed(grad: Tensor, param: Tensor) -> Tensor:
    if is_sharded(param) and is_sharded(grad) and grad.placements != param.placements:
        return grad.redistribute(param.device_mesh, param.placements)
    return grad


def _locals(tensors: Iterable[Any]) -> list[Tensor]:
    return [x.to_local() if is_sharded(x) else x for x in tensors]


class Place(NamedTuple):
    """Where an engine keeps the sizes of a parameter: a (2, length) buffer and its part of it."""

    param: Tensor
    sizes: Tensor
    slot: Slot


@dataclass
class Exchange:
    """What one process group reduces: parts ("rows", "columns", "whole") of parameters' sizes."""

    group: Any
    parts: list[tuple[Tensor, str, bool]] = field(default_factory=list)
    """Parameter, which part, whether it is a sum of squares."""

    def reduce(self, places: dict[Tensor, Place]) -> None:
        """Reduce sizes in place."""
        for is_sum in (False, True):
            views = [
                _part(places[param].sizes, places[param].slot, which)
                for param, which, sums in self.parts
                if sums == is_sum
            ]
            if not views:
                continue
            packed = torch.cat([view.reshape(-1) for view in views])
            if is_sum:
                total = packed.double().square()
                dist.all_reduce(total, dist.ReduceOp.SUM, group=self.group)
                packed = total.sqrt().to(packed.dtype)
            else:
                # As integers, which order as the sizes do: some backends' float maximum drops a NaN.
                bits = packed.view(torch.int64 if packed.dtype == torch.float64 else torch.int32)
                dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group)
            for view, reduced in zip(views, packed.split([view.numel() for view in views]), strict=True):
                view.copy_(reduced.view(view.shape))


def _packed(statistics: UpdateStatistics | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is added up, and what the largest is taken of; nothing, where a rank has no part."""
    if statistics is None:
        return torch.zeros(4, device=device), torch.full((2,), -torch.inf, device=device)
    s = statistics
    added = (s.num_clipped, s.num_bounded, s.update_sum_sq, s.weight_sum_sq)
    largest = (-s.smallest_ratio, s.largest_ratio)
    return torch.stack([x.float() for x in added]), torch.stack([x.float() for x in largest])


def _part(sizes: Tensor, slot: Slot, which: str) -> Tensor:
    bounds = {
        "rows": (slot.start, slot.columns_start),
        "columns": (slot.columns_start, slot.whole_start),
        "whole": (slot.whole_start, slot.end),
    }
    begin, end = bounds[which]
    return sizes[:, begin:end]


class Sharding:
    """What all sharded parameters of an optimizer have to exchange, in the order of the parameters."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self.slots: dict[Tensor, Slot] = {}
        """The layout of each exchanged parameter's shard alone."""
        self.process_groups: dict[str, Any] = {}
        self.spread_of: dict[Tensor, tuple[str, ...]] = {}
        """The process groups over which a parameter is sharded, by name."""
        self.spreads: list[tuple[str, ...]] = [()]
        self.device = torch.device("cpu")
        for number, group in enumerate(groups):
            for i, param in enumerate(group["params"]):
                if is_sharded(param) and param.requires_grad:
                    self._add(f"parameter {i} of group {number}", param, group)

    def _add(self, name: str, param: DTensor, group: dict[str, Any]) -> None:
        mesh, dims = param.device_mesh, sharded_dims(name, param)
        for mesh_dim, dim in enumerate(dims):
            if dim is not None and mesh.size(mesh_dim) > 1:
                process_group = mesh.get_group(mesh_dim)
                self.process_groups.setdefault(process_group.group_name, process_group)
                self.spread_of[param] = (*self.spread_of.get(param, ()), process_group.group_name)
        self.device = param.device
        spread = self.spread_of.get(param, ())
        if spread not in self.spreads:
            self.spreads.append(spread)
        if "norm" not in group:
            return  # an element-wise optimizer exchanges nothing
        matrices = algorithm.matrices_of(param.to_local().shape, group["matrix_dims"])
        slot = plan(((matrices, group["element_wise"]),)).slots[0]
        crossing = crossing_of(param.ndim, group["matrix_dims"], dims, list(mesh.shape))
        for which, mesh_dims in crossing._asdict().items():
            if which != "whole" and not slot.has_rows:
                continue
            for mesh_dim in mesh_dims:
                process_group = mesh.get_group(mesh_dim)
                exchange = self.exchanges.setdefault(process_group.group_name, Exchange(process_group))
                exchange.parts.append((param, which, group["norm"] == "l2"))
                self.slots[param] = slot

    def any(self, flag: Tensor) -> Tensor:
        """Whether a flag is set on any rank that shares a parameter with this one."""
        bits = flag.to(torch.int32)
        for group in self.process_groups.values():
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
        return bits > 0

    def any_rank(self, flag: bool) -> bool:
        """The same for a flag on the host."""
        return bool(self.any(torch.tensor(flag, device=self.device)))

    def total_norm(self, works: list[Work], device: torch.device) -> Tensor:
        """The 2-norm of all gradients, each shard counted once."""
        squares = {key: torch.zeros((), dtype=torch.float64, device=device) for key in self.spreads}
        for work in works:
            for owner, grad in zip(work.owners, work.grads, strict=True):
                norm = torch.linalg.vector_norm(grad, dtype=torch.float32).double().to(device)
                squares[self.spread_of.get(owner, ())] += norm.square()
        for key, square in squares.items():
            for name in key:
                dist.all_reduce(square, dist.ReduceOp.SUM, group=self.process_groups[name])
        return torch.stack(list(squares.values())).sum().sqrt().float()

    def merge_statistics(self, recorder: Recorder, names: dict[Tensor, str]) -> None:
        """Make the statistics of shards those of whole parameters, on every rank."""
        for spread in self.spreads[1:]:
            params = [param for param, over in self.spread_of.items() if over == spread]
            totals, extremes = zip(
                *(_packed(recorder.get(names[p]), self.device) for p in params), strict=True
            )
            sums, most = torch.stack(totals), torch.stack(extremes)
            for name in spread:
                dist.all_reduce(sums, dist.ReduceOp.SUM, group=self.process_groups[name])
                dist.all_reduce(most, dist.ReduceOp.MAX, group=self.process_groups[name])
            for param, (clipped, bounded, update, weight), (least, largest) in zip(
                params, sums, most, strict=True
            ):
                recorder[names[param]] = UpdateStatistics(
                    param.numel(), clipped, bounded, -least, largest, update, weight
                )

    def reduce(self, places: Iterable[Place], owners: dict[Tensor, Tensor]) -> None:
        """Between the phases of a step. ``owners`` gives the parameter of each rank's own tensor."""
        of_params = {owners[place.param]: place for place in places}
        # A rank without a gradient, or with an empty shard, adds nothing: zero is the least size. But it
        # passes on what it hears in one group to the ranks of the next.
        for param, slot in self.slots.items():
            if param not in of_params:
                (shard,) = _locals([param])
                dtype = algorithm.compute_dtype(shard)
                zeros = torch.zeros(2, slot.end, dtype=dtype, device=shard.device)
                of_params[param] = Place(shard, zeros, slot)
        for exchange in self.exchanges.values():
            exchange.reduce(of_params)
