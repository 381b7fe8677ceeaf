"""The ranks that share a parameter, and their process groups.

A group is looked up whenever it is needed and never stored: a group that is still referenced cannot be
destroyed at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import torch.distributed as dist

from merit_optim.optim.torch_private import with_values

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_joined: WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = WeakValueDictionary()
"""Groups of several mesh dimensions, by their ranks, for as long as torch keeps them."""


class MeshRanks(NamedTuple):
    """The ranks that share some dimensions of a mesh with this rank."""

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group. A group of several dimensions is created on first use, by all of its ranks.

        Ranks must first use overlapping groups in the same order.
        """
        if len(self.mesh_dims) == 1:
            return self.mesh.get_group(self.mesh_dims[0])
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "the parameters of an optimizer are on this rank"
        index = tuple(slice(None) if i in self.mesh_dims else at for i, at in enumerate(coordinate))
        with with_values():
            ranks = self.mesh.mesh[index].flatten().tolist()
        return _group_of(tuple(sorted(ranks)))

    @property
    def members(self) -> tuple[int, ...]:
        """Their global ranks, in the order of the process group."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Their coordinates in the mesh, in the same order."""
        with with_values():
            return tuple(tuple((self.mesh.mesh == rank).nonzero()[0].tolist()) for rank in self.members)


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    group = dist.group.WORLD if len(ranks) == dist.get_world_size() else _joined.get(ranks)
    if group is None:
        # The other ranks of the job do not take part.
        group = _joined[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return group
