"""What a monitor has seen, layer by layer, of one rank or of all."""

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


def combine(seen: Mapping[str, Tensor]) -> AttentionReading | None:
    """A reading of (3, heads) observations; None of none."""
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
    """What the ranks of a group saw together, on each of them. ``device`` is the one that this rank uses.

    They may have seen different layers, as with LayerDrop, so names go with the numbers. Gathered, not
    reduced: a maximum and sums in one call, and no backend that loses a NaN.
    """
    own = {name: observation.cpu() for name, observation in seen.items()}
    ranks: list[dict[str, Tensor]] = [{} for _ in range(group.size())]
    with torch.cuda.device(device if device.type == "cuda" else -1):
        dist.all_gather_object(ranks, own, group=group)
    together: dict[str, Tensor] = {}
    for of_rank in ranks:
        for name, observation in of_rank.items():
            before = together.get(name, observation)
            if before.shape != observation.shape:
                raise RuntimeError(
                    f"ranks saw {before.shape[1]} and {observation.shape[1]} heads of {name}; heads can be "
                    "told apart only if there are as many on every rank. Read without a group there."
                )
            together[name] = merge(before, observation) if name in together else observation
    return together
