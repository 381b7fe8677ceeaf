"""Sections of sharded_worker.py: whole matrices of sharded weights, and the ranks that own them."""

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from sharded_cases import (
    OF_MATRICES,
    SHAPES,
    compare,
    placed,
    same,
    set_gradients,
    values,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from merit_optim import Muon as MuonOptimizer
from merit_optim.optim.axes.directions import Muon, Soap, muon
from merit_optim.optim.engines.ranks.process_groups import MeshRanks

Comparisons = Iterator[tuple[str, list[str]]]


def in_every_dimension(world: int) -> Comparisons:
    """Stacked matrices and convolutions, sharded in each of their dimensions."""
    line = init_device_mesh("cpu", (world,))
    shapes = [(5, 4, 6), (2, 7, 3), (3, 3, 2, 2), (5, 2, 3, 4)]
    of_muon = ("MuonMERIT", "MuonMERIT stacked", "NorMuon", "NorMuon stacked", "OrScale stacked")
    for dim, name in itertools.product(range(4), (*of_muon, "SOAPMERIT", "SOAPMERIT stacked")):
        stacked = "stacked" in name
        some = [shape for shape in shapes if len(shape) > dim and (len(shape) == 3 or not stacked)]
        fulls = [values(shape, i) for i, shape in enumerate(some)]
        params = [nn.Parameter(distribute_tensor(full, line, [Shard(dim)])) for full in fulls]
        if params:
            yield f"dimension {dim}, {name}", compare(name, params, fulls, num_steps=3)


def split_by_rows(world: int) -> tuple[list[Tensor], list[Tensor]]:
    mesh = init_device_mesh("cpu", (world,))
    fulls = [values(shape, i) for i, shape in enumerate(SHAPES)]
    return [nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])) for full in fulls], fulls


def behaviour(world: int) -> Comparisons:
    yield "each matrix is processed once", formed_once(world)
    yield "other weights advance while messages are in flight", overlapped(world)
    yield "options may change what is sent", changed_options(world)
    for option in ({"precondition_frequency": 2}, {"refresh_phase": 0}):
        yield f"options may change when bases are improved, {option}", changed_turns(world, **option)


def formed_once(world: int) -> list[str]:
    """Each matrix is processed by one rank, and every rank has some of the work."""
    params, _ = split_by_rows(world)
    stack = nn.Parameter(distribute_tensor(values((world, 4, 6), 9), params[0].device_mesh, [Shard(1)]))
    groups: list[dict[str, Any]] = [{"params": params[:2], "direction": "muon"}]
    groups += [{"params": [stack], "direction": "muon", "matrix_dims": 2}]
    optimizer = MuonOptimizer(groups)
    for param in (*params[:2], stack):
        param.grad = torch.ones_like(param)
    shapes: list[tuple[int, ...]] = []

    def counted(x_NRC: Tensor, *args: Any) -> Tensor:
        shapes.append(tuple(x_NRC.shape))
        return polar(x_NRC, *args)

    polar = muon.polar
    with mock.patch.object(muon, "polar", counted):
        optimizer.step()
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, shapes)
    counts = Counter(shape for shapes in everywhere for shape in shapes)
    expected = Counter({(1, 16, 12): 1, (1, 5, 7): 1, (1, 4, 6): world})
    idle = ["a rank has nothing to do"] * (not all(everywhere))
    return idle + ([] if counts == expected else [str(counts)])


def overlapped(world: int) -> list[str]:
    """Weights that are whole on this rank advance between sending the first message and waiting for it."""
    from merit_optim.optim.engines.eager.foreach import EagerPart
    from merit_optim.optim.engines.ranks.owners import Gathering

    params, _ = split_by_rows(world)
    optimizer = OF_MATRICES["MuonMERIT"](params)
    set_gradients(params, SHAPES, 0)
    order = []

    def logged(cls: type, method: str) -> Any:
        original = getattr(cls, method)

        def call(self: Any, *args: Any) -> Any:
            if type(self) is cls:
                order.append(f"{cls.__name__}.{method}")
            return original(self, *args)

        return mock.patch.object(cls, method, call)

    with logged(Gathering, "_send"), logged(EagerPart, "advance"), logged(Gathering, "_wait"):
        optimizer.step()
    send, wait, advance = "Gathering._send", "Gathering._wait", "EagerPart.advance"
    return [] if order == [send, advance, wait, send, wait] else order


def changed_options(world: int) -> list[str]:
    """Other dtypes of the products, and other weights."""
    params, fulls = split_by_rows(world)

    def change(step: int, optimizer: torch.optim.Optimizer, some: list[Tensor]) -> None:
        hidden = optimizer.param_groups[0]
        if step == 1:
            hidden["ns_dtype"] = "float32"
        if step == 2:
            hidden["momentum"] = 0.5
        if step == 3:
            more = nn.Parameter(placed(values((7, 9), 77), some[0]))
            some.append(more)
            optimizer.add_param_group({"params": [more], "direction": "muon"})

    both: list[list[Tensor]] = [params, [full.clone().requires_grad_() for full in fulls]]
    for some in both:
        optimizer = OF_MATRICES["MuonMERIT"](some)
        for step in range(6):
            set_gradients(some, [*SHAPES, (7, 9)][: len(some)], step)
            optimizer.step()
            change(step, optimizer, some)
    together = enumerate(zip(*both, strict=True))
    return [str(i) for i, (param, full) in together if not same("", param, full)]


