"""What attention did: the largest logit and the entropy of every head, exactly and in little memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Logits held at one time, at most, as long as one query of every sequence and head fits: 128 MiB.
_BLOCK_ELEMENTS = 2**25


class Observation(NamedTuple):
    """Largest scaled, masked attention logit, and the mean entropy in nats, of each layer and head.

    Both are (layers, heads) in float32, over all sequences and queries of the batch. A query that
    attends to n tokens alike has entropy log(n), one that attends to a single token has 0.
    """

    max_logits: Tensor
    entropy: Tensor | None

    @classmethod
    def of_layers(cls, layers: list[Tensor]) -> Observation:
        """From what :func:`observe_attention` gave for each layer."""
        stacked = torch.stack(layers)
        return cls(stacked[:, 0], stacked[:, 1] if stacked.shape[1] > 1 else None)


# One operator: torch.compile would unroll the loop, and has nothing to gain from looking into it.
@torch.library.custom_op("merit_optim::observe_attention", mutates_args=())
def observe_attention(query: Tensor, key: Tensor, scale: float, entropy: bool) -> Tensor:
    """Largest causal logit of each head and, if asked for, the mean entropy: (1 or 2, heads) in float32.

    ``query`` and ``key`` are (batch, heads, time, head width). Products of bf16 numbers are exact in
    float32 (and in TF32), so the logits are those of the attention kernels, which add in float32 too.
    """
    with torch.autocast(query.device.type, enabled=False):  # it would round the logits to bf16
        return _observe(query.float(), key.float(), scale, entropy)


@observe_attention.register_fake
def _(query: Tensor, key: Tensor, scale: float, entropy: bool) -> Tensor:  # noqa: ARG001
    return query.new_empty((2 if entropy else 1, query.shape[1]), dtype=torch.float32)


def _observe(query: Tensor, key: Tensor, scale: float, entropy: bool) -> Tensor:
    batch, heads, time, _ = query.shape
    step = max(1, _BLOCK_ELEMENTS // (batch * heads * time))
    largest = query.new_full((heads,), -torch.inf)
    total = query.new_zeros((heads,))
    for begin in range(0, time, step):
        end = min(begin + step, time)
        # Keys after the block are not formed at all; within it, the part above the diagonal is masked.
        logits = query[:, :, begin:end] @ key[:, :, :end].mT
        square = logits[..., begin:]
        masked = torch.ones(square.shape[-2:], dtype=torch.bool, device=query.device).triu_(1)
        square.masked_fill_(masked, -torch.inf)
        row_max = logits.amax(dim=-1, keepdim=True)
        largest = torch.maximum(largest, row_max.amax(dim=(0, 2, 3)))
        if entropy:
            # With s = logit - row_max and z = sum(exp s), the entropy is log z - sum(s exp s) / z.
            weights = logits.sub_(row_max).mul_(scale).exp()
            square.masked_fill_(masked, 0.0)
            normaliser = weights.sum(dim=-1)
            moment = weights.mul_(logits).sum(dim=-1)
            total += (normaliser.log() - moment / normaliser).sum(dim=(0, 2))
    largest *= scale  # once here, not on every logit
    return torch.stack([largest, total / (batch * time)] if entropy else [largest])
