"""The largest attention logit and the entropy of every head, computed block by block to save memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The most logits in memory at a time, if one query of every sequence and head fits: 128 MiB.
_BLOCK_ELEMENTS = 2**25


# A custom operator: torch.compile would unroll the loop, without any gain.
@torch.library.custom_op("merit_optim::observe_attention", mutates_args=())
def observe_attention(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    entropy: bool,
    left: int = -1,
    right: int = -1,
    offset: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Return statistics of the softmax over ``query @ key.mT * scale`` for each head: (3, heads) in float32.

    The rows are the largest visible logit, the sum of the entropies of all queries in nats, and the number of
    these queries. The last two are 0 without ``entropy``. Queries that see no key do not count: the largest
    logit of a head with no others is -inf.

    ``query`` is (batch, heads, queries, width) and ``key`` (batch, key heads, keys, width), where a key
    head serves consecutive query heads. ``mask`` is as in ``scaled_dot_product_attention`` and may be
    broadcast: boolean, true where a key is visible, or added to the logits; one that adds half the
    smallest number of its dtype or less hides the key. Query i is at position ``i + offset`` and sees
    ``left`` keys before it and ``right`` keys after it; -1 is all of them, so ``right=0`` is causal.
    ``softcap`` c replaces a logit by c * tanh(logit / c) before it is masked.

    Products of bf16 numbers are exact in float32 (and in TF32), so the logits are those of the
    attention kernels, which add in float32 too.
    """
    with torch.autocast(query.device.type, enabled=False):  # it would round the logits to bf16
        return _observe(query.float(), key.float(), mask, scale, softcap, left, right, offset, entropy)


@observe_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    mask: Tensor | None = None,  # noqa: ARG001
    *,
    scale: float,  # noqa: ARG001
    entropy: bool,  # noqa: ARG001
    left: int = -1,  # noqa: ARG001
    right: int = -1,  # noqa: ARG001
    offset: int = 0,  # noqa: ARG001
    softcap: float = 0.0,  # noqa: ARG001
) -> Tensor:
    return query.new_empty((3, query.shape[1]), dtype=torch.float32)


@observe_attention.register_vmap
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Treat the dimension of vmap as part of the batch: only heads are kept apart."""
    tensors = [
        x if x is None else x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip((query, key, mask), (*in_dims, None), strict=False)
    ]
    batch = max(x.shape[1] for x in tensors if x is not None)  # some tensors may be broadcast
    joined = (x if x is None else x.expand(-1, batch, *x.shape[2:]).flatten(0, 1) for x in tensors)
    return observe_attention(*joined, **options), None


def _observe(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    offset: int,
    entropy: bool,
) -> Tensor:
    batch, heads, num_queries, _ = query.shape
    _, key_heads, num_keys, _ = key.shape
    query = query.unflatten(1, (key_heads, heads // key_heads))
    if mask is not None:
        mask = mask.unsqueeze(1) if mask.shape[1] == 1 else mask.unflatten(1, query.shape[1:3])
    # Scale at the end if that changes nothing: it saves one pass over the logits.
    scale_first = softcap != 0 or scale <= 0 or (mask is not None and mask.dtype != torch.bool)
    tally = Tally(query, scale=1.0 if scale_first else scale, entropy=entropy)
    step = max(1, _BLOCK_ELEMENTS // max(1, batch * heads * num_keys))
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        # Skip keys that no query of the block can see.
        first = max(0, begin + offset - left) if left >= 0 else 0
        last = min(num_keys, end + offset + right) if right >= 0 else num_keys
        if first >= last or batch == 0:
            continue
        block = query[..., begin:end, :].flatten(2, 3) @ key[:, :, first:last].mT
        logits = block.unflatten(2, (-1, end - begin))
        if softcap:
            logits.mul_(scale / softcap).tanh_().mul_(softcap)
        elif scale_first:
            logits.mul_(scale)
        hidden = _outside(logits, begin + offset - first, left, right)
        if mask is not None:
            part = _part(_part(mask, -2, begin, end), -1, first, last)
            if part.dtype == torch.bool:
                hidden.append((logits, part.logical_not()))
            else:
                logits.add_(part)
                hidden.append((logits, part <= torch.finfo(part.dtype).min / 2))
        tally.add(logits, hidden)
    return tally.stacked()


def _outside(logits: Tensor, place: int, left: int, right: int) -> list[tuple[Tensor, Tensor]]:
    """Return parts of the logits, each with a mask of the keys outside a query's window.

    The first query is at key ``place`` of the block. Only the edges of the window are checked.
    """
    rows, columns = logits.shape[-2:]
    hidden = []
    if right >= 0 and (begin := max(0, place + right + 1)) < columns:
        edge = logits[..., begin:]
        after = torch.ones(edge.shape[-2:], dtype=torch.bool, device=logits.device)
        hidden.append((edge, after.triu_(place + right + 1 - begin)))
    if left >= 0 and (end := place + rows - 1 - left) > 0:
        edge = logits[..., :end]
        before = torch.ones(edge.shape[-2:], dtype=torch.bool, device=logits.device)
        hidden.append((edge, before.tril_(place - left - 1)))
    return hidden


def _part(mask: Tensor, dim: int, begin: int, end: int) -> Tensor:
    return mask if mask.shape[dim] == 1 else mask.narrow(dim, begin, end - begin)


class Tally:
    """Largest logit, entropies and number of queries, accumulated over blocks.

    A block is (batch, key heads, query heads of each, queries, keys), not yet multiplied by ``scale``.
    """

    def __init__(self, query: Tensor, *, scale: float, entropy: bool) -> None:
        self.scale, self.entropy = scale, entropy
        self.largest = query.new_full(query.shape[1:3], -torch.inf)
        self.total = query.new_zeros(query.shape[1:3])
        self.count = query.new_zeros(query.shape[1:3])

    def add(self, logits: Tensor, hidden: list[tuple[Tensor, Tensor]]) -> None:
        """Add a block, without the ``hidden`` elements of its parts. The block is overwritten."""
        for part, where in hidden:
            part.masked_fill_(where, -torch.inf)
        row_max = logits.amax(dim=-1, keepdim=True)
        self.largest = torch.maximum(self.largest, row_max.amax(dim=(0, 3, 4)))
        if not self.entropy:
            return
        # With s = logit - row_max and z = sum(exp s), the entropy is log z - sum(s exp s) / z.
        weights = logits.sub_(row_max).mul_(self.scale).exp()
        for part, where in hidden:
            part.masked_fill_(where, 0.0)  # otherwise exp(s) * s would be 0 * inf = NaN
        normaliser = weights.sum(dim=-1)
        moment = weights.mul_(logits).sum(dim=-1)
        blind = row_max.squeeze(-1) == -torch.inf
        entropies = (normaliser.log() - moment / normaliser).masked_fill(blind, 0.0)
        self.total += entropies.sum(dim=(0, 3))
        self.count += blind.logical_not().sum(dim=(0, 3))

    def stacked(self) -> Tensor:
        """Return the rows of :func:`observe_attention`."""
        return torch.stack([self.largest * self.scale, self.total, self.count]).flatten(1)
