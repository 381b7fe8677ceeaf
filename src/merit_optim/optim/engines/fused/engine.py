"""The trust-ratio step in a few Triton launches for the whole model.

What does not change between steps (shapes, places in the buffers, tiles) is kept in tables on the device.
What may change (addresses, learning rates) is compared in every step and sent only if it changed, so that
a step costs little host time however large the model is.
"""

from __future__ import annotations

import array
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.algorithm import Rule
from merit_optim.optim.directions import Direction, Extent, Muon, direction_of
from merit_optim.optim.directions.adam import bias_correction
from merit_optim.optim.engines.fused import kernels
from merit_optim.optim.engines.fused.launch import (
    TRITON,
    HeldDirections,
    HeldLaunch,
    Launch,
    Sender,
    Shared,
    Variant,
    variant_of,
)
from merit_optim.optim.engines.fused.newton_schulz import Iteration, Polar, num_together
from merit_optim.optim.engines.fused.tables import KernelWeight, Tile, weights_of
from merit_optim.optim.engines.part import Formed, Part, Place, Share, Whole
from merit_optim.optim.engines.plan import Plan, plan
from merit_optim.optim.engines.work import Control, Work, names_of, pick
from merit_optim.optim.matrices import Matrices, View
from merit_optim.optim.statistics import Recorder

# The fastest tiles that benchmarks/tiles.py measured on an H200; see docs/performance.md.
MOMENTS_TILE = Tile(rows=32, columns=64, steps=4, warps=4)
APPLY_TILE = Tile(rows=16, columns=64, steps=2, warps=4)

# The most elements in matrices of one launch whose directions are held. Each matrix needs two copies in
# bfloat16 and two or three squares of its smaller side (three if that is at most half of the other): at most
# 8 bytes per element. A larger matrix is processed alone.
MAX_HELD = 2**26

_DTYPE = operator.attrgetter("dtype")

# Offsets within a tile have 32 bits, and within a matrix that is multiplied.
MAX_COLUMNS = 2**24
MAX_MATRIX = 2**31 - 1


def refusal(group: dict[str, Any], param: Tensor) -> str | None:
    """Why a parameter cannot be fused, or None."""
    if param.dtype not in TRITON:
        return f"it has dtype {param.dtype}, not one of {', '.join(map(str, TRITON))}"
    if not param.is_contiguous():
        return "it is not contiguous"
    if param.is_neg():
        return "it is a view that torch negates when it is read"
    matrices = View.of(group).matrices(param.shape)
    if _is_muon(group) and matrices.rows * matrices.columns > MAX_MATRIX:
        return "it has a matrix of 2**31 elements or more"
    if matrices.columns > MAX_COLUMNS and not matrices.is_vector:
        return f"its rows have more than {MAX_COLUMNS} elements"
    return refused_options(group)


def refused_options(group: dict[str, Any]) -> str | None:
    """Why no parameter of a group can be fused, or None."""
    view, rule, direction = View.of(group), Rule.of(group), direction_of(group)
    if view.split is not None and view.split_dim:
        return f"the kernels do not support split={view.split!r} of columns"
    unknown: dict[str, Any] = {"calibrated": rule.calibrated}
    if isinstance(direction, Muon):
        unknown["ns_dtype"] = direction.ns_dtype if direction.ns_dtype != "bfloat16" else None
    elif not direction.HAS_KERNELS:
        unknown["direction"] = direction.NAME
    for option, value in unknown.items():
        if value:
            return f"the kernels do not support {option}={value!r}"
    if group["norm"] == "l2" and group["element_wise"]:
        return "norm='l2' with element_wise=True needs a sum for every row and column, which the kernels lack"
    return None


class StepTensors(NamedTuple):
    """All tensors of a step on one device, in parallel lists."""

    params: list[Tensor]
    grads: list[Tensor]
    firsts: list[Tensor]
    """The first state of each: m of Adam's direction, the momentum of Muon's."""
    seconds: list[Tensor]
    """v of Adam's direction, the averages of NorMuon's. For Muon's the momentum again, unused."""
    steps: list[Tensor]

    @staticmethod
    def of(works: Sequence[Work]) -> StepTensors:
        return StepTensors(
            [x for work in works for x in work.params],
            [x for work in works for x in work.grads],
            [x for work in works for x in work.states[0]],
            [x for work in works for x in work.states[1 if len(work.states) > 1 else 0]],
            [x for work in works for x in work.steps],
        )

    def addresses(self) -> array.array[int]:
        return array.array("q", map(Tensor.data_ptr, chain.from_iterable(self)))


