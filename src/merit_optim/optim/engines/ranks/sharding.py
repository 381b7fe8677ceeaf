"""Sharded parameters: the collectives of a step.

Between the phases of a step, the sizes that a parameter's placement has cut are reduced, for all parameters
together: one all-reduce per process group. Everything else is local and element-wise, so the step on many
ranks equals the step on one, bit for bit (for the max norm; sums of squares are added in another order).

Every rank takes part in every all-reduce, in the same order and with the same number of elements, whether it
has gradients or not: what the ranks of a group share depends only on shapes and placements.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from merit_optim.optim.algorithm import compute_dtype
from merit_optim.optim.axes.directions import MatrixDirection
from merit_optim.optim.engines.gradients import norms
from merit_optim.optim.engines.part import Place, Share
from merit_optim.optim.engines.plan import Slot, plan
from merit_optim.optim.engines.ranks.line_sums import LineSums
from merit_optim.optim.engines.ranks.owners import Owners
from merit_optim.optim.engines.ranks.placements import crossing_of_param, is_sharded, sharded_dims, share_of
from merit_optim.optim.engines.ranks.process_groups import MeshRanks
from merit_optim.optim.engines.work import Work, is_true
from merit_optim.optim.refresh import Members, phases_of
from merit_optim.optim.spec import Spec
from merit_optim.optim.statistics import Recorder, UpdateStatistics

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class BufferKind(NamedTuple):
    """The device and dtype of a buffer. Buffers of one kind can be joined."""

    device: torch.device
    dtype: torch.dtype


class Sharded(NamedTuple):
    """A parameter, or one of the matrices that it is split into, whose sizes are reduced over ranks."""

    slot: Slot
    """The slot of this rank's shard if it were alone in a buffer."""
    kind: BufferKind


Layout = list[tuple[int, int, Slot]]
"""The number of each ``Sharded``, with the number of the engine that has its sizes, and the slot there."""


class Exchange:
    """One message of a step: the sizes of all parameters that a process group reduces."""

    def __init__(self, ranks: MeshRanks, kind: BufferKind, is_sum: bool) -> None:
        self.ranks, self.kind, self.is_sum = ranks, kind, is_sum
        self.carried: list[tuple[int, str]] = []
        """The number of a ``Sharded``, and which of its sizes: "rows", "columns" or "whole"."""
        self.after: list[Exchange] = []
        """Earlier exchanges that reduce some of the same sizes: this one reduces their results further."""
        self.index = torch.empty(0, dtype=torch.int64)
        """Their indices in the buffer of sizes. Kept between steps, so that packing is one operation."""
        self._sent: tuple[Tensor, Any] | None = None

    def start(self, sizes: Tensor) -> None:
        """Pack the message and start to send it."""
        for earlier in self.after:
            earlier.finish(sizes)
        message = sizes.index_select(1, self.index)
        if self.is_sum:
            message = message.double().square_()
            work = dist.all_reduce(message, dist.ReduceOp.SUM, group=self.ranks.group, async_op=True)
        else:
            # As integers, which have the same order: some backends' float maximum drops a NaN. Its sign bit
            # is cleared, because it would make the NaN the smallest.
            bits = message.view(torch.int64 if message.dtype == torch.float64 else torch.int32)
            bits.bitwise_and_(torch.iinfo(bits.dtype).max)
            work = dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.ranks.group, async_op=True)
        self._sent = message, work

    def finish(self, sizes: Tensor) -> None:
        """Wait for the message and unpack it, unless this is already done."""
        if self._sent is None:
            return
        (message, work), self._sent = self._sent, None
        work.wait()
        if self.is_sum:
            message = message.sqrt_().to(sizes.dtype)
        sizes.index_copy_(1, self.index, message)


