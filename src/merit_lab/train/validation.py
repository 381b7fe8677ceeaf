"""The loss on the validation sequences, with its standard error."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from merit_lab.train.parallel import Ranks


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