class FusedEngine:
    """Steps on one device, with the tables kept between them."""

    moments_tile = MOMENTS_TILE
    apply_tile = APPLY_TILE
    max_held = MAX_HELD

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sender = Sender()
        self._originals: list[Tensor] = []
        self._options: list[tuple[Any, ...]] = []
        self._addresses: array.array[int] | None = None
        self._hyper_values: array.array[float] | None = None
        self._polars: dict[tuple[int, Iteration], Polar] = {}

    def parts_of(
        self, works: list[Work], control: Control, shares: Mapping[Tensor, Share] | None = None
    ) -> tuple[list[Part], list[Work]]:
        """Update the tables; return the parts to run, and the work that cannot be fused, untouched.

        ``shares``: this rank's share of each sharded parameter whose direction needs whole matrices.
        """
        shares = shares or {}
        if control.gradient_scale is not None:
            # It has float64 where any gradient of the step does, and kernels are compiled for one dtype.
            control = control._replace(gradient_scale=control.gradient_scale.float())
        tensors = StepTensors.of(works)
        addresses = tensors.addresses()
        if not self._still_fits(works, tensors, addresses):
            self._build(works, tensors, shares)
        if self._launches:
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            resend = capturing or self._sender.has_captured
            if resend or addresses != self._addresses:
                table = torch.frombuffer(addresses, dtype=torch.int64).view(len(tensors), -1)
                for launch in self._launches:
                    launch.send_addresses(table, self._sender)
            self._send_hyper(works, resend)
        self._addresses = addresses
        self._shared.sizes.zero_()
        held = [launch for launch in self._launches if isinstance(launch, HeldLaunch)]
        parts: list[Part] = [FusedHeldPart(self, works, control, launch) for launch in held]
        if launches := [launch for launch in self._launches if not isinstance(launch, HeldLaunch)]:
            parts.append(FusedPart(self, works, control, launches))
        return parts, _rest(works, self._unfused)

    def form(self, wholes: Iterable[Whole]) -> list[Formed]:
        """Call the directions' ``whole``, together for matrices of one shape."""
        wholes = list(wholes)
        alike: dict[Iteration, list[int]] = {}
        formed: dict[int, Formed] = {}
        for i, (group, direction, gathered, step) in enumerate(wholes):
            can_be_fused = refused_options(group) is None and gathered[0].numel() <= MAX_MATRIX
            if isinstance(direction, Muon) and can_be_fused:
                iteration = Iteration.of(direction, *gathered[0].shape[1:])
                alike.setdefault(iteration, []).append(i)
            else:
                formed[i] = direction.whole(gathered, step)
        for iteration, members in alike.items():
            num = num_together(len(members), iteration.rows * iteration.columns, self.max_held)
            for some in (members[first : first + num] for first in range(0, len(members), num)):
                key = len(some), iteration
                if key not in self._polars:
                    self._polars[key] = Polar(*key)
                of_all = self._polars[key].whole(torch.cat([wholes[i].gathered[0] for i in some]))
                of_each = zip(*(x.split(1) for x in of_all), strict=True)
                formed.update(zip(some, of_each, strict=True))
        return [formed[i] for i in range(len(wholes))]

    def _still_fits(self, works: list[Work], tensors: StepTensors, addresses: array.array[int]) -> bool:
        """Whether the tables fit these tensors. Gradients may be new, with the same dtypes and layouts."""
        num = len(tensors.params)
        if self._addresses is None or num != len(self._originals):
            return False
        # Compare originals: the local part of a sharded parameter is a new tensor object on every access.
        if not all(map(operator.is_, _originals(works), self._originals)):
            return False
        if [_options(work) for work in works] != self._options:
            return False
        # Even at the same addresses: freed memory can be reused for tensors of another dtype or layout.
        if _kinds(tensors) != self._kinds:
            return False
        if addresses == self._addresses:
            return True
        other_than_grads = (slice(0, num), slice(2 * num, None))
        grads, grads_before = addresses[num : 2 * num], self._addresses[num : 2 * num]
        return all(addresses[at] == self._addresses[at] for at in other_than_grads) and all(
            (now % 16 == 0) == (before % 16 == 0) for now, before in zip(grads, grads_before, strict=True)
        )

    def _build(self, works: list[Work], tensors: StepTensors, shares: Mapping[Tensor, Share]) -> None:
        originals = _originals(works)
        group_numbers = [i for i, work in enumerate(works) for _ in work.params]
        groups = [work.group for work in works for _ in work.params]
        matrices_of: dict[int, tuple[Matrices, ...]] = {}
        for i, of_param in enumerate(zip(*tensors, strict=True)):
            if _can_be_fused(groups[i], originals[i], *of_param):
                view = shares[originals[i]].view if originals[i] in shares else View.of(groups[i])
                matrices_of[i] = view.split_matrices(tensors.params[i].shape)
        self._unfused = set(range(len(originals))) - matrices_of.keys()
        layout: Plan = plan(
            tuple((part, Rule.of(groups[i]).has_rows) for i, parts in matrices_of.items() for part in parts)
        )
        slots = iter(layout.slots)
        self._slots = {i: [next(slots) for _ in parts] for i, parts in matrices_of.items()}
        members: dict[Variant, list[KernelWeight]] = {}
        for i, parts in matrices_of.items():
            share, (param, *others, _) = shares.get(originals[i]), (some[i] for some in tensors)
            is_cut = share is not None and share.is_cut
            if is_cut:  # the parts are gathered, formed and held together
                parts = (View.of(groups[i]).matrices(param.shape),) * len(parts)
            variants = [variant_of(groups[i], part, is_cut, param, *others) for part in parts]
            weights = weights_of(i, self._slots[i], group_numbers[i])
            if isinstance(direction := direction_of(groups[i]), Muon):
                weights = _held(weights, direction, share)
            for w in weights:
                members.setdefault(variants[w.part], []).append(w)
        tiles = self.moments_tile, self.apply_tile
        self._launches: list[Launch] = []
        for variant, weights in members.items():
            if variant.held is None:
                self._launches.append(Launch(variant, weights, self.device, *tiles))
                continue
            num = len(weights)
            if not variant.held.is_cut:  # otherwise all directions are held until they are applied
                num = num_together(num, weights[0].rows * weights[0].columns, self.max_held)
            self._launches += [
                HeldLaunch(variant, weights[first : first + num], self.device, *tiles)
                for first in range(0, len(weights), num)
            ]
        self._shared = Shared(layout.length, len(works), self.device)
        self._originals = originals
        self._options = [_options(work) for work in works]
        self._kinds = _kinds(tensors)
        self._addresses = self._hyper_values = None

    def _send_hyper(self, works: list[Work], resend: bool) -> None:
        values: list[float] = []
        for work in works:
            group = work.group
            beta1, beta2 = (group["momentum"], 0.0) if _is_muon(group) else group["betas"]
            lr, rule = group["lr"], Rule.of(group)
            if isinstance(lr, Tensor):
                # Read on the host; copied into the table below on a device.
                lr = lr.item() if lr.device.type == "cpu" else math.inf
            values += (lr, beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], group["weight_decay"])
            values.append(math.inf if rule.clip is None else rule.clip)
            values += (-math.inf, math.inf) if rule.bounds is None else rule.bounds
        packed, hyper = array.array("f", values), self._shared.hyper
        if resend or packed != self._hyper_values:
            self._sender.send(torch.frombuffer(packed, dtype=torch.float32).view(hyper.shape), hyper)
            self._hyper_values = packed
        for row, work in enumerate(works):
            lr = work.group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                hyper[row, kernels.LR.value].copy_(lr.reshape(()))


