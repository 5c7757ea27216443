"""Compute partial log-sum-exps of a block of logits, and the weights of its gradient: Triton kernels of the softmax losses.

A block is X = scale · log₂e · A Bᵀ of n rows and m columns, logits in bits, times a factor of each row of A and B. The
offset of column j from row i is δ = j − i + ``ahead``. Sums leave out positive pairs, |δ| = ``partner`` among the first
``local`` columns; a row and itself, δ = 0 of one tower; and pairs of a row ≥ ``corner_row`` and a column ≥
``corner_column``, which are another rank's. Tiles with such pairs need masks, and masks need registers: a second launch
with smaller tiles processes them (``EDGE``).

A sum of exponentials s · 2ᵉ is stored as two numbers, integer exponent e and mantissa s: the fraction of a logarithm of
100 bits or more would lose digits. (The sum is 0 where e is ``NOTHING``.)
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from contrastive_zoo.engine.kernels.blocks import LOG2E, on_diagonal, own_tiles, store_halves, sum_in_threads

NOTHING: tl.constexpr = tl.constexpr(-1e30)  # the maximum of an empty set; unlike −inf, its difference with itself is 0

LIFT: tl.constexpr = tl.constexpr(50.0)
"""Bits that are added to the exponents of exponentials, and of rows' factors in column sums: otherwise they are at most 1
and the upper half of float32's range is unused. 2 · 50 bits leave 27 for the number of summands."""

MIN_PRECISE_SUM: tl.constexpr = tl.constexpr(2.0**-32)
"""A column sum this large is precise: a lost term is below 2⁻⁷⁶ (126 bits less ``LIFT``), and 2²⁰ of them are
below 2⁻²⁴ of the sum."""

SPREAD: tl.constexpr = tl.constexpr(80.0)
"""Largest difference, in bits, of a tile's row and column log-sum-exps for which one exponential serves both: a weight
that underflows is then below 2^(80 − 126)."""


