"""How a parameter's placement on a mesh of ranks affects a step.

A rank updates its shard as if it were the whole parameter, except for sizes that depend on other ranks.
Sharding rows keeps the size of each row and cuts those of columns; sharding columns does the reverse; both
cut the size of the whole weight. ``sharding.py`` reduces the sizes that were cut, and ``owners.py`` gathers
whole matrices for directions that need them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from merit_optim.optim.engines.part import Share
from merit_optim.optim.engines.work import Work
from merit_optim.optim.matrices import Extent, View, num_stacking
from merit_optim.optim.spec import Spec
from merit_optim.optim.torch_private import finished, local_tensor, num_shards_before, shard_kinds

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


class Crossing(NamedTuple):
    """The mesh dimensions over which a parameter's sizes are reduced."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    whole: tuple[int, ...]


def crossing_of(
    num_dims: int, matrix_dims: int | None, sharded_dims: Sequence[int | None], mesh_shape: Sequence[int]
) -> Crossing:
    """The sizes that cross ranks, given the tensor dimension that each mesh dimension shards, or None.

    >>> crossing_of(2, None, [0], [4])  # FSDP2: rows are whole, columns are cut
    Crossing(rows=(), columns=(0,), whole=(0,))
    """
    num_batch_dims = num_stacking(num_dims, matrix_dims)
    is_vector = num_dims - num_batch_dims < 2
    rows: list[int] = []
    columns: list[int] = []
    whole: list[int] = []
    for mesh_dim, (dim, size) in enumerate(zip(sharded_dims, mesh_shape, strict=True)):
        if dim is None or size == 1 or dim < num_batch_dims:
            continue  # replicated, or matrices stay whole
        whole.append(mesh_dim)
        if not is_vector:
            (columns if dim == num_batch_dims else rows).append(mesh_dim)
    return Crossing(tuple(rows), tuple(columns), tuple(whole))


class Region(NamedTuple):
    """A box of a tensor: its start and size in each dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(*self, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def since(self, dim: int) -> Region:
        """The region without the dimensions before this one."""
        return Region(self.starts[dim:], self.sizes[dim:])


class Cutting(NamedTuple):
    """How a parameter is cut into the shards of a mesh."""

    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    """The tensor dimension that each mesh dimension shards, or None."""
    mesh_shape: tuple[int, ...]
    late: tuple[int, ...] = ()
    """Mesh dimensions that cut after those to their right, as FSDP2 does with tensor parallelism."""

    def region(self, coordinate: Sequence[int]) -> Region:
        """The region of the rank at a mesh coordinate; each mesh dimension cuts as ``torch.chunk`` does.

        >>> Cutting((10, 7), (0, 1), (4, 2)).region((3, 1))
        Region(starts=(9, 4), sizes=(1, 3))
        >>> Cutting((8,), (0, 0), (2, 2), late=(0,)).region((1, 0))
        Region(starts=(2,), sizes=(2,))
        """
        starts, sizes = [0] * len(self.shape), list(self.shape)
        early = [mesh_dim for mesh_dim in range(len(self.dims)) if mesh_dim not in self.late]
        for mesh_dim in [*early, *reversed(self.late)]:
            dim = self.dims[mesh_dim]
            if dim is not None:
                length = -(-sizes[dim] // self.mesh_shape[mesh_dim])
                first = min(length * coordinate[mesh_dim], sizes[dim])
                starts[dim] += first
                sizes[dim] = min(length, sizes[dim] - first)
        return Region(tuple(starts), tuple(sizes))

    def since(self, dim: int) -> Cutting:
        """The cutting of one of the matrices that the dimensions before this one stack."""
        dims = tuple(None if d is None or d < dim else d - dim for d in self.dims)
        return self._replace(shape=self.shape[dim:], dims=dims)

    def by_rows(self, shape: tuple[int, ...]) -> Cutting:
        """The cutting of another tensor's rows among the ranks that share this one.

        >>> Cutting((10, 7), (1,), (4,)).by_rows((7, 7)).region((3,))
        Region(starts=(6, 0), sizes=(1, 7))
        """
        return Cutting(shape, tuple(None if dim is None else 0 for dim in self.dims), self.mesh_shape)


def cutting_of(name: str, param: DTensor) -> Cutting:
    """How a parameter is cut; raise if its placements do not tell."""
    dims, mesh = sharded_dims(name, param), param.device_mesh
    late: list[int] = []
    for mesh_dim, (dim, placement) in enumerate(zip(dims, param.placements, strict=True)):
        factor = num_shards_before(placement)
        if dim is None or factor == 1:
            continue
        late.append(mesh_dim)
        right = range(mesh_dim + 1, mesh.ndim)
        if factor != math.prod(mesh.size(other) for other in right if dims[other] == dim):
            raise TypeError(
                f"{name} is placed as {param.placements} on a mesh of {tuple(mesh.shape)}; the part of each "
                f"rank is only known if split_factor={factor} is the number of shards of the mesh dimensions "
                "to its right, as with FSDP2. Redistribute the parameter to Shard and Replicate."
            )
    return Cutting(tuple(param.shape), tuple(dims), tuple(mesh.shape), tuple(late))


def local_region(name: str, param: DTensor) -> Region:
    """This rank's region of a parameter; raise if its local tensor has another shape."""
    region, shard = cutting_of(name, param).region(_coordinate(param)), tuple(local_tensor(param).shape)
    if region.sizes != shard:
        raise ValueError(
            f"{name} of shape {tuple(param.shape)} is placed as {param.placements}, which gives this rank "
            f"{region.sizes} of it, but its local tensor has {shard}. Create the parameter with "
            "distribute_tensor or fully_shard, which cut as torch.chunk does."
        )
    return region