class FusedPart:
    """Weights with Adam's direction, updated in two phases with the sizes in between."""

    def __init__(
        self, engine: FusedEngine, works: list[Work], control: Control, launches: Sequence[Launch]
    ) -> None:
        self.engine, self.works, self.control, self.launches = engine, works, control, launches
        # The first matrix of a parameter represents it.
        self.items = [w.item for launch in launches for w in launch.weights if w.is_first]
        self._corrections: list[Tensor | None] = [None] * len(launches)
        if any(launch.variant.bias_correction for launch in launches):
            of_items = torch.cat([_corrections(work, engine.device) for work in works])
            self._corrections = [of_items[launch.items_there] for launch in launches]

    @property
    def places(self) -> list[Place]:
        """Where the sizes of each weight are."""
        params = [param for work in self.works for param in work.params]
        shared, slots = self.engine._shared, self.engine._slots
        return [Place(params[i], shared.sizes, slot) for i in self.items for slot in slots[i]]

    def advance(self) -> None:
        """Update m and v, and measure w and u."""
        with self._on_device():
            self._measure()

    def _measure(self, held: HeldDirections | None = None) -> None:
        for launch, corrections in zip(self.launches, self._corrections, strict=True):
            if launch.variant.norm != "none":  # without ratios, ``apply`` does everything in one pass
                launch.run_moments(self.engine._shared, corrections, self.control, held)

    def apply(self, recorder: Recorder | None) -> None:
        """Update w, and count the step."""
        with self._on_device():
            self._apply(recorder)
        self._mark_changed()

    def _apply(self, recorder: Recorder | None, held: HeldDirections | None = None) -> None:
        shared, control = self.engine._shared, self.control
        for launch, corrections in zip(reversed(self.launches), reversed(self._corrections), strict=True):
            if launch.variant.norm == "none" and held is None:
                launch.run_moments(shared, corrections, control, at_once=recorder is None)
                if recorder is None:
                    continue
            statistics = None
            if recorder is not None:
                num_tiles = sum(launch.apply_grid.num_tiles)
                shape = (num_tiles, kernels.NUM_STATISTICS.value)
                statistics = torch.zeros(shape, dtype=torch.float32, device=self.engine.device)
            launch.run_apply(shared, corrections, control, statistics, held)
            if recorder is not None and statistics is not None:
                names = [name for work in self.works for name in names_of(work)]
                launch.record(statistics, names, recorder)

    def _mark_changed(self) -> None:
        """Tell autograd that kernels wrote, so that a backward pass through old weights raises an error."""
        tensors = (_originals(self.works), *StepTensors.of(self.works))
        for changed in (tensors[0], tensors[1], *tensors[3:]):
            torch.autograd.graph.increment_version([changed[i] for i in self.items])

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the engine's device current: Triton launches there, wherever the tensors are."""
        device = self.engine.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(device)


