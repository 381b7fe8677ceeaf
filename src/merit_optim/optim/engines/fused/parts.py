"""The parts of a fused step: weights that are updated together, and the launches for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from merit_optim.optim.axes.directions.adam import bias_correction
from merit_optim.optim.axes.holds import Products
from merit_optim.optim.engines.fused import layout
from merit_optim.optim.engines.fused.known import is_muon
from merit_optim.optim.engines.fused.launch import HeldDirections, HeldLaunch, Launch, Shared
from merit_optim.optim.engines.fused.tables import StepTensors
from merit_optim.optim.engines.part import Formed, Place
from merit_optim.optim.engines.plan import Slot
from merit_optim.optim.engines.work import Control, Work, names_of, originals_of
from merit_optim.optim.statistics import Recorder


class FusedPart:
    """Weights with Adam's direction, updated in two phases with the sizes in between."""

    def __init__(
        self,
        shared: Shared,
        slots: Mapping[int, list[Slot]],
        works: list[Work],
        control: Control,
        launches: Sequence[Launch],
    ) -> None:
        self.shared, self.slots, self.device = shared, slots, shared.sizes.device
        self.works, self.control, self.launches = works, control, launches
        # The first matrix of a parameter represents it.
        self.items = [w.item for launch in launches for w in launch.weights if w.is_first]
        self._corrections: list[Tensor | None] = [None] * len(launches)
        if any(launch.variant.bias_correction for launch in launches):
            of_items = torch.cat([_corrections(work, self.device) for work in works])
            self._corrections = [of_items[launch.items_there] for launch in launches]

    @property
    def places(self) -> list[Place]:
        """Where the sizes of each weight are."""
        params = [param for work in self.works for param in work.params]
        return [Place(params[i], self.shared.sizes, slot) for i in self.items for slot in self.slots[i]]

    @property
    def is_cut(self) -> bool:
        """Adam's direction needs no whole matrices."""
        return False

    @property
    def has_products(self) -> bool:
        """Adam's direction has none in the kernels."""
        return False

    def advance(self) -> None:
        """Update m and v, and measure w and u."""
        with self._on_device():
            self._measure()

    def _measure(self, held: HeldDirections | None = None) -> None:
        for launch, corrections in zip(self.launches, self._corrections, strict=True):
            # Without sizes and products, ``apply`` does everything in one pass.
            if launch.variant.norm is not None or launch.variant.hold == "sphere":
                launch.run_moments(self.shared, corrections, self.control, held)

    def apply(self, recorder: Recorder | None) -> None:
        """Update w, and count the step."""
        with self._on_device():
            self._apply(recorder)
        self._mark_changed()

    def _apply(
        self, recorder: Recorder | None, held: HeldDirections | None = None, shares: Tensor | None = None
    ) -> None:
        shared, control = self.shared, self.control
        for launch, corrections in zip(reversed(self.launches), reversed(self._corrections), strict=True):
            if launch.variant.norm is None and held is None:
                launch.run_moments(shared, corrections, control, at_once=recorder is None)
                if recorder is None:
                    continue
            statistics = None
            if recorder is not None:
                num_tiles = sum(launch.apply_grid.num_tiles)
                shape = (num_tiles, layout.NUM_STATISTICS.value)
                statistics = torch.zeros(shape, dtype=torch.float32, device=self.device)
            launch.run_apply(shared, corrections, control, statistics, held, shares)
            if recorder is not None and statistics is not None:
                names = [name for work in self.works for name in names_of(work)]
                launch.record(statistics, names, recorder)

    def _mark_changed(self) -> None:
        """Tell autograd that kernels wrote, so that a backward pass through old weights raises an error."""
        tensors = (originals_of(self.works), *StepTensors.of(self.works))
        for changed in (tensors[0], tensors[1], *tensors[3:]):
            torch.autograd.graph.increment_version([changed[i] for i in self.items])

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the weights' device current: Triton launches there, wherever the tensors are."""
        device = self.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(device)


