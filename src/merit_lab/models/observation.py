"""Attention statistics of a model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionObservation(NamedTuple):
    """Largest scaled, masked attention logit, and the mean entropy in nats, of each layer and head.

    Both are (layers, heads) in float32, over all sequences and queries of the batch. A query that
    attends to n tokens equally has entropy log(n), one that attends to a single token has 0.
    """

    max_logits: Tensor
    entropy: Tensor | None

    @classmethod
    def of_layers(cls, layers: list[Tensor]) -> AttentionObservation:
        """Combine the one or two rows that ``attend`` returned for each layer."""
        stacked = torch.stack(layers)
        return cls(stacked[:, 0], stacked[:, 1] if stacked.shape[1] > 1 else None)
