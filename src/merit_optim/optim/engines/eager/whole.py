"""Any direction, ratio and hold, by their own functions: one weight at a time, whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.axes.directions import MatrixDirection, Sent
from merit_optim.optim.axes.holds import Move, Products
from merit_optim.optim.axes.ratios.ratio import quotient, undefined
from merit_optim.optim.engines.eager import limits
from merit_optim.optim.engines.eager.blocks import in_dtype, reduce_into
from merit_optim.optim.engines.eager.stored import Block, Stored
from merit_optim.optim.engines.part import Formed, Place
from merit_optim.optim.engines.plan import pieces, plan
from merit_optim.optim.engines.work import Control, is_true, prepared_gradient, scalar, store
from merit_optim.optim.matrices import Extent
from merit_optim.optim.statistics import Recorder, UpdateStatistics, measure


class Changing(NamedTuple):
    """A matrix that this step changes, or several of one shape: what is known of it so far."""

    number: int
    u_NRC: Tensor
    """The update, and once it is scaled and clipped c."""
    statistics: UpdateStatistics | None = None


class WholePart:
    """One weight. Its update is formed once, and held until the weight is changed.

    A step takes three phases: ``advance``, ``scale`` and ``settle``. Ranks that share the weight agree on the
    sizes after the first, and on a hold's products after the second.
    """

    def __init__(self, stored: Stored, device: torch.device, dtype: torch.dtype, control: Control) -> None:
        self.stored, self.spec, self.dtype, self.control = stored, stored.spec, dtype, control
        self.layout = plan(tuple((matrices, self.spec.ratio.has_rows) for matrices in stored.matrices))
        self.sizes = torch.zeros(2, self.layout.length, dtype=dtype, device=device)
        self.tensors = list(stored.cut(iter(enumerate(self.layout.slots))))
        self.changing: list[Changing] = []
        self.products: dict[tuple[Tensor, int], Products] = {}
        """What the hold needs to know of each matrix, by its parameter and number."""

    @property
    def places(self) -> list[Place]:
        """Where the sizes of each matrix are kept."""
        return [Place(self.stored.item.param, self.sizes, tensors.slot) for tensors in self.tensors]

    @property
    def originals(self) -> list[Tensor]:
        return [self.stored.item.original]

    @property
    def is_cut(self) -> bool:
        needs_matrices = isinstance(self.spec.direction, MatrixDirection)
        return needs_matrices and self.stored.share is not None and self.stored.share.is_cut

    @property
    def has_products(self) -> bool:
        return self.line_dim is not None

    @property
    def line_dim(self) -> int | None:
        """The lines of which the hold needs products, which ranks may share."""
        return self.spec.hold.line_dim(self.spec.view)

    # --- the first phase ------------------------------------------------------------------------------

    def advance(self) -> None:
        """Update the state of the direction, form u, and measure w and u."""
        grads = self.stored.view.cut_matrices(self._grad(), self.stored.item.param.shape)
        for i, grad_NRC in enumerate(grads):
            of_direction, _, _ = self.spec.divided(self.tensors[i].state)
            self._form(i, *self.spec.direction.advance(grad_NRC, of_direction, self.stored.item.step))
        self._measure()

    def before(self) -> list[tuple[Tensor, ...]]:
        """Run the first phase of the direction: return this rank's input to the whole matrices."""
        of_direction, _, _ = self.spec.divided(self.stored.seen[1:])
        gathered, new = self._matrix_direction.before(self._grad(), of_direction)
        self._store(of_direction, new)
        return [gathered]

    def _grad(self) -> Tensor:
        """The gradient that the direction gets, before the weight is split."""
        prepared = prepared_gradient(self.stored.item, self.dtype, self.control)
        _, _, of_hold = self.spec.divided(self.stored.seen[1:])
        weight_NRC, *state = (in_dtype(self.dtype, x) for x in (self.stored.seen[0], *of_hold))
        grad_NRC = prepared.reshape(self.stored.shape_NRC)
        grad_NRC, new = self.spec.hold.before(grad_NRC, weight_NRC, tuple(state))
        self._store(of_hold, new)
        return grad_NRC

    def after(self, formed: Sequence[Formed]) -> None:
        """Run the last phase of the direction, with what was formed from the whole matrices."""
        direction, (of_weight,) = self._matrix_direction, formed
        whole = self.extents[0]
        traffic = direction.traffic(whole.num_rows, whole.num_columns, self.dtype)
        of_matrices = zip(*map(self._cut_formed, of_weight, traffic.formed), strict=True)
        for i, (of_matrix, extent) in enumerate(zip(of_matrices, self.extents, strict=True)):
            of_direction, _, _ = self.spec.divided(self.tensors[i].state)
            step = self.stored.item.step
            self._form(i, *direction.after(of_matrix, of_direction, self.dtype, extent, step))
        self._measure()

    @property
    def _matrix_direction(self) -> MatrixDirection:
        assert isinstance(self.spec.direction, MatrixDirection)
        return self.spec.direction

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The size of each matrix, and which of its rows and columns are here."""
        if self.stored.share is not None:
            return self.stored.share.extents
        return tuple(Extent.whole(matrices.rows, matrices.columns) for matrices in self.stored.matrices)

    def _cut_formed(self, x_NRC: Tensor | None, sent: Sent) -> tuple[Tensor | None, ...]:
        if x_NRC is None:
            return (None,) * len(self.tensors)
        return self.stored.cut_part(x_NRC, like_weight=sent.shape is None)

    def _form(self, i: int, d_NRC: Tensor | None, state: tuple[Tensor, ...]) -> None:
        """Store the state of a direction and form u. Without d, this step does not change the weight."""
        tensors = self.tensors[i]
        self._store(tensors.state, state)
        if d_NRC is not None:
            weight_NRC = in_dtype(self.dtype, tensors.weight)
            u_NRC = self.spec.hold.inside(d_NRC, weight_NRC, self.stored.item.weight_decay)
            self.changing.append(Changing(i, u_NRC))

    def _store(self, stored: Sequence[Tensor], computed: Sequence[Tensor]) -> None:
        for old, new in zip(stored, computed, strict=False):  # a direction's state is the first of all
            store(old, new, self.control.skip)

    def _measure(self) -> None:
        """Measure w and u, in the pieces in which all engines do it on this device: sums depend on them."""
        norm = self.spec.ratio.measures
        if norm is None:
            return
        sizes_of_both = [self.layout.views(sizes) for sizes in self.sizes.unbind(0)]
        for changing in self.changing:
            tensors = self.tensors[changing.number]
            limit = limits.PIECE_ELEMENTS_CPU if tensors.weight.is_cpu else limits.PIECE_ELEMENTS
            for piece in pieces(tensors.slot.matrices, limit) if tensors.weight.numel() else ():
                block = Block(tensors, piece)
                for x_NRC, sizes in zip((tensors.weight, changing.u_NRC), sizes_of_both, strict=True):
                    x_NRC = in_dtype(self.dtype, block.of(x_NRC))
                    magnitude = x_NRC.abs() if norm == "max" else x_NRC * x_NRC
                    reduce_into(block, magnitude, sizes[changing.number], norm)
        if norm == "l2":
            self.sizes.sqrt_()

    # --- the last two phases ----------------------------------------------------------------------------

    def apply(self, recorder: Recorder | None) -> None:
        """Change w, where no rank has to be asked in between."""
        self.scale(recorder)
        self.settle(recorder)

    def scale(self, recorder: Recorder | None) -> None:
        """Scale and clip u, and form the products that the hold needs."""
        ratio = self.spec.ratio
        all_ratios, all_undefined = quotient(*self.sizes), undefined(*self.sizes)
        # To leave undefined ratios out costs one more pass. To look for them is free on a CPU.
        is_defined = self.sizes.is_cpu and not is_true(all_undefined.any(), if_fake=False)
        for n, changing in enumerate(self.changing):
            tensors = self.tensors[changing.number]
            ratios, no_ratios = tensors.slot.view(all_ratios), tensors.slot.view(all_undefined)
            _, of_ratio, _ = self.spec.divided(tensors.state)
            in_full = tuple(in_dtype(self.dtype, x) for x in of_ratio)
            ratios, new = ratio.remember(ratios, no_ratios, in_full)
            self._store(of_ratio, new)
            scale = ratio.scale(ratios, None if is_defined else no_ratios)
            weight_NRC, scaled_NRC = in_dtype(self.dtype, tensors.weight), changing.u_NRC * scale
            change_NRC, line_dim = ratio.clipped(scaled_NRC), self.line_dim
            if recorder is not None and weight_NRC.numel():  # a rank may hold nothing of a matrix
                statistics = measure(weight_NRC, scaled_NRC, scale, ratios, ratio, change_NRC)
                self.changing[n] = changing = changing._replace(statistics=statistics)
            if line_dim is not None:
                key = self.stored.item.original, changing.number
                self.products[key] = Products.of(weight_NRC, change_NRC, line_dim)
            self.changing[n] = changing._replace(u_NRC=change_NRC)

    def settle(self, recorder: Recorder | None) -> None:
        """Change w."""
        item, hold = self.stored.item, self.spec.hold
        lr = scalar(item.lr, self.sizes.device)
        for number, change_NRC, statistics in self.changing:
            tensors = self.tensors[number]
            _, _, of_hold = self.spec.divided(tensors.state)
            weight_NRC, *state = (in_dtype(self.dtype, x) for x in (tensors.weight, *of_hold))
            extent, products = self.extents[number], self.products.get((item.original, number))
            move = Move(lr, item.weight_decay, extent, self.line_dim, item.step, products)
            new_NRC, new = hold.apply(weight_NRC, change_NRC, tuple(state), move)
            if recorder is not None and statistics is not None:
                change = (new_NRC - weight_NRC).square().sum()
                recorder.add(item.name, replace(statistics, update_sum_sq=change))
            self._store((tensors.weight, *of_hold), (new_NRC, *new))
        self.stored.return_copies()