def changed_turns(world: int, **options: int) -> list[str]:
    """Enough matrices for all phases of the first frequency, some of which the second does not have."""
    mesh, shapes = init_device_mesh("cpu", (world,)), [(6, 4)] * 6
    fulls = [values(shape, i) for i, shape in enumerate(shapes)]
    sharded: list[Tensor] = [nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])) for full in fulls]
    references: list[Tensor] = [full.clone().requires_grad_() for full in fulls]
    for some in (sharded, references):
        optimizer = OF_MATRICES["SOAP"](some)
        for step in range(9):
            set_gradients(some, shapes, step)
            optimizer.step()
            if step == 3:
                optimizer.param_groups[0].update(options)
    together = enumerate(zip(sharded, references, strict=True))
    return [str(i) for i, (param, full) in together if not same("", param, full)]


def collectives(world: int) -> Comparisons:
    """Two all-to-alls and an all-reduce per process group, with the bytes that the cost model predicts."""
    from sharded_cost import exchange_bytes
    from sharded_muon_cost import traffic

    # Uneven, so that ranks and directions differ; a vector sends nothing.
    shapes, line = [(16, 12), (7, 20), (5, 6), (9, 11), (12,)], init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2))
    layouts: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "hsdp": (grid, [Replicate(), Shard(0)]),
        "rows and columns": (grid, [Shard(0), Shard(1)]),
        "rows twice": (grid, [Shard(0), Shard(0)]),
    }
    soap = Soap(max_precond_dim=20)
    directions = {"MuonMERIT": Muon(), "NorMuon": Muon(neuron_beta=0.95), "SOAPMERIT": soap}
    for (layout, (mesh, placements)), name in itertools.product(layouts.items(), directions):
        fitting = [s for s in shapes if all(not p.is_shard() or p.dim < len(s) for p in placements)]
        params = [nn.Parameter(distribute_tensor(values(s, 0), mesh, placements)) for s in fitting]
        optimizer = OF_MATRICES[name](params)
        set_gradients(params, fitting, 0)
        calls: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        with counted("all_reduce", calls, sent=0), counted("all_to_all_single", calls, sent=1):
            optimizer.step()

        sizes, at = list(mesh.shape), mesh.get_coordinate()
        dims = [p.dim if p.is_shard() else None for p in placements]
        matrices = [(shape, dims) for shape in fitting if len(shape) > 1]
        expected: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        for mesh_dims, matrix_traffic in traffic(matrices, sizes, at, directions[name]).items():
            members = MeshRanks(mesh, mesh_dims).members
            expected.update(
                ("all_to_all_single", members, sent)
                for sent in (matrix_traffic.sent, matrix_traffic.sent_back)
            )
        if name != "NorMuon":
            for mesh_dim, size in enumerate(exchange_bytes(matrices, sizes)):
                members = MeshRanks(mesh, (mesh_dim,)).members
                expected.update([("all_reduce", members, size)] if size else [])
        if dist.get_rank():  # the cost model of sizes describes the first rank, whose shards are the largest
            for some in (calls, expected):
                for call in [call for call in some if call[0] == "all_reduce"]:
                    del some[call]
        yield f"{layout}, {name}", [] if calls == expected else [f"{calls}, not {expected}"]


def counted(name: str, calls: Counter[Any], sent: int) -> Any:
    """Count calls of a collective: its ranks, and the bytes of the argument that is sent."""
    original = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name, tuple(dist.get_process_group_ranks(kwargs["group"])), args[sent].nbytes] += 1
        return original(*args, **kwargs)

    return mock.patch.object(dist, name, call)


def die_between_messages(world: int) -> None:
    """A rank exits, as if killed, after it has sent its parts and before it sends its results.

    It exits with status 0, because the others would otherwise be stopped.
    """
    from merit_optim.optim.engines.ranks.owners import Gathering

    params, _ = split_by_rows(world)
    optimizer = OF_MATRICES["MuonMERIT"](params)
    set_gradients(params, SHAPES, 0)
    optimizer.step()
    begun = time.monotonic()
    if dist.get_rank() == 1:
        with mock.patch.object(Gathering, "form", side_effect=lambda *_: os._exit(0)):
            optimizer.step()
    try:
        optimizer.step()
    except RuntimeError as error:
        # Write the line and its end at once: ranks are unbuffered, and others write at the same time.
        print(f"RAISED after {time.monotonic() - begun:.1f} s: {error}\n", end="", flush=True)
    os._exit(0)  # destroying the process groups would wait for the rank that exited
