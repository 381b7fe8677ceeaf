"""One rank of tests/optim/engines/test_sharded.py: steps in many layouts, compared with whole parameters.

Run by forked_ranks.py or torchrun, with the sections to compare as arguments.
"""

import copy
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import sharded_behaviour
import sharded_matrices
import torch
import torch.distributed as dist
from sharded_cases import (
    BY_ROWS,
    MIXED,
    NUM_STEPS,
    OF_MATRICES,
    OPTIMIZERS,
    SHAPES,
    WITHIN_TOLERANCE,
    compare,
    placed,
    report,
    same,
    values,
    whole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from merit_optim import MERIT
from merit_optim.optim.engines.ranks import process_groups

Comparisons = Iterator[tuple[str, list[str]]]


def meshes(world: int) -> Iterator[tuple[str, DeviceMesh, list[Any]]]:
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("line",))
    yield "rows", line, [Shard(0)]
    yield "columns", line, [Shard(1)]
    yield "replicated", line, [Replicate()]
    if world % 2 == 0:
        grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
        yield "hsdp", grid, [Replicate(), Shard(0)]
        yield "rows and columns", grid, [Shard(0), Shard(1)]
        yield "rows twice", grid, [Shard(0), Shard(0)]


def on_mesh(
    mesh: DeviceMesh,
    placements: list[Any],
    name: str,
    dtype: torch.dtype,
    shapes: list[tuple[int, ...]] = SHAPES,
    num_steps: int | None = None,
) -> list[str]:
    fulls = [values(shape, i, dtype) for i, shape in enumerate(shapes)]
    params: list[Tensor] = []
    for i, full in enumerate(fulls):
        fits = all(not isinstance(p, Shard) or p.dim < full.ndim for p in placements)
        # Weights that do not fit the layout are replicated, or are plain tensors.
        fitting = placements if fits else [Replicate()] * mesh.ndim
        plain = not fits and i % 2
        params.append(nn.Parameter(full.clone() if plain else distribute_tensor(full, mesh, fitting)))
    return compare(name, params, fulls, num_steps=num_steps)


def some_in_turn(names: list[str], number: int) -> list[str]:
    """All names for the first layout, and another third of them for each further one."""
    return names[number % 3 :: 3] if number else names


def layouts(world: int) -> Comparisons:
    """Parameters of many shapes, placed by hand.

    Four ranks test every optimizer in every layout; two and three ranks test all in the first, and a third in
    each of the others.
    """
    left_out = {"every fourth MuonMERIT", "mixed", *OF_MATRICES, *BY_ROWS}
    names = [name for name in OPTIMIZERS if "fused" not in name and name not in left_out]
    for number, (layout, mesh, placements) in enumerate(meshes(world)):
        for name in names if world == 4 else some_in_turn(names, number):
            yield f"{layout}, {name}", on_mesh(mesh, placements, name, torch.float32)
        for name in ("MERIT", "MERIT-W", "MERIT corrected", "MaxLAMB"):
            yield f"{layout}, {name}, bf16", on_mesh(mesh, placements, name, torch.bfloat16)


def matrices(world: int) -> Comparisons:
    """Directions that need whole matrices, in the same layouts."""
    shapes = [shape for shape, _ in MIXED]
    for number, (layout, mesh, placements) in enumerate(meshes(world)):
        # All steps and all optimizers in the first layout: each takes a second.
        num_steps = NUM_STEPS if number else None
        for dtype in (torch.float32, torch.bfloat16):
            wrong = on_mesh(mesh, placements, "mixed", dtype, shapes, num_steps)
            yield f"{layout}, mixed, {dtype}", wrong
        for name in some_in_turn(list(OF_MATRICES), number):
            yield f"{layout}, {name}", on_mesh(mesh, placements, name, torch.float32, SHAPES, num_steps)
    if world == 4:
        crossed = DeviceMesh("cpu", [[0, 2], [1, 3]])
        wrong = on_mesh(crossed, [Shard(0), Shard(1)], "MuonMERIT", torch.float32, SHAPES, NUM_STEPS)
        yield "ranks in another order", wrong


def by_rows(world: int) -> Comparisons:
    """Ratios and holds that need whole rows, or sums over them in order: weights cut along their rows."""
    mesh = init_device_mesh("cpu", (world,))
    for name in BY_ROWS:
        yield name, on_mesh(mesh, [Shard(0)], name, torch.float32)


