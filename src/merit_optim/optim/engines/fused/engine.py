"""The trust-ratio step in a few Triton launches for the whole model.

What does not change between steps (shapes, places in the buffers, tiles) is kept in tables on the device.
What may change (addresses, learning rates) is compared in every step and sent only if it changed, so that
a step costs little host time however large the model is.
"""

from __future__ import annotations

import array
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from merit_optim.optim.axes.directions import MatrixDirection, Muon
from merit_optim.optim.axes.holds import Shares, Sphere
from merit_optim.optim.engines.fused import layout
from merit_optim.optim.engines.fused.known import is_muon, is_sphere
from merit_optim.optim.engines.fused.launch import (
    HeldLaunch,
    Launch,
    Sender,
    Shared,
    Variant,
    variant_of,
)
from merit_optim.optim.engines.fused.newton_schulz import Iteration, Polar, num_together
from merit_optim.optim.engines.fused.parts import FusedHeldPart, FusedPart
from merit_optim.optim.engines.fused.refusals import can_be_formed, can_be_fused
from merit_optim.optim.engines.fused.tables import KernelWeight, StepTensors, Tile, weights_of
from merit_optim.optim.engines.part import Formed, Part, Share, Whole
from merit_optim.optim.engines.plan import Plan, plan
from merit_optim.optim.engines.work import Control, Work, originals_of, pick
from merit_optim.optim.matrices import Extent, Matrices
from merit_optim.optim.spec import Spec

# The fastest tiles that benchmarks/tiles.py measured on an H200; see docs/performance.md.
MOMENTS_TILE = Tile(rows=32, columns=64, steps=4, warps=4)
APPLY_TILE = Tile(rows=16, columns=64, steps=2, warps=4)

# The most elements in matrices of one launch whose directions are held. Each matrix needs two copies in
# bfloat16 and two or three squares of its smaller side (three if that is at most half of the other): at most
# 8 bytes per element. A larger matrix is processed alone.
MAX_HELD = 2**26

_DTYPE = operator.attrgetter("dtype")


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
        tables = self._shared, self._slots
        parts: list[Part] = [FusedHeldPart(*tables, works, control, launch) for launch in held]
        if launches := [launch for launch in self._launches if not isinstance(launch, HeldLaunch)]:
            parts.append(FusedPart(*tables, works, control, launches))
        return parts, _rest(works, self._unfused)

    def form(self, wholes: Iterable[Whole]) -> list[Formed]:
        """Call the directions' ``whole``, together for matrices of one shape."""
        wholes = list(wholes)
        alike: dict[Iteration, list[int]] = {}
        formed: dict[int, Formed] = {}
        for i, (spec, gathered, step) in enumerate(wholes):
            direction = spec.direction
            assert isinstance(direction, MatrixDirection)
            if is_muon(direction) and can_be_formed(spec, gathered[0]):
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
        if not all(map(operator.is_, originals_of(works), self._originals)):
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
        originals = originals_of(works)
        group_numbers = [i for i, work in enumerate(works) for _ in work.params]
        specs: list[Spec] = [work.spec for work in works for _ in work.params]
        radii = [x if is_sphere(work.spec.hold) else None for work in works for x in work.states[-1]]
        matrices_of: dict[int, tuple[Matrices, ...]] = {}
        for i, of_param in enumerate(zip(*tensors, radii, strict=True)):
            if can_be_fused(specs[i], originals[i], *of_param):
                view = shares[originals[i]].view if originals[i] in shares else specs[i].view
                matrices_of[i] = view.split_matrices(tensors.params[i].shape)
        self._unfused = set(range(len(originals))) - matrices_of.keys()
        layout: Plan = plan(
            tuple((part, specs[i].ratio.has_rows) for i, parts in matrices_of.items() for part in parts)
        )
        slots = iter(layout.slots)
        self._slots = {i: [next(slots) for _ in parts] for i, parts in matrices_of.items()}
        members: dict[Variant, list[KernelWeight]] = {}
        for i, parts in matrices_of.items():
            share, (param, *others, _) = shares.get(originals[i]), (some[i] for some in tensors)
            is_cut = share is not None and share.is_cut
            if is_cut:  # the parts are gathered, formed and held together
                parts = (specs[i].view.matrices(param.shape),) * len(parts)
            variants = [variant_of(specs[i], part, is_cut, param, *others) for part in parts]
            weights = weights_of(i, self._slots[i], group_numbers[i])
            if is_muon(direction := specs[i].direction):
                weights = _held(weights, direction, share)
                if is_sphere(hold := specs[i].hold):
                    weights = _on_spheres(weights, hold, radii[i])
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
            direction, ratio, lr = work.spec.direction, work.spec.ratio, work.lr
            decay = work.weight_decay
            if is_muon(direction):
                beta1, beta2, eps = direction.momentum, 0.0, 0.0
            else:
                (beta1, beta2), eps = direction.betas, direction.eps
            if isinstance(lr, Tensor):
                # Read on the host; copied into the table below on a device.
                lr = lr.item() if lr.device.type == "cpu" else math.inf
            if isinstance(hold := work.spec.hold, Shares):
                decay, lr = hold.shares(lr, decay)
            values += (lr, beta1, 1 - beta1, beta2, 1 - beta2, eps, decay)
            values.append(math.inf if ratio.clip is None else ratio.clip)
            bounds = None if ratio.measures is None else ratio.ratio_bounds  # of 1 there are none
            values += bounds or (-math.inf, math.inf)
        packed, hyper = array.array("f", values), self._shared.hyper
        if resend or packed != self._hyper_values:
            self._sender.send(torch.frombuffer(packed, dtype=torch.float32).view(hyper.shape), hyper)
            self._hyper_values = packed
        for row, work in enumerate(works):
            if isinstance(work.lr, Tensor) and work.lr.device.type != "cpu":
                lr, hold = work.lr.reshape(()), work.spec.hold
                if isinstance(hold, Shares):
                    of_weight, lr = hold.shares(lr, work.weight_decay)
                    hyper[row, layout.WEIGHT_DECAY.value].copy_(of_weight)
                hyper[row, layout.LR.value].copy_(lr)


def _options(work: Work) -> tuple[Any, ...]:
    """What the tables depend on besides the tensors of ``StepTensors``."""
    options = len(work.params), work.spec.fixed
    if not is_sphere(work.spec.hold):
        return options
    return *options, work.spec.ratio.clip, [(x.data_ptr(), x.dtype) for x in work.states[-1]]


def _held(weights: list[KernelWeight], direction: Muon, share: Share | None) -> list[KernelWeight]:
    """The matrices of a parameter whose directions are held, with those of which they are a ``share``."""
    held: list[KernelWeight] = []
    averages_at = 0
    for w in weights:
        extent = Extent.whole(w.rows, w.columns) if share is None else share.extents[w.part]
        scale = direction.factor(extent.num_rows, extent.num_columns)
        held.append(w._replace(extent=extent, scale=scale, averages_at=averages_at))
        averages_at += (extent.num_rows, extent.num_columns)[direction.output_dim - 1]
    return held


def _on_spheres(weights: list[KernelWeight], hold: Sphere, radius: Tensor | None) -> list[KernelWeight]:
    """The matrices of a parameter, with the places of their radii."""
    assert radius is not None
    held: list[KernelWeight] = []
    at = radius.data_ptr()
    for w in weights:
        assert w.extent is not None
        named = 0.0 if hold.gain is None else hold.named_radius(w.extent)
        held.append(w._replace(radius_at=at, named_radius=named))
        at += w.extent.num_rows * radius.itemsize
    return held


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
