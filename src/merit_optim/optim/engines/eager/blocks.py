"""What is done with one block of a weight: measure it, and scale it by the ratios of its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from merit_optim.optim import algorithm
from merit_optim.optim.algorithm import Sizes
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


def block_ratio(block: Block, ratio: Sizes, no_ratio: Sizes | None) -> Tensor:
    """Return s of one block from the ratios of its weight, as algorithm.element_ratio defines it."""
    rule, (whole, rows, columns) = block.tensors.rule, _of_block(block, ratio)
    if rows is None or columns is None:
        return algorithm.bounded(whole, rule)
    if rule.weight_bound:
        rows = torch.maximum(rows, whole)
    scale = algorithm.bounded(torch.maximum(rows, columns), rule)
    if no_ratio is not None:
        _, no_rows, no_columns = _of_block(block, no_ratio)
        assert no_rows is not None and no_columns is not None
        scale.masked_fill_(no_rows | no_columns, 1)
    return scale


def bounded_by_whole(block: Block, ratio: Sizes, scale: Tensor) -> Tensor | None:
    """Mark the elements whose s is the weight-wise ratio, because it exceeds both row's and column's."""
    whole, rows, columns = _of_block(block, ratio)
    if rows is None or columns is None or not block.tensors.rule.weight_bound:
        return None
    return (torch.maximum(rows, columns) < whole) & (scale == whole)


def _of_block(block: Block, of_weight: Sizes) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the block's whole, rows and columns in shapes that broadcast to (N, R, C)."""
    whole_N, rows_NR, columns_NC = of_weight.whole_N, of_weight.rows_NR, of_weight.columns_NC
    if not block.piece.is_whole:
        matrices, rows = block.piece.matrices, block.piece.rows
        whole_N = whole_N[matrices]
        rows_NR = None if rows_NR is None else rows_NR[matrices, rows]
        columns_NC = None if columns_NC is None else columns_NC[matrices]
    whole_N11 = whole_N.view(-1, 1, 1)
    if rows_NR is None or columns_NC is None:
        return whole_N11, None, None
    return whole_N11, rows_NR.unsqueeze(2), columns_NC.unsqueeze(1)
