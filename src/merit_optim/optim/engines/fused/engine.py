"""The trust-ratio step in a few Triton launches for the whole model.

What does not change from step to step (shapes, places in the buffers, tiles) is kept in tables on the
device. What may change (addresses, learning rates) is compared every step and sent again only if it
did, so that a step costs the host little however large the model is.
"""

from __future__ import annotations

import array
import math
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.algorithm import Rule
from merit_optim.optim.directions import direction_of
from merit_optim.optim.directions.adam import bias_correction
from merit_optim.optim.engines.fused import kernels
from merit_optim.optim.engines.fused.launch import TRITON, Launch, Sender, Shared, Variant, variant_of
from merit_optim.optim.engines.fused.tables import Tile, weights_of
from merit_optim.optim.engines.part import Place
from merit_optim.optim.engines.plan import Plan, plan
from merit_optim.optim.engines.work import Control, Work, names_of, pick
from merit_optim.optim.matrices import View
from merit_optim.optim.statistics import Recorder

# The best of those that benchmarks/tiles.py measures on an H200; docs/performance.md has the figures.
MOMENTS_TILE = Tile(rows=32, columns=64, steps=4, warps=4)
APPLY_TILE = Tile(rows=16, columns=64, steps=2, warps=4)

_DTYPE = operator.attrgetter("dtype")

# Offsets within a tile have 32 bits.
MAX_COLUMNS = 2**24


def refusal(group: dict[str, Any], param: Tensor) -> str | None:
    """Why a parameter cannot be fused, or None."""
    if param.dtype not in TRITON:
        return f"it has dtype {param.dtype}, not one of {', '.join(map(str, TRITON))}"
    if not param.is_contiguous():
        return "it is not contiguous"
    view, rule = View.of(group), Rule.of(group)
    unknown = {
        "direction": direction_of(group).NAME if direction_of(group).NAME != "adam" else None,
        "split": view.split,
        "ratio_bounds": rule.ratio_bounds,
        "calibrated": rule.calibrated,
    }
    for option, value in unknown.items():
        if value:
            return f"{option}={value!r} is not among what the kernels know"
    matrices = view.matrices(param.shape)
    if matrices.columns > MAX_COLUMNS and not matrices.is_vector:
        return f"its rows have more than {MAX_COLUMNS} elements"
    if group["norm"] == "l2" and group["element_wise"]:
        return "norm='l2' with element_wise=True has sums for every row and column, which the kernels lack"
    return None


