"""Regions of sharded weights, owners of matrices, and the layout of messages, without other processes."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from merit_optim import MERIT, SOAPMERIT, Muon, MuonMERIT, NorMuon
from merit_optim.optim.axes.directions import Muon as MuonDirection
from merit_optim.optim.axes.directions import Soap as SoapDirection
from merit_optim.optim.engines.eager.stored import Stored
from merit_optim.optim.engines.ranks.owners import Matrix, matrix_of, plan_of
from merit_optim.optim.engines.ranks.placements import Cutting, cutting_of
from merit_optim.optim.engines.ranks.sharding import _signature
from merit_optim.optim.engines.work import Item, Names
from merit_optim.optim.matrices import View
from merit_optim.optim.spec import Spec

MESHES = [(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2)]


@contextmanager
def ranks(rank: int, num_ranks: int) -> Iterator[None]:
    """A fake process group of which only this rank exists: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_regions_equal_torch_s_shards(mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_s

    for rows, dims in itertools.product(range(1, 14), itertools.product((None, 0, 1), repeat=len(mesh))):
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        for coordinate in itertools.product(*map(range, mesh)):
            region = Cutting((rows, 5), dims, mesh).region(coordinate)
            sizes, starts = torch_s((rows, 5), mesh, list(coordinate), placements)
            assert region.sizes == tuple(sizes)
            assert region.starts == tuple(starts) or not region.num_elements


@pytest.mark.parametrize(("mesh", "num_rows"), [((2, 2), 13), ((2, 4), 13), ((3, 2), 12), ((4, 2), 16)])
def test_regions_of_fsdp2_with_tensor_parallelism_equal_torch_s_shards(mesh, num_rows) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_s
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [_StridedShard(0, split_factor=mesh[1]), Shard(0)]
    for coordinate in itertools.product(*map(range, mesh)):
        region = Cutting((num_rows, 5), (0, 0), mesh, late=(0,)).region(coordinate)
        sizes, starts = torch_s((num_rows, 5), mesh, list(coordinate), placements)
        assert region.sizes == tuple(sizes)
        assert region.starts == tuple(starts) or not region.num_elements


# In the second case torch reports other shards than FSDP2 makes of 7 rows: 4 and 3; then 2, 2, 0 and 1, 1, 1.
@pytest.mark.parametrize(("mesh", "num_rows"), [((2, 2), 6), ((3, 2), 7), ((2, 2), 1)])
def test_regions_equal_fsdp2_s_shards(mesh, num_rows) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for rank in range(math.prod(mesh)):
        with ranks(rank, math.prod(mesh)):
            whole = dist.init_device_mesh("cpu", mesh, mesh_dim_names=("data", "tensor"))
            layer = nn.Linear(3, num_rows, bias=False)
            parallelize_module(layer, whole["tensor"], ColwiseParallel())
            fully_shard(layer, mesh=whole["data"])
            # torch caches the parameter's mesh, with the coordinate of the first rank.
            region = cutting_of("weight", layer.weight).region(whole.get_coordinate())
            assert region.sizes == tuple(layer.weight.to_local().shape)


def matrices(*shapes: tuple[int, int]) -> list[Matrix]:
    """Split by rows over two ranks."""
    at, direction = ((0,), (1,)), MuonDirection()
    return [matrix_of(Cutting(shape, (0,), (2,)), at, direction, View(), torch.float32) for shape in shapes]


def test_the_most_expensive_matrices_are_assigned_first() -> None:
    some = matrices((4, 4), (8, 8), (4, 4), (8, 16), (8, 8))
    assert [matrix.cost / 5 for matrix in some] == [6 * 64, 6 * 512, 6 * 64, 10 * 512, 6 * 512]
    plans = [plan_of(some, rank, 2) for rank in range(2)]
    # 8x16 to the first; both 8x8 to the second; then 4x4 to the first, which has less, twice.
    assert plans[0].owners == plans[1].owners == (0, 1, 0, 0, 1)


def test_ranks_share_the_work_of_each_phase() -> None:
    """If phases were ignored, each of two ranks would have every second phase to itself."""
    direction, shape = SoapDirection(), (8, 8)
    cutting, at = Cutting(shape, (0,), (2,)), ((0,), (1,))
    some = [
        matrix_of(cutting, at, direction, View(), torch.float32, phase) for phase in (0, 1, 2, 3, 0, 1, 2, 3)
    ]
    owners = plan_of(some, 0, 2).owners
    assert {(matrix.phase, owner) for matrix, owner in zip(some, owners, strict=True)} == set(
        itertools.product(range(4), range(2))
    )


def test_state_that_happens_to_have_the_shape_of_a_shard_is_not_viewed_as_the_weight() -> None:
    """A rank may have nothing of a weight of one row and one column, nor of the rows of a basis."""
    weight = nn.Parameter(torch.zeros(2, 1, 1))
    (group,) = SOAPMERIT([{"params": [weight], "direction": "soap"}]).param_groups
    shard, of_rows, of_columns = torch.zeros(1, 0, 1), torch.zeros(1, 1, 2), torch.zeros(1, 0, 1)
    state = (shard, shard, of_rows, of_columns, of_rows, of_columns)
    names, spec = Names.of(0, group), Spec.of(group)
    seen = Stored(Item(names, spec, 0.1, 0.0, shard, shard, torch.zeros(()), state, weight)).seen
    assert [tuple(x.shape) for x in seen] == [(1, 1, 0)] * 3 + [(1, 1, 2), (1, 0, 1)] * 2


# --- errors ---------------------------------------------------------------------------------------------


def sharded(shape: tuple[int, ...], mesh: tuple[int, ...], *dims: int) -> nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    placements = [Shard(dim) for dim in dims]
    return nn.Parameter(
        distribute_tensor(
            torch.ones(shape), dist.init_device_mesh("cpu", mesh), placements, src_data_rank=None
        )
    )


def test_state_of_stacked_matrices_is_refused_if_it_cannot_be_sharded() -> None:
    with ranks(0, 2):
        stack, options = sharded((2, 2, 4, 4), (2,), 1), {"direction": "muon", "matrix_dims": 2}
        with pytest.raises(ValueError, match=r"stacks the matrices\. Here 2 do, of which dimension 1 is"):
            NorMuon([{"params": [stack], **options}])
        with pytest.raises(ValueError, match="merge them into one dimension, or shard another"):
            MERIT([{"params": [stack], "matrix_dims": 2, "ratio": "weight", "calibrated": True}])
        MuonMERIT([{"params": [stack], **options}], neuron_beta=None)
        NorMuon([{"params": [sharded((2, 2, 4, 4), (2,), 2)], **options}])
        with pytest.raises(ValueError, match="SOAP, neuron_beta, calibrated=True and spheres keep state for"):
            SOAPMERIT([{"params": [stack], "direction": "soap", "matrix_dims": 2}])


def test_a_list_that_was_changed_in_place_is_noticed() -> None:
    group: dict[str, Any] = MERIT([nn.Parameter(torch.zeros(6, 2))], split=[4, 2]).param_groups[0]
    before = _signature([(Spec.of(group), [])])
    assert _signature([(Spec.of(group), [])]) == before
    group["split"][:] = [2, 4]
    assert _signature([(Spec.of(group), [])]) != before


def test_split_columns_are_refused_if_a_rank_s_columns_are_not_contiguous() -> None:
    with ranks(0, 2):
        options: dict[str, Any] = {"direction": "muon", "split": 2, "split_dim": 1}
        with pytest.raises(ValueError, match=r"if dimension 2 is sharded .*: shard dimension 0 or 1, or use"):
            Muon([{"params": [sharded((4, 4, 6), (2,), 2)], **options}])
        Muon([{"params": [sharded((4, 4, 6), (2,), 1)], **options}])


def test_a_shard_that_does_not_match_its_placement_is_refused() -> None:
    """The parts of other ranks are only known from the placement."""
    from torch.distributed.tensor import DTensor, Shard

    with ranks(0, 2):
        mesh = dist.init_device_mesh("cpu", (2,))
        odd = DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)], shape=torch.Size((4, 3)), stride=(3, 1))
        message = r"which gives this rank \(2, 3\) of it, but its local tensor has \(1, 3\)"
        with pytest.raises(ValueError, match=message):
            Muon([{"params": [nn.Parameter(odd)], "direction": "muon"}])
        MERIT([nn.Parameter(odd)])


