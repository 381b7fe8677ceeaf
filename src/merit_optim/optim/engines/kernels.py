"""The trust-ratio step as one Triton kernel over all weights.

A program works on a tile of one weight: ``STEPS`` blocks of ``BLOCK_R`` rows, ``BLOCK_C`` columns wide.
It either does the moments phase on it or the apply phase, and finds out which from tables, so that any
number of weights share a launch:

    schedule (ticket // PER_SEGMENT,) -> segment: some tiles of one weight, in one phase
    segments (segment, NUM_FIELDS)    -> which tiles; the weight's shape, places in the sizes buffers, group
    pointers (segment, 4)             -> addresses of the weight's w, g, m and v
    hyper    (group, NUM_HYPER)       -> learning rate, betas and so on

Few steps from ticket to data: each costs a trip to memory before any data moves.

**Order.** The apply phase of a weight needs the sizes that all its moments tiles found. Where both
phases are in one launch (``ORDERED``), programs take tickets, so that they begin in the order of the
schedule whatever the hardware does, and an apply tile waits until its weight's moments tiles, which have
earlier tickets and wait for nobody, have been counted. The schedule puts the apply tiles so soon after
that they find w, m and v still in the cache.

**Sizes** are float32 magnitudes, compared as the integers their bits spell: for numbers that are not
negative the order is the same, and a NaN, which is larger than any number in this order, is never lost.
Sums of squares (``L2``) go to one place for each tile and are added up in a fixed order by
``sum_squares``, so that two runs give the same bits.

Shape suffixes: R rows of a block, C columns of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOMENTS, APPLY = tl.constexpr(0), tl.constexpr(1)
PER_SEGMENT = tl.constexpr(16)

(
    PHASE,
    FIRST_TICKET,
    FIRST_TILE,
    NUM_TILES,
    WEIGHT,
    ROWS,
    COLUMNS,
    ROWS_AT,
    COLUMNS_AT,
    WHOLE_AT,
    HAS_ROWS,
    GROUP,
    TILES_AT,
    TILES_IN_ALL,
) = (tl.constexpr(i) for i in range(14))
NUM_FIELDS = tl.constexpr(14)
NUM_HYPER = tl.constexpr(8)
LR, BETA1, ONE_MINUS_BETA1, BETA2, ONE_MINUS_BETA2, EPS, WEIGHT_DECAY, CLIP = (
    tl.constexpr(i) for i in range(8)
)
NUM_STATISTICS = tl.constexpr(6)

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
NAN_TOO = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _address(pointers, which: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(pointers + which).to(tl.pointer_type(dtype))
    # Said of the pointer, not of the number it is made from: the cast forgets it, and with it the
    # 16-byte accesses.
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _bits(x):
    """|x| as an integer that orders as |x| does, NaN above all."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _direction(m, v, w, hyper, correction, BIAS_CORRECTION: tl.constexpr):
    """u, as algorithm.direction defines it."""
    denominator = tl.sqrt(v)
    if BIAS_CORRECTION:
        denominator = denominator / tl.load(correction + 1)
    u = m / (denominator + tl.load(hyper + EPS))
    if BIAS_CORRECTION:
        u = u / tl.load(correction)
    return u + w * tl.load(hyper + WEIGHT_DECAY)


@triton.jit
def _ratio(w, u):
    """algorithm.ratio: |w| / |u|, 1 where undefined, never infinite; and where it is undefined."""
    undefined = (w == 0) | (u == 0)
    quotient = tl.minimum(w / tl.where(undefined, 1.0, u), FLOAT_MAX, propagate_nan=NAN_TOO)
    return tl.where(undefined, 1.0, quotient), undefined


