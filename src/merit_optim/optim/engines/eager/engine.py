"""The trust-ratio step in ordinary torch operations, in place and in pieces.

Like every engine, it works in two phases. *Advance* updates the state and measures |w| and |u| into a flat
buffer. *Apply* forms all ratios of the buffer at once, forms u again and changes w. Each phase goes through
the weights in blocks of rows that fit the processor's cache, so the dozen operations of a phase cost one trip
to memory, and temporaries are the size of a block rather than of a weight. Small weights share torch calls.

On a CPU, a whole weight goes through both phases before the next one starts (``cpu.py``). u is kept between
the phases unless the weight is very large. Small weights of the same shape are copied into one stack.

That is so with Adam's direction, trust ratios and decay inside. Every other choice is computed by its own
functions, one whole weight at a time (``whole.py``); the update is formed once, in the first phase, and held.
If ranks share the matrices that a direction needs, the first phase is split in two, and whole matrices are
formed in between.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from merit_optim.optim import algorithm
from merit_optim.optim.axes.directions import Adam, MatrixDirection
from merit_optim.optim.axes.holds import Decay
from merit_optim.optim.axes.ratios import Merit, Unscaled, Weight
from merit_optim.optim.engines.eager import limits
from merit_optim.optim.engines.eager.cpu import CpuPart, Numbers
from merit_optim.optim.engines.eager.foreach import EagerPart
from merit_optim.optim.engines.eager.stored import Stack, Stored
from merit_optim.optim.engines.eager.whole import WholePart
from merit_optim.optim.engines.part import Formed, Part, Share, Whole
from merit_optim.optim.engines.work import Controls, Item, Work, items_of
from merit_optim.optim.spec import Spec
from merit_optim.optim.torch_private import is_fake


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
        spec: Spec = work.spec
        direction = spec.direction
        has_pieces = is_in_pieces(spec)
        may_stack = shares is None and not one_by_one and _can_be_stacked(work)
        stacks: dict[Hashable, list[Item]] = {}
        for item in items_of([work]):
            num_elements = item.param.numel()
            # A rank may hold nothing of the weight, but state of the whole.
            if not num_elements and not (item.original.numel() and any(x.numel() for x in item.state)):
                continue
            device, dtype = item.param.device, algorithm.compute_dtype(item.param)
            is_small = num_elements <= limits.STACKED_ELEMENTS and item.param.is_cpu
            if may_stack and is_small and item.param.data_ptr() not in stacked:
                stacked.add(item.param.data_ptr())
                assert isinstance(direction, Adam)
                steps = item.step.item() if direction.bias_correction else None
                stacks.setdefault((item.param.shape, item.param.dtype, steps), []).append(item)
                continue
            stored = Stored(item, None if shares is None else shares.get(item.original))
            if has_pieces:
                alike.setdefault((device, dtype), []).append(stored)
            else:
                parts.append(WholePart(stored, device, dtype, controls[device]))
        for items in stacks.values():
            first = items[0].param
            some = alike.setdefault((first.device, algorithm.compute_dtype(first)), [])
            together = max(1, limits.STACK_ELEMENTS // first.numel())
            batches = (items[start : start + together] for start in range(0, len(items), together))
            some += [Stored(batch[0]) if len(batch) == 1 else Stack(batch) for batch in batches]
    for (device, dtype), some in alike.items():
        control = controls[device]
        if device.type == "cpu" and shares is None and control.skip is None:
            for _, same_group in groupby(some, lambda stored: id(stored.item.names)):
                of_group = list(same_group)
                numbers = Numbers.of(of_group[0].item, dtype)
                parts += [CpuPart(stored, device, dtype, control, numbers) for stored in of_group]
        else:  # ranks reduce their sizes together, or a device takes few launches
            parts.append(EagerPart(some, device, dtype, control))
    return parts


_IN_PIECES = {Adam, Merit, Weight, Unscaled, Decay}


def is_in_pieces(spec: Spec) -> bool:
    """Whether weights are worked on in pieces: this engine has in-place code for exactly these choices."""
    return {type(choice) for choice in spec.choices} <= _IN_PIECES and not spec.ratio.keys


def _can_be_stacked(work: Work) -> bool:
    """Whether small weights may be stacked. In a stack, sums would be added in another order."""
    spec: Spec = work.spec
    is_plain = is_in_pieces(spec) and spec.view.split is None and spec.ratio.measures != "l2"
    return is_plain and spec.foreach is not False and not is_fake(work.params[0])


def form(wholes: Iterable[Whole]) -> Iterator[Formed]:
    """Form what each direction needs from its whole matrix, one matrix after the other."""
    for spec, gathered, step in wholes:
        assert isinstance(spec.direction, MatrixDirection)
        yield spec.direction.whole(gathered, step)
