"""What a monitor has seen, layer by layer, of one rank or of all."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from merit_optim.monitor.interception import merge


@dataclass(frozen=True, kw_only=True)
class AttentionReading:
    """The largest attention logit and the mean entropy in nats of every head, by the layer's name.

    The logits are those that the softmax sees: scaled, and only of keys that are not masked. A query that
    attends to n tokens alike has entropy log(n), one that attends to a single token has 0. All are float32
    on the CPU, of shape (heads,). Layers whose entropy was not measured are not in ``entropy``.
    """

    max_logits: dict[str, Tensor]
    entropy: dict[str, Tensor]

    def scalars(self, prefix: str = "attention/") -> dict[str, float]:
        """A few numbers for a logger: the largest logit and the smallest entropy of each layer and of all."""
        largest = {name: heads.max().item() for name, heads in self.max_logits.items()}
        smallest = {name: heads.min().item() for name, heads in self.entropy.items()}
        numbers = {f"{prefix}max_logit/{name}": value for name, value in largest.items()}
        numbers |= {f"{prefix}min_entropy/{name}": value for name, value in smallest.items()}
        # Of tensors, since Python's max and min pass over a NaN.
        numbers[f"{prefix}max_logit"] = torch.tensor(list(largest.values())).max().item()
        if smallest:
            numbers[f"{prefix}min_entropy"] = torch.tensor(list(smallest.values())).min().item()
        return numbers


def combine(seen: dict[str, Tensor], group: dist.ProcessGroup | None) -> AttentionReading:
    """A reading of (3, heads) observations; with a group, of all its ranks, by one collective."""
    heads = [observation.shape[1] for observation in seen.values()]
    device = next(iter(seen.values())).device
    table = torch.cat([observation.to(device) for observation in seen.values()], dim=1)
    if group is not None:
        # Gathered, not reduced: a maximum and sums in one call, and no backend that loses a NaN.
        ranks = [torch.empty_like(table) for _ in range(group.size())]
        dist.all_gather(ranks, table, group=group)
        table = functools.reduce(merge, ranks)
    parts = dict(zip(seen, table.cpu().split(heads, dim=1), strict=True))
    return AttentionReading(
        max_logits={name: part[0] for name, part in parts.items()},
        entropy={name: part[1] / part[2] for name, part in parts.items() if part[2].any()},
    )