class FusedHeldPart(FusedPart):
    """Matrices of one shape whose direction needs whole matrices, and is held until w is updated."""

    def __init__(
        self,
        shared: Shared,
        slots: Mapping[int, list[Slot]],
        works: list[Work],
        control: Control,
        launch: HeldLaunch,
    ) -> None:
        super().__init__(shared, slots, works, control, [launch])
        self.launch = launch
        self._corrections = [launch.scales]
        self._held: HeldDirections | None = None
        self._lines: Tensor | None = None
        self.products: dict[tuple[Tensor, int], Products] = {}

    def advance(self) -> None:
        """Update the momentum, form d, and measure w and u."""
        with self._on_device():
            n_NRC = self.launch.run_momentum(self.shared, self.control)
            self._hold(self.launch.polar.whole(n_NRC))

    @property
    def originals(self) -> list[Tensor]:
        originals = originals_of(self.works)
        return [originals[i] for i in self.items]

    @property
    def is_cut(self) -> bool:
        held = self.launch.variant.held
        return held is not None and held.is_cut

    def before(self) -> list[tuple[Tensor, ...]]:
        """Update the momentum, and return N, the input of the directions."""
        with self._on_device():
            n_NRC = self.launch.run_momentum(self.shared, self.control)
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
            self._change(recorder, self._sum_lines())

    def _sum_lines(self) -> Tensor | None:
        if self.launch.spheres is None:
            return None
        assert self._held is not None and self._held.products is not None
        return self.launch.spheres.lines(self._held.products)

    def _change(self, recorder: Recorder | None, lines: Tensor | None) -> None:
        """Change w, with the products of all lines of the whole matrices."""
        shares = None
        if self.launch.spheres is not None:
            assert lines is not None
            shares = self.launch.spheres.settle(lines, self.shared.hyper, self.control)
            radii = [x for work in self.works for x in work.states[-1]]
            torch.autograd.graph.increment_version([radii[i] for i in self.items])
        self._apply(recorder, self._held, shares)
        self._held = None
        self._mark_changed()

    # --- spheres of which ranks have parts --------------------------------------------------------------

    @property
    def has_products(self) -> bool:
        return self.launch.spheres is not None

    @property
    def _keys(self) -> list[tuple[Tensor, int]]:
        """The parameter of each matrix, and which of its parts it is."""
        originals = originals_of(self.works)
        return [(originals[w.item], w.part) for w in self.launch.weights]

    def scale(self, recorder: Recorder | None) -> None:  # noqa: ARG002  # the interface
        """Sum the products of this rank's rows."""
        with self._on_device():
            self._lines = self._sum_lines()
        assert self._lines is not None
        of_parts: dict[tuple[Tensor, int], list[Tensor]] = {}
        rows = [w.rows for w in self.launch.weights]
        for key, lines in zip(self._keys, self._lines[:, : sum(rows)].split(rows, 1), strict=True):
            of_parts.setdefault(key, []).append(lines)
        self.products = {
            key: Products(*torch.stack(some, 1).unsqueeze(3).unbind()) for key, some in of_parts.items()
        }

    def settle(self, recorder: Recorder | None) -> None:
        """Change w, with the products of all ranks."""
        stacked = {key: iter(torch.stack(x).flatten(2).unbind(1)) for key, x in self.products.items()}
        lines = torch.cat([next(stacked[key]) for key in self._keys], 1)
        assert self._lines is not None
        self._lines[:, : lines.shape[1]] = lines
        with self._on_device():
            self._change(recorder, self._lines)


def _corrections(work: Work, device: torch.device) -> Tensor:
    """(item, 2): Adam's bias corrections for the current step, which is counted at its end."""
    if is_muon(work.spec.direction):
        return torch.ones(len(work.params), 2, dtype=torch.float32, device=device)
    steps = torch.stack(work.steps).to(device) + 1
    correction = bias_correction(steps, *work.spec.direction.betas)
    return torch.stack([torch.as_tensor(x, device=device) for x in correction], 1).float()