class Tensors(NamedTuple):
    """All tensors of a step on one device, in parallel lists."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]

    @staticmethod
    def of(works: Sequence[Work]) -> Tensors:
        return Tensors(
            [x for work in works for x in work.params],
            [x for work in works for x in work.grads],
            [x for work in works for x in work.states[0]],
            [x for work in works for x in work.states[1]],
            [x for work in works for x in work.steps],
        )

    def addresses(self) -> array.array[int]:
        return array.array("q", map(Tensor.data_ptr, chain.from_iterable(self)))


class FusedEngine:
    """Steps on one device, with the tables kept between them."""

    moments_tile = MOMENTS_TILE
    apply_tile = APPLY_TILE

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sender = Sender()
        self._owners: list[Tensor] = []
        self._options: list[tuple[Any, ...]] = []
        self._addresses: array.array[int] | None = None
        self._hyper_values: array.array[float] | None = None

    def part_of(self, works: list[Work], control: Control) -> FusedPart:
        """The work, with the tables brought up to date."""
        tensors = Tensors.of(works)
        addresses = tensors.addresses()
        if not self._still_fits(works, tensors, addresses):
            self._build(works, tensors)
        if self._launches:
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            resend = capturing or self._sender.has_captured
            if resend or addresses != self._addresses:
                table = torch.frombuffer(addresses, dtype=torch.int64).view(len(tensors), -1)
                for launch in self._launches:
                    launch.send_addresses(table, self._sender)
            self._send_hyper(works, resend)
        self._addresses = addresses
        return FusedPart(self, works, control)

    def step(self, works: list[Work], control: Control, recorder: Recorder | None) -> list[Work]:
        """Update what can be fused; the rest is returned, untouched."""
        part = self.part_of(works, control)
        part.advance()
        part.apply(recorder)
        return part.rest

    def _still_fits(self, works: list[Work], tensors: Tensors, addresses: array.array[int]) -> bool:
        """Whether the tables are those of these tensors. Gradients may be new ones of the same kind."""
        num = len(tensors.params)
        if self._addresses is None or num != len(self._owners):
            return False
        # The owners: a sharded parameter's own part is a new tensor object every time it is asked for.
        if not all(map(operator.is_, _owners(works), self._owners)):
            return False
        if [_options(work) for work in works] != self._options:
            return False
        # Even at the same addresses: memory that was freed comes back for tensors of another kind.
        if _kinds(tensors.grads) != self._grad_kinds:
            return False
        if addresses == self._addresses:
            return True
        other_than_grads = (slice(0, num), slice(2 * num, None))
        grads, grads_before = addresses[num : 2 * num], self._addresses[num : 2 * num]
        return all(addresses[at] == self._addresses[at] for at in other_than_grads) and all(
            (now % 16 == 0) == (before % 16 == 0) for now, before in zip(grads, grads_before, strict=True)
        )

    def _build(self, works: list[Work], tensors: Tensors) -> None:
        group_numbers = [i for i, work in enumerate(works) for _ in work.params]
        groups = [work.group for work in works for _ in work.params]
        members: dict[Variant, list[int]] = {}
        self._unfused: set[int] = set()
        for i, (param, *others, step) in enumerate(zip(*tensors, strict=True)):
            dense = all(x.is_contiguous() and x.dtype in TRITON for x in others)
            countable = step.device == param.device and step.dtype == torch.float32
            if param.numel() and dense and countable and refusal(groups[i], param) is None:
                members.setdefault(variant_of(groups[i], param, *others), []).append(i)
            else:
                self._unfused.add(i)
        order = [i for items in members.values() for i in items]
        layout: Plan = plan(
            tuple(
                (View.of(groups[i]).matrices(tensors.params[i].shape), Rule.of(groups[i]).has_rows)
                for i in order
            )
        )
        slots = self._slots = dict(zip(order, layout.slots, strict=True))
        self._launches = [
            Launch(
                variant,
                [w for i in items for w in weights_of(i, slots[i], group_numbers[i])],
                self.device,
                self.moments_tile,
                self.apply_tile,
            )
            for variant, items in members.items()
        ]
        self._shared = Shared(layout.length, len(works), self.device)
        self._owners = _owners(works)
        self._options = [_options(work) for work in works]
        self._grad_kinds = _kinds(tensors.grads)
        self._addresses = self._hyper_values = None

    def _send_hyper(self, works: list[Work], resend: bool) -> None:
        values: list[float] = []
        for work in works:
            group = work.group
            (beta1, beta2), lr, clip = group["betas"], group["lr"], group["clip"]
            if isinstance(lr, Tensor):
                # On the host it is a number; on the device it is put into the table there.
                lr = lr.item() if lr.device.type == "cpu" else math.inf
            values += (lr, beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], group["weight_decay"])
            values.append(math.inf if clip is None else clip)
        packed, hyper = array.array("f", values), self._shared.hyper
        if resend or packed != self._hyper_values:
            self._sender.send(torch.frombuffer(packed, dtype=torch.float32).view(hyper.shape), hyper)
            self._hyper_values = packed
        for row, work in enumerate(works):
            lr = work.group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                hyper[row, kernels.LR.value].copy_(lr.reshape(()))


class FusedPart:
    """The work of one step, in two phases with the sizes between them."""

    def __init__(self, engine: FusedEngine, works: list[Work], control: Control) -> None:
        self.engine, self.works, self.control = engine, works, control
        self.rest = _rest(works, engine._unfused)
        self._corrections = None
        if any(launch.variant.bias_correction for launch in engine._launches):
            self._corrections = torch.cat([_corrections(work, engine.device) for work in works])

    @property
    def places(self) -> list[Place]:
        """Where the sizes of each weight are."""
        params = [param for work in self.works for param in work.params]
        return [Place(params[i], self.engine._shared.sizes, slot) for i, slot in self.engine._slots.items()]

    def advance(self) -> None:
        """Update m and v, and measure w and u."""
        shared = self.engine._shared
        with self._on_device():
            shared.sizes.zero_()
            for launch in self.engine._launches:
                launch.run_moments(shared, self._corrections, self.control)

    def apply(self, recorder: Recorder | None) -> None:
        """Change w, and count the step."""
        with self._on_device():
            for launch in reversed(self.engine._launches):
                statistics = None
                if recorder is not None:
                    num_tiles = sum(launch.apply_grid.num_tiles)
                    shape = (num_tiles, kernels.NUM_STATISTICS.value)
                    statistics = torch.zeros(shape, device=self.engine.device)
                launch.run_apply(self.engine._shared, self._corrections, self.control, statistics)
                if recorder is not None and statistics is not None:
                    names = [name for work in self.works for name in names_of(work)]
                    launch.record(statistics, names, recorder)
        # Kernels write behind autograd's back; it must know, to refuse a backward pass through old weights.
        for work in self.works:
            for changed in (work.owners, work.params, work.steps, *work.states):
                torch.autograd.graph.increment_version(changed)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device, whatever the tensors are on."""
        device = self.engine.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(device)


def _corrections(work: Work, device: torch.device) -> Tensor:
    """(item, 2): Adam's bias corrections for the step that is being taken, which is counted at its end."""
    steps = torch.stack(work.steps).to(device) + 1
    correction = bias_correction(steps, *work.group["betas"])
    return torch.stack([torch.as_tensor(x, device=device) for x in correction], 1).float()


def _owners(works: list[Work]) -> list[Tensor]:
    return [owner for work in works for owner in work.owners]


def _options(work: Work) -> tuple[Any, ...]:
    """What the tables depend on besides the tensors."""
    group = work.group
    return (
        len(work.params),
        *Rule.of(group)[1:],
        *View.of(group),
        group["maximize"],
        group["bias_correction"],
    )


def _kinds(grads: list[Tensor]) -> tuple[list[torch.dtype], list[bool]]:
    return list(map(_DTYPE, grads)), list(map(Tensor.is_contiguous, grads))


def _rest(works: list[Work], unfused: set[int]) -> list[Work]:
    """The parameters that were not fused."""
    rest, begin = [], 0
    for work in works if unfused else ():
        if keep := [i for i in range(len(work.params)) if begin + i in unfused]:
            rest.append(pick(work, keep))
        begin += len(work.params)
    return rest
