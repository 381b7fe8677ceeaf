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

    def scalars(self, prefix: str = "attention/", *, per_layer: bool = True) -> dict[str, float]:
        """Numbers for a logger: the largest logit and the smallest entropy, of each layer and of all."""
        numbers: dict[str, float] = {}
        for what, layers, extreme in (
            ("max_logit", self.max_logits, torch.amax),
            ("min_entropy", self.entropy, torch.amin),
        ):
            extremes = {name: extreme(heads) for name, heads in layers.items()}
            if per_layer:
                numbers |= {f"{prefix}{what}/{name}": value.item() for name, value in extremes.items()}
            if extremes:  # as tensors, since Python's max and min pass over a NaN
                numbers[f"{prefix}{what}"] = extreme(torch.stack(list(extremes.values()))).item()
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
    largest, total, count = table.cpu()
    return AttentionReading(
        max_logits=dict(zip(seen, largest.split(heads), strict=True)),
        entropy={
            name: entropies
            for name, entropies, counts in zip(
                seen, (total / count).split(heads), count.split(heads), strict=True
            )
            if counts.any()
        },
    )
