"""Weights that share torch calls: the blocks of a bucket, in foreach operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from merit_optim.optim import torch_private as private
from merit_optim.optim.axes.ratios import Sizes
from merit_optim.optim.axes.ratios.ratio import defined_quotient, quotient, undefined
from merit_optim.optim.engines.eager import limits
from merit_optim.optim.engines.eager.blocks import in_dtype, of_block, reduce_into
from merit_optim.optim.engines.eager.stored import Block, Stack, Stored, Tensors
from merit_optim.optim.engines.part import Place
from merit_optim.optim.engines.plan import pieces, plan
from merit_optim.optim.engines.work import Control, is_true, scalar, store
from merit_optim.optim.statistics import Recorder, measure


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
            tuple(
                (matrices, stored.spec.ratio.has_rows)
                for stored in all_stored
                for matrices in stored.matrices
            )
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

    @property
    def is_cut(self) -> bool:
        """Adam's direction needs no whole matrices."""
        return False

    @property
    def has_products(self) -> bool:
        """Decay needs no products."""
        return False

    def advance(self) -> None:
        """Update the state, and measure w and u."""
        self.buckets = list(_buckets(self.tensors))
        weight_sizes, update_sizes = map(self.layout.views, self.sizes.unbind(0))
        for bucket in self.buckets:
            _moments(bucket, self.dtype, self.control)
            if bucket[0].tensors.item.spec.ratio.measures is not None:
                _measure(bucket, self.dtype, weight_sizes, update_sizes)
        norms = {tensors.item.spec.ratio.measures for tensors in self.tensors}
        if norms == {"l2"}:
            self.sizes.sqrt_()
        elif "l2" in norms:
            for tensors in self.tensors:
                if tensors.item.spec.ratio.measures == "l2":
                    self.sizes[:, tensors.slot.start : tensors.slot.end].sqrt_()

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
        all_defined = self.device.type == "cpu" and is_true(self.sizes.all(), if_fake=True)
        ratio_of = defined_quotient if all_defined else quotient
        ratios = self.layout.views(ratio_of(*self.sizes.unbind(0)))
        return ratios, None if all_defined else self.layout.views(undefined(*self.sizes))


def _buckets(all_tensors: list[Tensors]) -> Iterator[list[Block]]:
    """Group blocks that share foreach calls: as many of a group as fit, or single ones if foreach=False."""
    bucket: list[Block] = []
    room = 0
    for tensors in all_tensors:
        limit = limits.PIECE_ELEMENTS_CPU if tensors.weight.is_cpu else limits.PIECE_ELEMENTS
        item = tensors.item
        if not tensors.weight.numel():
            continue  # a rank may hold nothing of a matrix
        for piece in pieces(tensors.slot.matrices, limit):
            joins = item.spec.foreach is not False and bucket and bucket[0].tensors.item.names is item.names
            if bucket and (not joins or piece.num_elements > room):
                yield bucket
                bucket = []
            if not bucket:
                room = min(limit, limits.JOINED_ELEMENTS_CPU) if tensors.weight.is_cpu else limit
            bucket.append(Block(tensors, piece))
            room -= piece.num_elements
    if bucket:
        yield bucket


def _in(dtype: torch.dtype, tensors: list[Tensor], *, copy: bool = False) -> list[Tensor]:
    if copy:
        return [x.to(dtype, copy=True) for x in tensors]
    return [in_dtype(dtype, x) for x in tensors]


def store_all(stored: list[Tensor], computed: list[Tensor], skip: Tensor | None) -> None:
    for old, new in zip(stored, computed, strict=True):
        store(old, new, skip)


def _moments(bucket: list[Block], dtype: torch.dtype, control: Control) -> None:
    """Update m and v in place."""
    spec = bucket[0].tensors.item.spec
    beta1, beta2 = spec.direction.betas
    grads = _in(dtype, [b.of(b.tensors.grad) for b in bucket])
    if control.gradient_scale is not None:
        grads = list(private.foreach_mul(grads, control.gradient_scale))
    if spec.maximize:
        grads = list(private.foreach_neg(grads))
    stored = [b.of(b.tensors.state[0]) for b in bucket], [b.of(b.tensors.state[1]) for b in bucket]
    # A step that may still be skipped is computed on copies of the state.
    exp_avgs, exp_avg_sqs = (_in(dtype, x, copy=control.skip is not None) for x in stored)
    private.foreach_lerp_(exp_avgs, grads, 1 - beta1)
    private.foreach_mul_(exp_avg_sqs, beta2)
    private.foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    store_all(stored[0], exp_avgs, control.skip)
    store_all(stored[1], exp_avg_sqs, control.skip)


def _updates(bucket: list[Block], dtype: torch.dtype, weights: list[Tensor]) -> list[Tensor]:
    """Form u as new tensors."""
    decays = private.foreach_mul(weights, bucket[0].tensors.item.weight_decay)
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
    private.foreach_add_(updates, bucket[0].tensors.item.spec.direction.eps)
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
    norm = bucket[0].tensors.item.spec.ratio.measures
    if norm == "max":
        weights = list(private.foreach_abs(weights))
        private.foreach_abs_(updates)
    else:
        weights = list(private.foreach_mul(weights, weights))
        private.foreach_mul_(updates, updates)
    for block, weight, update in zip(bucket, weights, updates, strict=True):
        number = block.tensors.number
        reduce_into(block, weight, weight_sizes[number], norm)
        reduce_into(block, update, update_sizes[number], norm)


def _apply(
    bucket: list[Block],
    dtype: torch.dtype,
    control: Control,
    ratios: list[Sizes],
    unscaled: list[Sizes] | None,
    recorder: Recorder | None,
) -> None:
    """w <- w - lr * clamp(s*u), in place."""
    item = bucket[0].tensors.item
    stored = [b.of(b.tensors.weight) for b in bucket]
    weights = _in(dtype, stored, copy=control.skip is not None)
    updates = _updates(bucket, dtype, weights)
    ratio = item.spec.ratio
    of_blocks = [of_block(block, ratios[block.tensors.number]) for block in bucket]
    scales = [
        ratio.scale(now, None if unscaled is None else of_block(block, unscaled[block.tensors.number]))
        for block, now in zip(bucket, of_blocks, strict=True)
    ]
    private.foreach_mul_(updates, scales)
    clip, lr = ratio.clip, scalar(item.lr, weights[0].device)
    if recorder is not None:
        of_bucket = zip(bucket, of_blocks, weights, updates, scales, strict=True)
        for block, now, weight, scaled, scale in of_bucket:
            taken = ratio.clipped(scaled) * lr
            recorder.add(block.tensors.item.name, measure(weight, scaled, scale, now, ratio, taken))
    if clip is not None:
        if len(updates) == 1:  # a single pass; foreach has no clamp with two bounds
            updates[0].clamp_(-clip, clip)
        else:
            private.foreach_clamp_min_(updates, -clip)
            private.foreach_clamp_max_(updates, clip)
    private.foreach_mul_(updates, lr)
    private.foreach_sub_(weights, updates)
    store_all(stored, weights, control.skip)
