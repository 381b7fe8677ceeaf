"""A sphere's part between the phases as Triton kernels: the products of its lines, then a and b of a*w - b*c.

The lines are the rows of whole matrices. Their sums are added in the order of axes/sums.py, so that a rank
that has no row of a matrix, and uses the eager engine, gets the same radius from the same lines.
"""

from __future__ import annotations

import triton
import triton.language as tl

from merit_optim.optim.engines.fused.layout import (
    LINES_AT,
    LR,
    NUM_HYPER,
    NUM_LINES,
    NUM_PRODUCTS,
    NUM_SPHERE_FIELDS,
    RADIUS,
    SPHERE_GROUP,
)

# More than the levels of a tree of sums: an odd number of terms leaves one more than half of them.
SPARE = tl.constexpr(32)


@triton.jit
def sum_panels(products, lines, num_rows, num_panels, stride, BLOCK: tl.constexpr):
    """The products of each row, (product, row), from those of its panels, which are added in order."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    products += rows * num_panels * NUM_PRODUCTS
    for which in tl.static_range(NUM_PRODUCTS):
        total = tl.zeros((BLOCK,), tl.float32)
        for panel in range(num_panels):
            total += tl.load(products + panel * NUM_PRODUCTS + which, mask, other=0.0)
        tl.store(lines + which * stride + rows, total, mask)


@triton.jit
def _add_halves(at, out, i, half, num):
    """Element i of the first half plus that of the second; the last of an odd number is kept."""
    kept = i < num - half
    one = tl.load(at + tl.where(i < half, i, 2 * half), kept, other=0.0)
    tl.store(out + i, one + tl.load(at + half + i, i < half, other=0.0), kept)


@triton.jit
def settle(
    spheres,
    named,
    hyper,
    lines,
    shares,
    skip,
    num_lines,
    stride,
    STATE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """a and b of each matrix, and its radius, as defined in axes/holds/sphere.py.

    ``lines``: (product, stride), first those of all matrices, then room for the sums of each. ``named``: the
    radius that ``gain`` names, or 0.
    """
    if HAS_SKIP:  # noqa: SIM102  # known at compile time, unlike the inner condition
        if tl.load(skip) != 0:
            return
    weight = tl.program_id(0).to(tl.int64)
    entry = spheres + weight * NUM_SPHERE_FIELDS
    first_line, num_here = tl.load(entry + LINES_AT), tl.load(entry + NUM_LINES)
    at = lines + first_line
    out = at + num_lines + weight * SPARE
    num = num_here
    while num > 1:
        half = num // 2
        for first in range(0, num - half, BLOCK):
            i = first + tl.arange(0, BLOCK)
            _add_halves(at, out, i, half, num)
            _add_halves(at + stride, out + stride, i, half, num)
            _add_halves(at + 2 * stride, out + 2 * stride, i, half, num)
        tl.debug_barrier()  # the next sums are of what other threads wrote
        num -= half
        at = out
        out += num
    w_sq, w_c, c_sq = tl.load(at), tl.load(at + stride), tl.load(at + 2 * stride)
    lr = tl.load(hyper + tl.load(entry + SPHERE_GROUP) * NUM_HYPER + LR)
    radius_at = tl.load(entry + RADIUS).to(tl.pointer_type(STATE))
    stored, start = tl.load(radius_at).to(tl.float32), tl.load(named + weight)
    start = tl.where(start == 0, tl.sqrt_rn(w_sq), start)
    radius = tl.where(stored == 0, start, stored)
    rests = (c_sq == 0) | (lr == 0)
    # A weight of zeros has no sphere to be on, and takes the step as it is.
    size = tl.sqrt_rn(tl.where(rests, 1.0, c_sq))
    share = tl.where(radius == 0, 1.0, tl.div_rn(radius, size)) * lr
    moved_sq = w_sq - 2 * share * w_c + share * share * c_sq
    moved = tl.sqrt_rn(tl.where(rests, 1.0, moved_sq))
    shrinking = tl.where(radius == 0, 1.0, tl.div_rn(radius, moved))
    tl.store(shares + weight * 2, tl.where(rests, 1.0, shrinking))
    tl.store(shares + weight * 2 + 1, tl.where(rests, 0.0, shrinking * share))
    num_kept = tl.where(rests, 0, num_here)
    tl.debug_barrier()  # all threads have read the radius
    for first in range(0, num_here, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(radius_at + i, tl.zeros((BLOCK,), tl.float32) + radius, i < num_kept)
