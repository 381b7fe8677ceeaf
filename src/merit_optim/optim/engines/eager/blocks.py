"""One block of a weight: its sizes are merged into those of the weight, and its ratios taken from them."""

from __future__ import annotations

import torch
from torch import Tensor

from merit_optim.optim.axes.ratios import Sizes
from merit_optim.optim.engines.eager.stored import Block


def in_dtype(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return x in this dtype. The comparison is cheaper than a call of ``to`` that does nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def reduce_into(block: Block, magnitude: Tensor, total: Sizes, norm: str) -> None:
    """Merge a block's sizes into the totals of its weight. Dimensions before (N, R, C) are kept."""
    reduce, merge = (torch.amax, torch.maximum) if norm == "max" else (torch.sum, torch.add)
    piece = block.piece
    if piece.is_whole:  # nothing to merge with
        if total.rows_NR is None or total.columns_NC is None:
            reduce(magnitude, (-2, -1), out=total.whole_N)
            return
        reduce(magnitude, -1, out=total.rows_NR)
        reduce(magnitude, -2, out=total.columns_NC)
        reduce(total.rows_NR, -1, out=total.whole_N)
        return
    whole = total.whole_N[..., piece.matrices]
    if total.rows_NR is None or total.columns_NC is None:
        merge(whole, reduce(magnitude, (-2, -1)), out=whole)
        return
    rows = reduce(magnitude, -1)
    total.rows_NR[..., piece.matrices, piece.rows] = rows
    columns = total.columns_NC[..., piece.matrices, :]
    merge(columns, reduce(magnitude, -2), out=columns)
    merge(whole, reduce(rows, -1), out=whole)


def of_block(block: Block, of_weight: Sizes) -> Sizes:
    """The sizes, or ratios, of a block's rows, of all columns, and of its matrices."""
    if block.piece.is_whole:
        return of_weight
    (rows_NR, columns_NC, whole_N), matrices = of_weight, block.piece.matrices
    if rows_NR is None or columns_NC is None:
        return Sizes(None, None, whole_N[matrices])
    return Sizes(rows_NR[matrices, block.piece.rows], columns_NC[matrices], whole_N[matrices])
