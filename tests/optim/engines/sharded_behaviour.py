"""Sections of sharded_worker.py: bad and missing gradients, collectives, replicas."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from math import isnan
from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import (
    NUM_STEPS,
    OPTIMIZERS,
    SHAPES,
    WITHIN_TOLERANCE,
    compare,
    placed,
    same,
    set_gradients,
    values,
    whole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from merit_optim import LAMB, MERIT, SOAP

Comparisons = Iterator[tuple[str, list[str]]]

# Wide enough for vector instructions, which give NaNs another sign.
SHAPES_WIDE = [(12, 160), *SHAPES]


def split_by_rows(world: int) -> tuple[list[Tensor], list[Tensor]]:
    mesh = init_device_mesh("cpu", (world,))
    fulls = [values(shape, i) for i, shape in enumerate(SHAPES_WIDE)]
    return [nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])) for full in fulls], fulls


def with_gradients(params: list[Tensor], fulls: list[Tensor], *, bad: bool) -> None:
    """Random gradients; if ``bad``, with a NaN on the last rank that has a part of the first parameter."""
    set_gradients(params, [tuple(full.shape) for full in fulls], 50)
    if bad:
        grad = values(tuple(fulls[0].shape), 50)
        grad[-1, -1] = torch.nan
        params[0].grad = placed(grad, params[0])


def cases(world: int) -> Comparisons:
    yield from bad_gradients(world)
    yield from missing_gradients(world)
    yield from clipped(world)
    yield "statistics are global", statistics(world)
    yield "process groups are not kept", kept_groups(world)
    yield "options of a checkpoint take effect", changed_options(world)
    yield "parameters may be added and replaced", added_later(world)
    yield "a rank may have no gradient before the first rate", late_gradients(world)
    yield "tensor-parallel plain tensors through DTensors", plain_tensor_parallel(world)


def pairs(world: int, *more: str) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """Optimizers by name, one for each kind of traffic, with sharded parameters and with whole ones."""
    for name in ("MERIT", "MuonMERIT", "NorMuon", "OrScale", "SOAPMERIT", *more):
        params, fulls = split_by_rows(world)
        yield name, params, [full.clone().requires_grad_() for full in fulls]


def everything(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
    """The weights and all state, whole."""
    states = [x for param in params for x in optimizer.state[param].values()]
    return [whole(x).clone() for x in (*params, *states)]


def bad_gradients(world: int) -> Comparisons:
    for name, params, fulls in pairs(world):
        optimizer = OPTIMIZERS[name](params, nonfinite="skip")
        with_gradients(params, fulls, bad=False)
        optimizer.step()
        before = everything(optimizer, params)
        with_gradients(params, fulls, bad=True)
        optimizer.step()
        kept = all(map(torch.equal, everything(optimizer, params), before))
        uncounted = ["not counted"] * (optimizer.num_skipped_steps != 1)
        yield f"a NaN on one rank is skipped by all, {name}", ["something changed"] * (not kept) + uncounted

        for group in optimizer.param_groups:
            group["nonfinite"] = "raise"
        try:
            optimizer.step()
            wrong = ["not raised"]
        except FloatingPointError as error:
            expected = "parameter 0 of group 0" if dist.get_rank() == world - 1 else "another rank"
            kept = all(map(torch.equal, everything(optimizer, params), before))
            wrong = ["something changed"] * (not kept) + [str(error)] * (expected not in str(error))
        yield f"a NaN on one rank is raised by all, {name}", wrong

    for name, params, references in pairs(world, "MERIT without bound"):
        for some in (params, references):
            optimizer = OPTIMIZERS[name](some)
            for bad in (False, True):  # SOAP's first step changes no weight
                with_gradients(some, references, bad=bad)
                optimizer.step()
        lost = not torch.equal(whole(params[0]).isnan(), references[0].isnan())
        numbered = enumerate(zip(params[1:], references[1:], strict=True), start=1)
        wrong = ["lost"] * lost + [str(i) for i, (x, full) in numbered if not same(name, x, full)]
        yield f"a NaN on one rank is where it is on one, {name}", wrong

    params, fulls = split_by_rows(world)
    optimizer = MERIT(params, capturable=True)
    with_gradients(params, fulls, bad=False)
    # A scaler asks the ranks of its first gradient alone, which may be replicated where others are not.
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor(float(dist.get_rank() == 0))
    optimizer.step()
    changed = [str(i) for i, (p, full) in enumerate(zip(params, fulls, strict=True)) if not same("", p, full)]
    yield "an overflow that one rank knows of is skipped by all", changed

    mesh, grad = init_device_mesh("cpu", (world,)), values((world, 3, 4), 0)
    stack = nn.Parameter(distribute_tensor(values((world, 3, 4), 1), mesh, [Shard(0)]))
    grad[-1, 0, 0] = torch.nan
    stack.grad = placed(grad, stack)
    optimizer = MERIT([stack], matrix_dims=2)
    with optimizer.recording() as recorded:
        optimizer.step()
    (stack,) = recorded.values()
    yield (
        "a NaN in one matrix is in the statistics of all",
        [] if isnan(stack.ratio_range[1]) else ["lost"],
    )


def missing_gradients(world: int) -> Comparisons:
    """A rank without gradients takes part, changes none of its weights, and does not block the others."""
    controlled = {"max_grad_norm": 1.0, "nonfinite": "skip"}
    for name, params, fulls in pairs(world):
        for options in ({}, controlled, {"nonfinite": "raise"}) if name == "MERIT" else ({},):
            optimizer = OPTIMIZERS[name](params, **options)
            with_gradients(params, fulls, bad=False)
            optimizer.step()
            before = [x.to_local().clone() for x in params]
            if dist.get_rank() == 0:
                for param in params:
                    param.grad = None
            optimizer.step()
            pairs_ = zip(before, params, strict=True)
            changed = [not torch.equal(x, p.to_local()) for x, p in pairs_ if x.numel()]
            wrong = any(changed) if dist.get_rank() == 0 else not all(changed)
            finite = all(p.to_local().isfinite().all() for p in params)
            wrongs = ["wrong"] * wrong + ["not finite"] * (not finite)
            yield f"a rank may be without gradients, {name} {options}", wrongs
    if world != 4:
        return
    # The last rank but one has the NaN; only the first, which has no gradient, can pass it on to the second.
    mesh = init_device_mesh("cpu", (2, 2))
    param = nn.Parameter(distribute_tensor(values((4, 6), 0), mesh, [Shard(0), Shard(1)]))
    if dist.get_rank() != 0:
        grad = values((2, 3), dist.get_rank())
        if dist.get_rank() == 2:
            grad[0, 0] = torch.nan
        param.grad = DTensor.from_local(grad, mesh, param.placements)
    MERIT([param], element_wise=False).step()
    has_nan = dist.get_rank() == 0 or bool(param.to_local().isnan().all())
    yield "a rank without gradients passes on a NaN", [] if has_nan else ["lost"]

    # One expert: half of the ranks have none, and their messages are empty.
    fulls = [values((1, 4, 4), 0)]
    params = [nn.Parameter(distribute_tensor(fulls[0], mesh, [Shard(0), Shard(1)]))]
    yield "a rank may be without experts", compare("MERIT stacked", params, fulls, num_steps=2)


def clipped(world: int) -> Comparisons:
    """The norm is a sum, compared with a tolerance; given the norm, everything else is bit for bit."""
    for name, params, references in pairs(world):
        optimizer, reference = OPTIMIZERS[name](params, max_grad_norm=0.1), OPTIMIZERS[name](references)
        shapes, wrong = [tuple(full.shape) for full in references], []
        for step in range(NUM_STEPS):
            for some in (params, references):
                set_gradients(some, shapes, step)
            optimizer.step()
            norm = optimizer.grad_norm
            expected = torch.nn.utils.get_total_norm([x.grad for x in references])
            wrong += [] if torch.allclose(norm, expected, rtol=1e-6) else [f"norm {norm}, not {expected}"]
            for x in references:
                x.grad *= (0.1 / (norm + 1e-6)).clamp(max=1.0)
            reference.step()
        numbered = enumerate(zip(params, references, strict=True))
        yield f"norm clipped, {name}", wrong + [str(i) for i, (x, y) in numbered if not same(name, x, y)]


def statistics(world: int) -> list[str]:
    """Every rank has the statistics of whole parameters."""
    wrong = []
    for name, params, references in pairs(world):
        recorded: list[Any] = []
        for some in (params, references):
            optimizer = OPTIMIZERS[name](some)
            for group in optimizer.param_groups:
                group["clip"] = 0.5
            with_gradients(some, references, bad=False)
            optimizer.step()  # SOAP's first step changes no weight
            some[1].grad = None
            with optimizer.recording() as by_name:
                optimizer.step()
            counts = {n: (s.num_elements, s.clipped, s.bounded) for n, s in by_name.items()}
            sizes = [(*s.ratio_range, s.relative_change) for s in by_name.values()]
            recorded.append((counts, torch.tensor(sizes)))
        (counts, sizes), (expected_counts, expected_sizes) = recorded
        exact = slice(0, 0 if name in WITHIN_TOLERANCE else 2)
        is_same = counts == expected_counts and len(counts) == len(params) - 1
        is_same = is_same and torch.equal(sizes[:, exact], expected_sizes[:, exact])
        is_same = is_same and torch.allclose(sizes, expected_sizes, rtol=1e-5)
        wrong += [] if is_same else [f"{name}: {recorded}"]

    # What no rank measures is not there: an empty weight, and a matrix that SOAP's first step leaves.
    mesh = init_device_mesh("cpu", (world,))
    some = [
        nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])) for shape in ((0, 3), (4, 3))
    ]
    for param in some:
        param.grad = torch.zeros_like(param) + 1
    soap = SOAP([{"params": some, "direction": "soap"}])
    with soap.recording() as by_name:
        soap.step()
    return wrong + list(by_name)


def kept_groups(world: int) -> list[str]:
    """A group that is still referenced outlives destroy_process_group, and its threads abort the process."""
    wrong = []
    for name, params, fulls in pairs(world):
        optimizer = OPTIMIZERS[name](params, max_grad_norm=1.0)
        gc.collect()  # what the optimizers before have kept
        group = params[0].device_mesh.get_group()
        before = sys.getrefcount(group)
        with_gradients(params, fulls, bad=False)
        optimizer.step()
        after = sys.getrefcount(group)
        wrong += [] if after == before else [f"{name}: {after - before} more references"]
    return wrong


def compiled(world: int) -> Comparisons:
    """A compiled step on sharded parameters runs uncompiled instead of treating each shard as the whole."""
    params, fulls = split_by_rows(world)
    references: list[Tensor] = [full.clone().requires_grad_() for full in fulls]
    for some in (params, references):
        optimizer = MERIT(some)
        step = torch.compile(optimizer.step, backend="eager") if some is params else optimizer.step
        for number in range(3):
            set_gradients(some, [tuple(full.shape) for full in fulls], number)
            step()
    pairs = enumerate(zip(params, references, strict=True))
    yield "compiled", [str(i) for i, (param, full) in pairs if not same("", param, full)]


def changed_options(world: int) -> list[str]:
    """A state dict that turns on the ratios of rows and columns, after steps without them."""
    params, fulls = split_by_rows(world)
    references: list[Tensor] = [full.clone().requires_grad_() for full in fulls]
    for some in (params, references):
        optimizer = MERIT(some, element_wise=False)
        for step in range(3):
            set_gradients(some, [tuple(full.shape) for full in fulls], step)
            optimizer.step()
            if step == 0:
                saved = optimizer.state_dict()
                saved["param_groups"][0]["element_wise"] = True
                optimizer.load_state_dict(saved)
    pairs = enumerate(zip(params, references, strict=True))
    return [str(i) for i, (param, full) in pairs if not same("", param, full)]


def late_gradients(world: int) -> list[str]:
    """While all rates are zero, only one rank has gradients, and so state."""
    params, fulls = split_by_rows(world)
    optimizer = MERIT(params)
    for step, lr in enumerate((0.0, 0.0, 0.01)):
        optimizer.param_groups[0]["lr"] = lr
        set_gradients(params, [tuple(full.shape) for full in fulls], step)
        if lr == 0 and dist.get_rank() > 0:
            for param in params:
                param.grad = None
        optimizer.step()
    ends = [whole(param) for param in params]
    return [str(i) for i, (end, full) in enumerate(zip(ends, fulls, strict=True)) if torch.equal(end, full)]


def added_later(world: int) -> list[str]:
    """Parameters in a new group, and others that replace the first ones."""
    params, fulls = split_by_rows(world)
    references: list[Tensor] = [full.clone().requires_grad_() for full in fulls]
    for some in (params, references):
        optimizer = MERIT(some[:3])
        for step in range(3):
            set_gradients(some, [tuple(full.shape) for full in fulls], step)
            optimizer.step()
            if step == 0:
                optimizer.add_param_group({"params": some[3:]})
            if step == 1:  # as libraries do that shard parameters after the optimizer was created
                some[:] = [nn.Parameter(param.detach().clone()) for param in some]
                old = [param for group in optimizer.param_groups for param in group["params"]]
                for before, after in zip(old, some, strict=True):
                    optimizer.state[after] = optimizer.state.pop(before)
                optimizer.param_groups[0]["params"][:] = some[:3]
                optimizer.param_groups[1]["params"][:] = some[3:]
    pairs = enumerate(zip(params, references, strict=True))
    return [str(i) for i, (param, full) in pairs if not same("", param, full)]


def plain_tensor_parallel(world: int) -> list[str]:
    """A plain shard, as in Megatron, is refused; a DTensor that shares its memory is the way out."""
    mesh, full = init_device_mesh("cpu", (world,)), values((4 * world, 6), 0)
    shard = nn.Parameter(full.chunk(world)[dist.get_rank()].clone())
    shard.tensor_model_parallel, shard.partition_dim = True, 0
    wrong = []
    try:
        MERIT([shard])
        wrong.append("not refused")
    except TypeError as error:
        wrong += (
            [] if "partition_dim=0" in str(error) and "DTensor.from_local" in str(error) else [str(error)]
        )
    param = nn.Parameter(DTensor.from_local(shard.detach(), mesh, [Shard(shard.partition_dim)]))
    reference = full.clone().requires_grad_()
    optimizers = MERIT([param]), MERIT([reference])
    for step in range(3):
        reference.grad = values((4 * world, 6), step)
        grad = reference.grad.chunk(world)[dist.get_rank()]
        param.grad = DTensor.from_local(grad, mesh, param.placements)
        for optimizer in optimizers:
            optimizer.step()
    if not torch.equal(shard, reference.chunk(world)[dist.get_rank()]):
        wrong.append("the plain tensor differs")
    shard.tensor_model_parallel = False
    MERIT([shard])
    return wrong


def counted_step(optimizer: torch.optim.Optimizer) -> Counter[tuple[tuple[int, ...], int]]:
    """The all-reduces of a step: their ranks and bytes."""
    calls: Counter[tuple[tuple[int, ...], int]] = Counter()
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[tuple(dist.get_process_group_ranks(kwargs["group"])), tensor.nbytes] += 1
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        optimizer.step()
    finally:
        dist.all_reduce = all_reduce
    return calls


def collectives(world: int) -> Comparisons:
    """One all-reduce per step and process group, with the bytes that the cost model predicts."""
    from sharded_cost import exchange_bytes

    shapes = [(16, 12), (8, 20), (12,)]
    line, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    layouts = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "hsdp": (grid, [Replicate(), Shard(0)]),
        "rows and columns": (grid, [Shard(0), Shard(1)]),
        "rows twice": (grid, [Shard(0), Shard(0)]),
    }
    for name, (mesh, placements) in layouts.items():
        for kind, is_sum in ((MERIT, False), (LAMB, True)):
            fitting = [s for s in shapes if all(not p.is_shard() or p.dim < len(s) for p in placements)]
            params = [nn.Parameter(distribute_tensor(values(s, 0), mesh, placements)) for s in fitting]
            optimizer = kind(params)
            set_gradients(params, fitting, 0)
            dims = [p.dim if p.is_shard() else None for p in placements]
            predicted = exchange_bytes(
                [(shape, dims) for shape in fitting],
                list(mesh.shape),
                element_wise=kind is MERIT,
                is_sum=is_sum,
            )
            expected = Counter(
                (tuple(dist.get_process_group_ranks(mesh.get_group(i))), size)
                for i, size in enumerate(predicted)
                if size
            )
            calls = counted_step(optimizer)
            yield f"{name}, {kind.__name__}", [] if calls == expected else [f"{calls}, not {expected}"]


def replicas(world: int) -> Comparisons:
    """With DDP and ZeroRedundancyOptimizer, every rank has the weights of one process."""
    del world
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def trained(kind: str, name: str) -> list[Tensor]:
        torch.manual_seed(0)
        network: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
        wrapped = DistributedDataParallel(network) if kind == "ddp" else network
        params = list(network.parameters())
        if kind == "zero":
            optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(params, MERIT, lr=1e-2)
        else:
            optimizer = OPTIMIZERS[name](params, lr=1e-2)
        for step in range(4):
            # The same on every rank: the average of two equal gradients is exact.
            wrapped(values((5, 6), step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in params]

    for kind, name in (("ddp", "MERIT"), ("zero", "MERIT"), ("ddp", "MuonMERIT"), ("ddp", "NorMuon")):
        pairs = enumerate(zip(trained(kind, name), trained("one process", name), strict=True))
        yield f"{kind}, {name}", [str(i) for i, (x, y) in pairs if not torch.equal(x, y)]
