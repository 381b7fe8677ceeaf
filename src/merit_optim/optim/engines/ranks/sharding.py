"""Sharded parameters: the collectives of a step.

Between the phases of a step, those parts of the sizes buffers that a parameter's placement has cut are
reduced, all parameters together: one all-reduce for each process group. Everything else is local and
element-wise, which makes the step on many ranks equal to the step on one, bit for bit (for the max norm;
sums of squares are added in another order).

Every rank takes part in every all-reduce, in the same order, with the same number of elements, whether
it has gradients or not: what the ranks of a group share is known from shapes and placements alone.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from merit_optim.optim.algorithm import Rule, compute_dtype
from merit_optim.optim.directions import Traffic
from merit_optim.optim.engines.gradients import norms
from merit_optim.optim.engines.part import Place, Share
from merit_optim.optim.engines.plan import Slot, plan
from merit_optim.optim.engines.ranks.owners import Owners, matrix_direction
from merit_optim.optim.engines.ranks.placements import crossing_of, is_sharded, sharded_dims, share_of
from merit_optim.optim.engines.ranks.process_groups import Ranks
from merit_optim.optim.engines.work import Work
from merit_optim.optim.matrices import View
from merit_optim.optim.refresh import phases_of
from merit_optim.optim.statistics import Recorder, UpdateStatistics

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Kind(NamedTuple):
    """Buffers of one kind can be joined."""

    device: torch.device
    dtype: torch.dtype


class Sharded(NamedTuple):
    """A parameter, or one of the matrices that it is split into, with sizes that cross ranks."""

    slot: Slot
    """Of this rank's shard, alone in a buffer."""
    kind: Kind


Layout = list[tuple[int, int, Slot]]
"""The numbers of ``Sharded``, each with the number of the engine that has its sizes, and the place there."""


class Exchange:
    """One message of a step: what a process group reduces, of all parameters together."""

    def __init__(self, ranks: Ranks, kind: Kind, is_sum: bool) -> None:
        self.ranks, self.kind, self.is_sum = ranks, kind, is_sum
        self.parts: list[tuple[int, str]] = []
        """The number of a ``Sharded``, and which of its sizes: "rows", "columns" or "whole"."""
        self.after: list[Exchange] = []
        """Exchanges before this one that reduce some of the same sizes: it passes on what they found."""
        self.index = torch.empty(0, dtype=torch.int64)
        """Where the parts stand in the sizes. Kept between steps: packing is then one operation."""
        self._sent: tuple[Tensor, Any] | None = None

    def start(self, sizes: Tensor) -> None:
        """Pack the message and send it off."""
        for earlier in self.after:
            earlier.finish(sizes)
        message = sizes.index_select(1, self.index)
        if self.is_sum:
            message = message.double().square_()
            work = dist.all_reduce(message, dist.ReduceOp.SUM, group=self.ranks.group, async_op=True)
        else:
            # As integers, which order as the sizes do: some backends' float maximum drops a NaN. Its sign
            # means nothing, and would make it the least of all.
            bits = message.view(torch.int64 if message.dtype == torch.float64 else torch.int32)
            bits.bitwise_and_(torch.iinfo(bits.dtype).max)
            work = dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.ranks.group, async_op=True)
        self._sent = message, work

    def finish(self, sizes: Tensor) -> None:
        """Wait for the message and unpack it, unless that was done already."""
        if self._sent is None:
            return
        (message, work), self._sent = self._sent, None
        work.wait()
        if self.is_sum:
            message = message.sqrt_().to(sizes.dtype)
        sizes.index_copy_(1, self.index, message)


