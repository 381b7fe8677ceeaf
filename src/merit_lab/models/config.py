"""Model configurations, presets, and their numbers of parameters and floating-point operations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from merit_lab.checks import LARGEST_SIZE, check_choice, check_size

if TYPE_CHECKING:
    import torch

Family = Literal["gpt2", "llama"]
AttentionKind = Literal["auto", "sdpa", "cudnn", "flex", "math"]

_VOCAB_MULTIPLE = 64  # 50257 tokens become nanoGPT's 50304: odd widths are slow on tensor cores
_LOGITS_AT_ONE_TIME = 2**29  # 1 GiB in bf16; fewer at a time save little
SMALLEST_FLEX_HEAD = 16  # flex_attention's kernels do not support smaller heads

# Larger sizes are certainly typos, as in checks.py.
MOST_LAYERS = 10**4
LONGEST_CONTEXT = 2**24


class Counts(NamedTuple):
    """Of a model: its parameters, a tied weight once, and the operations per token, forward and backward.

    The operations are counted as in PaLM, ``6 N + 12 layers width context``: N counts the parameters except
    pure lookup tables; attention counts in full, although the causal mask makes half of it unnecessary. They
    are None if they are unknown.

    Reference:
        Chowdhery et al., "PaLM", appendix B, https://arxiv.org/abs/2204.02311
    """

    parameters: int
    flops_per_token: int | None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT-2 or Llama language model.

    GPT-2 is nanoGPT's: pre-norm LayerNorm, GELU, learned positions, tied embeddings, no biases and no
    dropout. Llama has RMSNorm, rotary positions, SwiGLU and a separate output weight.

    Example:
        >>> config = ModelConfig(family="llama", width=64, heads=4, layers=2, vocab_size=256)
        >>> config.hidden_width, config.head_width, config.is_tied
        (176, 16, False)
        >>> config.count().parameters
        133440
        >>> PRESETS["gpt2-small"].with_vocab(50257).vocab_size
        50304
    """

    family: Family = "gpt2"
    """gpt2 or llama."""
    width: int = 768
    """Width of the residual stream."""
    heads: int = 12
    """Attention heads; they divide the width."""
    layers: int = 12
    """Blocks of attention and MLP."""
    context: int = 1024
    """Longest sequence, in tokens."""
    vocab_size: int = 50304
    """Rows of the embedding; padding beyond the tokenizer's tokens is allowed."""
    hidden: int | None = None
    """Width inside the MLP. None: 4 x width for GPT-2; 8/3 x width, up to a multiple of 16, for Llama."""
    tied: bool | None = None
    """Whether the output weight is the token embedding. None: yes for GPT-2, no for Llama."""
    qk_norm: bool = False
    """RMSNorm with a learned scale on each head's queries and keys, which bounds the attention logits."""
    norm_eps: float = 1e-5
    """Added to the variance in every norm."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies (Llama)."""
    attention: AttentionKind = "auto"
    """auto: flex in a compiled model on CUDA, otherwise sdpa. cudnn: sdpa with cuDNN only. math: plain matrix
    products, which can be differentiated twice."""
    loss_chunk: int | None = None
    """Tokens whose logits are in memory at a time while the loss is computed; 0: all of them. None: 1 GiB of
    logits in bf16, 8192 tokens for GPT-2's vocabulary; and 0 with math attention, since the chunked loss
    cannot be differentiated twice."""
    float32_residual: bool = False
    """Keep the residual stream in float32 under autocast, as nanoGPT does. Otherwise it has autocast's
    dtype."""

    def __post_init__(self) -> None:
        check_choice("family", self.family, get_args(Family))
        check_choice("attention", self.attention, get_args(AttentionKind))
        most = {"layers": MOST_LAYERS, "context": LONGEST_CONTEXT}
        for name in ("width", "heads", "layers", "context", "vocab_size"):
            check_size(name, getattr(self, name), most.get(name, LARGEST_SIZE))
        if self.hidden is not None:
            check_size("hidden", self.hidden)
        for name in ("norm_eps", "rope_base"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be above 0 and finite")
        if self.family == "gpt2" and self.rope_base != ModelConfig.rope_base:
            raise ValueError(
                f"rope_base is {self.rope_base!r}, but family is 'gpt2', which has learned positions; leave "
                "it out, or use family 'llama'"
            )
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}; every head has an equal share "
                f"of the width, so choose for example width {-(-self.width // self.heads) * self.heads}"
            )
        if self.family == "llama" and self.head_width % 2:
            raise ValueError(
                f"width {self.width} over {self.heads} heads gives heads of {self.head_width}; rotary "
                "positions rotate pairs of elements, so a Llama head needs an even width"
            )
        if self.attention == "flex" and self.head_width < SMALLEST_FLEX_HEAD:
            raise ValueError(
                f"heads of width {self.head_width} are too small for attention 'flex', which needs at least "
                f"{SMALLEST_FLEX_HEAD}; use fewer heads, or attention 'sdpa'"
            )
        if self.loss_chunk is not None and not 0 <= self.loss_chunk <= LARGEST_SIZE:
            raise ValueError(
                f"loss_chunk is {self.loss_chunk}; it must be a number of tokens, at most {LARGEST_SIZE}, "
                "0 or None"
            )
        if self.attention == "math" and self.loss_chunk:
            raise ValueError(
                f"loss_chunk is {self.loss_chunk} and attention is 'math', which is for second derivatives: "
                "the chunked loss does not have them; leave loss_chunk at None or set it to 0"
            )

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """Width inside the MLP."""
        if self.hidden is not None:
            return self.hidden
        if self.family == "gpt2":
            return 4 * self.width
        return -(-8 * self.width // (3 * 16)) * 16

    @property
    def is_tied(self) -> bool:
        """Whether the output weight is the token embedding."""
        return self.family == "gpt2" if self.tied is None else self.tied

    @property
    def tokens_per_loss_chunk(self) -> int:
        """Tokens whose logits are in memory at a time; 0 means all."""
        if self.loss_chunk is not None:
            return self.loss_chunk
        if self.attention == "math":
            return 0
        fitting = max(1, _LOGITS_AT_ONE_TIME // self.vocab_size)
        return 1 << (fitting.bit_length() - 1)  # a power of two, as batches are

    def count(self) -> Counts:
        """Return the number of parameters, and the floating-point operations per token."""
        attention = 4 * self.width**2 + (2 * self.head_width if self.qk_norm else 0)
        mlp = (2 if self.family == "gpt2" else 3) * self.width * self.hidden_width
        norms = (2 * self.layers + 1) * self.width
        multiplied = self.layers * (attention + mlp) + norms + self.vocab_size * self.width
        positions = self.context if self.family == "gpt2" else 0
        looked_up = (positions + (0 if self.is_tied else self.vocab_size)) * self.width
        flops = 6 * multiplied + 12 * self.layers * self.width * self.context
        return Counts(multiplied + looked_up, flops)

    def with_vocab(self, num_tokens: int) -> ModelConfig:
        """Return this model for ``num_tokens`` tokens, with the vocabulary padded to a multiple of 64."""
        check_size("num_tokens", num_tokens)
        return replace(self, vocab_size=-(-num_tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE)

    def to_measure(self, *, twice: bool) -> ModelConfig:
        """Return the same model for any device; ``twice`` if it must be twice differentiable.

        It does not use the configured attention, which may need a GPU or a compiler; all kinds agree up to
        rounding.
        """
        if twice:
            return replace(self, attention="math", loss_chunk=0)
        return replace(self, attention="sdpa")

    def gives_largest_logits(self, device: torch.device, *, compiled: bool) -> bool:
        """Whether the attention kernel returns the largest logits at almost no cost."""
        return (
            compiled
            and device.type == "cuda"
            and self.attention in ("auto", "flex")
            and self.head_width >= SMALLEST_FLEX_HEAD
        )


def _gpt2(width: int, heads: int, layers: int, context: int = 1024, vocab_size: int = 50304) -> ModelConfig:
    return ModelConfig(width=width, heads=heads, layers=layers, context=context, vocab_size=vocab_size)


def _llama(width: int, heads: int, layers: int, context: int = 1024, vocab_size: int = 32000) -> ModelConfig:
    config = _gpt2(width, heads, layers, context, vocab_size)
    return replace(config, family="llama", norm_eps=1e-6)


PRESETS: dict[str, ModelConfig] = {
    # For bytes and two CPU cores.
    "tiny": _gpt2(64, 4, 4, context=64, vocab_size=256),
    "llama-tiny": _llama(64, 4, 4, context=64, vocab_size=256),
    # For one GPU and minutes to an hour: 11M parameters for bytes, 11M and 34M for a BPE.
    "nano-10m": _gpt2(384, 6, 6, context=512, vocab_size=256),
    "nano-10m-bpe": _gpt2(256, 4, 8, context=512, vocab_size=16384),
    "nano-33m": _gpt2(512, 8, 8, context=512, vocab_size=16384),
    # The MERIT paper's GPT-2 models, with nanoGPT's padded vocabulary.
    "gpt2-small": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 16, 24),
    "gpt2-large": _gpt2(1280, 20, 36),
    "llama-130m": _llama(768, 12, 12),
    "llama-350m": _llama(1024, 16, 24),
}
