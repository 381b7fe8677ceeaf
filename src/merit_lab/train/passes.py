"""Forward and backward passes over a rank's micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from merit_lab.models import AttentionObservation
from merit_lab.models.attention import Observe
from merit_lab.train.parallel import Ranks, gradients_added

MicroBatch = tuple[Tensor, Tensor]


class AttentionTotals:
    """Attention statistics over the micro-batches of a step."""

    def __init__(self) -> None:
        self._max_logits: Tensor | None = None
        self._entropy: Tensor | None = None

    def add(self, observation: AttentionObservation | None, share: float) -> None:
        """Add a micro-batch, which is ``share`` of this rank's sequences."""
        if observation is None:
            return
        largest, entropy = observation.max_logits, observation.entropy
        self._max_logits = largest if self._max_logits is None else torch.maximum(self._max_logits, largest)
        if entropy is not None:
            part = entropy * share
            self._entropy = part if self._entropy is None else self._entropy + part

    def over_all(self, ranks: Ranks) -> dict[str, Tensor]:
        """Return the statistics of the global batch; empty if nothing was observed."""
        seen = {}
        if self._max_logits is not None:
            seen["max_logits"] = ranks.largest(self._max_logits)
        if self._entropy is not None:
            seen["entropy"] = ranks.sum(self._entropy) / ranks.size
        return seen


class Passes:
    """Computes gradients and attention statistics of batches.

    Args:
        module: the model, wrapped for the ranks.
        rows: this rank's part of a batch, as (begin, end) for each micro-batch.
        ranks: the ranks of the run.
        bf16: whether matrix products are in bfloat16.
    """

    def __init__(
        self, module: nn.Module, rows: Sequence[tuple[int, int]], ranks: Ranks, *, bf16: bool
    ) -> None:
        self._module, self._ranks, self._is_bf16 = module, ranks, bf16
        num_rows = sum(end - begin for begin, end in rows)
        self._shares = [(end - begin) / num_rows for begin, end in rows]

    def autocast(self) -> torch.autocast:
        """Return a context with bf16 matrix products, if configured."""
        return torch.autocast(self._ranks.device.type, torch.bfloat16, enabled=self._is_bf16)

    def gradients(
        self, batch: Iterable[MicroBatch], observe: Observe = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add gradients of the mean loss over the global batch; return the loss and attention statistics."""
        loss = torch.zeros((), device=self._ranks.device)
        attention = AttentionTotals()
        for i, ((inputs, targets), share) in enumerate(zip(batch, self._shares, strict=True)):
            with gradients_added(self._module, last=i == len(self._shares) - 1):
                output = self._forward(inputs, targets, observe)
                (output.loss * share).backward()
            loss += output.loss.detach() * share
            attention.add(output.attention, share)
        return self._ranks.sum(loss) / self._ranks.size, attention.over_all(self._ranks)

    @torch.no_grad()
    def attention(self, batch: Iterable[MicroBatch], observe: Observe) -> dict[str, Tensor]:
        """Return the attention statistics of a batch."""
        attention = AttentionTotals()
        for (inputs, targets), share in zip(batch, self._shares, strict=True):
            attention.add(self._forward(inputs, targets, observe).attention, share)
        return attention.over_all(self._ranks)

    def _forward(self, inputs: Tensor, targets: Tensor, observe: Observe) -> Any:
        with self.autocast():
            return self._module(inputs, targets, observe=observe)