class Sharding:
    """What all sharded parameters of an optimizer have to exchange, in the order of the parameters."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.device = torch.device("cpu")
        self.sharded: list[Sharded] = []
        """A place in this list is a number."""
        self.shares: dict[Tensor, Share] = {}
        """What this rank has of the matrices of a parameter, where that matters to its engine."""
        self.owners = Owners(phases_of(groups))
        self.exchanges: list[Exchange] = []
        self.ranks: dict[str, Ranks] = {}
        """By the name of their process group."""
        self._numbers: dict[Tensor, int] = {}
        """The first of each parameter."""
        self.spread_of: dict[Tensor, tuple[str, ...]] = {}
        """The process groups over which a parameter is sharded, by name."""
        for number, group in enumerate(groups):
            for i, param in enumerate(group["params"]):
                if _takes_part(param):
                    self._add(f"parameter {i} of group {number}", param, number, group)
        self.owners.share_out()
        for i, exchange in enumerate(self.exchanges):
            parts = set(exchange.parts)
            exchange.after = [
                earlier for earlier in self.exchanges[:i] if not parts.isdisjoint(earlier.parts)
            ]
        self.spreads = list(dict.fromkeys([(), *self.spread_of.values()]))
        self._laid_out: tuple[Layout, list[int]] | None = None
        self._joins: dict[Kind, Join] = {}
        self._made_for = _signature(groups)

    def _add(self, name: str, param: DTensor, group_index: int, group: dict[str, Any]) -> None:
        mesh, dims, view = param.device_mesh, sharded_dims(name, param), View.of(group)
        self.device = param.device
        over = [Ranks(mesh, (i,)) for i, dim in enumerate(dims) if dim is not None and mesh.size(i) > 1]
        self.spread_of[param] = tuple(ranks.group.group_name for ranks in over)
        self.ranks.update(zip(self.spread_of[param], over, strict=True))
        if view.split is not None or matrix_direction(group) is not None:
            self.shares[param] = share_of(name, param, view)
            view = self.shares[param].view
        self.owners.add(name, param, group_index, group)
        if group.get("norm", "none") == "none":
            return  # every element for itself: there is nothing to exchange
        crossing = crossing_of(param.ndim, group["matrix_dims"], dims, list(mesh.shape))
        if not crossing.whole:
            return
        shard = param.to_local()
        kind = Kind(shard.device, compute_dtype(shard))
        self._numbers[param] = len(self.sharded)
        for matrices in view.parts(shard.shape):
            slot = plan(((matrices, Rule.of(group).has_rows),)).slots[0]
            for which, mesh_dims in crossing._asdict().items():
                for mesh_dim in mesh_dims if slot.has_rows or which == "whole" else ():
                    ranks, is_sum = Ranks(mesh, (mesh_dim,)), group["norm"] == "l2"
                    self._exchange_of(ranks, kind, is_sum).parts.append((len(self.sharded), which))
            self.sharded.append(Sharded(slot, kind))

    def _exchange_of(self, ranks: Ranks, kind: Kind, is_sum: bool) -> Exchange:
        for exchange in self.exchanges:
            # Two meshes may have the same ranks, and groups of them that are not the same.
            same_ranks = exchange.ranks.members == ranks.members
            if same_ranks and (exchange.kind, exchange.is_sum) == (kind, is_sum):
                return exchange
        self.exchanges.append(Exchange(ranks, kind, is_sum))
        return self.exchanges[-1]

    def fits(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether these are still the parameters and options it was made for.

        Libraries that shard parameters put them into the groups in place, a checkpoint brings its own
        options, and a parameter may be frozen for a while.
        """
        params, options = _signature(groups)
        known_params, known_options = self._made_for
        same_params = len(params) == len(known_params) and all(map(operator.is_, params, known_params))
        return same_params and options == known_options

    def crosses(self, places: Iterable[Place], owners: dict[Tensor, Tensor]) -> bool:
        """Whether some of these sizes are reduced."""
        return any(owners[place.param] in self._numbers for place in places)

    def reduce(self, places: Iterable[Place], owners: dict[Tensor, Tensor]) -> None:
        """Between the phases of a step. ``owners`` gives the parameter of each rank's own tensor."""
        buffers: dict[int, tuple[int, Tensor]] = {}
        layout: Layout = []
        num_seen: Counter[Tensor] = Counter()
        for param, sizes, slot in places:
            owner = owners[param]
            if owner in self._numbers:
                engine, _ = buffers.setdefault(id(sizes), (len(buffers), sizes))
                layout.append((self._numbers[owner] + num_seen[owner], engine, slot))
                num_seen[owner] += 1
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
        """Find where all sizes stand when the engines' buffers, of these lengths, are joined."""
        found = {number: (engine, slot) for number, engine, slot in layout}
        bounds: dict[tuple[int, str], tuple[int, int]] = {}
        for kind in dict.fromkeys(entry.kind for entry in self.sharded):
            numbers = [i for i, entry in enumerate(self.sharded) if entry.kind == kind]
            used = sorted({found[i][0] for i in numbers if i in found})
            ends = list(accumulate((lengths[i] for i in used), initial=0))
            starts, end = dict(zip(used, ends, strict=False)), ends[-1]
            for i in numbers:
                if i in found:
                    engine, slot = found[i]
                    start = starts[engine]
                else:
                    slot = self.sharded[i].slot
                    start, end = end, end + slot.end
                for which, (first, last) in _bounds(slot).items():
                    bounds[i, which] = start + first, start + last
            self._joins[kind] = Join(used, end - ends[-1])
        for exchange in self.exchanges:
            index = torch.cat([torch.arange(*bounds[part]) for part in exchange.parts])
            exchange.index = index.to(exchange.kind.device)
        self._laid_out = layout, lengths

    def any(self, flag: Tensor) -> Tensor:
        """Whether a flag is set on any rank that shares a parameter with this one."""
        bits = flag.to(torch.int32)
        for ranks in self.ranks.values():
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=ranks.group)
        return bits > 0

    def any_rank(self, flag: bool) -> bool:
        """The same for a flag on the host."""
        return bool(self.any(torch.tensor(flag, device=self.device)))

    def total_norm(self, works: list[Work], device: torch.device) -> Tensor:
        """The 2-norm of all gradients, each shard counted once; added up in float64."""
        zero = torch.zeros((), device=device)
        parts = {spread: [zero] for spread in self.spreads}
        for work in works:
            for owner, norm in zip(work.owners, norms(work.grads, 2.0), strict=True):
                parts[self.spread_of.get(owner, ())].append(norm.to(device))
        squares = {spread: torch.stack(some).double().square().sum() for spread, some in parts.items()}
        for name, ranks in self.ranks.items():
            over = [spread for spread in self.spreads if name in spread]
            message = torch.stack([squares[spread] for spread in over])
            dist.all_reduce(message, dist.ReduceOp.SUM, group=ranks.group)
            squares.update(zip(over, message, strict=True))
        return torch.stack(list(squares.values())).sum().sqrt().float()

    def merge_statistics(self, recorder: Recorder, names: dict[Tensor, str]) -> None:
        """Make the statistics of shards those of whole parameters, for the parameters named."""
        for spread in self.spreads[1:]:
            params = [param for param, over in self.spread_of.items() if over == spread]
            parts = [_packed(recorder.get(names.get(param, "")), self.device) for param in params]
            sums, most = (torch.stack(x) for x in zip(*parts, strict=True))
            for name in spread:
                dist.all_reduce(sums, dist.ReduceOp.SUM, group=self.ranks[name].group)
                dist.all_reduce(most, dist.ReduceOp.MAX, group=self.ranks[name].group)
            most += 0 * sums[:, 2:3]  # a float maximum may drop a NaN; sums keep it
            for param, (clipped, bounded, update, weight), (least, largest) in zip(
                params, sums, most, strict=True
            ):
                if param in names:
                    recorder[names[param]] = UpdateStatistics(
                        param.numel(), clipped, bounded, -least, largest, update, weight
                    )


