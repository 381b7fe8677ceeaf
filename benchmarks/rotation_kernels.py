"""Products of SOAP as one Triton kernel: float32 matrices found by address, each the same bits in any batch.

A product reads its factors, and writes its result, where a table of addresses says, or in a buffer in which
matrices follow one another: so state need not be copied together. Tiles are fixed, so that a matrix gives the
same bits alone and in a batch, which cuBLAS does not promise. Not an engine yet: `rotations.py` times it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from merit_optim.optim.engines.fused.product_kernels import upper


@triton.jit
def _matrix(buffer, addresses, which: tl.constexpr, offset):
    if which is None:
        at = buffer + offset
    else:
        at = tl.multiple_of(tl.load(addresses + which).to(tl.pointer_type(tl.float32)), 16)
    return at


@triton.jit
def _dot(left, right, total, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        total = tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), total)
    else:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def product(
    addresses,
    left,
    right,
    out,
    num_rows,
    num_columns,
    k,
    beta1,
    beta2,
    eps,
    NUM_ADDRESSES: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    OUT: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    LEFT_T: tl.constexpr,
    RIGHT_T: tl.constexpr,
    THEN: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """left*right; then m and v are updated with it and m / (sqrt(v) + eps) is written ("adam"), or the result
    is averaged into what is there ("average"). ``SYMMETRIC``: the upper half of the tiles, mirrored.
    """
    tiles_down, tiles_across = tl.cdiv(num_rows, BLOCK_R), tl.cdiv(num_columns, BLOCK_C)
    num_tiles = tiles_down * (tiles_down + 1) // 2 if SYMMETRIC else tiles_down * tiles_across
    program = tl.program_id(0)
    matrix, tile = (program // num_tiles).to(tl.int64), program % num_tiles
    if SYMMETRIC:
        i, j = upper(tile)
    else:
        i, j = tl.swizzle2d(tile // tiles_across, tile % tiles_across, tiles_down, tiles_across, GROUP)
    addresses += matrix * NUM_ADDRESSES
    left = _matrix(left, addresses, LEFT, matrix * num_rows * k)
    right = _matrix(right, addresses, RIGHT, matrix * k * num_columns)
    out = _matrix(out, addresses, OUT, matrix * num_rows * num_columns)
    rows, columns = i * BLOCK_R + tl.arange(0, BLOCK_R), j * BLOCK_C + tl.arange(0, BLOCK_C)
    inner = tl.arange(0, BLOCK_K)
    # Beyond the edge, other rows are read and their results are not stored.
    rows_read, columns_read = rows, columns
    if not EVEN:
        rows_read, columns_read = rows % num_rows, columns % num_columns
    if LEFT_T:
        left_at, left_stride = left + inner[None, :] * num_rows + rows_read[:, None], BLOCK_K * num_rows
    else:
        left_at, left_stride = left + rows_read[:, None] * k + inner[None, :], BLOCK_K
    if RIGHT_T:
        right_at, right_stride = right + columns_read[None, :] * k + inner[:, None], BLOCK_K
    else:
        right_at = right + inner[:, None] * num_columns + columns_read[None, :]
        right_stride = BLOCK_K * num_columns
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
        if EVEN:
            left_tile, right_tile = tl.load(left_at), tl.load(right_at)
        else:
            inside = inner < k - step * BLOCK_K
            left_tile = tl.load(left_at, inside[None, :], other=0.0)
            right_tile = tl.load(right_at, inside[:, None], other=0.0)
        total = _dot(left_tile, right_tile, total, PRECISION)
        left_at += left_stride
        right_at += right_stride
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    at = rows[:, None] * num_columns + columns[None, :]
    if THEN == "adam":
        m_at, v_at = _matrix(out, addresses, M, 0) + at, _matrix(out, addresses, V, 0) + at
        m = tl.load(m_at, mask, other=0.0) * beta1 + total * (1 - beta1)
        v = tl.load(v_at, mask, other=0.0) * beta2 + total * total * (1 - beta2)
        tl.store(m_at, m, mask)
        tl.store(v_at, v, mask)
        total = m / (tl.sqrt(v) + eps)
    if THEN == "average":
        before = tl.load(out + at, mask, other=0.0)
        total = before + (total - before) * (1 - beta2)
    if SYMMETRIC:
        if i == j:
            total = tl.where(rows[:, None] <= columns[None, :], total, tl.trans(total))
        else:
            mirrored = (columns < num_columns)[:, None] & (rows < num_rows)[None, :]
            tl.store(out + columns[:, None] * num_columns + rows[None, :], tl.trans(total), mirrored)
    tl.store(out + at, total, mask)
