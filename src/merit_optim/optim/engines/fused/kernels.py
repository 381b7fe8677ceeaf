"""The trust-ratio step as Triton kernels: every weight of a step in one launch per phase.

``layout.py`` says how a program finds its tile. Adam's direction is recomputed from m and v in each phase. A
direction that needs whole matrices is computed between the phases and held (``HELD``), by the kernels of
``direction_kernels.py``. NorMuon's has a factor for each output, a row or a column (``OUTPUT_DIM``, 1 or 2).

Sizes are float32 magnitudes, compared as integers with the same bits: for nonnegative numbers the order is
the same, and a NaN, which is larger than any number in this order, is never lost. Sums of squares (``L2``)
are stored per tile and added up in a fixed order by ``sum_squares``, so that two runs give the same bits.

``HOLD`` is how w changes: None for decay inside, w - lr*c; "cautious"; "shares" for a*w - b*c with a and b of
a group; "sphere" for a and b of a matrix, which ``hold_kernels.py`` computes between the phases.

Shape suffixes: R rows of a block, C columns of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from merit_optim.optim.engines.fused.direction_kernels import (
    adam_update,
    factors_of,
    held_scale,
    held_update,
)
from merit_optim.optim.engines.fused.layout import (
    BETA1,
    BETA2,
    CLIP,
    COLUMNS_AT,
    EPS,
    GROUP,
    HAS_ROWS,
    HELD_AT,
    LR,
    MAX_RATIO,
    MIN_RATIO,
    NUM_FIELDS,
    NUM_HYPER,
    NUM_POINTERS,
    NUM_PRODUCTS,
    NUM_STATISTICS,
    NUM_TILES,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    ROWS_AT,
    TILES_AT,
    WEIGHT_DECAY,
    WHOLE_AT,
    address_of,
    count_step,
    num_rows_and_columns,
    place_of,
    tile_of,
)

UNSCALED = tl.constexpr(float("inf"))  # marks an undefined ratio of a row or column
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
NAN_TOO = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _bits(x):
    """|x| as an integer with the same order, and NaN above all numbers."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _ratio(w, u, undefined_is: tl.constexpr):
    """algorithm.ratio: |w| / |u|, never infinite, so that infinity can mark an undefined ratio."""
    undefined = (w == 0) | (u == 0)
    quotient = tl.minimum(w / tl.where(undefined, 1.0, u), FLOAT_MAX, propagate_nan=NAN_TOO)
    return tl.where(undefined, undefined_is, quotient)


@triton.jit
def _moved(w, c, lr, weight_decay, HOLD: tl.constexpr):
    """w after the step, as defined in axes/holds/. a*w - b*c has its a and b in place of decay and rate."""
    if HOLD is None:
        moved = w - lr * c
    elif HOLD == "cautious":
        moved = w - (c + w * (w * c > 0).to(tl.float32) * weight_decay) * lr
    else:
        moved = w * weight_decay - c * lr
        if HOLD == "sphere":  # it rests, bit for bit
            moved = tl.where(lr == 0, w, moved)
    return moved


