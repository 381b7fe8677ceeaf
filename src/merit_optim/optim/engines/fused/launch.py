"""Launches: the parameters of one variant, their tables on the device, and their kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from merit_optim.optim.axes.directions import Adam
from merit_optim.optim.axes.directions.muon import NEURON_EPS
from merit_optim.optim.axes.ratios import Merit
from merit_optim.optim.engines.fused import direction_kernels, kernels, layout
from merit_optim.optim.engines.fused.compiled import Kernel
from merit_optim.optim.engines.fused.known import branch_of, is_muon
from merit_optim.optim.engines.fused.newton_schulz import Iteration, Polar
from merit_optim.optim.engines.fused.spheres import Spheres
from merit_optim.optim.engines.fused.tables import KernelWeight, Tile, grid_of
from merit_optim.optim.engines.work import Control
from merit_optim.optim.matrices import Matrices
from merit_optim.optim.spec import Spec
from merit_optim.optim.statistics import Recorder, UpdateStatistics

TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

# The dtype in which a held direction is computed and stored.
HELD_DTYPE = torch.bfloat16

# Outputs that a program equalizes at a time.
BLOCK_OUTPUTS = 1024


class Held(NamedTuple):
    """What the directions of one launch have in common if they need whole matrices."""

    iteration: Iteration
    nesterov: bool
    is_cut: bool
    """Whether no rank has the whole matrices, so that they are gathered on their owners."""
    neuron_beta: float | None


class HeldDirections(NamedTuple):
    """The directions of one launch, still to scale."""

    d_NRC: Tensor
    factors: Tensor | None
    """NorMuon's, of all outputs."""
    products: Tensor | None = None
    """For spheres, those of w and d over each row of each panel of columns."""


class Variant(NamedTuple):
    """What kernels are compiled for. Parameters of one variant share a launch."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    aligned: bool
    """Whether 16-byte accesses are possible everywhere."""
    has_rows: bool
    norm: str | None
    weight_bound: bool
    maximize: bool
    bias_correction: bool
    hold: str | None
    """How the kernels change w."""
    held: Held | None


def variant_of(
    spec: Spec,
    matrices: Matrices,
    is_cut: bool,
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
) -> Variant:
    """The variant of a parameter's matrices, or of those that it is split into."""
    ratio, direction = spec.ratio, spec.direction
    tensors = (param, grad, first, second)
    held = None
    if is_muon(direction):
        iteration = Iteration.of(direction, matrices.rows, matrices.columns)
        held = Held(iteration, direction.nesterov, is_cut, direction.neuron_beta)
    return Variant(
        param.dtype,
        grad.dtype,
        first.dtype,
        matrices.columns % 16 == 0 and all(x.data_ptr() % 16 == 0 for x in tensors),
        ratio.has_rows,
        ratio.measures,
        not isinstance(ratio, Merit) or ratio.weight_bound,
        spec.maximize,
        isinstance(direction, Adam) and direction.bias_correction,
        branch_of(spec.hold),
        held,
    )


class Shared:
    """Buffers that all launches of a step share."""

    def __init__(self, length: int, num_groups: int, device: torch.device) -> None:
        self.sizes = torch.zeros(2, length, dtype=torch.float32, device=device)
        """The sizes of weights and of updates, laid out by ``plan``."""
        self.sizes_of_both = self.sizes.unbind()
        self.bits_of_both = self.sizes.view(torch.int32).unbind()
        self.hyper = torch.empty(num_groups, layout.NUM_HYPER.value, dtype=torch.float32, device=device)