@triton.jit(do_not_specialize=["local", "corner_row", "corner_column"])
def log_sum_exps(
    a,  # [n, d]
    b,  # [m, d]
    row_norms,  # [n]: factors of the rows' products
    column_norms,  # [m]
    scale,
    by_row,  # [2, column blocks, n]: exponents and mantissas of each row of a tile
    by_column,  # [2, chunks, m]: of each column of a program's rows
    excluded,  # [n]: a column that each row's sum and, by its row, the column's sum leave out; not read without EXCLUDED
    precision_lost,  # set to 1 if a column's sum may lack terms that are far below those of its tile
    n,
    m,
    d,
    ahead,
    partner,
    local,
    corner_row,
    corner_column,
    chunk,
    EDGE: tl.constexpr,  # 0: programs without masks, 1: the other programs, 2: all
    ONE_TOWER: tl.constexpr,
    SIDE: tl.constexpr,  # 1: only pairs with δ > 0, −1: only those with δ < 0, 0: all
    COLUMNS: tl.constexpr,
    EXCLUDED: tl.constexpr,  # with EDGE 2 only
    IF_LOST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
):
    if IF_LOST:
        if tl.load(precision_lost) == 0:
            return
    start, stop, block = own_tiles(n, m, chunk, BLOCK_N, GROUP)
    j = block * BLOCK_N
    strip = start // chunk
    if EDGE < 2:
        cut = (j + BLOCK_N > m) | ((stop > corner_row) & (j + BLOCK_N > corner_column))
        if (on_diagonal(start, stop, j + ahead, partner, ONE_TOWER, BLOCK_N) | cut) != (EDGE == 1):
            return
    if j >= corner_column:
        stop = min(stop, corner_row)
    if SIDE == 1:
        stop = min(stop, j + ahead + BLOCK_N)
    if SIDE == -1:
        start += max(j + ahead - start, 0) // BLOCK_M * BLOCK_M
    k = tl.load(scale) * LOG2E
    columns = j + tl.arange(0, BLOCK_N)
    of_columns = tl.load(column_norms + columns, mask=columns < m, other=1.0)
    reference = NOTHING
    # the rows of one thread in a matmul are 8 apart, so these sums cross no thread before the end
    sums = tl.zeros((WARPS, 8, BLOCK_N), tl.float32)
    for i in tl.range(start, stop, BLOCK_M, flatten=True):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for depth in range(0, d, BLOCK_K):
            acc = tl.dot(a.load([i, depth]), b.load([j, depth]).T, acc, input_precision=PRECISION)
        rows = i + tl.arange(0, BLOCK_M)
        acc *= of_columns[None, :]
        if EDGE:
            delta = (columns + ahead)[None, :] - rows[:, None]
            same_rank = (rows < local + ahead)[:, None] & (columns < local)[None, :]
            positive = same_rank & ((delta == partner) | (delta == -partner))
            others = (columns < m)[None, :] & ((rows < corner_row)[:, None] | (columns < corner_column)[None, :])
            others &= ~positive
            if SIDE:
                others &= delta * SIDE > 0
            elif ONE_TOWER:
                others &= delta != 0
            if EXCLUDED:
                left_out = tl.load(excluded + rows, mask=rows < n, other=-1)
                others &= columns[None, :] != left_out[:, None]
            acc = tl.where(others, acc, float("-inf"))
        k_rows = k * tl.load(row_norms + rows, mask=rows < n, other=1.0)
        top = tl.maximum(tl.ceil(tl.max(acc, 1) * k_rows), NOTHING)
        e = tl.exp2(acc * k_rows[:, None] - (top - LIFT)[:, None])
        place = by_row + block.to(tl.int64) * n + rows
        tl.store(place, top - LIFT, mask=rows < n)
        tl.store(place + tl.cdiv(m, BLOCK_N).to(tl.int64) * n, tl.sum(e, 1), mask=rows < n)
        if COLUMNS:
            top = tl.where(rows < n, top, NOTHING)
            highest = tl.maximum(reference, tl.max(top, 0))
            factors = tl.where(rows < n, tl.exp2(top - highest + LIFT), 0.0)
            groups = tl.reshape(e * factors[:, None], (BLOCK_M // (16 * WARPS), WARPS, 2, 8, BLOCK_N))
            sums = sums * tl.exp2(reference - highest) + tl.sum(tl.sum(groups, 2), 0)
            reference = highest
    if COLUMNS:
        total = tl.sum(tl.sum(sums, 0), 0)
        place = by_column + strip.to(tl.int64) * m + columns
        tl.store(place, tl.zeros_like(total) + (reference - 2 * LIFT), mask=columns < m)
        tl.store(place + tl.cdiv(n, chunk).to(tl.int64) * m, total, mask=columns < m)
        last = tl.where(columns < corner_column, stop, min(stop, corner_row))
        if SIDE == 1:
            last = tl.minimum(columns + ahead, last)
        partners = columns + ahead - partner
        others = last - start - ((start <= partners) & (partners < last) & (columns < local)).to(tl.int32)
        if tl.max(((total < MIN_PRECISE_SUM) & (others > 0) & (columns < m)).to(tl.int32), 0) > 0:
            tl.store(precision_lost, 1)


@triton.jit
def merge(
    parts,  # [2, count, n]
    out,  # [2, n], rows ``stride`` apart
    precision_lost,
    count,
    n,
    stride,
    IF_LOST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Compute ``out += parts.sum(0)`` of sums of exponentials."""
    if IF_LOST:
        if tl.load(precision_lost) == 0:
            return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = columns < n
    top = tl.load(out + columns, mask=there, other=NOTHING)
    total = tl.where(top > NOTHING, tl.load(out + stride + columns, mask=there, other=0.0), 0.0)
    for p in range(0, count, BLOCK_P):
        rows = p + tl.arange(0, BLOCK_P)
        places = parts + rows.to(tl.int64)[:, None] * n + columns[None, :]
        inside = (rows < count)[:, None] & there[None, :]
        exponents = tl.load(places, mask=inside, other=NOTHING)
        mantissas = tl.load(places + tl.cast(count, tl.int64) * n, mask=inside, other=0.0)
        higher = tl.maximum(top, tl.max(exponents, 0))
        factors = tl.where(exponents > NOTHING, tl.exp2(exponents - higher[None, :]), 0.0)
        total = total * tl.exp2(top - higher) + tl.sum(tl.where(factors > 0, mantissas, 0.0) * factors, 0)
        top = higher
    tl.store(out + columns, top, mask=there)
    tl.store(out + stride + columns, total, mask=there)


@triton.jit(do_not_specialize=["local"])
def softmax_weights(
    a,  # [n, d]
    b,  # [m, d]
    weights,  # [n, m]
    row_norms,  # [n], as for ``log_sum_exps``
    column_norms,  # [m]
    scale,
    of_rows,  # [2, n]: exponents and factors of rows
    of_columns,  # [2, m]
    products,  # [programs]: sums of weights, before they are rounded, times dot products
    excluded,  # as for ``log_sum_exps``; such pairs and positives have the weight 0
    n,
    m,
    d,
    rows_stride,
    columns_stride,
    ahead,
    partner,
    local,
    chunk,
    EDGE: tl.constexpr,
    ONE_TOWER: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXCLUDED: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,  # weights are stored in units of 2^−UNIT
    MAX_ROWS: tl.constexpr,  # largest chunk
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Write ``2 ** (X - exponent) * factor`` of rows plus that of columns, times both norms: weights of rows as read."""
    start, stop, block = own_tiles(n, m, chunk, BLOCK_N, GROUP)
    j = block * BLOCK_N
    if EDGE < 2:
        cut = (j + BLOCK_N > m) | (start + chunk > n)
        if (on_diagonal(start, stop, j + ahead, partner, ONE_TOWER, BLOCK_N) | cut) != (EDGE == 1):
            return
    k = tl.load(scale) * LOG2E
    columns = j + tl.arange(0, BLOCK_N)
    norms = tl.load(column_norms + columns, mask=columns < m, other=0.0)
    if COLUMNS:  # beyond the last row or column, exponents are infinite and weights 0
        by_column = tl.load(of_columns + columns, mask=columns < m, other=float("inf"))
        lowest = tl.min(by_column, 0)
        column_factors = tl.load(of_columns + columns_stride + columns, mask=columns < m, other=0.0)
        column_factors *= tl.exp2(lowest - by_column)
        every_row = start + tl.arange(0, MAX_ROWS)
        shared_exponential = (
            tl.max(tl.load(of_rows + every_row, mask=every_row < stop, other=float("-inf")), 0) - lowest < SPREAD
        )
    # loaded one tile ahead: waiting for a load here would stall the matmuls
    rows = start + tl.arange(0, BLOCK_M)
    by_row = tl.load(of_rows + rows, mask=rows < n, other=float("inf"))
    row_factors = tl.load(of_rows + rows_stride + rows, mask=rows < n, other=0.0)
    norms_of_rows = tl.load(row_norms + rows, mask=rows < n, other=0.0)
    total = tl.zeros((WARPS, 8, 4), tl.float32)
    for i in tl.range(start, stop, BLOCK_M, flatten=True):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for depth in range(0, d, BLOCK_K):
            acc = tl.dot(a.load([i, depth]), b.load([j, depth]).T, acc, input_precision=PRECISION)
        k_rows = (k * norms_of_rows)[:, None]
        acc *= norms[None, :]
        if not COLUMNS:
            w = tl.exp2(acc * k_rows - (by_row - UNIT)[:, None]) * row_factors[:, None]
        elif shared_exponential:
            up = tl.where(by_row < float("inf"), tl.exp2(by_row - lowest), 0.0)
            w = tl.exp2(acc * k_rows - (by_row - UNIT)[:, None])
            w *= row_factors[:, None] + up[:, None] * column_factors[None, :]
        else:
            w = tl.exp2(acc * k_rows - (by_row - UNIT)[:, None]) * row_factors[:, None]
            factors = tl.load(of_columns + columns_stride + columns, mask=columns < m, other=0.0)
            exponents = tl.load(of_columns + columns, mask=columns < m, other=float("inf"))
            w += tl.exp2(acc * k_rows - (exponents - UNIT)[None, :]) * factors[None, :]
        w *= norms_of_rows[:, None]
        rows = i + tl.arange(0, BLOCK_M)
        if EDGE:
            delta = (columns + ahead)[None, :] - rows[:, None]
            positive = (columns < local)[None, :] & ((delta == partner) | (delta == -partner))
            w = tl.where((rows < n)[:, None] & (columns < m)[None, :] & ~positive, w, 0.0)
            if ONE_TOWER:
                w = tl.where(delta == 0, 0.0, w)
            if EXCLUDED:
                left_out = tl.load(excluded + rows, mask=rows < n, other=-1)
                w = tl.where(columns[None, :] == left_out[:, None], 0.0, w)
        total += sum_in_threads(w * acc, BLOCK_M, BLOCK_N, WARPS)
        rows += BLOCK_M
        by_row = tl.load(of_rows + rows, mask=rows < n, other=float("inf"))
        row_factors = tl.load(of_rows + rows_stride + rows, mask=rows < n, other=0.0)
        norms_of_rows = tl.load(row_norms + rows, mask=rows < n, other=0.0)
        store_halves(weights, w * norms[None, :], i, j, BLOCK_M, BLOCK_N)
    tl.store(products + tl.program_id(0), tl.sum(tl.sum(tl.sum(total, 2), 1), 0) * 2.0**-UNIT)
