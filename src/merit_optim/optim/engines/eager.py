"""The trust-ratio step in ordinary torch operations, in place and in pieces.

Two phases, as in every engine. *Advance* updates the state and measures |w| and |u| into a flat buffer;
*apply* forms the buffer's ratios all at once, forms u again and changes w. Each phase goes through the
weights in blocks of rows that fit the processor's cache, so the dozen operations of a phase cost one trip to
memory, and the temporaries are the size of a block, not of a weight. With ``foreach`` many blocks share each
launch.

A direction that needs whole matrices is formed once, in the first phase, and held until the second is done.
Where ranks share these matrices, the first phase is in two, with the forming of whole matrices between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from merit_optim.optim import algorithm
from merit_optim.optim import torch_private as private
from merit_optim.optim.algorithm import Rule, Sizes
from merit_optim.optim.directions import Adam, MatrixDirection, Sent, direction_of
from merit_optim.optim.engines.part import Formed, Part, Place, Share, Whole
from merit_optim.optim.engines.plan import pieces, plan
from merit_optim.optim.engines.stored import Block, Stored, Tensors
from merit_optim.optim.engines.work import (
    Control,
    Controls,
    Work,
    items_of,
    prepared_gradient,
    scalar,
    store,
)
from merit_optim.optim.matrices import View
from merit_optim.optim.statistics import Recorder, measure

# Elements in a piece. On a CPU the four tensors of a piece and two temporaries should share the L2
# cache; measured on GPT-2's embedding, 2^17 to 2^18 was best (benchmarks/step.py --piece). Elsewhere
# a piece should be large enough to hide the launches.
PIECE_ELEMENTS_CPU = 256 * 1024
PIECE_ELEMENTS = 64 * 1024 * 1024


def parts_of(
    works: list[Work], controls: Controls, shares: Mapping[Tensor, Share] | None = None
) -> list[Part]:
    """The work in parts that share buffers; each weight whose direction is held is one by itself.

    ``shares`` says what this rank has of sharded parameters, where that is not clear from its own tensors.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Stored]] = {}
    parts: list[Part] = []
    for work in works:
        choices = direction_of(work.group), Rule.of(work.group), View.of(work.group)
        for item in items_of([work]):
            # A rank may have none of the weight, and state of all of it.
            if not item.owner.numel() or not any(x.numel() for x in (item.param, *item.state)):
                continue
            device, dtype = item.param.device, algorithm.compute_dtype(item.param)
            stored = Stored(item, *choices, None if shares is None else shares.get(item.owner))
            if isinstance(stored.direction, Adam):
                alike.setdefault((device, dtype), []).append(stored)
            else:
                parts.append(HeldPart([stored], device, dtype, controls[device]))
    return parts + [EagerPart(some, *key, controls[key[0]]) for key, some in alike.items()]


def form(wholes: Iterable[Whole]) -> Iterator[Formed]:
    """What each direction forms of its whole matrix: one after the other."""
    for _, direction, gathered, step in wholes:
        yield direction.whole(gathered, step)


