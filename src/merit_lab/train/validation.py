"""The loss on the validation sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from merit_lab.train.parallel import Ranks


@torch.no_grad()
def validation_loss(module: nn.Module, sequences: Tensor, micro_batch: int, ranks: Ranks) -> float:
    """Return the mean loss over ``sequences``, without dropout; ranks take micro-batches in turn."""
    module.eval()
    pieces = sequences.split(micro_batch)
    total = torch.zeros((), device=ranks.device)
    for turn in range(0, len(pieces), ranks.size):
        mine = turn + ranks.rank
        # A rank without a piece left still makes a pass: sharded models need every rank in each.
        piece = pieces[min(mine, len(pieces) - 1)].to(ranks.device)
        loss = module(piece[:, :-1].contiguous(), piece[:, 1:].contiguous()).loss
        total += loss * len(piece) if mine < len(pieces) else 0.0
    module.train()
    return ranks.sum(total).item() / len(sequences)
