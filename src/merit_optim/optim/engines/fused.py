"""The trust-ratio step in a few Triton launches for the whole model.

What does not change from step to step (shapes, places in the buffers, tiles) is kept in tables on the
device. What may change (addresses, learning rates) is compared every step and sent again only if it
did, so that a step costs the host little however large the model is.
"""

from __future__ import annotations

import array
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from merit_optim.optim import algorithm
from merit_optim.optim.engines import kernels
from merit_optim.optim.engines.plan import Plan, plan
from merit_optim.optim.engines.sharded import Place
from merit_optim.optim.engines.tables import Tile, Weight, grid_of, weights_of
from merit_optim.optim.engines.work import Control, Work, names_of, pick
from merit_optim.optim.statistics import Recorder, UpdateStatistics

_TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

# The best of those that benchmarks/tiles.py measures on an H200; docs/performance.md has the figures.
MOMENTS_TILE = Tile(rows=32, columns=64, steps=4, warps=4)
APPLY_TILE = Tile(rows=16, columns=64, steps=2, warps=4)

_DTYPE = operator.attrgetter("dtype")

# Offsets within a tile have 32 bits.
MAX_COLUMNS = 2**24


class Variant(NamedTuple):
    """Parameters of one variant share a launch: it is what the kernels are compiled for."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    aligned: bool
    """Whether 16-byte accesses are possible everywhere."""
    element_wise: bool
    l2: bool
    weight_bound: bool
    maximize: bool
    bias_correction: bool


def variant_of(
    group: dict[str, Any], param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> Variant:
    """The launch that a parameter belongs to."""
    matrices = algorithm.matrices_of(param.shape, group["matrix_dims"])
    tensors = (param, grad, exp_avg, exp_avg_sq)
    return Variant(
        param.dtype,
        grad.dtype,
        exp_avg.dtype,
        matrices.columns % 16 == 0 and all(x.data_ptr() % 16 == 0 for x in tensors),
        group["element_wise"],
        group["norm"] == "l2",
        group["weight_bound"],
        group["maximize"],
        group["bias_correction"],
    )


def refusal(group: dict[str, Any], param: Tensor) -> str | None:
    """Why a parameter cannot be fused, or None."""
    if param.dtype not in _TRITON:
        return f"it has dtype {param.dtype}, not one of {', '.join(map(str, _TRITON))}"
    if not param.is_contiguous():
        return "it is not contiguous"
    matrices = algorithm.matrices_of(param.shape, group["matrix_dims"])
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


class Shared:
    """What all launches of a step read."""

    def __init__(self, length: int, num_groups: int, device: torch.device) -> None:
        self.sizes = torch.zeros(2, length, device=device)
        """The sizes of weights and of updates, laid out by ``plan``."""
        self.sizes_of_both = self.sizes.unbind()
        self.bits_of_both = self.sizes.view(torch.int32).unbind()
        self.hyper = torch.empty(num_groups, kernels.NUM_HYPER.value, device=device)


class Kernel:
    """A Triton kernel with its grid.

    From the second time on it is started by its handle: to have it found again by its arguments would cost
    the host more than all the rest of a step.
    """

    def __init__(self, function: Any, num_programs: int, **constants: Any) -> None:
        self._function, self._grid, self._constants = function, (num_programs, 1, 1), constants
        self._known: dict[tuple[bool, ...], tuple[Callable[..., None], list[Any]]] = {}

    def __call__(self, *args: Any, **flags: bool) -> None:
        key = tuple(flags.values())
        if key in self._known:
            start, constants = self._known[key]
            start(*args, *constants)
            return
        named = self._constants | flags
        handle = self._function[self._grid](*args, **named)
        if handle is not None:  # Triton's interpreter has none
            constants = [named[name] for name in self._function.arg_names[len(args) :]]
            self._known[key] = handle[self._grid], constants


class Launch:
    """The parameters of one variant: their tables, and the kernels that run over them."""

    def __init__(
        self, variant: Variant, weights: list[Weight], device: torch.device, moments: Tile, apply: Tile
    ) -> None:
        self.variant, self.weights = variant, weights
        self.moments_grid = grid_of(weights, moments, device)
        self.apply_grid = self.moments_grid if apply == moments else grid_of(weights, apply, device)
        self.pointers = torch.empty(
            len(weights), kernels.NUM_POINTERS.value, dtype=torch.int64, device=device
        )
        # On the host, where addresses are put together, also if torch's default device is another.
        self.items = torch.tensor([w.item for w in weights], device="cpu")
        self.items_there = self.items.to(device)
        sizes = [dtype.itemsize for dtype in (variant.param, variant.grad, variant.state, variant.state)]
        self.offsets = torch.tensor(
            [[*(w.offset * size for size in sizes), 0] for w in weights], device="cpu"
        )
        # The first matrix of a parameter counts its step; the others have no address for it.
        self.counts = torch.tensor([[1, 1, 1, 1, int(w.offset == 0)] for w in weights], device="cpu")
        num_sums = sum(self.moments_grid.num_tiles) if variant.l2 else 0
        self.sums = torch.empty(2, num_sums, device=device).unbind()
        same = {
            "PARAM": _TRITON[variant.param],
            "STATE": _TRITON[variant.state],
            "ALIGNED": variant.aligned,
            "ANY_ROWS": variant.element_wise,
            "BIAS_CORRECTION": variant.bias_correction,
        }
        self._moments = Kernel(
            kernels.moments,
            self.moments_grid.num_programs,
            GRAD=_TRITON[variant.grad],
            L2=variant.l2,
            MAXIMIZE=variant.maximize,
            **same,
            **moments.launch_options,
        )
        self._sum_squares = Kernel(kernels.sum_squares, len(weights), BLOCK=1024)
        self._apply = Kernel(
            kernels.apply,
            self.apply_grid.num_programs,
            WEIGHT_BOUND=variant.weight_bound,
            **same,
            **apply.launch_options,
        )

    def send_addresses(self, addresses: Tensor, sender: Sender) -> None:
        """Put the weights' addresses, from the (5, item) addresses of their parameters, into the table."""
        sender.send(addresses.T[self.items] * self.counts + self.offsets, self.pointers)

    def run_moments(self, shared: Shared, corrections: Tensor | None, control: Control) -> None:
        """The first phase, and for l2 the sums that follow it. ``corrections``: (item, 2), Adam's."""
        grid, nothing = self.moments_grid, shared.hyper
        weight_sizes, update_sizes = self.sums if self.variant.l2 else shared.bits_of_both
        self._moments(
            grid.schedule,
            grid.weights,
            self.pointers,
            shared.hyper,
            nothing if corrections is None else corrections[self.items_there],
            nothing if control.gradient_scale is None else control.gradient_scale,
            nothing if control.skip is None else control.skip.view(torch.uint8),
            weight_sizes,
            update_sizes,
            HAS_SCALE=control.gradient_scale is not None,
            HAS_SKIP=control.skip is not None,
        )
        if self.variant.l2:
            for sums, total in zip(self.sums, shared.sizes_of_both, strict=True):
                self._sum_squares(grid.weights, sums, total)

    def run_apply(
        self, shared: Shared, corrections: Tensor | None, control: Control, statistics: Tensor | None
    ) -> None:
        """The last phase."""
        grid, nothing = self.apply_grid, shared.hyper
        self._apply(
            grid.schedule,
            grid.weights,
            self.pointers,
            shared.hyper,
            nothing if corrections is None else corrections[self.items_there],
            nothing if control.skip is None else control.skip.view(torch.uint8),
            *shared.sizes_of_both,
            nothing if statistics is None else statistics,
            HAS_SKIP=control.skip is not None,
            RECORD=statistics is not None,
        )

    def record(self, statistics: Tensor, names: Sequence[str], recorder: Recorder) -> None:
        """Turn the tiles' statistics into those of the parameters."""
        of_weights = statistics.split(self.apply_grid.num_tiles)
        for weight, of_weight in zip(self.weights, of_weights, strict=True):
            num_clipped, num_bounded, _, _, update_sum_sq, weight_sum_sq = of_weight.sum(0)
            recorder.add(
                names[weight.item],
                UpdateStatistics(
                    weight.rows * weight.columns,
                    num_clipped,
                    num_bounded,
                    # The kernel's extrema drop a NaN; its sums keep it.
                    of_weight[:, 2].amin() + 0 * update_sum_sq,
                    of_weight[:, 3].amax() + 0 * update_sum_sq,
                    update_sum_sq,
                    weight_sum_sq,
                ),
            )


