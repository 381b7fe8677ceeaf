"""Causal attention with torch's kernels, and optional attention statistics."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from merit_lab.models.base import Observe, at_least_float32
from merit_lab.models.config import SMALLEST_FLEX_HEAD, AttentionKind
from merit_optim.monitor.observation import observe_attention


def choose(kind: AttentionKind, device: torch.device, head_width: int) -> AttentionKind:
    """Return the kernel that ``kind`` means on this device.

    "auto" does not depend on what is observed: observing a step must not change it. flex returns the largest
    logits at almost no cost, but only if it is compiled.
    """
    if kind != "auto":
        return kind
    flexible = device.type == "cuda" and head_width >= SMALLEST_FLEX_HEAD and torch.compiler.is_compiling()
    return "flex" if flexible else "sdpa"


def causal_block_mask(length: int, device: torch.device) -> BlockMask:
    """Return the mask by which flex attention skips blocks."""
    return create_block_mask(_is_visible, None, None, length, length, device=str(device))


def _is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kind: AttentionKind,
    block_mask: BlockMask | None = None,
    observe: Observe = False,
) -> tuple[Tensor, Tensor | None]:
    """Return causal attention over (batch, heads, time, head width), and the observation of its heads.

    The observation has one row of largest logits and, unless ``observe`` is "max", one of mean entropies. It
    is computed separately from the same queries and keys, without a gradient; with flex the largest logits
    come from the attention kernel itself.
    """
    scale = 1 / math.sqrt(query.shape[-1])
    if kind == "flex":
        return _flex(query, key, value, scale, block_mask, observe)
    observation = _observe(query, key, scale, observe) if observe else None
    if kind == "math":
        return _math(query, key, value, scale), observation
    if kind == "cudnn":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True), observation
    return F.scaled_dot_product_attention(query, key, value, is_causal=True), observation


def _observe(query: Tensor, key: Tensor, scale: float, observe: Observe) -> Tensor:
    entropy = observe != "max"
    found = observe_attention(query.detach(), key.detach(), scale=scale, entropy=entropy, right=0)
    return torch.stack([found[0], found[1] / found[2]]) if entropy else found[:1]


def _math(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    time = query.shape[-2]
    masked = torch.ones(time, time, dtype=torch.bool, device=query.device).triu(1)
    logits = at_least_float32(query @ key.mT) * scale
    return logits.masked_fill(masked, -torch.inf).softmax(dim=-1).to(value.dtype) @ value


def _flex(
    query: Tensor, key: Tensor, value: Tensor, scale: float, block_mask: BlockMask | None, observe: Observe
) -> tuple[Tensor, Tensor | None]:
    if not observe:
        return _compiled_flex()(query, key, value, block_mask=block_mask, scale=scale), None
    request = AuxRequest(max_scores=True)
    mixed, aux = _compiled_flex()(query, key, value, block_mask=block_mask, scale=scale, return_aux=request)
    observation = aux.max_scores.detach().amax(dim=(0, 2))[None]
    if observe != "max":
        observation = torch.cat([observation, _observe(query, key, scale, observe)[1:]])
    return mixed, observation


def _compiled_flex() -> Any:
    """Return flex_attention, compiled by itself if its caller is not: uncompiled it stores all logits."""
    return flex_attention if torch.compiler.is_compiling() else _standalone_flex()


@cache
def _standalone_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)
