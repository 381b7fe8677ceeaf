"""The interface of the lab's language models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from merit_lab.models.attention import Observe
from merit_lab.models.names import AnyModelConfig
from merit_lab.models.observation import AttentionObservation


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


def check_inputs(config: AnyModelConfig, tokens: Tensor, targets: Tensor | None, observe: Observe) -> None:
    """Raise ValueError if a model cannot be called with these inputs."""
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or not tokens.numel():
        raise ValueError(
            f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; they must be torch.int64 of "
            "shape (batch, time), with at least one token"
        )
    if tokens.shape[1] > config.context:
        raise ValueError(
            f"a sequence of {tokens.shape[1]} tokens is longer than the model's context of "
            f"{config.context}; cut it, or build the model with a longer context"
        )
    if targets is not None and (targets.shape != tokens.shape or targets.dtype != torch.int64):
        raise ValueError(
            f"targets are {targets.dtype} of shape {tuple(targets.shape)}; they must be torch.int64 of "
            f"the tokens' shape {tuple(tokens.shape)}"
        )
    if observe not in (False, True, "max"):
        raise ValueError(f"observe is {observe!r}; it must be False, True or 'max'")
    # On a GPU this would make the host wait; there the kernels have assertions.
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        for name, ids in (("tokens", tokens), ("targets", targets)):
            if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size):
                raise ValueError(
                    f"{name} hold ids from {int(ids.min())} to {int(ids.max())}; the model's vocabulary "
                    f"has 0 to {config.vocab_size - 1}: is the data from another tokenizer?"
                )
