"""The ranks of a run: how they start, how they agree, and how they share a model."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from merit_lab.models import Model
from merit_lab.train.config import Parallel
from merit_lab.train.rank import raised_on_all

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and its peers; a single process is rank 0 of 1."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> Ranks:
        """Join the processes that torchrun started; without torchrun there is one rank."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if size > 1 and not dist.is_initialized():
            # gloo besides nccl: decisions on the host must not wait for work queued on the GPUs.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            store, *_ = next(rendezvous("env://", rank, size))
            store = PrefixStore(agree_on_name(store, rank, size), store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            atexit.register(dist.destroy_process_group)
        return cls(rank, size, device)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    def rows(self, batch: int) -> tuple[int, int]:
        """Return this rank's rows of a global batch, as (begin, end)."""
        if batch % self.size:
            raise ValueError(
                f"a batch of {batch} sequences cannot be split equally among {self.size} ranks; choose a "
                f"multiple of {self.size}, or another number of ranks"
            )
        share = batch // self.size
        return self.rank * share, (self.rank + 1) * share

    def first(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` on the first rank; return its value, or raise its error, on all ranks."""
        answers: list[Any] = [_answer(function) if self.is_first else None]
        if self.size > 1:
            dist.broadcast_object_list(answers, src=0, device=torch.device("cpu"))
        value: _T = _values(answers)[0]
        return value

    def gather(self, function: Callable[[], _T]) -> list[_T]:
        """Call ``function`` on each rank; return all values on all ranks. An error is raised on all."""
        answers: list[Any] = [_answer(function)]
        if self.size > 1:
            answers *= self.size
            dist.all_gather_object(answers, answers[self.rank])
        return _values(answers)

    def maximum(self, *values: int) -> list[int]:
        """Return the largest of each value over the ranks, on the hosts: the devices do not wait."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return cast("list[int]", tensor.tolist())

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, on the device."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum over ranks, on the device."""
        # A float maximum of some backends drops a NaN, and a sum keeps it.
        return self._reduce(tensor, dist.ReduceOp.MAX) + self.sum(torch.where(tensor.isnan(), tensor, 0))

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, operation)
        return tensor


def agree_on_name(store: Store, rank: int, size: int) -> str:
    """Return a name that these processes share and no earlier ones had. Every rank must call this.

    When torchrun restarts its processes, its store still holds the entries of the previous ones, and the new
    ones would wait for addresses of dead processes (pytorch/pytorch#135712). So each rank asks with a unique
    token, and the first rank answers every request until all live ranks have the answer.
    """
    token = uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", token)
        name: str = store.get(f"answer/{token}").decode()
        store.set(f"{name}/{rank}", "has it")
        return name
    waiting = list(range(1, size))
    while waiting:
        for other in waiting:
            asking = store.get(f"asks/{other}").decode()  # may be from a dead process; a live one asks later
            store.set(f"answer/{asking}", token)
        time.sleep(0.01)
        waiting = [other for other in waiting if not store.check([f"{token}/{other}"])]
    return token


def _answer(function: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return the value of a function, or its error."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _values(answers: Sequence[tuple[Any, Exception | None]]) -> list[Any]:
    for _, error in answers:
        if error is not None:
            raise raised_on_all(error)
    return [value for value, _ in answers]


def share(model: Model, kind: Parallel, ranks: Ranks, *, compiled: bool) -> nn.Module:
    """Return the module to call: the model on the device, compiled and wrapped for the ranks as configured.

    Its weights were drawn on the CPU, so they do not depend on the device or the ranks.
    """
    if ranks.size > 1 and kind == "fsdp2":
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        for block in model.sharded_parts():
            if compiled:
                block.compile(dynamic=False)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    model.to(ranks.device)
    if compiled:
        model.compile(dynamic=False)
    if ranks.size == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def unshared(module: nn.Module) -> nn.Module:
    """Return the model inside the module to call."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def drop_gathered(module: nn.Module) -> None:
    """Drop gathered weights: after a forward pass without backward, a sharded model keeps some of them."""
    if isinstance(module, FSDPModule):
        module.reshard()


@contextlib.contextmanager
def gradients_added(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Accumulate gradients over passes; the ranks exchange them in the ``last`` one."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    yield