class FusedHeldPart(FusedPart):
    """Matrices of one shape whose direction needs whole matrices, and is held until w is updated."""

    def __init__(self, engine: FusedEngine, works: list[Work], control: Control, launch: HeldLaunch) -> None:
        super().__init__(engine, works, control, [launch])
        self.launch = launch
        self._corrections = [launch.scales]
        self._held: HeldDirections | None = None

    def advance(self) -> None:
        """Update the momentum, form d, and measure w and u."""
        with self._on_device():
            n_NRC = self.launch.run_momentum(self.engine._shared, self.control)
            self._hold(self.launch.polar.whole(n_NRC))

    @property
    def originals(self) -> list[Tensor]:
        originals = _originals(self.works)
        return [originals[i] for i in self.items]

    @property
    def is_cut(self) -> bool:
        held = self.launch.variant.held
        return held is not None and held.is_cut

    def before(self) -> list[tuple[Tensor, ...]]:
        """Update the momentum, and return N, the input of the directions."""
        with self._on_device():
            n_NRC = self.launch.run_momentum(self.engine._shared, self.control)
        return [(some_NRC,) for some_NRC in n_NRC.split(self.launch.nums)]

    def after(self, formed: Sequence[Formed]) -> None:
        """Hold the directions, and measure w and u."""
        x, *of_outputs = zip(*formed, strict=True)
        with self._on_device():
            self._hold([torch.cat(x), *(torch.cat([y.flatten() for y in some]) for some in of_outputs)])

    def _hold(self, formed: Sequence[Tensor]) -> None:
        self._held = self.launch.hold(formed, self.control)
        self._measure(self._held)

    def apply(self, recorder: Recorder | None) -> None:
        with self._on_device():
            self._apply(recorder, self._held)
        self._held = None
        self._mark_changed()


