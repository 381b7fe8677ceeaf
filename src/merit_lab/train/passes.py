"""Forward and backward passes over a rank's micro-batches, and the loss on the validation sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from merit_lab.models import AttentionObservation
from merit_lab.models.base import Observe
from merit_lab.train.parallel import Ranks, gradients_added

MicroBatch = tuple[Tensor, Tensor]


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
        seen: list[tuple[AttentionObservation | None, float]] = []
        for i, ((inputs, targets), share) in enumerate(zip(batch, self._shares, strict=True)):
            with gradients_added(self._module, last=i == len(self._shares) - 1):
                output = self._forward(inputs, targets, observe)
                (output.loss * share).backward()
            loss += output.loss.detach() * share
            seen.append((output.attention, share))
        return self._ranks.sum(loss) / self._ranks.size, self._over_all(seen)

    def _over_all(self, seen: list[tuple[AttentionObservation | None, float]]) -> dict[str, Tensor]:
        """Return the attention statistics of the global batch; each micro-batch has a share of it."""
        observed = [(one, share) for one, share in seen if one is not None]
        if not observed:
            return {}
        largest = torch.stack([one.max_logits for one, _ in observed]).amax(0)
        found = {"max_logits": self._ranks.largest(largest)}
        entropies = [one.entropy * share for one, share in observed if one.entropy is not None]
        if entropies:
            found["entropy"] = self._ranks.sum(torch.stack(entropies).sum(0)) / self._ranks.size
        return found

    def _forward(self, inputs: Tensor, targets: Tensor, observe: Observe) -> Any:
        with self.autocast():
            return self._module(inputs, targets, observe=observe)


@torch.no_grad()
def validation_loss(
    module: nn.Module, sequences: Tensor, micro_batch: int, ranks: Ranks
) -> tuple[float, float | None]:
    """Return the mean loss over ``sequences``, without dropout, and its standard error over them.

    Ranks take micro-batches in turn. All of these have one size, so that one compiled graph is enough: the
    last is filled up with its last sequence. Of one sequence there is no standard error.
    """
    module.eval()
    pieces = sequences.split(micro_batch)
    losses = torch.zeros(len(sequences), device=ranks.device)
    for turn in range(0, len(pieces), ranks.size):
        mine = turn + ranks.rank
        # A rank without a piece left still makes a pass: sharded models need every rank in each.
        piece = pieces[min(mine, len(pieces) - 1)].to(ranks.device)
        num = len(piece)
        if num < len(pieces[0]):
            piece = torch.cat([piece, piece[-1:].expand(len(pieces[0]) - num, -1)])
        inputs, targets = piece[:, :-1].contiguous(), piece[:, 1:].contiguous()
        found = module(inputs, targets, of_sequences=True).loss
        if mine < len(pieces):
            losses[mine * micro_batch :][:num] = found[:num]
    module.train()
    losses = ranks.sum(losses).double()
    mean, num = losses.mean().item(), len(losses)
    return mean, losses.std().item() / num**0.5 if num > 1 else None
