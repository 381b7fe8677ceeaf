"""How long a step on sharded parameters takes, and what it sends, beside the alternatives.

    torchrun --nproc-per-node 2 benchmarks/sharded.py [--models tiny ...] [--output results.json]

On CUDA devices with NCCL, else on CPUs with gloo. Each contestant steps the same weights in the same
layouts: rows split over all ranks as FSDP2 does it, and from four ranks on rows and columns as FSDP2 with
tensor parallelism does. The naive formulation is ``naive.py`` on DTensors as they are, which takes a
collective for each reduction. Times are between two moments when nothing is under way on any rank:
medians, with the spread. Bytes are those of the tensors that one rank hands to collectives.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_cost import exchange_bytes
from sharded_muon_cost import traffic
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from merit_lab.measure.bench.command import environment
from merit_lab.measure.bench.contestants import NaiveMERIT
from merit_lab.measure.bench.model import WEIGHTS, Shape
from merit_optim import LAMB, MERIT, MaxLAMB, Muon, MuonMERIT
from merit_optim.optim.groups import divided
from merit_optim.optim.kinds import Kind

Kinds = list[Kind]


def by_kind(params: list[Tensor], kinds: Kinds) -> list[dict[str, Any]]:
    """A parameter group for each kind."""
    return divided(
        {"params": params}, {param: {"kind": kind} for param, kind in zip(params, kinds, strict=True)}
    )


CONTESTANTS: dict[str, Callable[[list[Tensor], Kinds], Optimizer]] = {
    "torch AdamW, foreach": lambda params, _: torch.optim.AdamW(params, foreach=True),
    "MERIT": lambda params, _: MERIT(params),
    "MaxLAMB": lambda params, _: MaxLAMB(params),
    "LAMB": lambda params, _: LAMB(params),
    "naive MERIT on DTensors": lambda params, _: NaiveMERIT(params),
    "Muon": lambda params, kinds: Muon(by_kind(params, kinds)),
    "MuonMERIT": lambda params, kinds: MuonMERIT(by_kind(params, kinds)),
}


@dataclass
class Result:
    """Milliseconds, and what one rank sends in a step."""

    model: str
    layout: str
    contestant: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    num_collectives: int
    num_bytes: int
    predicted_bytes: int | None
    """By the cost model; None where it says nothing."""


class Traffic(TorchDispatchMode):
    """Counts collectives and the bytes handed to them, whoever starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_collectives = self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor does it with plain tensors, which come by here again
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            first = args[1] if "alltoall" in func.__name__ else args[0]  # what comes back stands before it
            sent = first if isinstance(first, (list, tuple)) else [first]
            self.num_collectives += 1
            self.num_bytes += sum(x.nbytes for x in sent)
        return func(*args, **(kwargs or {}))


def layouts(world: int, device: torch.device) -> dict[str, tuple[DeviceMesh, list[Placement]]]:
    line = init_device_mesh(device.type, (world,))
    found: dict[str, tuple[DeviceMesh, list[Placement]]] = {"rows": (line, [Shard(0)])}
    if world >= 4 and world % 2 == 0:
        grid = init_device_mesh(device.type, (world // 2, 2))
        found["rows and columns"] = (grid, [Shard(0), Shard(1)])
    return found


def own_placements(shape: Shape, placements: list[Placement]) -> list[Placement]:
    """Vectors are replicated where a matrix is split by columns."""
    return [Replicate() if isinstance(p, Shard) and p.dim >= len(shape) else p for p in placements]


def make_parameters(
    shapes: list[Shape], mesh: DeviceMesh, placements: list[Placement], device: torch.device
) -> list[Tensor]:
    """Random weights with random gradients."""

    def placed(shape: Shape, scale: float) -> Tensor:
        own = own_placements(shape, placements)
        return distribute_tensor(torch.randn(shape, device=device) * scale, mesh, own)

    params = []
    for shape in shapes:
        param = placed(shape, 0.02).detach().requires_grad_()
        param.grad = placed(shape, 1e-3)
        params.append(param)
    return params


def predicted(name: str, model: str, mesh: DeviceMesh, placements: list[Placement]) -> int | None:
    """The bytes that the cost model gives."""
    if name.startswith("torch"):
        return 0
    if name.startswith("naive"):
        return None
    placed, of_matrices, sizes = [], 0, list(mesh.shape)
    for weight in WEIGHTS[model]:
        own = own_placements(weight.shape, placements)
        if weight.kind == "hidden" or "Muon" not in name:
            placed.append((weight.shape, [p.dim if isinstance(p, Shard) else None for p in own]))
    if "Muon" in name:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        of_groups = traffic(placed, sizes, coordinate).values()
        of_matrices = sum(of_group.sent + of_group.sent_back for of_group in of_groups)
    if name == "Muon":
        return of_matrices
    return of_matrices + sum(
        exchange_bytes(placed, sizes, element_wise="MERIT" in name, is_sum=name == "LAMB")
    )


def time_steps(optimizer: Optimizer, device: torch.device, seconds: float) -> list[float]:
    """Milliseconds of each step. Every rank takes the same number of them."""

    def timed() -> float:
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) * 1e3

    for _ in range(3):
        timed()
    count = torch.tensor(min(200, max(5, math.ceil(1e3 * seconds / timed()))), device=device)
    dist.broadcast(count, 0)
    return [timed() for _ in range(int(count))]


def measure(
    model: str, layout: str, name: str, mesh: DeviceMesh, placements: list[Placement], seconds: float
) -> Result:
    device = torch.device(mesh.device_type)
    torch.manual_seed(0)
    params = make_parameters([weight.shape for weight in WEIGHTS[model]], mesh, placements, device)
    optimizer = CONTESTANTS[name](params, [weight.kind for weight in WEIGHTS[model]])
    times = time_steps(optimizer, device, seconds)
    with Traffic() as traffic:
        optimizer.step()
    return Result(
        model,
        layout,
        name,
        statistics.median(times),
        min(times),
        max(times),
        traffic.num_collectives,
        traffic.num_bytes,
        predicted(name, model, mesh, placements),
    )


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=WEIGHTS, default=["gpt2-small" if cuda else "tiny"])
    parser.add_argument("--only", help="contestants whose name holds this")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each contestant, about")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()

    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    world, first = dist.get_world_size(), dist.get_rank() == 0
    record: dict[str, Any] = {
        "environment": environment(device) | {"num_ranks": world, "backend": dist.get_backend()}
        if first
        else {},
        "results": [],
    }
    dist.barrier()
    for model in args.models:
        for layout, (mesh, placements) in layouts(world, device).items():
            if first:
                total = sum(weight.num_elements for weight in WEIGHTS[model]) / 1e6
                print(f"\n{model}, {total:.1f}M parameters in float32, {layout} on {world} ranks")
                print(
                    f"  {'':26} {'ms':>9} {'spread':>19} {'collectives':>12} {'bytes':>12} {'predicted':>12}"
                )
            for name in CONTESTANTS:
                if args.only is not None and args.only not in name:
                    continue
                r = measure(model, layout, name, mesh, placements, args.seconds)
                record["results"].append(asdict(r))
                if first:
                    spread = f"{r.fastest_ms:.2f}..{r.slowest_ms:.2f}"
                    sent = f"{r.num_collectives:12} {r.num_bytes:12} {r.predicted_bytes!s:>12}"
                    print(f"  {name:26} {r.median_ms:9.2f} {spread:>19} {sent}", flush=True)
    if first and args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
