"""The lab's language model."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merit_lab.models.attention import causal_block_mask, choose
from merit_lab.models.base import AttentionObservation, Model, Observe, Output, as_autocast, check_inputs
from merit_lab.models.config import ModelConfig
from merit_lab.models.layers import Embedding, Linear, Norm, TransformerBlock, rotary_table
from merit_lab.models.loss import linear_cross_entropy

_INIT_STD = 0.02


class LanguageModel(Model):
    """A GPT-2 or Llama decoder.

    On the meta device it is built without memory; ``to_empty`` and :meth:`init_weights` then draw the same
    weights as direct construction from the same state of torch's generator.

    Example:
        >>> import torch
        >>> from merit_lab.models import PRESETS, build
        >>> _ = torch.manual_seed(0)
        >>> model = build(PRESETS["tiny"])
        >>> tokens = torch.randint(256, (2, 33))
        >>> output = model(tokens[:, :-1], tokens[:, 1:], observe=True)
        >>> output.loss.backward()
        >>> round(output.loss.item())  # about log(256): nothing is learned yet
        6
        >>> output.attention.max_logits.shape, output.attention.entropy.shape  # layers, heads
        (torch.Size([4, 4]), torch.Size([4, 4]))
    """

    config: ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.width)
        is_gpt2 = config.family == "gpt2"
        self.position_embedding = Embedding(config.context, config.width) if is_gpt2 else None
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = Norm(config.width, config.norm_eps, centred=is_gpt2)
        # A tied weight has only one name: a second one would be lost by to_empty.
        self.head = None if config.is_tied else Linear(config.width, config.vocab_size)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights from torch's generator, in a fixed order.

        Matrices are drawn from N(0, 0.02); those that write into the residual stream are smaller by
        1/sqrt(2 layers), so that its variance does not grow with the depth. Scales are 1.
        """
        residual_std = _INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            elif name.endswith(("attention.output.weight", "mlp.down.weight")):
                parameter.normal_(std=residual_std)
            else:
                parameter.normal_(std=_INIT_STD)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        observe: Observe = False,
        of_sequences: bool = False,
    ) -> Output:
        """See :meth:`Model.forward`."""
        check_inputs(self.config, tokens)
        length, device = tokens.shape[1], tokens.device
        kind = choose(self.config.attention, device, self.config.head_width)
        block_mask = causal_block_mask(length, device) if kind == "flex" else None
        rotary = None
        x = self.token_embedding(tokens)
        if self.position_embedding is None:
            rotary = rotary_table(length, self.config.head_width, self.config.rope_base, device)
        else:
            x = x + self.position_embedding(torch.arange(length, device=device))
        if not self.config.float32_residual:
            x = as_autocast(x)  # half the memory traffic
        observations = []
        for block in self.blocks:
            x, observation = block(x, kind, rotary, block_mask, observe)
            if observation is not None:
                observations.append(observation)
        x = as_autocast(self.norm(x))
        attention = AttentionObservation.of_layers(observations) if observations else None
        weight = self.token_embedding.weight if self.head is None else self.head.weight
        if targets is None:
            return Output(None, F.linear(x, weight.to(x.dtype)), attention)
        chunk = self.config.tokens_per_loss_chunk
        loss = linear_cross_entropy(
            x.flatten(0, 1), weight, targets.flatten(), chunk=chunk, of_rows=of_sequences
        )
        return Output(loss.view(targets.shape).mean(1) if of_sequences else loss, None, attention)

    def sharded_parts(self) -> Iterable[nn.Module]:
        """Return the blocks."""
        return self.blocks