class EagerPart:
    """Weights of one device and one compute dtype whose direction is element-wise, which is Adam's."""

    def __init__(
        self, all_stored: list[Stored], device: torch.device, dtype: torch.dtype, control: Control
    ) -> None:
        layout = plan(tuple((matrices, own.rule.has_rows) for own in all_stored for matrices in own.parts))
        self.device, self.dtype, self.control, self.all_stored = device, dtype, control, all_stored
        self.sizes = torch.zeros(2, layout.length, dtype=dtype, device=device)
        slots = iter(layout.slots)
        self.tensors = [tensors for own in all_stored for tensors in own.cut(slots)]

    @property
    def places(self) -> list[Place]:
        """Where the sizes of each weight are."""
        return [Place(tensors.item.param, self.sizes, tensors.slot) for tensors in self.tensors]

    def advance(self) -> None:
        """Update the state, and measure w and u."""
        self.buckets = list(_buckets(self.tensors))
        for bucket in self.buckets:
            self._advance_bucket(bucket)
            if bucket[0].tensors.rule.norm != "none":
                _measure(bucket, self.dtype, *self.sizes)
        for tensors in self.tensors:
            if tensors.rule.norm == "l2":
                self.sizes[:, tensors.slot.start : tensors.slot.end].sqrt_()

    def _advance_bucket(self, bucket: list[Block]) -> None:
        _moments(bucket, self.dtype, self.control)

    def apply(self, recorder: Recorder | None) -> None:
        """Change w."""
        ratios = algorithm.ratio(*self.sizes)
        for tensors in self.tensors:
            if tensors.rule.calibrated:
                whole_N11, first_N11 = tensors.slot.view(ratios).whole_N[:, None, None], tensors.state[-1]
                relative_N11, now_N11 = algorithm.calibrated(whole_N11, first_N11.to(self.dtype))
                store(first_N11, now_N11, self.control.skip)
                whole_N11.copy_(relative_N11)
        no_ratio = algorithm.undefined(*self.sizes)
        # Rare, and a pass over every block: a CPU looks first, where looking is free.
        unscaled = None if self.device.type == "cpu" and not no_ratio.any() else no_ratio
        # Backwards: the last blocks of the first phase are still in the cache.
        for bucket in reversed(self.buckets):
            _apply(bucket, self.dtype, self.control, ratios, unscaled, recorder)
        for stored in self.all_stored:
            stored.return_copies()


class HeldPart(EagerPart):
    """One weight whose direction is formed of whole matrices, and held until the weight is changed by it."""

    @property
    def stored(self) -> Stored:
        (stored,) = self.all_stored
        return stored

    @property
    def owners(self) -> list[Tensor]:
        return [self.stored.item.owner]

    @property
    def is_cut(self) -> bool:
        return self.stored.share is not None and self.stored.share.is_cut

    def advance(self) -> None:
        direction, step = self.stored.direction, self.stored.item.step
        grads = self.stored.view.cut_matrices(self._grad(), self.stored.item.param.shape)
        for i, (tensors, grad_NRC) in enumerate(zip(self.tensors, grads, strict=True)):
            self._hold(i, *direction.advance(grad_NRC, tensors.state[: len(direction.keys)], step))
        self.measure()

    def before(self) -> list[tuple[Tensor, ...]]:
        """The first phase of the direction: what whole matrices are formed of."""
        direction = self._matrix_direction
        old = self.stored.seen[1 : 1 + len(direction.keys)]
        gathered, new = direction.before(self._grad(), tuple(old))
        _store(old, list(new), self.control.skip)
        return [gathered]

    def after(self, formed: Sequence[Formed]) -> None:
        """The last phase of the direction, with what was formed of whole matrices."""
        direction, share = self._matrix_direction, self.stored.share
        assert share is not None
        (of_weight,) = formed
        extent = share.extents[0]
        traffic = direction.traffic(extent.num_rows, extent.num_columns, self.dtype)
        of_matrices = zip(*map(self._cut_formed, of_weight, traffic.formed), strict=True)
        for i, (tensors, own, extent) in enumerate(
            zip(self.tensors, of_matrices, share.extents, strict=True)
        ):
            state = tensors.state[: len(direction.keys)]
            self._hold(i, *direction.after(own, state, self.dtype, extent, self.stored.item.step))
        self.measure()

    @property
    def _matrix_direction(self) -> MatrixDirection:
        direction = self.stored.direction
        assert isinstance(direction, MatrixDirection)
        return direction

    def _grad(self) -> Tensor:
        grad = prepared_gradient(self.stored.item, self.dtype, self.control)
        return self.stored.view.seen(grad, grad.shape)

    def _cut_formed(self, x_NRC: Tensor | None, sent: Sent) -> tuple[Tensor | None, ...]:
        if x_NRC is None:
            return (None,) * len(self.tensors)
        return self.stored.cut_part(x_NRC, is_own=sent.shape is None)

    def _hold(self, number: int, d_NRC: Tensor | None, state: tuple[Tensor, ...]) -> None:
        tensors = self.tensors[number]
        _store(list(tensors.state[: len(state)]), list(state), self.control.skip)
        self.tensors[number] = tensors._replace(d=d_NRC)

    def measure(self) -> None:
        """Measure w and u. Where there is no d this step only prepares, and the weight stays."""
        self.tensors = [tensors for tensors in self.tensors if tensors.d is not None]
        super().advance()

    def _advance_bucket(self, bucket: list[Block]) -> None:
        """The state is that of whole matrices, and up to date."""