@triton.jit
def _moments_tile(
    entry,
    pointers,
    hyper,
    correction,
    gradient_scale,
    weight_sizes,
    update_sizes,
    w_partial,
    u_partial,
    first_row,
    columns,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ANY_ROWS: tl.constexpr,
    L2: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BIAS_CORRECTION: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    """m and v, and the tile's part of the sizes of w and u."""
    num_rows, num_columns = tl.load(entry + ROWS), tl.load(entry + COLUMNS)
    if ALIGNED:
        num_columns = tl.multiple_of(num_columns, 16)
    column_mask = columns < num_columns
    w_at = _address(pointers, 0, PARAM, ALIGNED)
    g_at = _address(pointers, 1, GRAD, ALIGNED)
    m_at = _address(pointers, 2, STATE, ALIGNED)
    v_at = _address(pointers, 3, STATE, ALIGNED)
    beta1, one_minus_beta1 = tl.load(hyper + BETA1), tl.load(hyper + ONE_MINUS_BETA1)
    beta2, one_minus_beta2 = tl.load(hyper + BETA2), tl.load(hyper + ONE_MINUS_BETA2)
    w_sizes = weight_sizes.to(tl.pointer_type(tl.int32), bitcast=True)
    u_sizes = update_sizes.to(tl.pointer_type(tl.int32), bitcast=True)
    if L2:
        w_total_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        u_total_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    else:
        w_total_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
        u_total_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for i in range(STEPS):
        rows = first_row + i * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = (rows < num_rows)[:, None] & column_mask[None, :]
        at = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        g = tl.load(g_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
        m = tl.load(m_at + at, mask, other=0).to(tl.float32)
        v = tl.load(v_at + at, mask, other=0).to(tl.float32)
        w = tl.load(w_at + at, mask, other=0).to(tl.float32)
        if HAS_SCALE:
            g = g * tl.load(gradient_scale)
        if MAXIMIZE:
            g = -g
        m_stored = (m * beta1 + g * one_minus_beta1).to(STATE)
        v_stored = (v * beta2 + g * g * one_minus_beta2).to(STATE)
        tl.store(m_at + at, m_stored, mask)
        tl.store(v_at + at, v_stored, mask)
        # From the state as it is stored, for that is what the apply phase will read.
        u = _direction(
            m_stored.to(tl.float32), v_stored.to(tl.float32), w, hyper, correction, BIAS_CORRECTION
        )
        if L2:
            w_total_RC += w * w
            u_total_RC += tl.where(mask, u * u, 0.0)
        else:
            w_size, u_size = _bits(w), _bits(u)
            if ANY_ROWS:
                row_mask = rows < num_rows * tl.load(entry + HAS_ROWS)
                rows_at = tl.load(entry + ROWS_AT) + rows
                tl.atomic_max(w_sizes + rows_at, tl.max(w_size, 1), row_mask, sem="relaxed")
                tl.atomic_max(u_sizes + rows_at, tl.max(u_size, 1), row_mask, sem="relaxed")
            w_total_RC = tl.maximum(w_total_RC, w_size)
            u_total_RC = tl.maximum(u_total_RC, u_size)
    if L2:
        tl.store(w_partial, tl.sum(tl.sum(w_total_RC, 1), 0))
        tl.store(u_partial, tl.sum(tl.sum(u_total_RC, 1), 0))
    else:
        w_columns, u_columns = tl.max(w_total_RC, 0), tl.max(u_total_RC, 0)
        if ANY_ROWS:
            sized = columns < num_columns * tl.load(entry + HAS_ROWS)
            columns_at = tl.load(entry + COLUMNS_AT) + columns
            tl.atomic_max(w_sizes + columns_at, w_columns, sized, sem="relaxed")
            tl.atomic_max(u_sizes + columns_at, u_columns, sized, sem="relaxed")
        whole_at = tl.load(entry + WHOLE_AT)
        tl.atomic_max(w_sizes + whole_at, tl.max(w_columns, 0), sem="relaxed")
        tl.atomic_max(u_sizes + whole_at, tl.max(u_columns, 0), sem="relaxed")


@triton.jit
def _apply_tile(
    entry,
    pointers,
    hyper,
    correction,
    weight_sizes,
    update_sizes,
    statistics,
    first_row,
    columns,
    PARAM: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ANY_ROWS: tl.constexpr,
    WEIGHT_BOUND: tl.constexpr,
    BIAS_CORRECTION: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    """w <- w - lr * clamp(s*u)."""
    num_rows, num_columns = tl.load(entry + ROWS), tl.load(entry + COLUMNS)
    if ALIGNED:
        num_columns = tl.multiple_of(num_columns, 16)
    column_mask = columns < num_columns
    w_at = _address(pointers, 0, PARAM, ALIGNED)
    m_at = _address(pointers, 2, STATE, ALIGNED)
    v_at = _address(pointers, 3, STATE, ALIGNED)
    lr, clip = tl.load(hyper + LR), tl.load(hyper + CLIP)
    whole_at = tl.load(entry + WHOLE_AT)
    whole, _ = _ratio(tl.load(weight_sizes + whole_at), tl.load(update_sizes + whole_at))
    if ANY_ROWS:
        has_rows = tl.load(entry + HAS_ROWS)
        columns_at = tl.load(entry + COLUMNS_AT) + columns
        sized_columns = columns < num_columns * has_rows
        column_ratio, column_unscaled = _ratio(
            tl.load(weight_sizes + columns_at, sized_columns, other=0.0),
            tl.load(update_sizes + columns_at, sized_columns, other=0.0),
        )
        rows_at = tl.load(entry + ROWS_AT)
    if RECORD:
        num_clipped = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        num_bounded = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        smallest = tl.full((BLOCK_R, BLOCK_C), float("inf"), tl.float32)
        largest = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        update_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        weight_sum = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for i in range(STEPS):
        rows = first_row + i * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = (rows < num_rows)[:, None] & column_mask[None, :]
        at = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        # Read for the last time in this step.
        m = tl.load(m_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
        v = tl.load(v_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(w_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
        u = _direction(m, v, w, hyper, correction, BIAS_CORRECTION)
        if ANY_ROWS:
            sized_rows = rows < num_rows * has_rows
            row_ratio, row_unscaled = _ratio(
                tl.load(weight_sizes + rows_at + rows, sized_rows, other=0.0),
                tl.load(update_sizes + rows_at + rows, sized_rows, other=0.0),
            )
            own = tl.maximum(row_ratio[:, None], column_ratio[None, :], propagate_nan=NAN_TOO)
            unscaled = row_unscaled[:, None] | column_unscaled[None, :]
            s = tl.maximum(own, whole, propagate_nan=NAN_TOO) if WEIGHT_BOUND else own
            s = tl.where(has_rows != 0, tl.where(unscaled, 1.0, s), whole)
        else:
            s = tl.zeros((BLOCK_R, BLOCK_C), tl.float32) + whole
        scaled = s * u
        taken = lr * tl.clamp(scaled, -clip, clip, propagate_nan=NAN_TOO)
        tl.store(w_at + at, (w - taken).to(PARAM), mask, eviction_policy="evict_first")
        if RECORD:
            num_clipped += tl.where(mask & (tl.abs(scaled) > clip), 1.0, 0.0)
            if ANY_ROWS and WEIGHT_BOUND:
                bounded = mask & (own < whole) & (s == whole)
                num_bounded += tl.where(bounded, 1.0, 0.0) * has_rows
            smallest = tl.minimum(smallest, tl.where(mask, s, float("inf")), propagate_nan=NAN_TOO)
            largest = tl.maximum(largest, tl.where(mask, s, 0.0), propagate_nan=NAN_TOO)
            update_sum += tl.where(mask, taken * taken, 0.0)
            weight_sum += w * w
    if RECORD:
        tl.store(statistics, tl.sum(tl.sum(num_clipped, 1), 0))
        tl.store(statistics + 1, tl.sum(tl.sum(num_bounded, 1), 0))
        tl.store(statistics + 2, tl.min(tl.min(smallest, 1), 0))
        tl.store(statistics + 3, tl.max(tl.max(largest, 1), 0))
        tl.store(statistics + 4, tl.sum(tl.sum(update_sum, 1), 0))
        tl.store(statistics + 5, tl.sum(tl.sum(weight_sum, 1), 0))


@triton.jit
def step(
    schedule,
    segments,
    pointers,
    hyper,
    corrections,
    gradient_scale,
    skip,
    weight_sizes,
    update_sizes,
    w_partial,
    u_partial,
    progress,
    statistics,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ANY_ROWS: tl.constexpr,
    WEIGHT_BOUND: tl.constexpr,
    L2: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BIAS_CORRECTION: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    ORDERED: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One tile of one phase. ``progress`` counts tickets, then each weight's finished moments tiles."""
    if HAS_SKIP:  # noqa: SIM102  # known at compile time, unlike the other
        if tl.load(skip) != 0:
            return
    ticket = tl.atomic_add(progress, 1, sem="relaxed") if ORDERED else tl.program_id(0)
    segment = tl.load(schedule + ticket // PER_SEGMENT).to(tl.int64)
    entry = segments + segment * NUM_FIELDS
    pointers += segment * 4
    phase, weight = tl.load(entry + PHASE), tl.load(entry + WEIGHT)
    tile = ticket - tl.load(entry + FIRST_TICKET)
    if tile >= tl.load(entry + NUM_TILES):  # a segment is filled up to a multiple of PER_SEGMENT
        return
    tile += tl.load(entry + FIRST_TILE)
    num_tiles = tl.load(entry + TILES_IN_ALL)
    finished = progress + 1 + weight
    hyper += tl.load(entry + GROUP) * NUM_HYPER
    panels = tl.cdiv(tl.load(entry + COLUMNS), BLOCK_C)
    if phase == APPLY:
        # Backwards: what the moments phase touched last is the likeliest to be in the cache.
        tile = num_tiles - 1 - tile
    first_row = (tile // panels) * (BLOCK_R * STEPS)
    columns = (tile % panels) * BLOCK_C + tl.arange(0, BLOCK_C)
    number = tl.load(entry + TILES_AT) + tile
    if phase == MOMENTS:
        _moments_tile(
            entry,
            pointers,
            hyper,
            corrections + weight * 2,
            gradient_scale,
            weight_sizes,
            update_sizes,
            w_partial + number,
            u_partial + number,
            first_row,
            columns,
            PARAM,
            GRAD,
            STATE,
            ALIGNED,
            ANY_ROWS,
            L2,
            MAXIMIZE,
            BIAS_CORRECTION,
            HAS_SCALE,
            BLOCK_R,
            BLOCK_C,
            STEPS,
        )
        if ORDERED:
            tl.debug_barrier()  # all threads have stored before one says so
            tl.atomic_add(finished, 1, sem="release")
    else:
        if ORDERED:
            while tl.atomic_add(finished, 0, sem="acquire") < num_tiles:
                pass
            tl.debug_barrier()
        _apply_tile(
            entry,
            pointers,
            hyper,
            corrections + weight * 2,
            weight_sizes,
            update_sizes,
            statistics + number * NUM_STATISTICS,
            first_row,
            columns,
            PARAM,
            STATE,
            ALIGNED,
            ANY_ROWS,
            WEIGHT_BOUND,
            BIAS_CORRECTION,
            RECORD,
            BLOCK_R,
            BLOCK_C,
            STEPS,
        )


@triton.jit
def sum_squares(segments, partial, sizes, BLOCK: tl.constexpr):
    """The Euclidean length of each weight from its tiles' sums of squares, always in the same order."""
    entry = segments + tl.program_id(0).to(tl.int64) * NUM_FIELDS
    first, num = tl.load(entry + TILES_AT), tl.load(entry + TILES_IN_ALL)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        total += tl.load(partial + first + tile, tile < num, other=0.0)
    tl.store(sizes + tl.load(entry + WHOLE_AT), tl.sqrt(tl.sum(total, 0)))
