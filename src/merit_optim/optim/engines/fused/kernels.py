"""The trust-ratio step as Triton kernels: every weight of a step in one launch per phase.

A program processes a tile of one weight: ``STEPS`` blocks of ``BLOCK_R`` rows, ``BLOCK_C`` columns wide.
It looks up its tile in tables, so that any number of weights share a launch:

    schedule (program // CHUNK, 2)       -> weight; first of CHUNK tiles
    weights  (weight, NUM_FIELDS)        -> shape, places in the sizes buffers, group
    pointers (weight, NUM_POINTERS)      -> addresses of w, g, m, v and of the step count
    hyper    (group, NUM_HYPER)          -> learning rate, betas and so on
    outputs  (weight, NUM_OUTPUT_FIELDS) -> for NorMuon, the outputs of the whole matrix

Adam's direction is recomputed from m and v in each phase. A direction that needs whole matrices is computed
between the phases and held (``HELD``): ``momentum`` writes its input, the other kernels read d. NorMuon's has
a factor for each output, a row or a column (``OUTPUT_DIM``, 1 or 2), which ``equalize`` computes.

Sizes are float32 magnitudes, compared as integers with the same bits: for nonnegative numbers the order is
the same, and a NaN, which is larger than any number in this order, is never lost. Sums of squares (``L2``)
are stored per tile and added up in a fixed order by ``sum_squares``, so that two runs give the same bits.

Shape suffixes: R rows of a block, C columns of a block.
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
NUM_OUTPUT_FIELDS = tl.constexpr(6)
NUM_OUTPUTS, NUM_INPUTS, MEAN_SQ_AT, OUTPUT_FACTORS_AT, FIRST_HERE, NUM_HERE = (
    tl.constexpr(i) for i in range(6)
)

UNSCALED = tl.constexpr(float("inf"))  # marks an undefined ratio of a row or column
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
NAN_TOO = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _address(pointers, which: tl.constexpr, offset, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(pointers + which).to(tl.pointer_type(dtype)) + offset
    # Declared on the pointer, not on the integer it is cast from: the cast would lose it, and with it the
    # 16-byte accesses.
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _tile_of(schedule, program):
    """The weight and the tile of a program."""
    chunk = schedule + (program // CHUNK) * 2
    return tl.load(chunk).to(tl.int64), tl.load(chunk + 1) + program % CHUNK


@triton.jit
def _place(entry, tile, height: tl.constexpr, width: tl.constexpr):
    """The first row of a tile, and its columns."""
    panels = tl.cdiv(tl.load(entry + COLUMNS), width).to(tl.int32)
    return (tile // panels).to(tl.int64) * height, (tile % panels) * width + tl.arange(0, width)


@triton.jit
def _num_rows_and_columns(entry, first_row, height: tl.constexpr, ALIGNED: tl.constexpr):
    """The number of rows of a tile, and of columns of its weight."""
    num_rows = tl.minimum(tl.load(entry + ROWS) - first_row, height).to(tl.int32)
    num_columns = tl.load(entry + COLUMNS).to(tl.int32)
    if ALIGNED:
        num_columns = tl.multiple_of(num_columns, 16)
    return num_rows, num_columns


@triton.jit
def _count_step(pointers, tile):
    """Count the step once per parameter: only its first matrix has an address for it."""
    if tile == 0:
        address = tl.load(pointers + 4)
        if address != 0:
            count_at = address.to(tl.pointer_type(tl.float32))
            tl.store(count_at, tl.load(count_at) + 1)


@triton.jit
def _bits(x):
    """|x| as an integer with the same order, and NaN above all numbers."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _adam_update(m, v, w, eps, weight_decay, correction, BIAS_CORRECTION: tl.constexpr):
    """u with Adam's direction, as defined by directions/adam.py and algorithm.decayed."""
    denominator = tl.sqrt(v)
    if BIAS_CORRECTION:
        denominator = denominator / tl.load(correction + 1)
    u = m / (denominator + eps)
    if BIAS_CORRECTION:
        u = u / tl.load(correction)
    return u + w * weight_decay


