"""The trust-ratio step in ordinary torch operations, in place and in pieces.

Two phases, as in every engine. *Advance* updates the state and measures |w| and |u| into a flat buffer;
*apply* forms the buffer's ratios all at once, forms u again and changes w. Each phase goes through the
weights in blocks of rows that fit the processor's cache, so the dozen operations of a phase cost one trip to
memory, and the temporaries are the size of a block, not of a weight. Small weights are worked on together,
by the same calls of torch.

On a CPU that has whole weights, both phases are done with some weights before the next: as many small ones as
fit the cache, or one larger one. u is then kept from one phase to the other, unless the weight is very large.

A direction that needs whole matrices is formed once, in the first phase, and held until the second is done.
Where ranks share these matrices, the first phase is in two, with the forming of whole matrices between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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

# Elements in a piece. On a CPU the tensors of a piece and its temporaries should share the L2 cache; measured
# on GPT-2's embedding, 2^17 to 2^18 was best (benchmarks/step.py --piece). Elsewhere a piece should be large
# enough to hide the launches.
PIECE_ELEMENTS_CPU = 256 * 1024
PIECE_ELEMENTS = 64 * 1024 * 1024
# On a CPU weights join in calls up to so many elements: with more, each call would fill the cache anew.
JOINED_ELEMENTS_CPU = 32 * 1024
# Weights of at most so many elements are copied into stacks.
STACKED_ELEMENTS = 8 * 1024
# So many pieces may be kept of u, at most: 16 MiB in float32.
KEPT_PIECES = 16


def parts_of(
    works: list[Work],
    controls: Controls,
    shares: Mapping[Tensor, Share] | None = None,
    *,
    one_by_one: bool = False,
) -> list[Part]:
    """The work in parts that share buffers; each weight whose direction is held is one by itself.

    ``shares`` says what this rank has of sharded parameters, where that is not clear from its own tensors.
    With ``one_by_one`` no weights are worked on as one, as is asked for where each is recorded.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Stored | Stack]] = {}
    parts: list[Part] = []
    for work in works:
        direction, rule, view = direction_of(work.group), Rule.of(work.group), View.of(work.group)
        may_stack = shares is None and not one_by_one and _can_be_stacked(direction, rule, work.group)
        stacks: dict[Hashable, list[Item]] = {}
        for item in items_of([work]):
            num_elements = item.param.numel()
            # A rank may have none of the weight, and state of all of it.
            if not num_elements and not (item.owner.numel() and any(x.numel() for x in item.state)):
                continue
            device, dtype = item.param.device, algorithm.compute_dtype(item.param)
            if may_stack and item.param.is_cpu and num_elements <= STACKED_ELEMENTS:
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
            together = max(1, PIECE_ELEMENTS_CPU // first.numel())
            batches = (items[start : start + together] for start in range(0, len(items), together))
            some += [_stack(batch, direction, rule, view) for batch in batches]
    for (device, dtype), some in alike.items():
        if device.type == "cpu" and shares is None:
            most = KEPT_PIECES * PIECE_ELEMENTS_CPU
            for bundle in _bundles(some):
                keeps = sum(stored.num_elements for stored in bundle) <= most
                parts.append(EagerPart(bundle, device, dtype, controls[device], keeps=keeps))
        else:  # their sizes are reduced together, or worked on in few launches
            parts.append(EagerPart(some, device, dtype, controls[device]))
    return parts


def _can_be_stacked(direction: Direction, rule: Rule, group: dict[str, Any]) -> bool:
    """Whether small weights of a group may be worked on as one. Sums would be added in another order."""
    is_plain = isinstance(direction, Adam) and group.get("split") is None and not rule.calibrated
    return is_plain and rule.norm != "l2" and group["foreach"] is not False


def _stack(items: list[Item], direction: Direction, rule: Rule, view: View) -> Stored | Stack:
    if len(items) == 1:
        return Stored(items[0], direction, rule, view)
    return Stack(items, direction, rule, view)


def _bundles(all_stored: list[Stored | Stack]) -> Iterator[list[Stored | Stack]]:
    """Weights that are a piece together; a larger one is alone."""
    bundle: list[Stored | Stack] = []
    room = PIECE_ELEMENTS_CPU
    for stored in all_stored:
        if bundle and stored.num_elements > room:
            yield bundle
            bundle, room = [], PIECE_ELEMENTS_CPU
        bundle.append(stored)
        room -= stored.num_elements
    if bundle:
        yield bundle


def form(wholes: Iterable[Whole]) -> Iterator[Formed]:
    """What each direction forms of its whole matrix: one after the other."""
    for _, direction, gathered, step in wholes:
        yield direction.whole(gathered, step)


class EagerPart:
    """Weights of one device and one compute dtype whose direction is element-wise, which is Adam's."""

    def __init__(
        self,
        all_stored: Sequence[Stored | Stack],
        device: torch.device,
        dtype: torch.dtype,
        control: Control,
        *,
        keeps: bool = False,
    ) -> None:
        self.layout = plan(
            tuple((matrices, own.rule.has_rows) for own in all_stored for matrices in own.parts)
        )
        self.device, self.dtype, self.control, self.all_stored = device, dtype, control, all_stored
        self.keeps = keeps
        """Whether u is kept from the first phase to the second."""
        self.sizes = torch.zeros(2, self.layout.length, dtype=dtype, device=device)
        slots = iter(enumerate(self.layout.slots))
        self.tensors = [tensors for own in all_stored for tensors in own.cut(slots)]

    @property
    def places(self) -> list[Place]:
        """Where the sizes of each weight are."""
        return [Place(tensors.item.param, self.sizes, tensors.slot) for tensors in self.tensors]

    def advance(self) -> None:
        """Update the state, and measure w and u."""
        self.buckets = list(_buckets(self.tensors))
        self.updates: list[list[Tensor] | None] = []
        weight_sizes, update_sizes = map(self.layout.views, self.sizes.unbind(0))
        for bucket in self.buckets:
            self._advance_bucket(bucket)
            kept = None
            if bucket[0].tensors.rule.norm != "none":
                updates = _measure(bucket, self.dtype, weight_sizes, update_sizes, keeps=self.keeps)
                kept = updates if self.keeps else None
            self.updates.append(kept)
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
        # Sizes of zero are rare, and a pass over every block: a CPU looks first, where looking is free.
        all_defined = self.device.type == "cpu" and bool(self.sizes.all())
        ratio_of = algorithm.defined_ratio if all_defined else algorithm.ratio
        ratios = self.layout.views(ratio_of(*self.sizes.unbind(0)))
        unscaled = None if all_defined else self.layout.views(algorithm.undefined(*self.sizes))
        for tensors in self.tensors:
            if tensors.rule.calibrated:
                whole_N11, first_N11 = ratios[tensors.number].whole_N[:, None, None], tensors.state[-1]
                relative_N11, now_N11 = algorithm.calibrated(whole_N11, first_N11.to(self.dtype))
                store(first_N11, now_N11, self.control.skip)
                whole_N11.copy_(relative_N11)
        # Backwards: the last blocks of the first phase are still in the cache.
        for bucket, updates in zip(reversed(self.buckets), reversed(self.updates), strict=True):
            _apply(bucket, self.dtype, self.control, ratios, unscaled, recorder, updates)
        for stored in self.all_stored:
            stored.return_copies()


class HeldPart(EagerPart):
    """One weight whose direction is formed of whole matrices, and held until the weight is changed by it."""

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
    """Blocks that are worked on together: as many of a group as fit, or one by one without foreach."""
    bucket: list[Block] = []
    room = 0
    for tensors in all_tensors:
        limit = PIECE_ELEMENTS_CPU if tensors.weight.is_cpu else PIECE_ELEMENTS
        group = tensors.item.group
        if not tensors.weight.numel():
            continue  # a rank may have none of a matrix
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


def _in(dtype: torch.dtype, tensors: list[Tensor], *, copy: bool = False) -> list[Tensor]:
    if copy:
        return [x.to(dtype, copy=True) for x in tensors]
    return [x if x.dtype == dtype else x.to(dtype) for x in tensors]


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
    # One for all, or none, as the options of their group are.
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
    bucket: list[Block],
    dtype: torch.dtype,
    weight_sizes: list[Sizes],
    update_sizes: list[Sizes],
    *,
    keeps: bool,
) -> list[Tensor]:
    """The bucket's part of the rows', columns' and wholes' sizes, l2 as sums of squares; u if it is kept."""
    weights = _in(dtype, [b.of(b.tensors.weight) for b in bucket])
    updates = _updates(bucket, dtype, weights)
    norm = bucket[0].tensors.rule.norm
    if norm == "max":
        weights = list(private.foreach_abs(weights))
        magnitudes = list(private.foreach_abs(updates)) if keeps else updates
        if not keeps:
            private.foreach_abs_(magnitudes)
    else:
        weights = list(private.foreach_mul(weights, weights))
        magnitudes = list(private.foreach_mul(updates, updates)) if keeps else updates
        if not keeps:
            private.foreach_mul_(magnitudes, magnitudes)
    for block, weight, update in zip(bucket, weights, magnitudes, strict=True):
        number = block.tensors.number
        _reduce(block, weight, weight_sizes[number], norm)
        _reduce(block, update, update_sizes[number], norm)
    return updates


