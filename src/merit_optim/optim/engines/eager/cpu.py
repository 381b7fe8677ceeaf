"""Weights on a CPU, one by one: both phases of a weight while it is in the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.engines.eager import limits
from merit_optim.optim.engines.eager.blocks import in_dtype, of_block, reduce_into
from merit_optim.optim.engines.eager.foreach import EagerPart
from merit_optim.optim.engines.eager.stored import Block, Stack, Stored
from merit_optim.optim.engines.plan import pieces
from merit_optim.optim.engines.work import Control, Item, scalar, store
from merit_optim.optim.statistics import Recorder, measure

CPU = torch.device("cpu")


class Numbers(NamedTuple):
    """Options as 0-d tensors. From a Python number torch would make one in every call."""

    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor
    lr: Tensor

    @staticmethod
    def of(item: Item, dtype: torch.dtype) -> Numbers:
        adam = item.spec.direction
        values = adam.betas[1], adam.eps, item.weight_decay, scalar(item.lr, CPU)
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
        norm, keeps = (
            stored.spec.ratio.measures,
            stored.num_elements <= limits.KEPT_PIECES * limits.PIECE_ELEMENTS_CPU,
        )
        self.blocks: list[tuple[Block, Tensor | None]] = []
        """Each with its u, if it is kept."""
        if norm == "max":  # w and u are measured together; sums would be added in another order
            sizes_of_both = self.layout.views(self.sizes)
        else:
            weight_sizes, update_sizes = map(self.layout.views, self.sizes.unbind(0))
        for tensors in self.tensors:
            for piece in pieces(tensors.slot.matrices, limits.PIECE_ELEMENTS_CPU):
                block, update = Block(tensors, piece), None
                self._moments(block)
                weight = in_dtype(self.dtype, block.of(tensors.weight))
                if norm == "max":
                    update = self._update(block, weight)
                    magnitudes = torch.empty((2, *weight.shape), dtype=self.dtype, device=CPU)
                    of_weight, of_update = magnitudes.unbind(0)
                    torch.abs(weight, out=of_weight)
                    torch.abs(update, out=of_update)
                    reduce_into(block, magnitudes, sizes_of_both[tensors.number], norm)
                elif norm == "l2":
                    update = self._update(block, weight)
                    reduce_into(block, weight * weight, weight_sizes[tensors.number], norm)
                    reduce_into(block, update * update, update_sizes[tensors.number], norm)
                self.blocks.append((block, update if keeps else None))
        if norm == "l2":
            self.sizes.sqrt_()

    def _moments(self, block: Block) -> None:
        tensors, spec, dtype = block.tensors, block.tensors.item.spec, self.dtype
        beta1, beta2 = spec.direction.betas
        grad = in_dtype(dtype, block.of(tensors.grad))
        if self.control.gradient_scale is not None:
            grad = grad * self.control.gradient_scale
        if spec.maximize:
            grad = -grad
        stored = block.of(tensors.state[0]), block.of(tensors.state[1])
        exp_avg, exp_avg_sq = in_dtype(dtype, stored[0]), in_dtype(dtype, stored[1])
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(self.numbers.beta2).addcmul_(grad, grad, value=1 - beta2)
        store(stored[0], exp_avg, None)
        store(stored[1], exp_avg_sq, None)

    def _update(self, block: Block, weight: Tensor) -> Tensor:
        """Form u as a new tensor, from the state as stored."""
        tensors, dtype = block.tensors, self.dtype
        update = in_dtype(dtype, block.of(tensors.state[1])).sqrt()
        if tensors.correction is not None:
            update.div_(tensors.correction.second_sqrt)
        update.add_(self.numbers.eps)
        torch.div(in_dtype(dtype, block.of(tensors.state[0])), update, out=update)
        if tensors.correction is not None:
            update.div_(tensors.correction.first)
        return update.add_(weight * self.numbers.weight_decay)

    def apply(self, recorder: Recorder | None) -> None:
        ratios, unscaled = self._ratios()
        lr, spec = self.numbers.lr, self.all_stored[0].spec
        for block, update in reversed(self.blocks):  # the last ones are still in the cache
            tensors, ratio = block.tensors, of_block(block, ratios[block.tensors.number])
            stored = block.of(tensors.weight)
            weight = in_dtype(self.dtype, stored)
            if update is None:
                update = self._update(block, weight)
            no_ratio = None if unscaled is None else of_block(block, unscaled[tensors.number])
            scale = spec.ratio.scale(ratio, no_ratio)
            update.mul_(scale)
            if recorder is not None:
                taken = spec.ratio.clipped(update) * lr
                recorder.add(tensors.item.name, measure(weight, update, scale, ratio, spec.ratio, taken))
            if spec.ratio.clip is not None:
                update.clamp_(-spec.ratio.clip, spec.ratio.clip)
            weight.sub_(update.mul_(lr))
            store(stored, weight, None)
        self.all_stored[0].return_copies()