class Sender:
    """Sends small tables to the device without waiting for it."""

    def __init__(self) -> None:
        self._captured: list[Tensor] = []

    @property
    def has_captured(self) -> bool:
        """Whether a CUDA graph sends tables too, so that the device may hold other ones than we sent."""
        return bool(self._captured)

    def send(self, table: Tensor, to: Tensor) -> None:
        if to.device.type != "cuda":
            to.copy_(table)
            return
        # Pinned memory is given back only when the copy is done: the next table cannot overtake this one.
        pinned = table.pin_memory()
        to.copy_(pinned, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(pinned)  # read again at every replay


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
        part.moments()
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
            dense = all(x.is_contiguous() and x.dtype in _TRITON for x in others)
            countable = step.device == param.device and step.dtype == torch.float32
            if param.numel() and dense and countable and refusal(groups[i], param) is None:
                members.setdefault(variant_of(groups[i], param, *others), []).append(i)
            else:
                self._unfused.add(i)
        order = [i for items in members.values() for i in items]
        layout: Plan = plan(
            tuple(
                (
                    algorithm.matrices_of(tensors.params[i].shape, groups[i]["matrix_dims"]),
                    groups[i]["element_wise"],
                )
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

    def moments(self) -> None:
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
    correction = algorithm.bias_correction(steps, *work.group["betas"])
    return torch.stack([torch.as_tensor(x, device=device) for x in correction], 1).float()


def _owners(works: list[Work]) -> list[Tensor]:
    return [owner for work in works for owner in work.owners]


def _options(work: Work) -> tuple[Any, ...]:
    """What the tables depend on besides the tensors."""
    group = work.group
    keys = ("matrix_dims", "element_wise", "norm", "weight_bound", "maximize", "bias_correction")
    return (len(work.params), *(group[key] for key in keys))


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