def _reduce(block: Block, magnitude: Tensor, total: Sizes, norm: str) -> None:
    reduce, merge = (torch.amax, torch.maximum) if norm == "max" else (torch.sum, torch.add)
    piece = block.piece
    if piece.is_whole:  # there is nothing to merge it with
        if total.rows_NR is None or total.columns_NC is None:
            reduce(magnitude, (1, 2), out=total.whole_N)
            return
        reduce(magnitude, 2, out=total.rows_NR)
        reduce(magnitude, 1, out=total.columns_NC)
        reduce(total.rows_NR, 1, out=total.whole_N)
        return
    whole = total.whole_N[piece.matrices]
    if total.rows_NR is None or total.columns_NC is None:
        merge(whole, reduce(magnitude, (1, 2)), out=whole)
        return
    rows = reduce(magnitude, 2)
    total.rows_NR[piece.matrices, piece.rows] = rows
    columns = total.columns_NC[piece.matrices]
    merge(columns, reduce(magnitude, 1), out=columns)
    merge(whole, reduce(rows, 1), out=whole)


def _apply(
    bucket: list[Block],
    dtype: torch.dtype,
    control: Control,
    ratios: list[Sizes],
    unscaled: list[Sizes] | None,
    recorder: Recorder | None,
    updates: list[Tensor] | None,
) -> None:
    """w <- w - lr * clamp(s*u), in place; u is formed where it was not kept."""
    group = bucket[0].tensors.item.group
    stored = [b.of(b.tensors.weight) for b in bucket]
    weights = _in(dtype, stored, copy=control.skip is not None)
    if updates is None:
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
        if len(updates) == 1:  # one pass, for which there is no foreach
            updates[0].clamp_(-clip, clip)
        else:
            private.foreach_clamp_min_(updates, -clip)
            private.foreach_clamp_max_(updates, clip)
    private.foreach_mul_(updates, lr)
    private.foreach_sub_(weights, updates)
    _store(stored, weights, control.skip)


def _scale(block: Block, ratio: Sizes, no_ratio: Sizes | None) -> Tensor:
    """s of one block, from the ratios of its weight: what algorithm.element_ratio defines."""
    rule, (whole, rows, columns) = block.tensors.rule, _of_block(block, ratio)
    if rows is None or columns is None:
        return algorithm.bounded(whole, rule)
    if rule.weight_bound:
        rows = torch.maximum(rows, whole)
    scale = algorithm.bounded(torch.maximum(rows, columns), rule)
    if no_ratio is not None:
        _, rows_too, columns_too = _of_block(block, no_ratio)
        assert rows_too is not None and columns_too is not None
        scale.masked_fill_(rows_too | columns_too, 1)
    return scale


def _of_block(block: Block, of_weight: Sizes) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What there is of a block's whole, rows and columns, each of a shape that broadcasts to (N, R, C)."""
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
    """Where the weight-wise ratio was larger than both the row's and the column's, and so decided."""
    whole, rows, columns = _of_block(block, ratio)
    if rows is None or columns is None or not block.tensors.rule.weight_bound:
        return None
    return (torch.maximum(rows, columns) < whole) & (scale == whole)