class Sharding:
    """What all sharded parameters of an optimizer must exchange, in the order of the parameters."""

    def __init__(self, members: Members) -> None:
        self.device = torch.device("cpu")
        self.sharded: list[Sharded] = []
        """``number`` below is an index into this list."""
        self.shares: dict[Tensor, Share] = {}
        """This rank's share of the matrices of a parameter, if its engine needs it."""
        self.owners = Owners(phases_of(members))
        self.exchanges: list[Exchange] = []
        self.line_sums = LineSums()
        self.ranks: dict[str, MeshRanks] = {}
        """By the name of their process group."""
        self._numbers: dict[Tensor, int] = {}
        """The first number of each parameter."""
        self.spread_of: dict[Tensor, tuple[str, ...]] = {}
        """The process groups over which a parameter is sharded, by name."""
        for number, (spec, params) in enumerate(members):
            for i, param in enumerate(params):
                if _takes_part(param):
                    self._add(f"parameter {i} of group {number}", param, number, spec)
        self.owners.share_out()
        for i, exchange in enumerate(self.exchanges):
            carried = set(exchange.carried)
            exchange.after = [
                earlier for earlier in self.exchanges[:i] if not carried.isdisjoint(earlier.carried)
            ]
        self.spreads = list(dict.fromkeys([(), *self.spread_of.values()]))
        self._laid_out: tuple[Layout, list[int]] | None = None
        self._joins: dict[BufferKind, Join] = {}
        self._made_for = _signature(members)

    def _add(self, name: str, param: DTensor, group_index: int, spec: Spec) -> None:
        mesh, dims, view = param.device_mesh, sharded_dims(name, param), spec.view
        self.device = param.device
        over = [MeshRanks(mesh, (i,)) for i, dim in enumerate(dims) if dim is not None and mesh.size(i) > 1]
        self.spread_of[param] = tuple(ranks.group.group_name for ranks in over)
        self.ranks.update(zip(self.spread_of[param], over, strict=True))
        has_products = spec.hold.line_dim(view) is not None
        if view.split is not None or isinstance(spec.direction, MatrixDirection) or has_products:
            self.shares[param] = share_of(name, param, view)
            self.line_sums.add(name, param, spec, self.shares[param])
            view = self.shares[param].view
        self.owners.add(name, param, group_index, spec)
        if spec.ratio.measures is None:
            return  # there are no sizes to exchange
        crossing = crossing_of_param(name, param, view.matrix_dims)
        if not crossing.whole:
            return
        shard = param.to_local()
        kind = BufferKind(shard.device, compute_dtype(shard))
        self._numbers[param] = len(self.sharded)
        for matrices in view.split_matrices(shard.shape):
            slot = plan(((matrices, spec.ratio.has_rows),)).slots[0]
            for which, mesh_dims in crossing._asdict().items():
                for mesh_dim in mesh_dims if slot.has_rows or which == "whole" else ():
                    ranks, is_sum = MeshRanks(mesh, (mesh_dim,)), spec.ratio.measures == "l2"
                    self._exchange_of(ranks, kind, is_sum).carried.append((len(self.sharded), which))
            self.sharded.append(Sharded(slot, kind))

    def _exchange_of(self, ranks: MeshRanks, kind: BufferKind, is_sum: bool) -> Exchange:
        for exchange in self.exchanges:
            # Two meshes may have the same ranks in different process groups.
            same_ranks = exchange.ranks.members == ranks.members
            if same_ranks and (exchange.kind, exchange.is_sum) == (kind, is_sum):
                return exchange
        self.exchanges.append(Exchange(ranks, kind, is_sum))
        return self.exchanges[-1]

    def fits(self, members: Members) -> bool:
        """Whether these are still the parameters and options that it was made for.

        Libraries that shard parameters replace them in the groups, a checkpoint brings its own options, and a
        parameter may be frozen for some time.
        """
        params, options = _signature(members)
        known_params, known_options = self._made_for
        same_params = len(params) == len(known_params) and all(map(operator.is_, params, known_params))
        return same_params and options == known_options

    def crosses(self, places: Iterable[Place], originals: dict[Tensor, Tensor]) -> bool:
        """Whether some of these sizes are reduced."""
        return any(originals[place.param] in self._numbers for place in places)

    def reduce(self, places: Iterable[Place], originals: dict[Tensor, Tensor]) -> None:
        """Reduce the sizes between the phases of a step. ``originals``: the parameters of local tensors."""
        buffers: dict[int, tuple[int, Tensor]] = {}
        layout: Layout = []
        num_seen: Counter[Tensor] = Counter()
        for param, sizes, slot in places:
            original = originals[param]
            if original in self._numbers:
                engine, _ = buffers.setdefault(id(sizes), (len(buffers), sizes))
                layout.append((self._numbers[original] + num_seen[original], engine, slot))
                num_seen[original] += 1
        engines = [sizes for _, sizes in buffers.values()]
        lengths = [sizes.shape[1] for sizes in engines]
        if (layout, lengths) != self._laid_out:
            self._lay_out(layout, lengths)
        joined = {kind: join.of(engines, kind) for kind, join in self._joins.items()}
        for exchange in self.exchanges:
            exchange.start(joined[exchange.kind])
        for exchange in self.exchanges:
            exchange.finish(joined[exchange.kind])
        for kind, join in self._joins.items():
            join.give_back(engines, joined[kind])

    def _lay_out(self, layout: Layout, lengths: list[int]) -> None:
        """Compute the indices of all sizes after the engines' buffers, of these lengths, are joined."""
        present = {number: (engine, slot) for number, engine, slot in layout}
        bounds: dict[tuple[int, str], tuple[int, int]] = {}
        for kind in dict.fromkeys(entry.kind for entry in self.sharded):
            numbers = [i for i, entry in enumerate(self.sharded) if entry.kind == kind]
            used = sorted({present[i][0] for i in numbers if i in present})
            ends = list(accumulate((lengths[i] for i in used), initial=0))
            starts, end = dict(zip(used, ends, strict=False)), ends[-1]
            for i in numbers:
                if i in present:
                    engine, slot = present[i]
                    start = starts[engine]
                else:
                    slot = self.sharded[i].slot
                    start, end = end, end + slot.end
                for which, (first, last) in _bounds(slot).items():
                    bounds[i, which] = start + first, start + last
            self._joins[kind] = Join(used, end - ends[-1])
        for exchange in self.exchanges:
            index = torch.cat([torch.arange(*bounds[entry]) for entry in exchange.carried])
            exchange.index = index.to(exchange.kind.device)
        self._laid_out = layout, lengths

    def any(self, flag: Tensor) -> Tensor:
        """Whether a flag is set on any rank that shares a parameter with this one."""
        bits = flag.to(torch.int32)
        for ranks in self.ranks.values():
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=ranks.group)
        return bits > 0

    def any_rank(self, flag: bool) -> bool:
        """Like ``any``, for a flag on the host."""
        return is_true(self.any(torch.tensor(flag, device=self.device)), if_fake=flag)

    def total_norm(self, works: list[Work], device: torch.device) -> Tensor:
        """The 2-norm of all gradients, with each shard counted once; summed in float64."""
        zero = torch.zeros((), dtype=torch.float32, device=device)
        parts = {spread: [zero] for spread in self.spreads}
        for work in works:
            for original, norm in zip(work.originals, norms(work.grads, 2.0), strict=True):
                parts[self.spread_of.get(original, ())].append(norm.to(device))
        squares = {spread: torch.stack(some).double().square().sum() for spread, some in parts.items()}
        for name, ranks in self.ranks.items():
            over = [spread for spread in self.spreads if name in spread]
            message = torch.stack([squares[spread] for spread in over])
            dist.all_reduce(message, dist.ReduceOp.SUM, group=ranks.group)
            squares.update(zip(over, message, strict=True))
        return torch.stack(list(squares.values())).sum().sqrt().float()

    def merge_statistics(self, recorder: Recorder, names: dict[Tensor, str]) -> None:
        """Combine the statistics of shards into those of whole parameters, for those in ``names``."""
        for spread in self.spreads[1:]:
            params = [param for param, over in self.spread_of.items() if over == spread]
            parts = [_packed(recorder.get(names.get(param, "")), self.device) for param in params]
            sums, most = (torch.stack(x) for x in zip(*parts, strict=True))
            for name in spread:
                dist.all_reduce(sums, dist.ReduceOp.SUM, group=self.ranks[name].group)
                dist.all_reduce(most, dist.ReduceOp.MAX, group=self.ranks[name].group)
            # No rank has measured a weight that is empty, or that SOAP's first step left as it was.
            measured = (most[:, 1] != -math.inf).tolist()
            most += 0 * sums[:, 2:3]  # a float maximum may drop a NaN; sums keep it
            for param, (clipped, bounded, update, weight), (least, largest), is_measured in zip(
                params, sums, most, measured, strict=True
            ):
                if param in names and is_measured:
                    recorder[names[param]] = UpdateStatistics(
                        param.numel(), clipped, bounded, -least, largest, update, weight
                    )


