"""The products of Newton-Schulz, and sums of squares, as Triton kernels: matrices of one shape in one launch.

Tensor cores multiply 16-bit numbers and add in float32. Symmetric products are computed for the upper half of
their tiles and mirrored. Every element of a product is added up in the same order whichever other matrices
share the launch, so that a matrix gives the same bits wherever it is processed.

N matrices are stored one after another, row by row, as weights are. X is the matrix that Newton-Schulz
iterates on, with the smaller side M and the larger side K. A tall matrix (``TALL``) is stored as X' and never
transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def upper(index):
    """The row and column of a tile of the upper triangle, counted column by column."""
    column = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The square root may be rounded past an integer.
    column = tl.where(column * (column + 1) // 2 > index, column - 1, column)
    column = tl.where((column + 1) * (column + 2) // 2 <= index, column + 1, column)
    return index - column * (column + 1) // 2, column


@triton.jit
def _dot(left, right, total, WIDEN: tl.constexpr):
    if WIDEN:  # Triton's interpreter would multiply the bits of bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total)


@triton.jit
def symmetric(
    left,
    right,
    out,
    m,
    k,
    share_of_product,
    share_of_right,
    share_of_left,
    share_of_one,
    TALL: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """X X', where left and right are X.

    With ``POLYNOMIAL``: the sum of multiples of left*right, right, the identity and, with ``HAS_LEFT``, left,
    for symmetric matrices that commute.
    """
    num_tiles = tl.cdiv(m, BLOCK_M)
    num_upper = num_tiles * (num_tiles + 1) // 2
    program = tl.program_id(0)
    matrix = (program // num_upper).to(tl.int64)
    i, j = upper(program % num_upper)
    rows, columns = i * BLOCK_M + tl.arange(0, BLOCK_M), j * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    # Beyond the edge, other rows are read and their results are not stored.
    rows_read, columns_read = rows, columns
    if not EVEN:
        rows_read, columns_read = rows % m, columns % m
    left += matrix * m * k
    right += matrix * m * k
    if TALL:
        left_at = left + inner[None, :] * m + rows_read[:, None]
        right_at = right + inner[:, None] * m + columns_read[None, :]
        stride = BLOCK_K * m
    else:
        left_at = left + rows_read[:, None] * k + inner[None, :]
        right_at = right + columns_read[None, :] * k + inner[:, None]
        stride = BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
        if EVEN:
            left_tile, right_tile = tl.load(left_at), tl.load(right_at)
        else:
            inside = inner < k - step * BLOCK_K
            left_tile = tl.load(left_at, inside[None, :], other=0.0)
            right_tile = tl.load(right_at, inside[:, None], other=0.0)
        total = _dot(left_tile, right_tile, total, WIDEN)
        left_at += stride
        right_at += stride
    out += matrix * m * m
    mask = (rows < m)[:, None] & (columns < m)[None, :]
    at = rows[:, None] * m + columns[None, :]
    if POLYNOMIAL:
        total = share_of_product * total + tl.where(rows[:, None] == columns[None, :], share_of_one, 0.0)
        total += share_of_right * tl.load(right + at, mask, other=0.0).to(tl.float32)
        if HAS_LEFT:
            total += share_of_left * tl.load(left + at, mask, other=0.0).to(tl.float32)
    tile = total.to(out.dtype.element_ty)
    if i == j:  # rounded matrices do not quite commute, and the next product assumes symmetry
        tile = tl.where(rows[:, None] <= columns[None, :], tile, tl.trans(tile))
    tl.store(out + at, tile, mask)
    if i != j:
        mirrored = (columns < m)[:, None] & (rows < m)[None, :]
        tl.store(out + columns[:, None] * m + rows[None, :], tl.trans(tile), mirrored)


@triton.jit
def product(
    left,
    right,
    x,
    out,
    num_rows,
    num_columns,
    k,
    share_of_x,
    HAS_X: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """left*right, one of which is X, plus a multiple of X with ``HAS_X``."""
    tiles_down, tiles_across = tl.cdiv(num_rows, BLOCK_R), tl.cdiv(num_columns, BLOCK_C)
    program = tl.program_id(0)
    matrix = (program // (tiles_down * tiles_across)).to(tl.int64)
    tile = program % (tiles_down * tiles_across)
    # Programs that run at the same time are neighbours in both directions, to share cached inputs.
    i, j = tl.swizzle2d(tile // tiles_across, tile % tiles_across, tiles_down, tiles_across, GROUP)
    rows, columns = i * BLOCK_R + tl.arange(0, BLOCK_R), j * BLOCK_C + tl.arange(0, BLOCK_C)
    inner = tl.arange(0, BLOCK_K)
    rows_read, columns_read = rows, columns
    if not EVEN:
        rows_read, columns_read = rows % num_rows, columns % num_columns
    left_at = left + matrix * num_rows * k + rows_read[:, None] * k + inner[None, :]
    right_at = right + matrix * k * num_columns + inner[:, None] * num_columns + columns_read[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
        if EVEN:
            left_tile, right_tile = tl.load(left_at), tl.load(right_at)
        else:
            inside = inner < k - step * BLOCK_K
            left_tile = tl.load(left_at, inside[None, :], other=0.0)
            right_tile = tl.load(right_at, inside[:, None], other=0.0)
        total = _dot(left_tile, right_tile, total, WIDEN)
        left_at += BLOCK_K
        right_at += BLOCK_K * num_columns
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    at = matrix * num_rows * num_columns + rows[:, None] * num_columns + columns[None, :]
    if HAS_X:
        total += share_of_x * tl.load(x + at, mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask)


@triton.jit
def squares(x, sums, num_elements, num_blocks, BLOCK: tl.constexpr):
    """The sum of squares of each block of each matrix, in float64, which cannot over- or underflow here."""
    program = tl.program_id(0)
    matrix, block = (program // num_blocks).to(tl.int64), program % num_blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + matrix * num_elements + at, at < num_elements, other=0.0).to(tl.float64)
    tl.store(sums + program, tl.sum(value * value, 0))


@triton.jit
def normalize(
    n, x, sums, margin, eps, num_elements, num_blocks, BLOCK: tl.constexpr, BLOCK_SUMS: tl.constexpr
):
    """N / (margin*|N|); every program adds up the sums of the blocks in the same order."""
    program = tl.program_id(0)
    matrix, block = (program // num_blocks).to(tl.int64), program % num_blocks
    total = tl.zeros((BLOCK_SUMS,), tl.float64)
    for first in range(0, num_blocks, BLOCK_SUMS):
        number = first + tl.arange(0, BLOCK_SUMS)
        total += tl.load(sums + matrix * num_blocks + number, number < num_blocks, other=0.0)
    norm = tl.sqrt(tl.sum(total, 0)) * margin
    # Not a maximum, which would drop a NaN.
    reciprocal = 1.0 / tl.where(norm < eps, eps, norm)
    at = block * BLOCK + tl.arange(0, BLOCK)
    at += matrix * num_elements
    mask = block * BLOCK + tl.arange(0, BLOCK) < num_elements
    value = tl.load(n + at, mask, other=0.0).to(tl.float64) * reciprocal
    tl.store(x + at, value.to(tl.float32).to(x.dtype.element_ty), mask)


@triton.jit
def mean_squares(
    x,
    out,
    num_outputs,
    num_inputs,
    output_stride,
    input_stride,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The mean square of each output of each matrix: of its rows, or of its columns if their stride is 1."""
    num_blocks = tl.cdiv(num_outputs, BLOCK_O)
    program = tl.program_id(0)
    matrix, block = (program // num_blocks).to(tl.int64), program % num_blocks
    outputs = block * BLOCK_O + tl.arange(0, BLOCK_O)
    x += matrix * num_outputs * num_inputs
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for first in range(0, num_inputs, BLOCK_I):
        inputs = first + tl.arange(0, BLOCK_I)
        mask = (outputs < num_outputs)[:, None] & (inputs < num_inputs)[None, :]
        at = outputs[:, None] * output_stride + inputs[None, :] * input_stride
        value = tl.load(x + at, mask, other=0.0).to(tl.float32)
        total += value * value
    tl.store(out + matrix * num_outputs + outputs, tl.sum(total, 1) / num_inputs, outputs < num_outputs)
