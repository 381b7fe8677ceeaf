"""The numbers of a step, copied from the device to the host without waiting.

They are read after the next step is queued. By then the copies are complete or nearly so, and the device is
never idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merit_lab.models import AttentionObservation
from merit_lab.train.parallel import Ranks
from merit_lab.train.speed import Moment


class HostCopies:
    """Tensors that are being copied to the host."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._copies = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> dict[str, Tensor]:
        """Wait until the copies are complete and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """The measurements of a step; ``step`` steps were done before it."""

    step: int
    lr: float
    tensors: HostCopies
    began: Moment
    optimizer_began: Moment
    optimizer_ended: Moment
    ended: Moment
    update: dict[str, dict[str, float]]


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
