"""What a parameter's placement on a mesh of ranks means for a step.

A rank works on its own shard as if it were the whole parameter; only sizes are missing that other ranks
know. Splitting rows leaves each row's size whole and cuts columns; splitting columns does the reverse;
both cut the whole weight's. What was cut is brought together by ``sharding.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch.distributed as dist
from torch import Tensor

from merit_optim.optim.engines.work import Work
from merit_optim.optim.torch_private import finished, local_tensor, shard_kinds

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
    from torch.distributed.tensor import Replicate

    dims: list[int | None] = []
    for placement in param.placements:
        if isinstance(placement, shard_kinds()):
            dims.append(placement.dim % max(1, param.ndim))
        elif isinstance(placement, Replicate):
            dims.append(None)
        else:
            raise TypeError(
                f"{name} is placed as {placement} on its mesh; a step can be exact for Shard and Replicate "
                "only. Redistribute the parameter before it is given to the optimizer."
            )
    return dims


def refuse_inexact(name: str, param: Tensor) -> None:
    """Raise for a parameter whose step could not be that of the whole parameter."""
    if is_sharded(param):
        sharded_dims(name, param)
    elif getattr(param, "tensor_model_parallel", False) and _num_ranks() > 1:
        raise TypeError(
            f"{name} is one rank's part of a tensor-parallel weight (tensor_model_parallel=True, "
            f"partition_dim={getattr(param, 'partition_dim', None)}), but a plain tensor: its rows' and "
            "columns' ratios need the other ranks, which it does not name. Give the optimizer a DTensor: "
            "DTensor.from_local(param, mesh, [Shard(param.partition_dim)]) shares its memory. If this rank "
            "has the whole weight, set param.tensor_model_parallel = False."
        )


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def local(work: Work) -> Work:
    """The same work on each rank's own tensors. A gradient is first brought to its parameter's placement."""
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