def _corrections(work: Work, device: torch.device) -> Tensor:
    """(item, 2): Adam's bias corrections for the current step, which is counted at its end."""
    if _is_muon(work.group):
        return torch.ones(len(work.params), 2, dtype=torch.float32, device=device)
    steps = torch.stack(work.steps).to(device) + 1
    correction = bias_correction(steps, *work.group["betas"])
    return torch.stack([torch.as_tensor(x, device=device) for x in correction], 1).float()


def _is_muon(group: dict[str, Any]) -> bool:
    """By its direction alone: a group may also have options of other directions, such as betas."""
    return isinstance(direction_of(group), Muon)


def _originals(works: list[Work]) -> list[Tensor]:
    return [original for work in works for original in work.originals]


def _options(work: Work) -> tuple[Any, ...]:
    """What the tables depend on besides the tensors."""
    group = work.group
    return (
        len(work.params),
        *Rule.of(group)[1:],
        *View.of(group),
        group["maximize"],
        *_compiled_for(direction_of(group)),
    )


def _compiled_for(direction: Direction) -> tuple[Any, ...]:
    if isinstance(direction, Muon):
        d = direction
        scaled = d.scale, d.transposed, d.neuron_beta
        return d.NAME, d.nesterov, d.ns_steps, d.coefficients, d.ns_dtype, d.eps, *scaled
    return direction.NAME, getattr(direction, "bias_correction", None)


def _held(weights: list[KernelWeight], direction: Muon, share: Share | None) -> list[KernelWeight]:
    """The matrices of a parameter whose directions are held, with those of which they are a ``share``."""
    held: list[KernelWeight] = []
    averages_at = 0
    for w in weights:
        extent = Extent(w.rows, w.columns) if share is None else share.extents[w.part]
        scale = direction.factor(extent.num_rows, extent.num_columns)
        held.append(w._replace(extent=extent, scale=scale, averages_at=averages_at))
        averages_at += (extent.num_rows, extent.num_columns)[direction.output_dim - 1]
    return held


def _is_plain(x: Tensor) -> bool:
    """Whether memory has its elements in order, as they are. Gradients may be negated when they are read."""
    return x.is_contiguous() and not x.is_neg()


def _can_be_fused(
    group: dict[str, Any],
    original: Tensor,
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
) -> bool:
    """Whether the tensors of a parameter are what the kernels assume. State may come from anywhere."""
    if not param.numel() or refusal(group, param) is not None:
        return False
    if any(x.device != param.device for x in (grad, first, second, step)):
        return False
    if not all(_is_plain(x) and x.dtype in TRITON for x in (grad, first, second)):
        return False
    if first.dtype != second.dtype or step.dtype != torch.float32:
        return False
    num, direction, view = param.numel(), direction_of(group), View.of(group)
    num_second = num
    if isinstance(direction, Muon) and direction.neuron_beta is not None:
        num_outputs = view.matrices(original.shape).shape[direction.output_dim]  # of whole matrices
        num_second = view.matrices(param.shape).num * num_outputs
    return (grad.numel(), first.numel(), second.numel()) == (num, num, num_second)


def _kinds(tensors: StepTensors) -> tuple[list[Any], ...]:
    """What may change at the same addresses."""
    params, grads, *state = tensors[:4]
    dtypes = (list(map(_DTYPE, x)) for x in (grads, *state))
    layouts = (list(map(Tensor.is_contiguous, x)) for x in (params, grads))
    return *dtypes, *layouts, list(map(Tensor.is_neg, grads))


def _rest(works: list[Work], unfused: set[int]) -> list[Work]:
    """The parameters that were not fused."""
    rest, begin = [], 0
    for work in works if unfused else ():
        if keep := [i for i in range(len(work.params)) if begin + i in unfused]:
            rest.append(pick(work, keep))
        begin += len(work.params)
    return rest
