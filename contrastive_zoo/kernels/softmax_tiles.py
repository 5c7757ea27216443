"""Triton kernels of the softmax losses: partial log-sum-exps of a block of logits, and the weights of its gradient.

A block is X = scale · log₂e · A Bᵀ of n rows and m columns: logits in bits, so that ``exp2`` needs no factor. Column j is
δ = j − i + ``ahead`` behind row i in the global batch, which says what the pair is:

    |δ| = partner                     a positive pair: excluded from sums
    δ = 0 of one tower                a row and itself: excluded as well

A sum of exponentials is kept as two numbers, whole exponent e and mantissa s, of which it is s · 2ᵉ: what lies between the
whole numbers would lose digits in a logarithm of 100 bits or more. (It is s · 2ᵉ = 0 where e is ``NOTHING``.)

Tiles that hold such pairs, or columns beyond the last, need masks, and masks need registers: a second launch with smaller
tiles takes them (``EDGE``), so that the first one has none.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from contrastive_zoo.kernels.walk import LOG2E, on_diagonal, own_tiles, store_halves

NOTHING: tl.constexpr = tl.constexpr(-1e30)
"""The maximum of nothing; unlike −inf it can be subtracted from itself."""

LIFT: tl.constexpr = tl.constexpr(50.0)
"""Bits by which exponentials, and the factors of rows in column sums, are lifted: otherwise they are at most 1 and the
upper half of float32's range stays unused. 2 · 50 bits leave 27 for the number of summands."""

LEAST: tl.constexpr = tl.constexpr(2.0**-32)
"""A column sum this large has lost nothing: a lost term is below 2⁻⁷⁶ (126 bits less ``LIFT``), and 2²⁰ of them are
below 2⁻²⁴ of the sum."""

SPREAD: tl.constexpr = tl.constexpr(80.0)
"""Bits that row and column log-sum-exps of a tile may lie apart so that one exponential serves both: a weight that
underflows is then below 2^(80 − 126)."""