class Join(NamedTuple):
    """How buffers of one kind are joined: those of some engines, and zeros for parameters that they lack.

    A rank without a gradient, or with an empty shard, contributes zeros, the smallest size. But it passes on
    the results of one process group to the ranks of the next. A rank without any matrix of a stack has no
    sizes, and its message is empty.
    """

    engines: list[int]
    num_zeros: int

    def of(self, buffers: list[Tensor], kind: BufferKind) -> Tensor:
        """All sizes in one buffer, without a copy if one engine has them all."""
        parts = [buffers[i] for i in self.engines]
        if self.num_zeros or not parts:
            parts.append(torch.zeros(2, self.num_zeros, dtype=kind.dtype, device=kind.device))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def give_back(self, buffers: list[Tensor], joined: Tensor) -> None:
        """Copy the joined sizes back into the engines' buffers."""
        targets = [buffers[i] for i in self.engines]
        if targets and targets[0] is joined:
            return
        lengths = [x.shape[1] for x in targets]
        for buffer, part in zip(targets, joined.split([*lengths, self.num_zeros], 1), strict=False):
            buffer.copy_(part)


def _takes_part(param: Tensor) -> TypeGuard[DTensor]:
    """Whether a parameter is sharded and trained. A frozen one that still has a gradient is updated too."""
    return is_sharded(param) and (param.requires_grad or param.grad is not None)


def _signature(members: Members) -> tuple[list[Tensor], list[tuple[int, Spec]]]:
    """The parameters and options that a sharding depends on."""
    taking_part: list[Tensor] = [param for _, params in members for param in params if _takes_part(param)]
    return taking_part, [(len(params), spec.fixed) for spec, params in members]


def _bounds(slot: Slot) -> dict[str, tuple[int, int]]:
    return {
        "rows": (slot.start, slot.columns_start),
        "columns": (slot.columns_start, slot.whole_start),
        "whole": (slot.whole_start, slot.end),
    }


def _packed(statistics: UpdateStatistics | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The statistics to sum and those to maximize; neutral values if a rank has no part.

    In float64, which represents all counts exactly.
    """
    if statistics is None:
        nothing = torch.zeros(4, dtype=torch.float64, device=device)
        return nothing, torch.full_like(nothing[:2], -torch.inf)
    s = statistics
    added = (s.num_clipped, s.num_bounded, s.update_sum_sq, s.weight_sum_sq)
    largest = (-s.smallest_ratio, s.largest_ratio)
    return torch.stack([x.double() for x in added]), torch.stack([x.double() for x in largest])
