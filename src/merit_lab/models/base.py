"""The interface of the lab's language models, and the precision of their parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from merit_lab.models.transformers_config import AnyModelConfig

Observe = Literal["max"] | bool


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32, for sums and exponentials; keep float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_autocast(x: Tensor) -> Tensor:
    """Convert to autocast's dtype if autocast is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


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


class Output(NamedTuple):
    """The output of a forward pass: the loss with targets, otherwise the logits; and the observation."""

    loss: Tensor | None
    logits: Tensor | None
    attention: AttentionObservation | None


class Model(nn.Module):
    """A language model that returns the loss or the logits, and optional attention statistics."""

    config: AnyModelConfig

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        observe: Observe = False,
        of_sequences: bool = False,
    ) -> Output:
        """Return the mean cross-entropy with ``targets``, the logits without.

        Args:
            tokens: (batch, time), int64.
            targets: the token to predict at each position, shaped like ``tokens``.
            observe: True for every head's largest attention logit and entropy, "max" for only the logits,
                which flex attention returns at almost no cost.
            of_sequences: return the mean of every sequence, (batch,), without a gradient.
        """
        raise NotImplementedError

    def sharded_parts(self) -> Iterable[nn.Module]:
        """Return the modules that FSDP2 shards separately; the rest is sharded with the model."""
        raise NotImplementedError


def check_device(config: AnyModelConfig, device: torch.device) -> None:
    """Raise ValueError if a device does not support a model's attention."""
    needs_cuda = config.attention in ("flex", "cudnn") or config.attention.startswith("flash")
    if needs_cuda and device.type != "cuda":
        raise ValueError(
            f"attention {config.attention!r} needs CUDA, but the tokens are on {device.type}; use 'auto' or "
            "'sdpa'"
        )


def check_inputs(config: AnyModelConfig, tokens: Tensor) -> None:
    """Raise ValueError for tokens that a model would take without a word, or refuse without a reason."""
    check_device(config, tokens.device)
    if tokens.shape[1] > config.context:
        raise ValueError(
            f"a sequence of {tokens.shape[1]} tokens is longer than the model's context of "
            f"{config.context}; cut it, or build the model with a longer context"
        )