@triton.jit
def log_sum_exps(
    a,  # [n, d]
    b,  # [m, d]
    scale,
    by_row,  # [2, column blocks, n]: exponents and mantissas of each row of a tile
    by_column,  # [2, chunks, m]: of each column of a program's rows
    positives,  # [n]: products of positive pairs, neither scaled nor in bits
    lost,  # becomes 1 if a column's sum may have lost terms that are far below its neighbours'
    n,
    m,
    d,
    ahead,
    partner,
    chunk,
    EDGE: tl.constexpr,  # 0: programs that need no mask, 1: the others, 2: all
    ONE_TOWER: tl.constexpr,
    UPPER: tl.constexpr,  # only pairs with δ > 0
    COLUMNS: tl.constexpr,
    IF_LOST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
):
    if IF_LOST:
        if tl.load(lost) == 0:
            return
    start, stop, block = own_tiles(n, m, chunk, BLOCK_N, GROUP)
    j = block * BLOCK_N
    if UPPER:
        stop = min(stop, j + BLOCK_N)
    if EDGE < 2:
        if (on_diagonal(start, stop, j + ahead, partner, ONE_TOWER, BLOCK_N) | (j + BLOCK_N > m)) != (EDGE == 1):
            return
    k = tl.load(scale) * LOG2E
    columns = j + tl.arange(0, BLOCK_N)
    reference = NOTHING
    # rows of one warp's share of a matrix product are 8 threads apart: these sums cross no thread before the end
    sums = tl.zeros((WARPS, 8, BLOCK_N), tl.float32)
    for i in tl.range(start, stop, BLOCK_M, flatten=True):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for depth in range(0, d, BLOCK_K):
            acc = tl.dot(a.load([i, depth]), b.load([j, depth]).T, acc, input_precision=PRECISION)
        rows = i + tl.arange(0, BLOCK_M)
        if EDGE:
            delta = (columns + ahead)[None, :] - rows[:, None]
            partners = rows + partner - ahead
            found = (rows < n) & (j <= partners) & (partners < min(j + BLOCK_N, m))
            tl.store(positives + rows, tl.sum(tl.where(delta == partner, acc, 0.0), 1), mask=found)
            others = (columns < m)[None, :] & (delta != partner) & (delta != -partner)
            if UPPER:
                others &= delta > 0
            elif ONE_TOWER:
                others &= delta != 0
            acc = tl.where(others, acc, float("-inf"))
        top = tl.maximum(tl.ceil(tl.max(acc, 1) * k), NOTHING)
        e = tl.exp2(acc * k - (top - LIFT)[:, None])
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
        place = by_column + (start // chunk).to(tl.int64) * m + columns
        tl.store(place, tl.zeros_like(total) + (reference - 2 * LIFT), mask=columns < m)
        tl.store(place + tl.cdiv(n, chunk).to(tl.int64) * m, total, mask=columns < m)
        last = stop + tl.zeros_like(columns)
        if UPPER:
            last = tl.minimum(columns, stop)
        partners = columns + ahead - partner
        others = last - start - ((start <= partners) & (partners < last)).to(tl.int32)
        if tl.max(((total < LEAST) & (others > 0) & (columns < m)).to(tl.int32), 0) > 0:
            tl.store(lost, 1)


@triton.jit
def merge(
    parts,  # [2, count, n]
    out,  # [2, n], rows ``stride`` apart
    lost,
    count,
    n,
    stride,
    IF_LOST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """``out += parts.sum(0)`` of sums of exponentials."""
    if IF_LOST:
        if tl.load(lost) == 0:
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


@triton.jit
def finish(
    of_rows,  # [2, ·]: sums of exponentials of others, of row i; becomes exponent and factor of ``softmax_weights``
    of_partners,  # [2, ·]: of column i, or of the row that is row i's partner
    again,  # [2, ·]: what replaces ``of_partners`` (and, of one tower, ``of_rows``) if digits were lost
    again_of_rows,
    lost,
    positives,  # [count]: products of pairs
    scale,
    losses,  # [count]
    pulls,  # [count] and, ``partner`` further, once more
    count,
    rows_stride,
    partners_stride,
    again_stride,
    partner,
    SIDES: tl.constexpr,  # how many of a pair look for the other
    ONE_TOWER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Losses log(1 + others / positive) in nats, pulls others / (others + positive); in float64, since it is n numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    positive = tl.load(positives + i, mask=there, other=0.0).to(tl.float64) * (tl.load(scale) * LOG2E)
    redo = False
    if SIDES == 2:
        redo = tl.load(lost) > 0
    if ONE_TOWER:
        loss, pull = _finish_side(of_rows, rows_stride, again_of_rows, again_stride, redo, positive, i, there)
    else:
        loss, pull = _finish_side(of_rows, rows_stride, of_rows, rows_stride, False, positive, i, there)
    if SIDES == 2:
        its_loss, its_pull = _finish_side(of_partners, partners_stride, again, again_stride, redo, positive, i, there)
        loss, pull = (loss + its_loss) / 2, pull + its_pull
    tl.store(losses + i, loss.to(tl.float32), mask=there)
    tl.store(pulls + i, pull.to(tl.float32), mask=there)
    if ONE_TOWER:
        tl.store(pulls + partner + i, pull.to(tl.float32), mask=there)


@triton.jit
def _finish_side(sums, stride, again, again_stride, redo, positive, i, there):
    place, mantissas = sums + i, sums + stride + i
    if redo:
        place, mantissas = again + i, again + again_stride + i
    exponent = tl.load(place, mask=there, other=NOTHING).to(tl.float64)
    mantissa = tl.load(mantissas, mask=there, other=0.0).to(tl.float64)
    some = (mantissa > 0) | (mantissa != mantissa)  # NaN stays
    others = tl.where(some, exponent + tl.log2(tl.where(some, mantissa, 1.0)), float("-inf"))
    gap = others - positive
    e = tl.exp2(-tl.abs(gap))
    one_more = 1.0 + e
    log1p = tl.where(one_more > 1.0, tl.log(one_more) * (e / tl.where(one_more > 1.0, one_more - 1.0, 1.0)), e)
    log1p = tl.where(gap != gap, gap, log1p)
    loss = tl.maximum(gap, 0.0) * (1.0 / LOG2E) + log1p
    pull = tl.where(gap > 0, 1.0, e) / one_more
    total = tl.maximum(others, positive) + log1p * LOG2E
    whole = tl.ceil(total)
    tl.store(sums + i, whole.to(tl.float32), mask=there)
    tl.store(sums + stride + i, tl.exp2(whole - total).to(tl.float32), mask=there)
    return loss, pull


@triton.jit
def softmax_weights(
    a,  # [n, d]
    b,  # [m, d]
    weights,  # [n, m]
    scale,
    of_rows,  # [2, n]: exponents and factors of rows, as ``finish`` leaves them
    of_columns,  # [2, m]
    pulls,  # [n]: what a positive pair's weight is, but for the sign
    n,
    m,
    d,
    rows_stride,
    columns_stride,
    ahead,
    partner,
    chunk,
    EDGE: tl.constexpr,
    ONE_TOWER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,  # weights are stored in units of 2^−UNIT
    MOST: tl.constexpr,  # no chunk is higher
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``2 ** (X - exponent) * factor`` of rows and of columns, added up; minus its pull for a positive pair."""
    start, stop, block = own_tiles(n, m, chunk, BLOCK_N, GROUP)
    j = block * BLOCK_N
    if EDGE < 2:
        if on_diagonal(start, stop, j + ahead, partner, ONE_TOWER, BLOCK_N) != (EDGE == 1):
            return
    k = tl.load(scale) * LOG2E
    columns = j + tl.arange(0, BLOCK_N)
    if COLUMNS:  # beyond the last row or column, exponents are infinite and weights 0
        by_column = tl.load(of_columns + columns, mask=columns < m, other=float("inf"))
        lowest = tl.min(by_column, 0)
        column_factors = tl.load(of_columns + columns_stride + columns, mask=columns < m, other=0.0)
        column_factors *= tl.exp2(lowest - by_column)
        every_row = start + tl.arange(0, MOST)
        together = tl.max(tl.load(of_rows + every_row, mask=every_row < stop, other=float("-inf")), 0) - lowest < SPREAD
    # read a tile ahead: a load that is waited for here would stop the products
    rows = start + tl.arange(0, BLOCK_M)
    by_row = tl.load(of_rows + rows, mask=rows < n, other=float("inf"))
    row_factors = tl.load(of_rows + rows_stride + rows, mask=rows < n, other=0.0)
    for i in tl.range(start, stop, BLOCK_M, flatten=True):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for depth in range(0, d, BLOCK_K):
            acc = tl.dot(a.load([i, depth]), b.load([j, depth]).T, acc, input_precision=PRECISION)
        if not COLUMNS:
            w = tl.exp2(acc * k - (by_row - UNIT)[:, None]) * row_factors[:, None]
        elif together:
            up = tl.where(row_factors > 0, tl.exp2(by_row - lowest), 0.0)
            w = tl.exp2(acc * k - (by_row - UNIT)[:, None])
            w *= row_factors[:, None] + up[:, None] * column_factors[None, :]
        else:
            w = tl.exp2(acc * k - (by_row - UNIT)[:, None]) * row_factors[:, None]
            factors = tl.load(of_columns + columns_stride + columns, mask=columns < m, other=0.0)
            exponents = tl.load(of_columns + columns, mask=columns < m, other=float("inf"))
            w += tl.exp2(acc * k - (exponents - UNIT)[None, :]) * factors[None, :]
        rows = i + tl.arange(0, BLOCK_M)
        if EDGE:
            delta = (columns + ahead)[None, :] - rows[:, None]
            pull = tl.load(pulls + rows, mask=rows < n, other=0.0) * 2.0**UNIT
            w = tl.where((delta == partner) | (delta == -partner), -pull[:, None], w)
            if ONE_TOWER:
                w = tl.where(delta == 0, 0.0, w)
        rows += BLOCK_M
        by_row = tl.load(of_rows + rows, mask=rows < n, other=float("inf"))
        row_factors = tl.load(of_rows + rows_stride + rows, mask=rows < n, other=0.0)
        store_halves(weights, w, i, j, BLOCK_M, BLOCK_N)
