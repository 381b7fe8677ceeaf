"""The trust-ratio step in ordinary torch operations, in place and in pieces.

Like every engine, it works in two phases. *Advance* updates the state and measures |w| and |u| into a flat
buffer. *Apply* forms all ratios of the buffer at once, forms u again and changes w. Each phase goes through
the weights in blocks of rows that fit the processor's cache, so the dozen operations of a phase cost one trip
to memory, and temporaries are the size of a block rather than of a weight. Small weights share torch calls.

On a CPU, a whole weight goes through both phases before the next one starts (``CpuPart``). u is kept between
the phases unless the weight is very large. Small weights of the same shape are copied into one stack.

A direction that needs whole matrices is formed once, in the first phase, and held until the second is done
(``HeldPart``). If ranks share these matrices, the first phase is split in two, and the whole matrices are
formed in between.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim import algorithm
from merit_optim.optim import torch_private as private
from merit_optim.optim.algorithm import Rule, Sizes
from merit_optim.optim.directions import Adam, Direction, MatrixDirection, Sent, direction_of
from merit_optim.optim.engines.part import Formed, Part, Place, Share, Whole
from merit_optim.optim.engines.plan import pieces, plan
from merit_optim.optim.engines.stored import Block, Stack, Stored, Tensors
from merit_optim.optim.engines.work import (
    Control,
    Controls,
    Item,
    Work,
    items_of,
    prepared_gradient,
    scalar,
    store,
)
from merit_optim.optim.matrices import View
from merit_optim.optim.statistics import Recorder, measure

CPU = torch.device("cpu")

# Elements in a piece. On a CPU the tensors of a piece and its temporaries should share the L2 cache; on
# GPT-2's embedding, 2^17 to 2^18 elements were fastest (benchmarks/step.py --piece). On other devices a piece
# should be large enough to hide the launches.
PIECE_ELEMENTS_CPU = 256 * 1024
PIECE_ELEMENTS = 64 * 1024 * 1024
# On a CPU, weights share calls up to this many elements. With more, every call would refill the cache.
JOINED_ELEMENTS_CPU = 32 * 1024
# Weights of at most STACKED_ELEMENTS are copied into stacks of at most STACK_ELEMENTS.
STACKED_ELEMENTS, STACK_ELEMENTS = 16 * 1024, 128 * 1024
# u is kept for weights of at most this many pieces: 16 MiB in float32.
KEPT_PIECES = 16


def parts_of(
    works: list[Work],
    controls: Controls,
    shares: Mapping[Tensor, Share] | None = None,
    *,
    one_by_one: bool = False,
) -> list[Part]:
    """Divide the work into parts. Weights of a part share a buffer of sizes.

    ``shares`` describes this rank's share of sharded parameters, if its tensors alone do not tell. With
    ``one_by_one`` small weights are not stacked, so that each can be recorded.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Stored | Stack]] = {}
    parts: list[Part] = []
    stacked: set[int] = set()  # addresses: of two copies of the same memory one would be lost
    for work in works:
        direction, rule, view = direction_of(work.group), Rule.of(work.group), View.of(work.group)
        may_stack = shares is None and not one_by_one and _can_be_stacked(direction, rule, work.group)
        stacks: dict[Hashable, list[Item]] = {}
        for item in items_of([work]):
            num_elements = item.param.numel()
            # A rank may hold nothing of the weight, but state of the whole.
            if not num_elements and not (item.owner.numel() and any(x.numel() for x in item.state)):
                continue
            device, dtype = item.param.device, algorithm.compute_dtype(item.param)
            is_small = num_elements <= STACKED_ELEMENTS and item.param.is_cpu
            if may_stack and is_small and item.param.data_ptr() not in stacked:
                stacked.add(item.param.data_ptr())
                steps = item.step.item() if work.group["bias_correction"] else None
                stacks.setdefault((item.param.shape, item.param.dtype, steps), []).append(item)
                continue
            stored = Stored(item, direction, rule, view, None if shares is None else shares.get(item.owner))
            if isinstance(direction, Adam):
                alike.setdefault((device, dtype), []).append(stored)
            else:
                parts.append(HeldPart([stored], device, dtype, controls[device]))
        for items in stacks.values():
            first = items[0].param
            some = alike.setdefault((first.device, algorithm.compute_dtype(first)), [])
            together = max(1, STACK_ELEMENTS // first.numel())
            batches = (items[start : start + together] for start in range(0, len(items), together))
            some += [_stack(batch, direction, rule, view) for batch in batches]
    for (device, dtype), some in alike.items():
        control = controls[device]
        if device.type == "cpu" and shares is None and control.skip is None:
            for _, same_group in groupby(some, lambda stored: id(stored.item.group)):
                of_group = list(same_group)
                numbers = Numbers.of(of_group[0].item.group, dtype)
                parts += [CpuPart(stored, device, dtype, control, numbers) for stored in of_group]
        else:  # ranks reduce their sizes together, or a device takes few launches
            parts.append(EagerPart(some, device, dtype, control))
    return parts


def _can_be_stacked(direction: Direction, rule: Rule, group: dict[str, Any]) -> bool:
    """Whether small weights of a group may be stacked. In a stack, sums would be added in another order."""
    is_plain = isinstance(direction, Adam) and group.get("split") is None and not rule.calibrated
    return is_plain and rule.norm != "l2" and group["foreach"] is not False


def _stack(items: list[Item], direction: Direction, rule: Rule, view: View) -> Stored | Stack:
    if len(items) == 1:
        return Stored(items[0], direction, rule, view)
    return Stack(items, direction, rule, view)


def form(wholes: Iterable[Whole]) -> Iterator[Formed]:
    """Form what each direction needs from its whole matrix, one matrix after the other."""
    for _, direction, gathered, step in wholes:
        yield direction.whole(gathered, step)


class EagerPart:
    """Weights of one device and compute dtype that have an element-wise direction, Adam's."""

    def __init__(
        self,
        all_stored: Sequence[Stored | Stack],
        device: torch.device,
        dtype: torch.dtype,
        control: Control,
    ) -> None:
        self.layout = plan(
            tuple((matrices, stored.rule.has_rows) for stored in all_stored for matrices in stored.parts)
        )
        self.device, self.dtype, self.control, self.all_stored = device, dtype, control, all_stored
        self.sizes = torch.zeros(2, self.layout.length, dtype=dtype, device=device)

    @cached_property
    def tensors(self) -> list[Tensors]:
        """The tensors of all weights. Made when first used: a stack is a copy."""
        slots = iter(enumerate(self.layout.slots))
        return [tensors for stored in self.all_stored for tensors in stored.cut(slots)]

    @property
    def places(self) -> list[Place]:
        """Where the sizes of each weight are kept."""
        return [Place(tensors.item.param, self.sizes, tensors.slot) for tensors in self.tensors]

    def advance(self) -> None:
        """Update the state, and measure w and u."""
        self.buckets = list(_buckets(self.tensors))
        weight_sizes, update_sizes = map(self.layout.views, self.sizes.unbind(0))
        for bucket in self.buckets:
            self._advance_bucket(bucket)
            if bucket[0].tensors.rule.norm != "none":
                _measure(bucket, self.dtype, weight_sizes, update_sizes)
        norms = {tensors.rule.norm for tensors in self.tensors}
        if norms == {"l2"}:
            self.sizes.sqrt_()
        elif "l2" in norms:
            for tensors in self.tensors:
                if tensors.rule.norm == "l2":
                    self.sizes[:, tensors.slot.start : tensors.slot.end].sqrt_()

    def _advance_bucket(self, bucket: list[Block]) -> None:
        _moments(bucket, self.dtype, self.control)

    def apply(self, recorder: Recorder | None) -> None:
        """Change w."""
        ratios, unscaled = self._ratios()
        # Backwards, because the last blocks of the first phase are still in the cache.
        for bucket in reversed(self.buckets):
            _apply(bucket, self.dtype, self.control, ratios, unscaled, recorder)
        for stored in self.all_stored:
            stored.return_copies()

    def _ratios(self) -> tuple[list[Sizes], list[Sizes] | None]:
        """Return the ratios of every weight and a mask of the undefined ones, None if all are defined."""
        # Undefined ratios are rare and cost one more pass over every block. Checking is free on a CPU.
        all_defined = self.device.type == "cpu" and bool(self.sizes.all())
        ratio_of = algorithm.defined_ratio if all_defined else algorithm.ratio
        ratios = self.layout.views(ratio_of(*self.sizes.unbind(0)))
        for tensors in self.tensors:
            if tensors.rule.calibrated:
                whole_N11, first_N11 = ratios[tensors.number].whole_N[:, None, None], tensors.state[-1]
                relative_N11, now_N11 = algorithm.calibrated(whole_N11, first_N11.to(self.dtype))
                store(first_N11, now_N11, self.control.skip)
                whole_N11.copy_(relative_N11)
        return ratios, None if all_defined else self.layout.views(algorithm.undefined(*self.sizes))


class Numbers(NamedTuple):
    """Options of a group as 0-d tensors. From a Python number torch would make one in every call."""

    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor
    lr: Tensor

    @staticmethod
    def of(group: dict[str, Any], dtype: torch.dtype) -> Numbers:
        values = group["betas"][1], group["eps"], group["weight_decay"], scalar(group["lr"], CPU)
        return Numbers(*(torch.as_tensor(value, dtype=dtype, device=CPU) for value in values))


class CpuPart(EagerPart):
    """A whole weight on a CPU, or a stack of small ones. u is kept unless the weight is very large.

    Calls for a single tensor: on a CPU, a foreach call saves nothing and needs more temporaries.
    """

    def __init__(
        self,
        stored: Stored | Stack,
        device: torch.device,
        dtype: torch.dtype,
        control: Control,
        numbers: Numbers,
    ) -> None:
        super().__init__([stored], device, dtype, control)
        self.numbers = numbers

    def advance(self) -> None:
        (stored,) = self.all_stored
        norm, keeps = stored.rule.norm, stored.num_elements <= KEPT_PIECES * PIECE_ELEMENTS_CPU
        self.blocks: list[tuple[Block, Tensor | None]] = []
        """Each with its u, if it is kept."""
        if norm == "max":  # w and u are measured together; sums would be added in another order
            sizes_of_both = self.layout.views(self.sizes)
        else:
            weight_sizes, update_sizes = map(self.layout.views, self.sizes.unbind(0))
        for tensors in self.tensors:
            for piece in pieces(tensors.slot.matrices, PIECE_ELEMENTS_CPU):
                block, update = Block(tensors, piece), None
                self._moments(block)
                weight = _as(self.dtype, block.of(tensors.weight))
                if norm == "max":
                    update = self._update(block, weight)
                    magnitudes = torch.empty((2, *weight.shape), dtype=self.dtype, device=CPU)
                    of_weight, of_update = magnitudes.unbind(0)
                    torch.abs(weight, out=of_weight)
                    torch.abs(update, out=of_update)
                    _reduce(block, magnitudes, sizes_of_both[tensors.number], norm)
                elif norm == "l2":
                    update = self._update(block, weight)
                    _reduce(block, weight * weight, weight_sizes[tensors.number], norm)
                    _reduce(block, update * update, update_sizes[tensors.number], norm)
                self.blocks.append((block, update if keeps else None))
        if norm == "l2":
            self.sizes.sqrt_()

    def _moments(self, block: Block) -> None:
        tensors, group, dtype = block.tensors, block.tensors.item.group, self.dtype
        beta1, beta2 = group["betas"]
        grad = _as(dtype, block.of(tensors.grad))
        if self.control.gradient_scale is not None:
            grad = grad * self.control.gradient_scale
        if group["maximize"]:
            grad = -grad
        stored = block.of(tensors.state[0]), block.of(tensors.state[1])
        exp_avg, exp_avg_sq = _as(dtype, stored[0]), _as(dtype, stored[1])
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(self.numbers.beta2).addcmul_(grad, grad, value=1 - beta2)
        store(stored[0], exp_avg, None)
        store(stored[1], exp_avg_sq, None)

    def _update(self, block: Block, weight: Tensor) -> Tensor:
        """Form u as a new tensor, from the state as stored."""
        tensors, dtype = block.tensors, self.dtype
        update = _as(dtype, block.of(tensors.state[1])).sqrt()
        if tensors.correction is not None:
            update.div_(tensors.correction.second_sqrt)
        update.add_(self.numbers.eps)
        torch.div(_as(dtype, block.of(tensors.state[0])), update, out=update)
        if tensors.correction is not None:
            update.div_(tensors.correction.first)
        return update.add_(weight * self.numbers.weight_decay)

    def apply(self, recorder: Recorder | None) -> None:
        ratios, unscaled = self._ratios()
        lr, clip = self.numbers.lr, self.tensors[0].rule.clip
        for block, update in reversed(self.blocks):  # the last ones are still in the cache
            tensors, ratio = block.tensors, ratios[block.tensors.number]
            stored = block.of(tensors.weight)
            weight = _as(self.dtype, stored)
            if update is None:
                update = self._update(block, weight)
            scale = _scale(block, ratio, None if unscaled is None else unscaled[tensors.number])
            update.mul_(scale)
            if recorder is not None:
                bounded = _bounded(block, ratio, scale)
                recorder.add(tensors.item.name, measure(weight, update, scale, bounded, clip, lr))
            if clip is not None:
                update.clamp_(-clip, clip)
            weight.sub_(update.mul_(lr))
            store(stored, weight, None)
        self.all_stored[0].return_copies()


class HeldPart(EagerPart):
    """One weight whose direction is formed from whole matrices, and held until the weight is changed."""

    @property
    def stored(self) -> Stored:
        (stored,) = self.all_stored
        assert isinstance(stored, Stored)
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
        """Run the first phase of the direction: return this rank's input to the whole matrices."""
        direction = self._matrix_direction
        old = self.stored.seen[1 : 1 + len(direction.keys)]
        gathered, new = direction.before(self._grad(), tuple(old))
        _store(old, list(new), self.control.skip)
        return [gathered]

    def after(self, formed: Sequence[Formed]) -> None:
        """Run the last phase of the direction, with what was formed from the whole matrices."""
        direction, share = self._matrix_direction, self.stored.share
        assert share is not None
        (of_weight,) = formed
        extent = share.extents[0]
        traffic = direction.traffic(extent.num_rows, extent.num_columns, self.dtype)
        of_matrices = zip(*map(self._cut_formed, of_weight, traffic.formed), strict=True)
        for i, (tensors, of_matrix, extent) in enumerate(
            zip(self.tensors, of_matrices, share.extents, strict=True)
        ):
            state = tensors.state[: len(direction.keys)]
            self._hold(i, *direction.after(of_matrix, state, self.dtype, extent, self.stored.item.step))
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
        return self.stored.cut_part(x_NRC, like_weight=sent.shape is None)

    def _hold(self, number: int, d_NRC: Tensor | None, state: tuple[Tensor, ...]) -> None:
        tensors = self.tensors[number]
        _store(list(tensors.state[: len(state)]), list(state), self.control.skip)
        self.tensors[number] = tensors._replace(d=d_NRC)

    def measure(self) -> None:
        """Measure w and u. Without d, this step only prepares, and the weight does not change."""
        self.tensors = [tensors for tensors in self.tensors if tensors.d is not None]
        super().advance()

    def _advance_bucket(self, bucket: list[Block]) -> None:
        """Do nothing: the state of whole matrices is up to date."""


def _buckets(all_tensors: list[Tensors]) -> Iterator[list[Block]]:
    """Group blocks that share foreach calls: as many of a group as fit, or single ones if foreach=False."""
    bucket: list[Block] = []
    room = 0
    for tensors in all_tensors:
        limit = PIECE_ELEMENTS_CPU if tensors.weight.is_cpu else PIECE_ELEMENTS
        group = tensors.item.group
        if not tensors.weight.numel():
            continue  # a rank may hold nothing of a matrix
        for piece in pieces(tensors.slot.matrices, limit):
            joins = group["foreach"] is not False and bucket and bucket[0].tensors.item.group is group
            if bucket and (not joins or piece.num_elements > room):
                yield bucket
                bucket = []
            if not bucket:
                room = min(limit, JOINED_ELEMENTS_CPU) if tensors.weight.is_cpu else limit
            bucket.append(Block(tensors, piece))
            room -= piece.num_elements
    if bucket:
        yield bucket


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return x in this dtype. The comparison is cheaper than a call of ``to`` that does nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def _in(dtype: torch.dtype, tensors: list[Tensor], *, copy: bool = False) -> list[Tensor]:
    if copy:
        return [x.to(dtype, copy=True) for x in tensors]
    return [_as(dtype, x) for x in tensors]


def _store(stored: list[Tensor], computed: list[Tensor], skip: Tensor | None) -> None:
    for old, new in zip(stored, computed, strict=True):
        store(old, new, skip)


def _moments(bucket: list[Block], dtype: torch.dtype, control: Control) -> None:
    """Update m and v in place."""
    group = bucket[0].tensors.item.group
    beta1, beta2 = group["betas"]
    grads = _in(dtype, [b.of(b.tensors.grad) for b in bucket])
    if control.gradient_scale is not None:
        grads = list(private.foreach_mul(grads, control.gradient_scale))
    if group["maximize"]:
        grads = list(private.foreach_neg(grads))
    stored = [b.of(b.tensors.state[0]) for b in bucket], [b.of(b.tensors.state[1]) for b in bucket]
    # A step that may still be skipped is computed on copies of the state.
    exp_avgs, exp_avg_sqs = (_in(dtype, x, copy=control.skip is not None) for x in stored)
    private.foreach_lerp_(exp_avgs, grads, 1 - beta1)
    private.foreach_mul_(exp_avg_sqs, beta2)
    private.foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    _store(stored[0], exp_avgs, control.skip)
    _store(stored[1], exp_avg_sqs, control.skip)


def _updates(bucket: list[Block], dtype: torch.dtype, weights: list[Tensor]) -> list[Tensor]:
    """Form u as new tensors."""
    decays = private.foreach_mul(weights, bucket[0].tensors.item.group["weight_decay"])
    held = [b.of(b.tensors.d) for b in bucket if b.tensors.d is not None]
    if held:
        return list(private.foreach_add(held, decays))
    updates = _directions(bucket, dtype)
    private.foreach_add_(updates, decays)
    return updates


def _directions(bucket: list[Block], dtype: torch.dtype) -> list[Tensor]:
    """Form Adam's d as new tensors, from the state as stored."""
    # All blocks of a bucket have the same group, and so all or none have a correction.
    corrects = bucket[0].tensors.correction is not None
    updates = list(private.foreach_sqrt(_in(dtype, [b.of(b.tensors.state[1]) for b in bucket])))
    if corrects:
        _divide(updates, [b.tensors.correction.second_sqrt for b in bucket if b.tensors.correction])
    private.foreach_add_(updates, bucket[0].tensors.item.group["eps"])
    updates = list(private.foreach_div(_in(dtype, [b.of(b.tensors.state[0]) for b in bucket]), updates))
    if corrects:
        _divide(updates, [b.tensors.correction.first for b in bucket if b.tensors.correction])
    return updates


def _divide(tensors: list[Tensor], divisors: list[float | Tensor]) -> None:
    for x, divisor in zip(tensors, divisors, strict=True):
        x.div_(divisor)


def _measure(
    bucket: list[Block], dtype: torch.dtype, weight_sizes: list[Sizes], update_sizes: list[Sizes]
) -> None:
    """Measure the rows, columns and wholes of a bucket; for l2, sums of squares."""
    weights = _in(dtype, [b.of(b.tensors.weight) for b in bucket])
    updates = _updates(bucket, dtype, weights)
    norm = bucket[0].tensors.rule.norm
    if norm == "max":
        weights = list(private.foreach_abs(weights))
        private.foreach_abs_(updates)
    else:
        weights = list(private.foreach_mul(weights, weights))
        private.foreach_mul_(updates, updates)
    for block, weight, update in zip(bucket, weights, updates, strict=True):
        number = block.tensors.number
        _reduce(block, weight, weight_sizes[number], norm)
        _reduce(block, update, update_sizes[number], norm)


def _reduce(block: Block, magnitude: Tensor, total: Sizes, norm: str) -> None:
    """Merge a block's sizes into the totals of its weight. Dimensions before (N, R, C) are kept."""
    reduce, merge = (torch.amax, torch.maximum) if norm == "max" else (torch.sum, torch.add)
    piece = block.piece
    if piece.is_whole:  # nothing to merge with
        if total.rows_NR is None or total.columns_NC is None:
            reduce(magnitude, (-2, -1), out=total.whole_N)
            return
        reduce(magnitude, -1, out=total.rows_NR)
        reduce(magnitude, -2, out=total.columns_NC)
        reduce(total.rows_NR, -1, out=total.whole_N)
        return
    whole = total.whole_N[..., piece.matrices]
    if total.rows_NR is None or total.columns_NC is None:
        merge(whole, reduce(magnitude, (-2, -1)), out=whole)
        return
    rows = reduce(magnitude, -1)
    total.rows_NR[..., piece.matrices, piece.rows] = rows
    columns = total.columns_NC[..., piece.matrices, :]
    merge(columns, reduce(magnitude, -2), out=columns)
    merge(whole, reduce(rows, -1), out=whole)


def _apply(
    bucket: list[Block],
    dtype: torch.dtype,
    control: Control,
    ratios: list[Sizes],
    unscaled: list[Sizes] | None,
    recorder: Recorder | None,
) -> None:
    """w <- w - lr * clamp(s*u), in place."""
    group = bucket[0].tensors.item.group
    stored = [b.of(b.tensors.weight) for b in bucket]
    weights = _in(dtype, stored, copy=control.skip is not None)
    updates = _updates(bucket, dtype, weights)
    scales = [
        _scale(
            block, ratios[block.tensors.number], None if unscaled is None else unscaled[block.tensors.number]
        )
        for block in bucket
    ]
    private.foreach_mul_(updates, scales)
    clip = group["clip"]
    lr = scalar(group["lr"], weights[0].device)
    if recorder is not None:
        for block, weight, scaled, scale in zip(bucket, weights, updates, scales, strict=True):
            bounded = _bounded(block, ratios[block.tensors.number], scale)
            recorder.add(block.tensors.item.name, measure(weight, scaled, scale, bounded, clip, lr))
    if clip is not None:
        if len(updates) == 1:  # a single pass; foreach has no clamp with two bounds
            updates[0].clamp_(-clip, clip)
        else:
            private.foreach_clamp_min_(updates, -clip)
            private.foreach_clamp_max_(updates, clip)
    private.foreach_mul_(updates, lr)
    private.foreach_sub_(weights, updates)
    _store(stored, weights, control.skip)


def _scale(block: Block, ratio: Sizes, no_ratio: Sizes | None) -> Tensor:
    """Return s of one block from the ratios of its weight, as algorithm.element_ratio defines it."""
    rule, (whole, rows, columns) = block.tensors.rule, _of_block(block, ratio)
    if rows is None or columns is None:
        return algorithm.bounded(whole, rule)
    if rule.weight_bound:
        rows = torch.maximum(rows, whole)
    scale = algorithm.bounded(torch.maximum(rows, columns), rule)
    if no_ratio is not None:
        _, no_rows, no_columns = _of_block(block, no_ratio)
        assert no_rows is not None and no_columns is not None
        scale.masked_fill_(no_rows | no_columns, 1)
    return scale


def _of_block(block: Block, of_weight: Sizes) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the block's whole, rows and columns in shapes that broadcast to (N, R, C)."""
    whole_N, rows_NR, columns_NC = of_weight.whole_N, of_weight.rows_NR, of_weight.columns_NC
    if not block.piece.is_whole:
        matrices, rows = block.piece.matrices, block.piece.rows
        whole_N = whole_N[matrices]
        rows_NR = None if rows_NR is None else rows_NR[matrices, rows]
        columns_NC = None if columns_NC is None else columns_NC[matrices]
    whole_N11 = whole_N.view(-1, 1, 1)
    if rows_NR is None or columns_NC is None:
        return whole_N11, None, None
    return whole_N11, rows_NR.unsqueeze(2), columns_NC.unsqueeze(1)


def _bounded(block: Block, ratio: Sizes, scale: Tensor) -> Tensor | None:
    """Mark the elements whose s is the weight-wise ratio, because it exceeds both row's and column's."""
    whole, rows, columns = _of_block(block, ratio)
    if rows is None or columns is None or not block.tensors.rule.weight_bound:
        return None
    return (torch.maximum(rows, columns) < whole) & (scale == whole)