def fused(world: int) -> Comparisons:
    """The fused engine, in Triton's interpreter, which is slow."""
    from interpreting import chunks_of, patch_once

    from merit_optim.optim.engines.fused import newton_schulz

    patch_once()
    mesh, shapes = init_device_mesh("cpu", (world,)), [(5, 7), (1, 9), (3, 4, 5), (13,)]
    # Small tiles, so that a matrix has several.
    small = {"PRODUCT_TILE": newton_schulz.ProductTile(4, 8, 4, 1, 1), "BLOCK": 16}
    square = newton_schulz.ProductTile(4, 4, 4, 1, 1)
    with chunks_of(2), mock.patch.multiple(newton_schulz, SYMMETRIC_TILE=square, **small):
        for name, placement in (("MERIT", Shard(0)), ("MERIT", Shard(1)), ("MaxLAMB", Shard(0))):
            wrong = on_mesh(mesh, [placement], f"{name}, fused", torch.float32, shapes, num_steps=3)
            yield f"{placement}, {name}", wrong
        hidden = [*product(("MuonMERIT", "NorMuon"), (Shard(0), Shard(1))), ("NorMuonSphere", Shard(0))]
        for name, placement in hidden:
            wrong = on_mesh(mesh, [placement], f"{name}, fused", torch.float32, shapes, num_steps=2)
            yield f"{placement}, {name}", wrong
        shapes = [(9, 5), (12, 5), (2, 6, 4), (8, 5)]
        for placement in (Shard(0), Shard(1)):
            wrong = on_mesh(mesh, [placement], "split, fused", torch.float32, shapes, num_steps=2)
            yield f"{placement}, split", wrong


