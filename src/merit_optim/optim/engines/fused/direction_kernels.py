"""The directions in Triton: Adam's from m and v, a held one, and the kernels of Muon's and NorMuon's.

Shape suffixes: R rows of a block, C columns of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from merit_optim.optim.engines.fused.layout import (
    BETA1,
    FACTORS_AT,
    FIRST_HERE,
    GROUP,
    HELD_AT,
    MEAN_SQ_AT,
    NUM_FIELDS,
    NUM_HERE,
    NUM_HYPER,
    NUM_INPUTS,
    NUM_OUTPUT_FIELDS,
    NUM_OUTPUTS,
    NUM_POINTERS,
    NUM_TILES,
    ONE_MINUS_BETA1,
    OUTPUT_FACTORS_AT,
    address_of,
    num_rows_and_columns,
    place_of,
    tile_of,
)


@triton.jit
def adam_update(m, v, eps, correction, BIAS_CORRECTION: tl.constexpr):
    """Adam's direction, as defined by directions/adam.py."""
    denominator = tl.sqrt(v)
    if BIAS_CORRECTION:
        denominator = denominator / tl.load(correction + 1)
    u = m / (denominator + eps)
    if BIAS_CORRECTION:
        u = u / tl.load(correction)
    return u


@triton.jit
def factors_of(factors, entry, first_row, OUTPUT_DIM: tl.constexpr):
    """Where the factors of a tile's outputs are: from its first row on, or those of all columns."""
    if OUTPUT_DIM is not None:
        factors += tl.load(entry + FACTORS_AT)
    if OUTPUT_DIM == 1:
        factors += first_row
    return factors


@triton.jit
def held_scale(correction, factors, rows, columns, num_rows, num_columns, OUTPUT_DIM: tl.constexpr):
    """The scale of a held direction: one, or one for each output."""
    scale = tl.load(correction)
    if OUTPUT_DIM == 1:
        scale = scale * tl.load(factors + rows, rows < num_rows, other=0)[:, None]
    elif OUTPUT_DIM == 2:
        scale = scale * tl.load(factors + columns, columns < num_columns, other=0)[None, :]
    return scale


@triton.jit
def held_update(held_at, at, mask, scale):
    """A held direction: scale*d."""
    return tl.load(held_at + at, mask, other=0).to(tl.float32) * scale


@triton.jit
def momentum(
    schedule,
    weights,
    pointers,
    hyper,
    gradient_scale,
    skip,
    held,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Update Muon's momentum M, and write N, the input of the direction."""
    if HAS_SKIP:  # noqa: SIM102  # known at compile time, unlike the inner condition
        if tl.load(skip) != 0:
            return
    weight, tile = tile_of(schedule, tl.program_id(0))
    entry = weights + weight * NUM_FIELDS
    if tile >= tl.load(entry + NUM_TILES):
        return
    first_row, columns = place_of(entry, tile, BLOCK_R * STEPS, BLOCK_C)
    pointers += weight * NUM_POINTERS
    hyper += tl.load(entry + GROUP) * NUM_HYPER
    num_rows, num_columns = num_rows_and_columns(entry, first_row, BLOCK_R * STEPS, ALIGNED)
    offset = first_row * num_columns
    g_at = address_of(pointers, 1, offset, GRAD, ALIGNED)
    m_at = address_of(pointers, 2, offset, STATE, ALIGNED)
    n_at = held + tl.load(entry + HELD_AT) + offset
    if ALIGNED:
        n_at = tl.multiple_of(n_at, 16)
    beta, one_minus_beta = tl.load(hyper + BETA1), tl.load(hyper + ONE_MINUS_BETA1)
    for i in tl.range(0, STEPS, loop_unroll_factor=1):
        rows = i * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        at = rows[:, None] * num_columns + columns[None, :]
        g = tl.load(g_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
        m = tl.load(m_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
        if HAS_SCALE:
            g = g * tl.load(gradient_scale)
        if MAXIMIZE:
            g = -g
        m_stored = (m * beta + g * one_minus_beta).to(STATE)
        tl.store(m_at + at, m_stored, mask, eviction_policy="evict_first")
        n = m_stored.to(tl.float32)
        if NESTEROV:
            n = n * beta + g * one_minus_beta
        tl.store(n_at + at, n.to(held.dtype.element_ty), mask)


@triton.jit
def equalize(
    outputs,
    pointers,
    mean_sq,
    factors,
    skip,
    beta,
    one_minus_beta,
    eps,
    STATE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update NorMuon's averages, and write the factors of the outputs, as defined by directions/muon.py.

    One program processes a whole matrix, even if this rank has only some of its outputs, or none.
    """
    if HAS_SKIP:  # noqa: SIM102  # known at compile time, unlike the inner condition
        if tl.load(skip) != 0:
            return
    weight = tl.program_id(0).to(tl.int64)
    entry = outputs + weight * NUM_OUTPUT_FIELDS
    num = tl.load(entry + NUM_OUTPUTS)
    first_here, num_here = tl.load(entry + FIRST_HERE), tl.load(entry + NUM_HERE)
    num_inputs = tl.load(entry + NUM_INPUTS).to(tl.float32)
    mean_sq += tl.load(entry + MEAN_SQ_AT)
    factors += tl.load(entry + OUTPUT_FACTORS_AT)
    average_at = address_of(pointers + weight * NUM_POINTERS, 3, 0, STATE, False)
    sum_sq, new_sum_sq = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num, BLOCK):
        output = first + tl.arange(0, BLOCK)
        mask = output < num
        now = tl.load(mean_sq + output, mask, other=0)
        average = tl.load(average_at + output, mask, other=0).to(tl.float32)
        stored = (average * beta + now * one_minus_beta).to(STATE)
        tl.store(average_at + output, stored, mask)
        root = tl.sqrt(stored.to(tl.float32)) + eps
        sum_sq += now
        new_sum_sq += now / (root * root)
    size, new_size = tl.sqrt(num_inputs * tl.sum(sum_sq, 0)), tl.sqrt(num_inputs * tl.sum(new_sum_sq, 0))
    kept = size / (new_size + eps)
    # The same blocks again, so that each thread reads the averages that it wrote.
    for first in range(0, num, BLOCK):
        output = first + tl.arange(0, BLOCK)
        root = tl.sqrt(tl.load(average_at + output, output < num, other=0).to(tl.float32)) + eps
        here = output - first_here
        tl.store(factors + here, kept / root, (here >= 0) & (here < num_here))