def _buckets(all_tensors: list[Tensors]) -> Iterator[list[Block]]:
    """Blocks that are worked on together: one by one, or with foreach as many of a group as fit."""
    bucket: list[Block] = []
    room = 0
    for tensors in all_tensors:
        on_cpu = tensors.weight.device.type == "cpu"
        limit = PIECE_ELEMENTS_CPU if on_cpu else PIECE_ELEMENTS
        foreach = tensors.item.group["foreach"]
        if foreach is None:
            foreach = not on_cpu
        if not tensors.weight.numel():
            continue  # a rank may have none of a matrix
        for piece in pieces(tensors.slot.matrices, limit):
            block = Block(tensors, piece)
            num_elements = block.of(tensors.weight).numel()
            joins = foreach and bucket and bucket[0].tensors.item.group is tensors.item.group
            if bucket and (not joins or num_elements > room):
                yield bucket
                bucket = []
            if not bucket:
                room = limit
            bucket.append(block)
            room -= num_elements
    if bucket:
        yield bucket


def _in(dtype: torch.dtype, tensors: list[Tensor], *, copy: bool = False) -> list[Tensor]:
    return [x.to(dtype, copy=copy) for x in tensors]


def _store(stored: list[Tensor], computed: list[Tensor], skip: Tensor | None) -> None:
    for old, new in zip(stored, computed, strict=True):
        store(old, new, skip)


def _moments(bucket: list[Block], dtype: torch.dtype, control: Control) -> None:
    """m and v, in place."""
    group = bucket[0].tensors.item.group
    beta1, beta2 = group["betas"]
    grads = _in(dtype, [b.of(b.tensors.grad) for b in bucket])
    if control.gradient_scale is not None:
        grads = list(private.foreach_mul(grads, control.gradient_scale))
    if group["maximize"]:
        grads = list(private.foreach_neg(grads))
    stored = [b.of(b.tensors.state[0]) for b in bucket], [b.of(b.tensors.state[1]) for b in bucket]
    # A step that may yet be skipped is computed beside the state.
    exp_avgs, exp_avg_sqs = (_in(dtype, x, copy=control.skip is not None) for x in stored)
    private.foreach_lerp_(exp_avgs, grads, 1 - beta1)
    private.foreach_mul_(exp_avg_sqs, beta2)
    private.foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    _store(stored[0], exp_avgs, control.skip)
    _store(stored[1], exp_avg_sqs, control.skip)


def _updates(bucket: list[Block], dtype: torch.dtype, weights: list[Tensor]) -> list[Tensor]:
    """u: new tensors."""
    decays = private.foreach_mul(weights, bucket[0].tensors.item.group["weight_decay"])
    held = [b.of(b.tensors.d) for b in bucket if b.tensors.d is not None]
    if held:
        return list(private.foreach_add(held, decays))
    updates = _directions(bucket, dtype)
    private.foreach_add_(updates, decays)
    return updates


def _directions(bucket: list[Block], dtype: torch.dtype) -> list[Tensor]:
    """Adam's d, from the state as it is stored: new tensors."""
    corrections = [b.tensors.correction for b in bucket]
    updates = list(private.foreach_sqrt(_in(dtype, [b.of(b.tensors.state[1]) for b in bucket])))
    _divide(updates, [c and c.second_sqrt for c in corrections])
    private.foreach_add_(updates, bucket[0].tensors.item.group["eps"])
    updates = list(private.foreach_div(_in(dtype, [b.of(b.tensors.state[0]) for b in bucket]), updates))
    _divide(updates, [c and c.first for c in corrections])
    return updates


def _divide(tensors: list[Tensor], divisors: list[float | Tensor | None]) -> None:
    for x, divisor in zip(tensors, divisors, strict=True):
        if divisor is not None:
            x.div_(divisor)


