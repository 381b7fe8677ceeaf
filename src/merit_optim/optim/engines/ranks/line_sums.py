"""The products of a hold's lines, where ranks share a matrix: each rank gets those of all lines.

A rank that has whole lines writes their sums to their places among zeros, so that adding up the messages of
all ranks changes no bit, and every rank then adds up all lines in the same order as one process does. Where
ranks share a line, their parts of its sum are added in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from merit_optim.optim.algorithm import compute_dtype
from merit_optim.optim.axes.holds import Products
from merit_optim.optim.engines.part import ProductPart, Share
from merit_optim.optim.engines.ranks.placements import crossing_of_param
from merit_optim.optim.engines.ranks.process_groups import MeshRanks
from merit_optim.optim.matrices import Extent, num_stacking
from merit_optim.optim.spec import Spec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Lines(NamedTuple):
    """The lines of one matrix of a parameter, or of several stacked ones, on all ranks."""

    param: DTensor
    number: int
    """Which of the matrices that the parameter is split into."""
    num: int
    """How many matrices are stacked."""
    extent: Extent
    line_dim: int
    kind: tuple[torch.device, torch.dtype]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(products, N, lines)."""
        num_lines = self.extent.num_rows if self.line_dim == 1 else self.extent.num_columns
        return len(Products._fields), self.num, num_lines

    @property
    def here(self) -> slice:
        """Which of the lines this rank has."""
        return self.extent.rows if self.line_dim == 1 else self.extent.columns


class LineSums:
    """What all sharded parameters exchange whose hold needs products, in the order of the parameters."""

    def __init__(self) -> None:
        self.lines: list[Lines] = []
        self._groups: dict[
            tuple[tuple[int, ...], torch.device, torch.dtype], tuple[MeshRanks, list[int]]
        ] = {}
        """The numbers of the lines that each process group adds up."""

    def add(self, name: str, param: DTensor, spec: Spec, share: Share) -> None:
        """Add a parameter if its hold needs products, and no rank has all of its lines."""
        line_dim = spec.hold.line_dim(spec.view)
        crossing = crossing_of_param(name, param, spec.view.matrix_dims)
        if line_dim is None or not crossing.whole:
            return
        shard = param.to_local()
        kind = shard.device, compute_dtype(shard)
        num = shard.shape[: num_stacking(param.ndim, spec.view.matrix_dims)].numel()
        for number, extent in enumerate(share.extents):
            for mesh_dim in crossing.whole:
                ranks = MeshRanks(param.device_mesh, (mesh_dim,))
                _, numbers = self._groups.setdefault((ranks.members, *kind), (ranks, []))
                numbers.append(len(self.lines))
            self.lines.append(Lines(param, number, num, extent, line_dim, kind))

    def cross(self, part: ProductPart) -> bool:
        """Whether ranks share the matrices of a part."""
        return any(lines.param is original for lines in self.lines for original in part.originals)

    def agree(self, parts: Sequence[ProductPart]) -> None:
        """Replace the products of this rank's lines by those of all."""
        sums = [torch.zeros(x.shape, device=x.kind[0], dtype=x.kind[1]) for x in self.lines]
        for number, part in self._with_parts(parts):
            lines = self.lines[number]
            products = part.products.get((lines.param, lines.number))
            if products is not None:
                sums[number][:, :, lines.here] = torch.stack([x.flatten(1) for x in products])
        for ranks, numbers in self._groups.values():
            message = torch.cat([sums[number].flatten() for number in numbers])
            dist.all_reduce(message, dist.ReduceOp.SUM, group=ranks.group)
            parts_of_message = message.split([sums[number].numel() for number in numbers])
            for number, flat in zip(numbers, parts_of_message, strict=True):
                sums[number] = flat.view(self.lines[number].shape)
        for number, part in self._with_parts(parts):
            lines = self.lines[number]
            if (lines.param, lines.number) in part.products:
                by_line = sums[number].unsqueeze(4 - lines.line_dim)
                part.products[lines.param, lines.number] = Products(*by_line.unbind())

    def _with_parts(self, parts: Sequence[ProductPart]) -> Iterator[tuple[int, ProductPart]]:
        of_params = {original: part for part in parts for original in part.originals}
        for number, lines in enumerate(self.lines):
            if lines.param in of_params:
                yield number, of_params[lines.param]