class Launch:
    """The parameters of one variant, with their tables and kernels."""

    def __init__(
        self, variant: Variant, weights: list[KernelWeight], device: torch.device, moments: Tile, apply: Tile
    ) -> None:
        self.variant, self.weights = variant, weights
        self.moments_grid = grid_of(weights, moments, device)
        self.apply_grid = self.moments_grid if apply == moments else grid_of(weights, apply, device)
        self.pointers = torch.empty(len(weights), layout.NUM_POINTERS.value, dtype=torch.int64, device=device)
        # Addresses are assembled on the host, even if torch's default device is another.
        self.items = torch.tensor([w.item for w in weights], device="cpu")
        self.items_there = self.items.to(device)
        sizes = [dtype.itemsize for dtype in (variant.param, variant.grad, variant.state, variant.state)]
        self.offsets = torch.tensor(
            [[*(w.offset * size for size in sizes), 0] for w in weights], device="cpu"
        )
        # The first matrix of a parameter counts its step; the others get a null address for it.
        self.counts = torch.tensor([[1, 1, 1, 1, int(w.is_first)] for w in weights], device="cpu")
        num_sums = sum(self.moments_grid.num_tiles) if variant.norm == "l2" else 0
        self.sums = torch.empty(2, num_sums, dtype=torch.float32, device=device).unbind()
        same = {
            "PARAM": TRITON[variant.param],
            "STATE": TRITON[variant.state],
            "HELD": variant.held is not None,
            "OUTPUT_DIM": None if variant.held is None else variant.held.iteration.output_dim,
            "HOLD": variant.hold,
            "ALIGNED": variant.aligned,
            "ANY_ROWS": variant.has_rows,
            "BIAS_CORRECTION": variant.bias_correction,
        }
        self._moments = Kernel(
            kernels.moments,
            self.moments_grid.num_programs,
            GRAD=TRITON[variant.grad],
            MEASURE=variant.norm is not None,
            L2=variant.norm == "l2",
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
        """Send the weights' addresses, computed from the (5, item) addresses of their parameters."""
        sender.send(addresses.T[self.items] * self.counts + self.offsets, self.pointers)

    def run_moments(
        self,
        shared: Shared,
        corrections: Tensor | None,
        control: Control,
        held: HeldDirections | None = None,
        at_once: bool = False,
    ) -> None:
        """Run the first phase, and for l2 the sums that follow it.

        ``at_once``: also run the last phase, if nothing is measured.

        ``corrections``: (weight, 2), Adam's; for a ``held`` direction, the first one is its scale.
        """
        grid, nothing = self.moments_grid, shared.hyper
        weight_sizes, update_sizes = self.sums if self.variant.norm == "l2" else shared.bits_of_both
        if held is not None and held.products is not None:
            weight_sizes = held.products
        self._moments(
            grid.schedule,
            grid.weights,
            self.pointers,
            shared.hyper,
            nothing if corrections is None else corrections,
            nothing if control.gradient_scale is None else control.gradient_scale,
            nothing if control.skip is None else control.skip.view(torch.uint8),
            nothing if held is None else held.d_NRC,
            nothing if held is None or held.factors is None else held.factors,
            weight_sizes,
            update_sizes,
            HAS_SCALE=control.gradient_scale is not None,
            HAS_SKIP=control.skip is not None,
            AT_ONCE=at_once,
        )
        if self.variant.norm == "l2":
            for sums, total in zip(self.sums, shared.sizes_of_both, strict=True):
                self._sum_squares(grid.weights, sums, total)

    def run_apply(
        self,
        shared: Shared,
        corrections: Tensor | None,
        control: Control,
        statistics: Tensor | None,
        held: HeldDirections | None = None,
        shares: Tensor | None = None,
    ) -> None:
        """Run the last phase. ``shares``: a and b of each weight on a sphere."""
        grid, nothing = self.apply_grid, shared.hyper
        self._apply(
            grid.schedule,
            grid.weights,
            self.pointers,
            shared.hyper,
            nothing if corrections is None else corrections,
            nothing if control.skip is None else control.skip.view(torch.uint8),
            nothing if held is None else held.d_NRC,
            nothing if held is None or held.factors is None else held.factors,
            *shared.sizes_of_both,
            nothing if statistics is None else statistics,
            nothing if shares is None else shares,
            HAS_SKIP=control.skip is not None,
            RECORD=statistics is not None,
        )

    def record(self, statistics: Tensor, names: Sequence[str], recorder: Recorder) -> None:
        """Combine the statistics of tiles into those of parameters."""
        of_weights = statistics.split(self.apply_grid.num_tiles)
        for weight, of_weight in zip(self.weights, of_weights, strict=True):
            if not weight.rows:
                continue
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


class HeldLaunch(Launch):
    """Matrices whose direction needs whole matrices, and is held.

    They have one shape, or, if ranks share them, the weights that they are split from have one.
    """

    def __init__(
        self, variant: Variant, weights: list[KernelWeight], device: torch.device, moments: Tile, apply: Tile
    ) -> None:
        assert variant.held is not None
        iteration = variant.held.iteration
        rows, columns = iteration[:2]
        nums_here = [w.columns if iteration.output_dim == 2 else w.rows for w in weights]
        *rows_before, num_rows = accumulate((w.rows for w in weights), initial=0)
        *factors_at, self._num_factors = accumulate(nums_here, initial=0)
        weights = [
            w._replace(held_at=before * columns, factors_at=at)
            for w, before, at in zip(weights, rows_before, factors_at, strict=True)
        ]
        super().__init__(variant, weights, device, moments, apply)
        self.shape = (num_rows // rows, rows, columns)
        num_rows_of: Counter[int] = Counter()
        for w in weights:
            num_rows_of[w.item] += w.rows
        self.nums = [num // rows for num in num_rows_of.values()]
        """The number of matrices of this shape of each parameter."""
        self.scales = torch.tensor([[w.scale, 1.0] for w in weights], dtype=torch.float32, device=device)
        self.polar = Polar(self.shape[0], iteration)
        self._momentum = Kernel(
            direction_kernels.momentum,
            self.moments_grid.num_programs,
            GRAD=TRITON[variant.grad],
            STATE=TRITON[variant.state],
            ALIGNED=variant.aligned,
            MAXIMIZE=variant.maximize,
            NESTEROV=variant.held.nesterov,
            **moments.launch_options,
        )
        self._neuron_beta = variant.held.neuron_beta
        if self._neuron_beta is not None:
            self._outputs = torch.tensor(_outputs_of(weights, iteration.output_dim), device=device)
            # NorMuon's averages are where v of Adam's direction would be.
            averages_at = torch.tensor([w.averages_at for w in weights], device="cpu")
            self.offsets[:, 3] = averages_at * variant.state.itemsize
            self._equalize = Kernel(
                direction_kernels.equalize,
                len(weights),
                STATE=TRITON[variant.state],
                BLOCK=BLOCK_OUTPUTS,
                enable_fp_fusion=False,  # directions/muon.py says why
            )

        self.spheres = None
        if variant.hold == "sphere":
            self.spheres = Spheres(weights, moments.columns, TRITON[variant.state], device)

    def run_momentum(self, shared: Shared, control: Control) -> Tensor:
        """Update the momentum, and return N, the input of the direction, as (N, R, C)."""
        grid, nothing = self.moments_grid, shared.hyper
        n_NRC = torch.empty(self.shape, dtype=HELD_DTYPE, device=shared.hyper.device)
        self._momentum(
            grid.schedule,
            grid.weights,
            self.pointers,
            shared.hyper,
            nothing if control.gradient_scale is None else control.gradient_scale,
            nothing if control.skip is None else control.skip.view(torch.uint8),
            n_NRC,
            HAS_SCALE=control.gradient_scale is not None,
            HAS_SKIP=control.skip is not None,
        )
        return n_NRC

    def hold(self, formed: Sequence[Tensor | None], control: Control) -> HeldDirections:
        """The directions from the results of ``whole``; for NorMuon, also update the averages.

        The mean squares are those of all outputs of each whole matrix, one after another.
        """
        x_NRC, *of_outputs = formed
        assert x_NRC is not None
        products = None if self.spheres is None else self.spheres.products()
        if self._neuron_beta is None:
            return HeldDirections(x_NRC, None, products)
        (mean_sq,), beta = of_outputs, self._neuron_beta
        assert mean_sq is not None
        factors = torch.empty(self._num_factors, dtype=torch.float32, device=x_NRC.device)
        self._equalize(
            self._outputs,
            self.pointers,
            mean_sq,
            factors,
            factors if control.skip is None else control.skip.view(torch.uint8),
            beta,
            1 - beta,
            NEURON_EPS,
            HAS_SKIP=control.skip is not None,
        )
        return HeldDirections(x_NRC, factors, products)


def _outputs_of(weights: Sequence[KernelWeight], output_dim: int | None) -> list[tuple[int, ...]]:
    """(weight, NUM_OUTPUT_FIELDS)."""
    table: list[tuple[int, ...]] = []
    mean_sq_at = 0
    for w in weights:
        assert w.extent is not None
        num_rows, num_columns, rows, columns = w.extent
        by_rows, by_columns = (
            (num_rows, num_columns, rows, w.rows),
            (num_columns, num_rows, columns, w.columns),
        )
        num_outputs, num_inputs, here, num_here = by_columns if output_dim == 2 else by_rows
        table.append((num_outputs, num_inputs, mean_sq_at, w.factors_at, here.start or 0, num_here))
        mean_sq_at += num_outputs
    return table


class Sender:
    """Sends small tables to the device without waiting for it."""

    def __init__(self) -> None:
        self._captured: list[Tensor] = []

    @property
    def has_captured(self) -> bool:
        """Whether a CUDA graph sends tables too, so that the device may hold others than were sent last."""
        return bool(self._captured)

    def send(self, table: Tensor, to: Tensor) -> None:
        if to.device.type != "cuda":
            to.copy_(table)
            return
        # Pinned memory is reused only after the copy is done, so the next table cannot overwrite this one.
        pinned = table.pin_memory()
        to.copy_(pinned, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(pinned)  # read again at every replay