def _measure(bucket: list[Block], dtype: torch.dtype, weight_sizes: Tensor, update_sizes: Tensor) -> None:
    """The bucket's part of the rows', columns' and wholes' sizes, l2 as sums of squares."""
    weights = _in(dtype, [b.of(b.tensors.weight) for b in bucket])
    updates = _updates(bucket, dtype, weights)
    norm = bucket[0].tensors.rule.norm
    if norm == "max":
        private.foreach_abs_(updates)
        weights = list(private.foreach_abs(weights))
    else:
        private.foreach_mul_(updates, updates)
        weights = list(private.foreach_mul(weights, weights))
    for block, weight, update in zip(bucket, weights, updates, strict=True):
        _reduce(block, weight, block.tensors.slot.view(weight_sizes), norm)
        _reduce(block, update, block.tensors.slot.view(update_sizes), norm)


def _reduce(block: Block, magnitude: Tensor, total: Sizes, norm: str) -> None:
    reduce, merge = (torch.amax, torch.maximum) if norm == "max" else (torch.sum, torch.add)
    whole = total.whole_N[block.piece.matrices]
    if total.rows_NR is None or total.columns_NC is None:
        merge(whole, reduce(magnitude, (1, 2)), out=whole)
        return
    rows = reduce(magnitude, 2)
    total.rows_NR[block.piece.matrices, block.piece.rows] = rows
    columns = total.columns_NC[block.piece.matrices]
    merge(columns, reduce(magnitude, 1), out=columns)
    merge(whole, reduce(rows, 1), out=whole)


def _apply(
    bucket: list[Block],
    dtype: torch.dtype,
    control: Control,
    ratios: Tensor,
    unscaled: Tensor | None,
    recorder: Recorder | None,
) -> None:
    """w <- w - lr * clamp(s*u), in place."""
    group = bucket[0].tensors.item.group
    stored = [b.of(b.tensors.weight) for b in bucket]
    weights = _in(dtype, stored, copy=control.skip is not None)
    updates = _updates(bucket, dtype, weights)
    scales = [_scale(block, ratios, unscaled) for block in bucket]
    private.foreach_mul_(updates, scales)
    clip = group["clip"]
    lr = scalar(group["lr"], weights[0].device)
    if recorder is not None:
        for block, weight, scaled, scale in zip(bucket, weights, updates, scales, strict=True):
            bounded = _bounded(block, ratios, scale)
            recorder.add(block.tensors.item.name, measure(weight, scaled, scale, bounded, clip, lr))
    if clip is not None:
        private.foreach_clamp_min_(updates, -clip)
        private.foreach_clamp_max_(updates, clip)
    private.foreach_mul_(updates, lr)
    private.foreach_sub_(weights, updates)
    _store(stored, weights, control.skip)


def _scale(block: Block, ratios: Tensor, unscaled: Tensor | None) -> Tensor:
    """s of one block, from the ratios of all: what algorithm.element_ratio defines."""
    piece, slot, rule = block.piece, block.tensors.slot, block.tensors.rule
    ratio = slot.view(ratios)
    whole = ratio.whole_N[piece.matrices, None, None]
    if ratio.rows_NR is None or ratio.columns_NC is None:
        return algorithm.bounded(whole, rule)
    rows = ratio.rows_NR[piece.matrices, piece.rows, None]
    if rule.weight_bound:
        rows = torch.maximum(rows, whole)
    scale = algorithm.bounded(torch.maximum(rows, ratio.columns_NC[piece.matrices, None, :]), rule)
    if unscaled is not None:
        no_ratio = slot.view(unscaled)
        assert no_ratio.rows_NR is not None and no_ratio.columns_NC is not None
        rows_too = no_ratio.rows_NR[piece.matrices, piece.rows, None]
        scale.masked_fill_(rows_too | no_ratio.columns_NC[piece.matrices, None, :], 1)
    return scale


def _bounded(block: Block, ratios: Tensor, scale: Tensor) -> Tensor | None:
    """Where the weight-wise ratio was larger than both the row's and the column's, and so decided."""
    ratio = block.tensors.slot.view(ratios)
    if ratio.rows_NR is None or ratio.columns_NC is None or not block.tensors.rule.weight_bound:
        return None
    rows = ratio.rows_NR[block.piece.matrices, block.piece.rows, None]
    columns = ratio.columns_NC[block.piece.matrices, None, :]
    whole = ratio.whole_N[block.piece.matrices, None, None]
    return (torch.maximum(rows, columns) < whole) & (scale == whole)
