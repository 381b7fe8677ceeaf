"""One rank of tests/optim/engines/test_sharded.py: steps on sharded and on whole parameters, compared.

Run by torchrun. The first rank prints a line of JSON: what was compared, and what differed.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from merit_optim import LAMB, MERIT, Lion, MaxLAMB

NUM_STEPS = 6
# Uneven and empty shards included: 1 row, 5 rows, prime sizes, vectors, a scalar where it is replicated.
SHAPES = [(16, 12), (5, 7), (1, 9), (3, 4, 5), (13,), (2,)]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "MERIT": MERIT,
    "MERIT without bound": lambda p: MERIT(p, weight_bound=False),
    "MERIT-W": lambda p: MERIT(p, element_wise=False),
    "MERIT stacked": lambda p: MERIT(p, matrix_dims=2, clip=None),
    "MERIT corrected": lambda p: MERIT(p, bias_correction=True, maximize=True),
    "MaxLAMB": MaxLAMB,
    "LAMB": LAMB,
    "Lion": Lion,
    "MERIT, clipped": lambda p: MERIT(p, max_grad_norm=0.1),
}
FUSED = {"MERIT, fused": lambda p: MERIT(p, fused=True), "MaxLAMB, fused": lambda p: MaxLAMB(p, fused=True)}
# Sums: their order is another one.
WITHIN_TOLERANCE = {"LAMB", "MERIT, clipped"}


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, placed as a parameter is."""
    if not isinstance(like, DTensor):
        return full.clone()
    replicated = distribute_tensor(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim)
    return replicated.redistribute(like.device_mesh, like.placements)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(name: str, actual: Tensor, expected: Tensor) -> bool:
    actual = whole(actual.detach())
    if name in WITHIN_TOLERANCE:
        return torch.allclose(actual, expected.detach(), rtol=1e-5, atol=1e-6)
    return torch.equal(actual, expected.detach())


def compare(name: str, params: list[Tensor], fulls: list[Tensor]) -> list[str]:
    """Take steps with the sharded parameters and with the whole ones; what differs afterwards."""
    references = [full.clone().requires_grad_() for full in fulls]
    sharded, reference = OPTIMIZERS[name](params), OPTIMIZERS[name](references)
    for step in range(NUM_STEPS):
        for i, (param, full) in enumerate(zip(params, references, strict=True)):
            grad = values(tuple(full.shape), 1000 * step + i, full.dtype)
            full.grad, param.grad = grad, placed(grad, param)
        sharded.step()
        reference.step()
    wrong = []
    for i, (param, full) in enumerate(zip(params, references, strict=True)):
        if not same(name, param, full):
            wrong.append(f"weight {i} {tuple(full.shape)}")
        for key, state in reference.state[full].items():
            if not same(name, sharded.state[param][key], state):
                wrong.append(f"{key} {i} {tuple(full.shape)}")
    return wrong


def layouts(world: int) -> Iterator[tuple[str, DeviceMesh, list[Any]]]:
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("line",))
    yield "rows", line, [Shard(0)]
    yield "columns", line, [Shard(1)]
    yield "replicated", line, [Replicate()]
    if world % 2 == 0:
        grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
        yield "hsdp", grid, [Replicate(), Shard(0)]
        yield "rows and columns", grid, [Shard(0), Shard(1)]
        yield "rows twice", grid, [Shard(0), Shard(0)]


def on_layout(mesh: DeviceMesh, placements: list[Any], name: str, dtype: torch.dtype) -> list[str]:
    fulls = [values(shape, i, dtype) for i, shape in enumerate(SHAPES)]
    params: list[Tensor] = []
    for i, full in enumerate(fulls):
        fits = all(not isinstance(p, Shard) or p.dim < full.ndim for p in placements)
        # Every other one that does not fit the layout stays whole, the rest are split by rows.
        own = placements if fits else [Replicate()] * mesh.ndim
        params.append(
            nn.Parameter(full.clone() if not fits and i % 2 else distribute_tensor(full, mesh, own))
        )
    return compare(name, params, fulls)