def test_a_strided_shard_that_does_not_match_the_mesh_is_refused() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    with ranks(0, 2):
        mesh = dist.init_device_mesh("cpu", (2,))
        weight = DTensor.from_local(torch.ones(2, 3), mesh, [_StridedShard(0, split_factor=2)])
        with pytest.raises(TypeError, match="split_factor=2 is the number of shards of the mesh dimensions"):
            Muon([{"params": [nn.Parameter(weight)], "direction": "muon"}])


def test_state_with_other_placements_than_its_stack_is_refused() -> None:
    """If a matrix is cut, each rank holds all averages of its rows; otherwise ranks would differ."""
    with ranks(0, 2):
        weight = sharded((4, 3), (2,), 0)
        optimizer = NorMuon([{"params": [weight], "direction": "muon"}])
        weight.grad = torch.ones_like(weight)
        optimizer._gather()  # creates the state
        assert optimizer.state[weight]["second_momentum_buffer"].placements[0].is_replicate()
        saved = optimizer.state_dict()
        state = saved["state"][0]
        state["second_momentum_buffer"] = sharded((1, 4, 1), (2,), 1).detach()
        with pytest.raises(ValueError, match=r"Shard\(dim=1\).*, which needs .*Replicate"):
            optimizer.load_state_dict(saved)
