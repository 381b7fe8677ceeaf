"""The ranks that share a parameter, and their process groups.

A group is looked up whenever it is needed and never kept: one that something refers to cannot be destroyed at
the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_joined: WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = WeakValueDictionary()
"""Groups of several mesh dimensions, by their ranks, for as long as torch has them."""


class Ranks(NamedTuple):
    """Those that some dimensions of a mesh join, seen from this rank."""

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group. That of several dimensions is made when it is first asked for, by all of them.

        They have to ask in the same order for groups that overlap.
        """
        if len(self.mesh_dims) == 1:
            return self.mesh.get_group(self.mesh_dims[0])
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "the parameters of an optimizer are on this rank"
        index = tuple(slice(None) if i in self.mesh_dims else at for i, at in enumerate(coordinate))
        return _group_of(tuple(sorted(self.mesh.mesh[index].flatten().tolist())))

    @property
    def members(self) -> tuple[int, ...]:
        """Their numbers in the job, in the order of the process group."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Where in the mesh they are, in the same order."""
        return tuple(tuple((self.mesh.mesh == rank).nonzero()[0].tolist()) for rank in self.members)


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    group = dist.group.WORLD if len(ranks) == dist.get_world_size() else _joined.get(ranks)
    if group is None:
        # The others of the job know nothing of it.
        group = _joined[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return group