class Network(nn.Module):
    """Two layers, sized so that shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 6)
        self.norm = nn.LayerNorm(6)


def on_network(world: int, tensor_parallel: bool, name: str) -> list[str]:
    torch.manual_seed(0)
    network = Network()
    fulls = [p.detach().clone() for p in network.parameters()]
    if tensor_parallel:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(network, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(network, mesh=mesh["data"])
    else:
        fully_shard(network, mesh=init_device_mesh("cpu", (world,)))
    return compare(name, list(network.parameters()), fulls)


def split_by_rows(world: int) -> tuple[list[Tensor], list[Tensor]]:
    mesh = init_device_mesh("cpu", (world,))
    fulls = [values(shape, i, torch.float32) for i, shape in enumerate(SHAPES)]
    return [nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])) for full in fulls], fulls


def set_gradients(params: list[Tensor], fulls: list[Tensor], bad: bool) -> None:
    """Random ones; with a NaN on the last rank that has a part of the first parameter."""
    for i, (param, full) in enumerate(zip(params, fulls, strict=True)):
        grad = values(tuple(full.shape), 50 + i, torch.float32)
        if bad and i == 0:
            grad[-1, -1] = torch.nan
        param.grad = placed(grad, param)


def bad_gradients(world: int) -> Iterator[tuple[str, list[str]]]:
    params, fulls = split_by_rows(world)
    optimizer = MERIT(params, nonfinite="skip")
    set_gradients(params, fulls, bad=True)
    optimizer.step()
    changed = [str(i) for i, (p, full) in enumerate(zip(params, fulls, strict=True)) if not same("", p, full)]
    yield (
        "a NaN on one rank is skipped by all",
        changed + ["not counted"] * (optimizer.num_skipped_steps != 1),
    )

    params, fulls = split_by_rows(world)
    optimizer = MERIT(params, nonfinite="raise")
    set_gradients(params, fulls, bad=True)
    try:
        optimizer.step()
    except FloatingPointError as error:
        own = dist.get_rank() == world - 1
        told = "parameter 0 of group 0" if own else "another rank"
        yield "a NaN on one rank is raised by all", [] if told in str(error) else [str(error)]
    else:
        yield "a NaN on one rank is raised by all", ["not raised"]

    params, fulls = split_by_rows(world)
    optimizer = MERIT(params)
    set_gradients(params, fulls, bad=True)
    optimizer.step()
    yield "a NaN on one rank reaches all", [] if whole(params[0].detach()).isnan().all() else ["lost"]

    params, fulls = split_by_rows(world)
    optimizer = MERIT(params, max_grad_norm=1.0, nonfinite="skip")
    set_gradients(params, fulls, bad=False)
    if dist.get_rank() == 0:
        for param in params:
            param.grad = None
    optimizer.step()  # and does not hang
    finite = all(whole(p.detach()).isfinite().all() for p in params)
    yield "a rank may be without gradients", [] if finite else ["not finite"]


def statistics(world: int) -> list[str]:
    """Those of the whole parameters, on every rank."""
    params, fulls = split_by_rows(world)
    references = [full.clone().requires_grad_() for full in fulls]
    recorded = []
    for some in (params, references):
        optimizer = MERIT(some, clip=0.5)
        set_gradients(some, fulls, bad=False)
        with optimizer.recording() as found:
            optimizer.step()
        recorded.append({n: (s.num_elements, s.clipped, s.bounded, *s.ratio_range) for n, s in found.items()})
        changes = [s.relative_change for _, s in sorted(found.items())]
        recorded.append({"change": [round(change, 5) for change in changes]})
    return [] if recorded[:2] == recorded[2:] else [str(recorded)]


def collectives(world: int) -> list[str]:
    """One all-reduce a step, of the columns and wholes of weights and updates, four bytes each."""
    params, fulls = split_by_rows(world)
    optimizer = MERIT(params)
    set_gradients(params, fulls, bad=False)
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        optimizer.step()
    finally:
        dist.all_reduce = all_reduce
    columns = [full[0].numel() for full in fulls if full.ndim > 1]
    expected = 2 * 4 * (sum(columns) + len(fulls))
    return [] if calls == [expected] else [f"{calls}, not [{expected}]"]


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    found: dict[str, list[str]] = {}
    if sys.argv[1:] == ["fused"]:
        OPTIMIZERS.update(FUSED)
        mesh = init_device_mesh("cpu", (world,))
        for name in FUSED:
            for placement in (Shard(0), Shard(1)):
                found[f"{placement}, {name}"] = on_layout(mesh, [placement], name, torch.float32)
        report(found)
        return
    for layout, mesh, placements in layouts(world):
        for name in OPTIMIZERS:
            found[f"{layout}, {name}"] = on_layout(mesh, placements, name, torch.float32)
        found[f"{layout}, MERIT, bf16"] = on_layout(mesh, placements, "MERIT", torch.bfloat16)
    for tensor_parallel in [False, *([True] if world == 4 else [])]:
        for name in ("MERIT", "MaxLAMB"):
            found[f"network, tensor parallel {tensor_parallel}, {name}"] = on_network(
                world, tensor_parallel, name
            )
    found |= dict(bad_gradients(world))
    found["statistics are global"] = statistics(world)
    found["one collective of the expected size"] = collectives(world)
    report(found)


def report(found: dict[str, list[str]]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, found)
    if rank == 0:
        merged = {case: sorted({w for one in everywhere for w in one[case]}) for case in found}
        print("RESULT " + json.dumps(merged), file=sys.stdout, flush=True)
    dist.barrier()  # nobody leaves while another still listens
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
