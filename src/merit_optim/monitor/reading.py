"""The readings of a monitor, layer by layer, for one rank or all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from merit_optim.monitor.interception import merge


@dataclass(frozen=True, kw_only=True)
class AttentionReading:
    """The largest attention logit and the mean entropy in nats of every head, by the layer's name.

    The logits are the inputs of the softmax: scaled, and only of keys that are not masked. A query that
    attends to n tokens equally has entropy log(n), one that attends to a single token has 0. All are float32
    on the CPU, of shape (heads,). Layers whose entropy was not measured are not in ``entropy``.
    """

    max_logits: dict[str, Tensor]
    entropy: dict[str, Tensor]

    def scalars(self, prefix: str = "attention/", *, per_layer: bool = True) -> dict[str, float]:
        """Return numbers for a logger: the largest logit and the smallest entropy, per layer and overall."""
        numbers: dict[str, float] = {}
        for quantity, layers, extreme in (
            ("max_logit", self.max_logits, torch.amax),
            ("min_entropy", self.entropy, torch.amin),
        ):
            extremes = {name: extreme(heads) for name, heads in layers.items()}
            if per_layer:
                numbers |= {f"{prefix}{quantity}/{name}": value.item() for name, value in extremes.items()}
            if extremes:  # as tensors, since Python's max and min ignore a NaN
                numbers[f"{prefix}{quantity}"] = extreme(torch.stack(list(extremes.values()))).item()
        return numbers


def combine(seen: Mapping[str, Tensor]) -> AttentionReading | None:
    """Return a reading from (3, heads) observations; None if there are none."""
    if not seen:
        return None
    heads = [observation.shape[1] for observation in seen.values()]
    device = next(iter(seen.values())).device
    table = torch.cat([observation.to(device) for observation in seen.values()], dim=1)
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


def of_all_ranks(
    seen: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor]:
    """Return the combined observations of a group on each of its ranks; ``device`` is that of this rank.

    Ranks may have observed different layers, as with LayerDrop, so names are exchanged too. Observations are
    gathered, not reduced: one call serves the maximum and the sums, and no backend can drop a NaN.
    """
    of_this_rank = {name: observation.cpu() for name, observation in seen.items()}
    ranks: list[dict[str, Tensor]] = [{} for _ in range(group.size())]
    with torch.cuda.device(device if device.type == "cuda" else -1):
        dist.all_gather_object(ranks, of_this_rank, group=group)
    together: dict[str, Tensor] = {}
    for of_rank in ranks:
        for name, observation in of_rank.items():
            before = together.get(name, observation)
            if before.shape != observation.shape:
                raise RuntimeError(
                    f"ranks observed {before.shape[1]} and {observation.shape[1]} heads of {name}; the "
                    "number of heads must be the same on every rank. Call read() without a group."
                )
            together[name] = merge(before, observation) if name in together else observation
    return together