class Network(nn.Module):
    """Two layers with uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).tanh()))


TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def fsdp(network: nn.Module, world: int) -> None:
    fully_shard(network, mesh=init_device_mesh("cpu", (world,)))


def fsdp_by_columns(network: nn.Module, world: int) -> None:
    """Shard dimension 1 if it divides evenly, as FSDP2 requires."""

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim > 1 and param.shape[1] % world == 0 else None

    fully_shard(network, mesh=init_device_mesh("cpu", (world,)), shard_placement_fn=placement)


def hsdp(network: nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(network, mesh=mesh)


def fsdp_and_tp(network: nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(network, mesh["tensor"], TENSOR_PARALLEL)
    fully_shard(network, mesh=mesh["data"])


def hsdp_and_tp(network: nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, world // 4), mesh_dim_names=("replicate", "shard", "tensor"))
    parallelize_module(network, mesh["tensor"], TENSOR_PARALLEL)
    fully_shard(network, mesh=mesh["replicate", "shard"])


def networks(world: int) -> Comparisons:
    """Modules sharded by FSDP2 and tensor parallelism."""
    ways = {4: [fsdp, fsdp_by_columns, hsdp, fsdp_and_tp], 8: [hsdp_and_tp]}
    of_vectors = ("MERIT", "MERIT corrected", "MERIT-W", "MaxLAMB", "LAMB")
    of_matrices = ("MuonMERIT", "NorMuon", "OrScale", "SOAPMERIT")
    # Eight processes are slow to start and to run: one optimizer for each kind of traffic.
    one_each = ("MERIT", "LAMB", "MuonMERIT", "OrScale", "SOAPMERIT")
    names = one_each if world == 8 else (*of_vectors, *of_matrices)
    for way in ways.get(world, [fsdp, fsdp_by_columns]):
        num_steps = None if way is fsdp else NUM_STEPS  # all steps in one layout, as above
        for name in names:
            for dtype in (torch.float32, torch.bfloat16):
                # Sums over bf16 weights are too often near a rounding boundary for a tolerance.
                if name in WITHIN_TOLERANCE and dtype != torch.float32:
                    continue
                torch.manual_seed(0)
                network = Network().to(dtype)
                fulls = [p.detach().clone() for p in network.parameters()]
                way(network, world)
                wrong = compare(name, list(network.parameters()), fulls, num_steps=num_steps)
                yield f"{way.__name__}, {name}, {dtype}", wrong


def tensor_parallel(world: int) -> Comparisons:
    """Training with tensor and sequence parallelism, where gradients of the norm are partial sums."""
    torch.manual_seed(0)
    network, mesh = Network(), init_device_mesh("cpu", (world,))
    reference = copy.deepcopy(network)
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    parallelize_module(network, mesh, plan)
    optimizers = [MERIT(x.parameters()) for x in (network, reference)]
    kinds = set()
    for step in range(NUM_STEPS):
        network(values((3, 4 * world, 12), step)).square().sum().backward()
        for param, full in zip(network.parameters(), reference.parameters(), strict=True):
            kinds |= {type(placement) for placement in param.grad.placements}
            full.grad = whole(param.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    yield (
        "tensor parallel, gradients as they come",
        [
            name
            for (name, param), full in zip(network.named_parameters(), reference.parameters(), strict=True)
            if not same("", param, full)
        ]
        + ["no partial gradients"] * (Partial not in kinds),
    )


def mixed(world: int) -> Comparisons:
    """Several meshes in one optimizer, and parameters that are frozen for some steps."""
    line = init_device_mesh("cpu", (world,))
    other = init_device_mesh("cpu", (1, world))
    grid = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 else other
    where = [(line, [Shard(0)]), (grid, [Shard(0), Shard(1)]), (other, [Replicate(), Shard(0)]), None]
    fulls = [values((6 + i, 10), i) for i in range(8)]
    params: list[Tensor] = []
    for i, full in enumerate(fulls):
        place = where[i % len(where)]
        params.append(nn.Parameter(full.clone() if place is None else distribute_tensor(full, *place)))
    for name in ("MERIT", "LAMB", "every fourth MuonMERIT", "MuonMERIT", "NorMuon", "SOAPMERIT"):
        again = [nn.Parameter(placed(full, p)) for full, p in zip(fulls, params, strict=True)]
        yield f"several meshes, {name}", compare(name, again, fulls, num_steps=NUM_STEPS)

    def freeze(step: int, some: list[Tensor]) -> None:
        frozen = {0: [0, 1], 1: [0, 1], 2: [5], 3: [5]}.get(step, [])
        for i, param in enumerate(some):
            param.requires_grad_(i not in frozen)
            if i in frozen and not (step == 2 and i == 5):  # its gradient is left from before
                param.grad = None

    for name in ("MERIT", "MuonMERIT", "NorMuon", "SOAPMERIT"):
        again = [nn.Parameter(placed(full, p)) for full, p in zip(fulls, params, strict=True)]
        yield f"frozen for a while, {name}", compare(name, again, fulls, freeze, NUM_STEPS)

    def unused(step: int, some: list[Tensor]) -> None:
        del step
        some[0].grad = some[5].grad = None

    for name in ("MuonMERIT", "NorMuon", "SOAPMERIT"):
        again = [nn.Parameter(placed(full, p)) for full, p in zip(fulls, params, strict=True)]
        yield f"never used, {name}", compare(name, again, fulls, unused, NUM_STEPS)


SECTIONS = {
    "layouts": layouts,
    "matrices": matrices,
    "by rows": by_rows,
    "in every dimension": sharded_matrices.in_every_dimension,
    "matrix behaviour": sharded_matrices.behaviour,
    "matrix collectives": sharded_matrices.collectives,
    "fused": fused,
    "networks": networks,
    "tensor parallel": tensor_parallel,
    "mixed": mixed,
    "behaviour": sharded_behaviour.cases,
    "collectives": sharded_behaviour.collectives,
    "replicas": sharded_behaviour.replicas,
    "compiled": sharded_behaviour.compiled,
}


def main() -> None:
    compared: dict[str, list[str]] = {}
    world, made = dist.get_world_size(), mock.Mock(wraps=dist.new_group)
    with mock.patch.object(dist, "new_group", made):
        for section in sys.argv[1:]:
            if section == "die":
                sharded_matrices.die_between_messages(world)
            compared |= dict(SECTIONS[section](world))
    # However many optimizers there were. With fewer than eight ranks, all are in a group that torch created.
    num_joined = [call.kwargs for call in made.call_args_list].count({"use_local_synchronization": True})
    expected = int(world == 8)
    compared["one process group for each set of ranks"] = [] if num_joined == expected else [f"{num_joined}"]
    report(compared)
    assert not process_groups._joined, "a process group outlives the others"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