class Join(NamedTuple):
    """How the buffers of one kind become one: which engines', and zeros for parameters they lack.

    A rank without a gradient, or with an empty shard, adds nothing: zero is the least size. But it passes on
    what it hears in one process group to the ranks of the next. A rank without any matrix of a stack has no
    sizes at all, and its message is empty.
    """

    engines: list[int]
    num_zeros: int

    def of(self, buffers: list[Tensor], kind: Kind) -> Tensor:
        """The sizes of all; the buffer itself, where one has everything."""
        parts = [buffers[i] for i in self.engines]
        if self.num_zeros or not parts:
            parts.append(torch.zeros(2, self.num_zeros, dtype=kind.dtype, device=kind.device))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def give_back(self, buffers: list[Tensor], joined: Tensor) -> None:
        """Write what was joined back into the engines' buffers."""
        own = [buffers[i] for i in self.engines]
        if own and own[0] is joined:
            return
        lengths = [x.shape[1] for x in own]
        for buffer, part in zip(own, joined.split([*lengths, self.num_zeros], 1), strict=False):
            buffer.copy_(part)


def _takes_part(param: Tensor) -> TypeGuard[DTensor]:
    """Whether a parameter is sharded and trained; a frozen one that kept a gradient is stepped too."""
    return is_sharded(param) and (param.requires_grad or param.grad is not None)


def _signature(groups: Sequence[dict[str, Any]]) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """What a sharding depends on."""
    params: list[Tensor] = [param for group in groups for param in group["params"] if _takes_part(param)]
    names = ("norm", "element_wise", "matrix_dims", "split", "split_dim", "direction")
    options = [(len(group["params"]), *map(group.get, names), _traffic(group)) for group in groups]
    return params, options


def _traffic(group: dict[str, Any]) -> Traffic | None:
    """What crosses ranks for a matrix of a group; of any size, which the parameters decide."""
    direction = matrix_direction(group)
    return None if direction is None else direction.traffic(1, 1, torch.float32)


def _bounds(slot: Slot) -> dict[str, tuple[int, int]]:
    return {
        "rows": (slot.start, slot.columns_start),
        "columns": (slot.columns_start, slot.whole_start),
        "whole": (slot.whole_start, slot.end),
    }


def _packed(statistics: UpdateStatistics | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is added up, and what the largest is taken of; nothing, where a rank has no part.

    In float64, which holds any count exactly.
    """
    if statistics is None:
        nothing = torch.zeros(4, dtype=torch.float64, device=device)
        return nothing, torch.full_like(nothing[:2], -torch.inf)
    s = statistics
    added = (s.num_clipped, s.num_bounded, s.update_sum_sq, s.weight_sum_sq)
    largest = (-s.smallest_ratio, s.largest_ratio)
    return torch.stack([x.double() for x in added]), torch.stack([x.double() for x in largest])