def _coordinate(param: DTensor) -> Sequence[int]:
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None, "the parameters of an optimizer are on this rank"
    return coordinate


def crossing_of_param(name: str, param: DTensor, matrix_dims: int | None) -> Crossing:
    """The sizes of a parameter that cross ranks; if those of the whole do, no rank has a whole matrix."""
    return crossing_of(param.ndim, matrix_dims, sharded_dims(name, param), param.device_mesh.shape)


def share_of(name: str, param: DTensor, view: View) -> Share:
    """This rank's share of a parameter's matrices."""
    region, crossing = local_region(name, param), crossing_of_param(name, param, view.matrix_dims)
    return share_of_region(view, tuple(param.shape), region, is_cut=bool(crossing.whole))


def share_of_region(view: View, shape: tuple[int, ...], region: Region, *, is_cut: bool) -> Share:
    """The share of a region in the matrices of a parameter of this shape.

    >>> from merit_optim.optim.matrices import View
    >>> share = share_of_region(View(split=3), (12, 5), Region((0, 0), (6, 5)), is_cut=True)
    >>> share.view.split  # all of the first matrix, half of the second, none of the third
    (4, 2, 0)
    >>> share.extents[1]
    Extent(num_rows=4, num_columns=5, rows=slice(0, 2, None), columns=slice(0, 5, None))
    """
    matrix = region.since(num_stacking(len(shape), view.matrix_dims))
    if len(matrix.sizes) < 2:  # a vector, which is one row
        (start,), (length,) = matrix if matrix.sizes else ((0,), (1,))
        columns = slice(start, start + length)
        return Share(view, (Extent(1, view.matrices(shape).columns, slice(0, 1), columns),), is_cut)
    # The columns of a rank are contiguous if only the first of their dimensions is sharded.
    starts = matrix.starts[0], math.prod(matrix.starts[1:2]) * math.prod(matrix.sizes[2:])
    lengths = matrix.sizes[0], math.prod(matrix.sizes[1:])
    rows, columns = (slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
    if view.split is None:
        whole = view.matrices(shape)
        return Share(view, (Extent(whole.rows, whole.columns, rows, columns),), is_cut)
    first, last = starts[view.split_dim], starts[view.split_dim] + lengths[view.split_dim]
    here: list[slice] = []
    for start, end in pairwise(accumulate(view.lengths(shape), initial=0)):
        begin = min(max(first, start), end) - start
        here.append(slice(begin, max(begin, min(last, end) - start)))
    extents = tuple(
        Extent(part.rows, part.columns, *((rows, some) if view.split_dim else (some, columns)))
        for part, some in zip(view.split_matrices(shape), here, strict=True)
    )
    return Share(view._replace(split=tuple(some.stop - some.start for some in here)), extents, is_cut)


def refusal(param: DTensor, spec: Spec, *, has_stacked_state: bool) -> str | None:
    """Why a sharded parameter cannot have this spec, or state for each of its stacked matrices; or None."""
    mesh, view = param.device_mesh, spec.view
    num_batch_dims = num_stacking(param.ndim, view.matrix_dims)
    for mesh_dim, dim in enumerate(sharded_dims("it", param)):
        if dim is None or mesh.size(mesh_dim) == 1:
            continue
        if spec.hold.WHOLE_ROWS and dim > num_batch_dims:
            return f"hold={spec.hold.NAME!r} needs whole rows: shard dimension {num_batch_dims}, not {dim}"
        if has_stacked_state and dim < num_batch_dims and num_batch_dims > 1:
            return (
                "SOAP, neuron_beta, calibrated=True and spheres keep state for each stacked matrix, which "
                f"can only be sharded if one dimension stacks the matrices. Here {num_batch_dims} do, of "
                f"which dimension {dim} is sharded: merge them into one dimension, or shard another"
            )
        if view.split is not None and view.split_dim == 1 and dim > num_batch_dims + 1:
            return (
                f"split_dim=1 splits columns, and if dimension {dim} is sharded a rank's columns are not "
                f"contiguous: shard dimension {num_batch_dims} or {num_batch_dims + 1}, or use split=None"
            )
    return None


def is_sharded(param: Tensor) -> TypeGuard[DTensor]:
    """Whether a parameter is a DTensor, without importing DTensor."""
    return hasattr(param, "placements")


def any_sharded(params: Iterable[Tensor]) -> bool:
    """Whether any parameter is a DTensor. Checks their types, which are few."""
    return any(hasattr(kind, "placements") for kind in set(map(type, params)))


def sharded_dims(name: str, param: DTensor) -> list[int | None]:
    """The tensor dimension that each mesh dimension shards, or None; raise for other placements."""
    from torch.distributed.tensor import Replicate

    dims: list[int | None] = []
    for placement in param.placements:
        if isinstance(placement, shard_kinds()):
            dims.append(placement.dim % max(1, param.ndim))
        elif isinstance(placement, Replicate):
            dims.append(None)
        else:
            raise TypeError(
                f"{name} is placed as {placement} on its mesh; a step is only exact for Shard and Replicate. "
                "Redistribute the parameter before passing it to the optimizer."
            )
    return dims


def stacked_placements(param: DTensor, matrix_dims: int | None, *, by_rows: bool) -> list[Placement]:
    """The placements of state with one item per stacked matrix: cut like the stack.

    Ranks that share a matrix split the rows of its state, or each holds all of it.
    """
    from torch.distributed.tensor import Replicate, Shard

    num_batch_dims, mesh = num_stacking(param.ndim, matrix_dims), param.device_mesh
    placements: list[Placement] = []
    for mesh_dim, dim in enumerate(sharded_dims("a parameter", param)):
        if dim is None or mesh.size(mesh_dim) == 1:
            placements.append(Replicate())
        elif dim < num_batch_dims:
            placements.append(param.placements[mesh_dim])
        else:
            placements.append(Shard(1) if by_rows else Replicate())
    return placements


def stacked_zeros(
    param: DTensor, matrix_dims: int | None, shape: tuple[int, ...], dtype: torch.dtype, *, by_rows: bool
) -> DTensor:
    """State of this shape, whose first dimension counts the stacked matrices, with ``stacked_placements``."""
    from torch.distributed.tensor import DTensor

    shard, num_batch_dims = local_tensor(param), num_stacking(param.ndim, matrix_dims)
    matrix = shape[1:]
    if by_rows:
        cutting = cutting_of("a parameter", param).since(num_batch_dims).by_rows(matrix)
        matrix = cutting.region(_coordinate(param)).sizes
    num_matrices = math.prod(shard.shape[:num_batch_dims])
    zeros = torch.zeros(num_matrices, *matrix, dtype=dtype, device=shard.device)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    placements = stacked_placements(param, matrix_dims, by_rows=by_rows)
    return DTensor.from_local(
        zeros, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def refuse_inexact(name: str, param: Tensor) -> None:
    """Raise if the step of a rank's part would differ from the step of the whole parameter."""
    if is_sharded(param):
        sharded_dims(name, param)
    elif getattr(param, "tensor_model_parallel", False) and _num_ranks() > 1:
        raise TypeError(
            f"{name} is one rank's part of a tensor-parallel weight (tensor_model_parallel=True, "
            f"partition_dim={getattr(param, 'partition_dim', None)}), but a plain tensor: the ratios of its "
            "rows and columns need the other ranks, which a plain tensor does not know. Pass a DTensor: "
            "DTensor.from_local(param, mesh, [Shard(param.partition_dim)]) shares its memory. If this rank "
            "has the whole weight, set param.tensor_model_parallel = False."
        )


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def local(work: Work) -> Work:
    """The work on local tensors. Gradients are first redistributed to their parameters' placements."""
    if not any_sharded(work.params):
        return work
    # A gradient that a collective is still writing to has no address yet.
    grads = list(map(finished, _locals(map(_as_placed, work.grads, work.params))))
    return work._replace(params=_locals(work.params), grads=grads, states=[_locals(x) for x in work.states])


def _as_placed(grad: Tensor, param: Tensor) -> Tensor:
    if is_sharded(param) and is_sharded(grad) and grad.placements != param.placements:
        return grad.redistribute(param.device_mesh, param.placements)
    return grad


def _locals(tensors: Iterable[Tensor]) -> list[Tensor]:
    from torch.distributed.tensor import DTensor

    return [local_tensor(x) if isinstance(x, DTensor) else x for x in tensors]
