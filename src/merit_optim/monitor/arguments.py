"""Convert the arguments of attention functions to those of :func:`observe_attention`.

Each function has the signature of the attention function it is named for. It returns None if the call cannot
be observed: with tensor subclasses, or with keys that are not among the arguments.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant

from merit_optim.optim.torch_private import is_wrapper


class AttentionArguments(NamedTuple):
    """Arguments of :func:`observe_attention`."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    options: dict[str, Any]


def of_scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001
) -> AttentionArguments | None:
    """``torch.nn.functional.scaled_dot_product_attention``."""
    if not _is_plain(query):
        return None
    mask, offset = attn_mask, 0
    if isinstance(mask, CausalBias):
        if mask.variant == CausalVariant.LOWER_RIGHT:
            offset = mask.seq_len_kv - mask.seq_len_q
        mask, is_causal = None, True
    elif mask is not None and type(mask) not in (Tensor, nn.Parameter):
        return None  # a mask subclass whose meaning is unknown
    if query.ndim < 4:  # one head
        query, key = query.unsqueeze(-3), key.unsqueeze(-3)
        mask = mask.unsqueeze(-3) if mask is not None and mask.ndim > 2 else mask
    elif query.ndim > 4:
        batches = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
        query, key = (x.expand(*batches, *x.shape[-3:]) for x in (query, key))
        mask = mask.expand(*batches, *mask.shape[-3:]) if mask is not None and mask.ndim > 3 else mask
    if query.shape[-3] == 1:  # broadcast over all heads of the keys
        query = query.expand(*query.shape[:-3], key.shape[-3], -1, -1)
    options = {"scale": _scale(query, scale), "right": 0 if is_causal else -1, "offset": offset}
    return AttentionArguments(
        _four_dimensional(query), _four_dimensional(key), _four_dimensional(mask), options
    )


def of_multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    embed_dim_to_check: int,  # noqa: ARG001
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,  # noqa: ARG001
    add_zero_attn: bool,
    *others: Any,  # noqa: ARG001
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    **more: Any,  # noqa: ARG001
) -> AttentionArguments | None:
    """``torch.nn.functional.multi_head_attention_forward``, which nn.MultiheadAttention calls.

    Its queries and keys are internal, so they are computed again. Its boolean masks hide keys where true.
    """
    if bias_k is not None or add_zero_attn or static_k is not None or not _is_plain(query):
        return None
    if in_proj_weight is not None:
        q_proj_weight, k_proj_weight, _ = in_proj_weight.chunk(3)
    q_bias, k_bias, _ = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    assert q_proj_weight is not None and k_proj_weight is not None
    with torch.no_grad():
        query, key = F.linear(query, q_proj_weight, q_bias), F.linear(key, k_proj_weight, k_bias)
    if query.ndim == 2:  # one sequence
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    query, key = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (query, key))
    mask = _added(attn_mask)
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:
        padding = _added(key_padding_mask[:, None, None])
        mask = padding if mask is None or padding is None else mask + padding
    return AttentionArguments(query, key, mask, {"scale": _scale(query, None)})


def of_eager(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,  # noqa: ARG001
) -> AttentionArguments | None:
    """The eager attention of transformers' models: everything that hides a key is in the mask."""
    mask = None if attention_mask is None else attention_mask[..., : key.shape[-2]]
    if position_bias is not None:
        mask = position_bias if mask is None else position_bias + mask
    options = {"scale": _scale(query, scaling), "softcap": softcap or 0.0}
    return AttentionArguments(query, key, mask, options | _beside_sinks(s_aux))


def of_flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> AttentionArguments | None:
    """The flash kernels of transformers: a padding mask, the last query at the last key, a window."""
    if cu_seq_lens_q is not None or (attention_mask is None and _is_packed(position_ids, len(query))):
        return None  # several texts in one row
    if any(name.endswith("indices") and value is not None for name, value in others.items()):
        return None  # the keys that each query sees: indices in DeepSeek's models, block_indices in MiniMax's
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = -1 if sliding_window is None else sliding_window - 1
    options = {
        "scale": _scale(query, scaling),
        "softcap": softcap or 0.0,
        "left": window,
        "right": 0 if causal else window,
        "offset": key.shape[-2] - query.shape[-2],
    }
    mask = None if attention_mask is None else attention_mask[:, None, None, -key.shape[-2] :].bool()
    return AttentionArguments(query, key, mask, options | _beside_sinks(s_aux))


def _is_packed(position_ids: Tensor | None, num_rows: int) -> bool:
    """Whether the kernels take one row for several texts, because its positions do not count on."""
    return position_ids is not None and num_rows == 1 and bool((position_ids.diff() != 1).any())


def _is_plain(tensor: Tensor) -> bool:
    return not (tensor.is_nested or is_wrapper(tensor))


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _beside_sinks(sinks: Tensor | None) -> dict[str, bool]:
    """Disable the entropy if learned sinks take a part of each query's attention."""
    return {} if sinks is None else {"entropy": False}


def _four_dimensional(tensor: Any) -> Any:
    if tensor is None or tensor.ndim == 4:
        return tensor
    return tensor.flatten(0, -4) if tensor.ndim > 4 else tensor[(None,) * (4 - tensor.ndim)]


def _added(mask: Tensor | None) -> Tensor | None:
    """Convert a boolean mask, which hides keys where true, to an additive one; keep an additive one."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