@triton.jit
def _factors_of(factors, entry, first_row, OUTPUT_DIM: tl.constexpr):
    """Where the factors of a tile's outputs are: from its first row on, or those of all columns."""
    if OUTPUT_DIM is not None:
        factors += tl.load(entry + FACTORS_AT)
    if OUTPUT_DIM == 1:
        factors += first_row
    return factors


@triton.jit
def _held_scale(correction, factors, rows, columns, num_rows, num_columns, OUTPUT_DIM: tl.constexpr):
    """The scale of a held direction: one, or one for each output."""
    scale = tl.load(correction)
    if OUTPUT_DIM == 1:
        scale = scale * tl.load(factors + rows, rows < num_rows, other=0)[:, None]
    elif OUTPUT_DIM == 2:
        scale = scale * tl.load(factors + columns, columns < num_columns, other=0)[None, :]
    return scale


@triton.jit
def _held_update(held_at, at, mask, w, scale, weight_decay):
    """u with a held direction: scale*d + weight_decay*w."""
    return tl.load(held_at + at, mask, other=0).to(tl.float32) * scale + w * weight_decay


@triton.jit
def _ratio(w, u, undefined_is: tl.constexpr):
    """algorithm.ratio: |w| / |u|, never infinite, so that infinity can mark an undefined ratio."""
    undefined = (w == 0) | (u == 0)
    quotient = tl.minimum(w / tl.where(undefined, 1.0, u), FLOAT_MAX, propagate_nan=NAN_TOO)
    return tl.where(undefined, undefined_is, quotient)


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
    weight, tile = _tile_of(schedule, tl.program_id(0))
    entry = weights + weight * NUM_FIELDS
    if tile >= tl.load(entry + NUM_TILES):
        return
    first_row, columns = _place(entry, tile, BLOCK_R * STEPS, BLOCK_C)
    pointers += weight * NUM_POINTERS
    hyper += tl.load(entry + GROUP) * NUM_HYPER
    num_rows, num_columns = _num_rows_and_columns(entry, first_row, BLOCK_R * STEPS, ALIGNED)
    offset = first_row * num_columns
    g_at = _address(pointers, 1, offset, GRAD, ALIGNED)
    m_at = _address(pointers, 2, offset, STATE, ALIGNED)
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

    With ``HELD``, only measure. With ``AT_ONCE``, if s is 1, take the whole step.
    """
    if HAS_SKIP:  # noqa: SIM102  # known at compile time, unlike the inner condition
        if tl.load(skip) != 0:
            return
    program = tl.program_id(0)
    weight, tile = _tile_of(schedule, program)
    entry = weights + weight * NUM_FIELDS
    if tile >= tl.load(entry + NUM_TILES):  # a weight's last chunk may have unused programs
        return
    first_row, columns = _place(entry, tile, BLOCK_R * STEPS, BLOCK_C)
    pointers += weight * NUM_POINTERS
    correction = corrections + weight * 2
    hyper += tl.load(entry + GROUP) * NUM_HYPER
    num_rows, num_columns = _num_rows_and_columns(entry, first_row, BLOCK_R * STEPS, ALIGNED)
    column_mask = columns < num_columns
    # 64-bit offsets up to the tile, 32-bit within it.
    offset = first_row * num_columns
    w_at = _address(pointers, 0, offset, PARAM, ALIGNED)
    if HELD:
        d_at = held + tl.load(entry + HELD_AT) + offset
        factors = _factors_of(factors, entry, first_row, OUTPUT_DIM)
    else:
        g_at = _address(pointers, 1, offset, GRAD, ALIGNED)
        m_at = _address(pointers, 2, offset, STATE, ALIGNED)
        v_at = _address(pointers, 3, offset, STATE, ALIGNED)
    beta1, one_minus_beta1 = tl.load(hyper + BETA1), tl.load(hyper + ONE_MINUS_BETA1)
    beta2, one_minus_beta2 = tl.load(hyper + BETA2), tl.load(hyper + ONE_MINUS_BETA2)
    eps, weight_decay = tl.load(hyper + EPS), tl.load(hyper + WEIGHT_DECAY)
    if AT_ONCE:
        lr, clip = tl.load(hyper + LR), tl.load(hyper + CLIP)
        _count_step(pointers, tile)
    if ANY_ROWS:
        has_rows = tl.load(entry + HAS_ROWS).to(tl.int32)
        rows_at = tl.load(entry + ROWS_AT) + first_row
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
            scale = _held_scale(correction, factors, rows, columns, num_rows, num_columns, OUTPUT_DIM)
            u = _held_update(d_at, at, mask, w, scale, weight_decay)
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
            u = _adam_update(
                m_stored.to(tl.float32),
                v_stored.to(tl.float32),
                w,
                eps,
                weight_decay,
                correction,
                BIAS_CORRECTION,
            )
        if AT_ONCE:
            taken = lr * tl.clamp(u, -clip, clip, propagate_nan=NAN_TOO)
            tl.store(w_at + at, (w - taken).to(PARAM), mask)
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
    PARAM: tl.constexpr,
    STATE: tl.constexpr,
    HELD: tl.constexpr,
    OUTPUT_DIM: tl.constexpr,
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
    """w <- w - lr * clamp(s*u), and count the step."""
    if HAS_SKIP:  # noqa: SIM102  # known at compile time, unlike the inner condition
        if tl.load(skip) != 0:
            return
    # In reverse: the data that the moments phase used last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    weight, tile = _tile_of(schedule, program)
    entry = weights + weight * NUM_FIELDS
    if tile >= tl.load(entry + NUM_TILES):
        return
    first_row, columns = _place(entry, tile, BLOCK_R * STEPS, BLOCK_C)
    pointers += weight * NUM_POINTERS
    correction = corrections + weight * 2
    hyper += tl.load(entry + GROUP) * NUM_HYPER
    num_rows, num_columns = _num_rows_and_columns(entry, first_row, BLOCK_R * STEPS, ALIGNED)
    column_mask = columns < num_columns
    # 64-bit offsets up to the tile, 32-bit within it.
    offset = first_row * num_columns
    w_at = _address(pointers, 0, offset, PARAM, ALIGNED)
    if HELD:
        d_at = held + tl.load(entry + HELD_AT) + offset
        factors = _factors_of(factors, entry, first_row, OUTPUT_DIM)
    else:
        m_at = _address(pointers, 2, offset, STATE, ALIGNED)
        v_at = _address(pointers, 3, offset, STATE, ALIGNED)
    _count_step(pointers, tile)
    lr, clip = tl.load(hyper + LR), tl.load(hyper + CLIP)
    min_ratio, max_ratio = tl.load(hyper + MIN_RATIO), tl.load(hyper + MAX_RATIO)
    eps, weight_decay = tl.load(hyper + EPS), tl.load(hyper + WEIGHT_DECAY)
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
            scale = _held_scale(correction, factors, rows, columns, num_rows, num_columns, OUTPUT_DIM)
            u = _held_update(d_at, at, mask, w, scale, weight_decay)
        else:
            m = tl.load(m_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
            v = tl.load(v_at + at, mask, other=0, eviction_policy="evict_first").to(tl.float32)
            u = _adam_update(m, v, w, eps, weight_decay, correction, BIAS_CORRECTION)
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
        taken = lr * tl.clamp(scaled, -clip, clip, propagate_nan=NAN_TOO)
        tl.store(w_at + at, (w - taken).to(PARAM), mask, eviction_policy="evict_first")
        if RECORD:
            num_clipped += tl.where(mask & (tl.abs(scaled) > clip), 1.0, 0.0)
            if ANY_ROWS and WEIGHT_BOUND:
                unbounded = tl.maximum(row_ratio[:, None], unbounded_column[None, :], propagate_nan=NAN_TOO)
                bounded = mask & (unbounded < whole) & (s == whole)
                num_bounded += tl.where(bounded, 1.0, 0.0) * has_rows
            smallest = tl.minimum(smallest, tl.where(mask, s, float("inf")), propagate_nan=NAN_TOO)
            largest = tl.maximum(largest, tl.where(mask, s, 0.0), propagate_nan=NAN_TOO)
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
    average_at = _address(pointers + weight * NUM_POINTERS, 3, 0, STATE, False)
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
