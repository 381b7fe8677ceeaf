"""The layers of both families. ``LanguageModel.init_weights`` initializes their weights.

Shapes: B batch, T time, W width, H heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from merit_lab.models.attention import attend
from merit_lab.models.base import Observe, at_least_float32
from merit_lab.models.config import AttentionKind, ModelConfig


class Linear(nn.Linear):
    """A linear layer without a bias and with an uninitialized weight."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw nothing: the generator is for ``init_weights``."""


class Embedding(nn.Embedding):
    """An embedding table with an uninitialized weight."""

    def reset_parameters(self) -> None:
        """Draw nothing: the generator is for ``init_weights``."""


class Norm(nn.Module):
    """LayerNorm (GPT-2) or RMSNorm (Llama) with a scale and no bias, computed in float32."""

    def __init__(self, width: int, eps: float, *, centred: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        weight, shape = at_least_float32(self.weight), tuple(self.weight.shape)
        if self.centred:
            return F.layer_norm(at_least_float32(x), shape, weight, None, self.eps).type_as(x)
        return F.rms_norm(at_least_float32(x), shape, weight, self.eps).type_as(x)


def rotary_table(length: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, (T, D) each.

    They are computed in each forward pass, at almost no cost: a buffer would be lost by ``to_empty`` and
    converted with the model's dtype.
    """
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * base**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions: element i is rotated with element i + D/2, as Hugging Face's weights expect."""
    cosine, sine = table
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat([-second, first], dim=-1) * sine).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with the family's weights.

    The ratios of MERIT and LAMB depend on how a weight is stored. GPT-2 stores query, key and value as one
    weight of 3 W rows, like nanoGPT, which the paper's experiments use: rows still have separate ratios, but
    the three share their column ratios and the weight's bound. Llama stores three weights, as usual. So both
    mean the same to an optimizer as elsewhere, and map to Hugging Face's checkpoints weight by weight.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.head_width = config.width, config.head_width
        if config.family == "gpt2":
            self.query_key_value = Linear(width, 3 * width)
        else:
            self.query = Linear(width, width)
            self.key = Linear(width, width)
            self.value = Linear(width, width)
        self.query_norm = Norm(self.head_width, config.norm_eps, centred=False) if config.qk_norm else None
        self.key_norm = Norm(self.head_width, config.norm_eps, centred=False) if config.qk_norm else None
        self.output = Linear(width, width)
        self.family = config.family

    def forward(
        self,
        x_BTW: Tensor,
        kind: AttentionKind,
        rotary: tuple[Tensor, Tensor] | None,
        block_mask: BlockMask | None,
        observe: Observe,
    ) -> tuple[Tensor, Tensor | None]:
        if self.family == "gpt2":
            projected = self.query_key_value(x_BTW).chunk(3, dim=-1)
        else:
            projected = (self.query(x_BTW), self.key(x_BTW), self.value(x_BTW))
        query, key, value = (
            p.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for p in projected
        )  # BHTD
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        mixed, observation = attend(query, key, value, kind=kind, block_mask=block_mask, observe=observe)
        return self.output(mixed.transpose(1, 2).flatten(2)), observation


class MLP(nn.Module):
    """GELU (GPT-2), or SwiGLU with its gate (Llama)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden_width
        self.gate = Linear(width, hidden) if config.family == "llama" else None
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        down: Tensor = self.down(inside)
        return down


class TransformerBlock(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        is_gpt2 = config.family == "gpt2"
        self.attention_norm = Norm(config.width, config.norm_eps, centred=is_gpt2)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.width, config.norm_eps, centred=is_gpt2)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        kind: AttentionKind,
        rotary: tuple[Tensor, Tensor] | None,
        block_mask: BlockMask | None,
        observe: Observe,
    ) -> tuple[Tensor, Tensor | None]:
        mixed, observation = self.attention(self.attention_norm(x), kind, rotary, block_mask, observe)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), observation