@triton.jit
def moments(
    schedule,
    weights,
    pointers,
    hyper,
    corrections,
    gradient_scale,
    skip,
    held,
    factors,
    weight_sizes,
    update_sizes,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    HELD: tl.constexpr,
    OUTPUT_DIM: tl.constexpr,
    HOLD: tl.constexpr,
    ALIGNED: tl.constexpr,
    ANY_ROWS: tl.constexpr,
    MEASURE: tl.constexpr,
    L2: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BIAS_CORRECTION: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Update m and v; with ``MEASURE``, measure w and u; with ``L2``, as the sums of squares of each tile.

    With ``HELD``, only measure. With ``AT_ONCE``, if s is 1, take the whole step. For a sphere, the sums of
    w*w, w*u and u*u over each row of a tile are ``weight_sizes``, (row, panel of columns, product).
    """
    if HAS_SKIP:  # noqa: SIM102  # known at compile time, unlike the inner condition
        if tl.load(skip) != 0:
            return
    program = tl.program_id(0)
    weight, tile = tile_of(schedule, program)
    entry = weights + weight * NUM_FIELDS
    if tile >= tl.load(entry + NUM_TILES):  # a weight's last chunk may have unused programs
        return
    first_row, columns = place_of(entry, tile, BLOCK_R * STEPS, BLOCK_C)
    pointers += weight * NUM_POINTERS
    correction = corrections + weight * 2
    hyper += tl.load(entry + GROUP) * NUM_HYPER
    num_rows, num_columns = num_rows_and_columns(entry, first_row, BLOCK_R * STEPS, ALIGNED)
    column_mask = columns < num_columns
    # 64-bit offsets up to the tile, 32-bit within it.
    offset = first_row * num_columns
    w_at = address_of(pointers, 0, offset, PARAM, ALIGNED)
    if HELD:
        d_at = held + tl.load(entry + HELD_AT) + offset
        factors = factors_of(factors, entry, first_row, OUTPUT_DIM)
    else:
        g_at = address_of(pointers, 1, offset, GRAD, ALIGNED)
        m_at = address_of(pointers, 2, offset, STATE, ALIGNED)
        v_at = address_of(pointers, 3, offset, STATE, ALIGNED)
    beta1, one_minus_beta1 = tl.load(hyper + BETA1), tl.load(hyper + ONE_MINUS_BETA1)
    beta2, one_minus_beta2 = tl.load(hyper + BETA2), tl.load(hyper + ONE_MINUS_BETA2)
    eps, weight_decay = tl.load(hyper + EPS), tl.load(hyper + WEIGHT_DECAY)
    if AT_ONCE:
        lr, clip = tl.load(hyper + LR), tl.load(hyper + CLIP)
        count_step(pointers, tile)
    if ANY_ROWS:
        has_rows = tl.load(entry + HAS_ROWS).to(tl.int32)
        rows_at = tl.load(entry + ROWS_AT) + first_row
    if HOLD == "sphere":
        num_panels = tl.cdiv(num_columns, BLOCK_C)
        row = tl.load(entry + HELD_AT) // num_columns + first_row  # of the launch, as d
        products_at = weight_sizes + (row * num_panels + tile % num_panels) * NUM_PRODUCTS
    if L2:
        w_total_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        u_total_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    else:
        w_total_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
        u_total_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    # Not unrolled: saving registers gains more than the loop costs.
    for i in tl.range(0, STEPS, loop_unroll_factor=1):
        rows = i * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = (rows < num_rows)[:, None] & column_mask[None, :]
        at = rows[:, None] * num_columns + columns[None, :]
        w = tl.load(w_at + at, mask, other=0).to(tl.float32)
        if HELD:
            scale = held_scale(correction, factors, rows, columns, num_rows, num_columns, OUTPUT_DIM)
            u = held_update(d_at, at, mask, scale)
        else:
            g = tl.load(g_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
            m = tl.load(m_at + at, mask, other=0).to(tl.float32)
            v = tl.load(v_at + at, mask, other=0).to(tl.float32)
            if HAS_SCALE:
                g = g * tl.load(gradient_scale)
            if MAXIMIZE:
                g = -g
            m_stored = (m * beta1 + g * one_minus_beta1).to(STATE)
            v_stored = (v * beta2 + g * g * one_minus_beta2).to(STATE)
            tl.store(m_at + at, m_stored, mask)
            tl.store(v_at + at, v_stored, mask)
            # From the state as stored, which is what the apply phase will read.
            u = adam_update(
                m_stored.to(tl.float32), v_stored.to(tl.float32), eps, correction, BIAS_CORRECTION
            )
        if HOLD is None:
            u += w * weight_decay
        if AT_ONCE:
            c = tl.clamp(u, -clip, clip, propagate_nan=NAN_TOO)
            tl.store(w_at + at, _moved(w, c, lr, weight_decay, HOLD).to(PARAM), mask)
        if MEASURE:
            if L2:
                w_total_RC += w * w
                u_total_RC += tl.where(mask, u * u, 0.0)
            else:
                w_size, u_size = _bits(w), _bits(u)
                if ANY_ROWS:
                    row_mask = rows < num_rows * has_rows
                    tl.atomic_max(weight_sizes + rows_at + rows, tl.max(w_size, 1), row_mask, sem="relaxed")
                    tl.atomic_max(update_sizes + rows_at + rows, tl.max(u_size, 1), row_mask, sem="relaxed")
                w_total_RC = tl.maximum(w_total_RC, w_size)
                u_total_RC = tl.maximum(u_total_RC, u_size)
        if HOLD == "sphere":
            # Of each row alone, so that the sums do not depend on which rows are on one rank.
            sums_at = products_at + rows * (num_panels * NUM_PRODUCTS)
            tl.store(sums_at, tl.sum(w * w, 1), rows < num_rows)
            tl.store(sums_at + 1, tl.sum(w * u, 1), rows < num_rows)
            tl.store(sums_at + 2, tl.sum(u * u, 1), rows < num_rows)
    if L2:
        number = tl.load(entry + TILES_AT) + tile
        tl.store(weight_sizes + number, tl.sum(tl.sum(w_total_RC, 1), 0))
        tl.store(update_sizes + number, tl.sum(tl.sum(u_total_RC, 1), 0))
    elif MEASURE:
        w_columns, u_columns = tl.max(w_total_RC, 0), tl.max(u_total_RC, 0)
        if ANY_ROWS:
            sized = columns < num_columns * has_rows
            columns_at = tl.load(entry + COLUMNS_AT) + columns
            tl.atomic_max(weight_sizes + columns_at, w_columns, sized, sem="relaxed")
            tl.atomic_max(update_sizes + columns_at, u_columns, sized, sem="relaxed")
        whole_at = tl.load(entry + WHOLE_AT)
        tl.atomic_max(weight_sizes + whole_at, tl.max(w_columns, 0), sem="relaxed")
        tl.atomic_max(update_sizes + whole_at, tl.max(u_columns, 0), sem="relaxed")


@triton.jit
def apply(
    schedule,
    weights,
    pointers,
    hyper,
    corrections,
    skip,
    held,
    factors,
    weight_sizes,
    update_sizes,
    statistics,
    shares,
    PARAM: tl.constexpr,
    STATE: tl.constexpr,
    HELD: tl.constexpr,
    OUTPUT_DIM: tl.constexpr,
    HOLD: tl.constexpr,
    ALIGNED: tl.constexpr,
    ANY_ROWS: tl.constexpr,
    WEIGHT_BOUND: tl.constexpr,
    BIAS_CORRECTION: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    """w <- hold(w, clamp(s*u)), and count the step. ``shares``: a and b of every weight on a sphere."""
    if HAS_SKIP:  # noqa: SIM102  # known at compile time, unlike the inner condition
        if tl.load(skip) != 0:
            return
    # In reverse: the data that the moments phase used last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    weight, tile = tile_of(schedule, program)
    entry = weights + weight * NUM_FIELDS
    if tile >= tl.load(entry + NUM_TILES):
        return
    first_row, columns = place_of(entry, tile, BLOCK_R * STEPS, BLOCK_C)
    pointers += weight * NUM_POINTERS
    correction = corrections + weight * 2
    hyper += tl.load(entry + GROUP) * NUM_HYPER
    num_rows, num_columns = num_rows_and_columns(entry, first_row, BLOCK_R * STEPS, ALIGNED)
    column_mask = columns < num_columns
    # 64-bit offsets up to the tile, 32-bit within it.
    offset = first_row * num_columns
    w_at = address_of(pointers, 0, offset, PARAM, ALIGNED)
    if HELD:
        d_at = held + tl.load(entry + HELD_AT) + offset
        factors = factors_of(factors, entry, first_row, OUTPUT_DIM)
    else:
        m_at = address_of(pointers, 2, offset, STATE, ALIGNED)
        v_at = address_of(pointers, 3, offset, STATE, ALIGNED)
    count_step(pointers, tile)
    lr, clip = tl.load(hyper + LR), tl.load(hyper + CLIP)
    min_ratio, max_ratio = tl.load(hyper + MIN_RATIO), tl.load(hyper + MAX_RATIO)
    eps, weight_decay = tl.load(hyper + EPS), tl.load(hyper + WEIGHT_DECAY)
    if HOLD == "sphere":
        weight_decay, lr = tl.load(shares + weight * 2), tl.load(shares + weight * 2 + 1)
    whole_at = tl.load(entry + WHOLE_AT)
    whole = _ratio(tl.load(weight_sizes + whole_at), tl.load(update_sizes + whole_at), 1.0)
    if ANY_ROWS:
        has_rows = tl.load(entry + HAS_ROWS).to(tl.int32)
        columns_at = tl.load(entry + COLUMNS_AT) + columns
        sized_columns = columns < num_columns * has_rows
        unbounded_column = _ratio(
            tl.load(weight_sizes + columns_at, sized_columns, other=0.0),
            tl.load(update_sizes + columns_at, sized_columns, other=0.0),
            UNSCALED,
        )
        column_unscaled = (unbounded_column == UNSCALED) & (has_rows != 0)
        column_ratio = unbounded_column
        if WEIGHT_BOUND:
            column_ratio = tl.maximum(column_ratio, whole, propagate_nan=NAN_TOO)
        column_ratio = tl.where(has_rows != 0, column_ratio, whole)
        rows_at = tl.load(entry + ROWS_AT) + first_row
    if RECORD:
        num_clipped = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        num_bounded = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        smallest = tl.full((BLOCK_R, BLOCK_C), float("inf"), tl.float32)
        largest = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        update_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        weight_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    # Not unrolled: saving registers gains more than the loop costs.
    for i in tl.range(0, STEPS, loop_unroll_factor=1):
        rows = i * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = (rows < num_rows)[:, None] & column_mask[None, :]
        at = rows[:, None] * num_columns + columns[None, :]
        # evict_first: this is the last read in this step.
        w = tl.load(w_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
        if HELD:
            scale = held_scale(correction, factors, rows, columns, num_rows, num_columns, OUTPUT_DIM)
            u = held_update(d_at, at, mask, scale)
        else:
            m = tl.load(m_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
            v = tl.load(v_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
            u = adam_update(m, v, eps, correction, BIAS_CORRECTION)
        if HOLD is None:
            u += w * weight_decay
        if ANY_ROWS:
            sized_rows = rows < num_rows * has_rows
            row_ratio = _ratio(
                tl.load(weight_sizes + rows_at + rows, sized_rows, other=0.0),
                tl.load(update_sizes + rows_at + rows, sized_rows, other=0.0),
                UNSCALED,
            )
            row_ratio = tl.where(has_rows != 0, row_ratio, whole)
            s = tl.maximum(row_ratio[:, None], column_ratio[None, :], propagate_nan=NAN_TOO)
            s = tl.clamp(s, min_ratio, max_ratio, propagate_nan=NAN_TOO)
            s = tl.where((row_ratio == UNSCALED)[:, None] | column_unscaled[None, :], 1.0, s)
        else:
            s = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
            s += tl.clamp(whole, min_ratio, max_ratio, propagate_nan=NAN_TOO)
        scaled = s * u
        c = tl.clamp(scaled, -clip, clip, propagate_nan=NAN_TOO)
        moved = _moved(w, c, lr, weight_decay, HOLD)
        tl.store(w_at + at, moved.to(PARAM), mask, eviction_policy="evict_first")
        if RECORD:
            num_clipped += tl.where(mask & (tl.abs(scaled) > clip), 1.0, 0.0)
            if ANY_ROWS and WEIGHT_BOUND:
                unbounded = tl.maximum(row_ratio[:, None], unbounded_column[None, :], propagate_nan=NAN_TOO)
                bounded = mask & (unbounded < whole) & (s == whole)
                num_bounded += tl.where(bounded, 1.0, 0.0) * has_rows
            smallest = tl.minimum(smallest, tl.where(mask, s, float("inf")), propagate_nan=NAN_TOO)
            largest = tl.maximum(largest, tl.where(mask, s, 0.0), propagate_nan=NAN_TOO)
            taken = lr * c if HOLD is None else moved - w
            update_sum += tl.where(mask, taken * taken, 0.0)
            weight_sum += w * w
    if RECORD:
        statistics += (tl.load(entry + TILES_AT) + tile) * NUM_STATISTICS
        tl.store(statistics, tl.sum(tl.sum(num_clipped, 1), 0))
        tl.store(statistics + 1, tl.sum(tl.sum(num_bounded, 1), 0))
        tl.store(statistics + 2, tl.min(tl.min(smallest, 1), 0))
        tl.store(statistics + 3, tl.max(tl.max(largest, 1), 0))
        tl.store(statistics + 4, tl.sum(tl.sum(update_sum, 1), 0))
        tl.store(statistics + 5, tl.sum(tl.sum(weight_sum, 1), 0))


@triton.jit
def sum_squares(weights, partial, sizes, BLOCK: tl.constexpr):
    """The Euclidean norm of each weight from the sums of squares of its tiles, added in a fixed order."""
    entry = weights + tl.program_id(0).to(tl.int64) * NUM_FIELDS
    first, num = tl.load(entry + TILES_AT), tl.load(entry + NUM_TILES)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        total += tl.load(partial + first + tile, tile < num, other=0.0)
    tl.store(sizes + tl.load(entry + WHOLE_AT), tl.sqrt(tl.sum(total, 0)))
