"""The tables that the Triton kernels read, and how a program finds its tile in them.

A program processes a tile of one weight: ``STEPS`` blocks of ``BLOCK_R`` rows, ``BLOCK_C`` columns wide.
It looks up its tile in tables, so that any number of weights share a launch:

    schedule (program // CHUNK, 2)       -> weight; first of CHUNK tiles
    weights  (weight, NUM_FIELDS)        -> shape, places in the sizes buffers, group
    pointers (weight, NUM_POINTERS)      -> addresses of w, g, m, v and of the step count
    hyper    (group, NUM_HYPER)          -> learning rate, betas and so on
    outputs  (weight, NUM_OUTPUT_FIELDS) -> for NorMuon, the outputs of the whole matrix
    spheres  (weight, NUM_SPHERE_FIELDS) -> for spheres, the radius and the rows of the whole matrix
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(16)

NUM_FIELDS = tl.constexpr(11)
ROWS, COLUMNS, ROWS_AT, COLUMNS_AT, WHOLE_AT, HAS_ROWS, GROUP, HELD_AT, FACTORS_AT, TILES_AT, NUM_TILES = (
    tl.constexpr(i) for i in range(11)
)
NUM_POINTERS = tl.constexpr(5)
NUM_HYPER = tl.constexpr(10)
LR, BETA1, ONE_MINUS_BETA1, BETA2, ONE_MINUS_BETA2, EPS, WEIGHT_DECAY, CLIP, MIN_RATIO, MAX_RATIO = (
    tl.constexpr(i) for i in range(10)
)
NUM_STATISTICS = tl.constexpr(6)
NUM_PRODUCTS = tl.constexpr(3)  # <w, w>, <w, c> and <c, c>
NUM_OUTPUT_FIELDS = tl.constexpr(6)
NUM_OUTPUTS, NUM_INPUTS, MEAN_SQ_AT, OUTPUT_FACTORS_AT, FIRST_HERE, NUM_HERE = (
    tl.constexpr(i) for i in range(6)
)
NUM_SPHERE_FIELDS = tl.constexpr(4)
RADIUS, LINES_AT, NUM_LINES, SPHERE_GROUP = (tl.constexpr(i) for i in range(4))


@triton.jit
def address_of(pointers, which: tl.constexpr, offset, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(pointers + which).to(tl.pointer_type(dtype)) + offset
    # Declared on the pointer, not on the integer it is cast from: the cast would lose it, and with it the
    # 16-byte accesses.
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def tile_of(schedule, program):
    """The weight and the tile of a program."""
    chunk = schedule + (program // CHUNK) * 2
    return tl.load(chunk).to(tl.int64), tl.load(chunk + 1) + program % CHUNK


@triton.jit
def place_of(entry, tile, height: tl.constexpr, width: tl.constexpr):
    """The first row of a tile, and its columns."""
    panels = tl.cdiv(tl.load(entry + COLUMNS), width).to(tl.int32)
    return (tile // panels).to(tl.int64) * height, (tile % panels) * width + tl.arange(0, width)


@triton.jit
def num_rows_and_columns(entry, first_row, height: tl.constexpr, ALIGNED: tl.constexpr):
    """The number of rows of a tile, and of columns of its weight."""
    num_rows = tl.minimum(tl.load(entry + ROWS) - first_row, height).to(tl.int32)
    num_columns = tl.load(entry + COLUMNS).to(tl.int32)
    if ALIGNED:
        num_columns = tl.multiple_of(num_columns, 16)
    return num_rows, num_columns


@triton.jit
def count_step(pointers, tile):
    """Count the step once per parameter: only its first matrix has an address for it."""
    if tile == 0:
        address = tl.load(pointers + 4)
        if address != 0:
            count_at = address.to(tl.pointer_type(tl.float32))
            tl.store(count_at, tl.load(count_at) + 1)
