"""Triton kernels of the softmax losses: partial log-sum-exps of a block of logits, and the weights of its gradient.

A block is X = scale · log₂e · A Bᵀ of n rows and m columns: logits in bits, so that ``exp2`` needs no factor. Column j is
δ = j − i + ``ahead`` behind row i in the global batch, which says what the pair is:

    |δ| = partner                     a positive pair: excluded from sums
    δ = 0 of one tower                a row and itself: excluded as well

Tiles that hold such pairs, or columns beyond the last, need masks, and masks need registers: a second launch with smaller
tiles takes them (``EDGE``), so that the first one has none.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from contrastive_zoo.kernels.walk import LOG2E, on_diagonal, own_tiles

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
    by_row,  # [column blocks, n]: of each row of a tile
    by_column,  # [chunks, m]: of each column of a program's rows
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
        top = tl.maximum(tl.max(acc, 1) * k, NOTHING)
        e = tl.exp2(acc * k - (top - LIFT)[:, None])
        of_rows = top + (tl.log2(tl.sum(e, 1)) - LIFT)
        tl.store(by_row + block.to(tl.int64) * n + rows, of_rows, mask=rows < n)
        if COLUMNS:
            top = tl.where(rows < n, top, NOTHING)
            highest = tl.maximum(reference, tl.max(top, 0))
            factors = tl.where(rows < n, tl.exp2(top - highest + LIFT), 0.0)
            groups = tl.reshape(e * factors[:, None], (BLOCK_M // (16 * WARPS), WARPS, 2, 8, BLOCK_N))
            sums = sums * tl.exp2(reference - highest) + tl.sum(tl.sum(groups, 2), 0)
            reference = highest
    if COLUMNS:
        total = tl.sum(tl.sum(sums, 0), 0)
        of_columns = reference + (tl.log2(total) - 2 * LIFT)
        tl.store(by_column + (start // chunk).to(tl.int64) * m + columns, of_columns, mask=columns < m)
        last = stop + tl.zeros_like(columns)
        if UPPER:
            last = tl.minimum(columns, stop)
        partners = columns + ahead - partner
        others = last - start - ((start <= partners) & (partners < last)).to(tl.int32)
        if tl.max(((total < LEAST) & (others > 0) & (columns < m)).to(tl.int32), 0) > 0:
            tl.store(lost, 1)


@triton.jit
def merge(parts, out, lost, count, n, IF_LOST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    """``out = log2(2 ** out + (2 ** parts).sum(0))`` of parts [count, n]."""
    if IF_LOST:
        if tl.load(lost) == 0:
            return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = columns < n
    top = tl.maximum(tl.load(out + columns, mask=there, other=0.0), NOTHING)
    total = tl.where(top > NOTHING, 1.0, 0.0)
    for p in range(0, count, BLOCK_P):
        rows = p + tl.arange(0, BLOCK_P)
        places = parts + rows.to(tl.int64)[:, None] * n + columns[None, :]
        x = tl.load(places, mask=(rows < count)[:, None] & there[None, :], other=float("-inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher[None, :]), 0)
        top = higher
    tl.store(out + columns, top + tl.log2(total), mask=there)


@triton.jit
def softmax_weights(
    a,  # [n, d]
    b,  # [m, d]
    weights,  # [n, m]
    scale,
    of_rows,  # [n]: log-sum-exps in bits, the positive pair included
    of_columns,  # [m]
    pulls,  # [n]: what a positive pair's weight is, but for the sign
    n,
    m,
    d,
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
    """``2 ** (X - of_rows[:, None]) + 2 ** (X - of_columns)``, minus its pull for a positive pair."""
    start, stop, block = own_tiles(n, m, chunk, BLOCK_N, GROUP)
    j = block * BLOCK_N
    if EDGE < 2:
        if on_diagonal(start, stop, j + ahead, partner, ONE_TOWER, BLOCK_N) != (EDGE == 1):
            return
    k = tl.load(scale) * LOG2E
    columns = j + tl.arange(0, BLOCK_N)
    if COLUMNS:  # beyond the last row or column, log-sum-exps are infinite and weights 0
        by_column = tl.load(of_columns + columns, mask=columns < m, other=float("inf")) - UNIT
        lowest = tl.min(by_column, 0)
        column_factors = tl.exp2(lowest - by_column)
        every_row = start + tl.arange(0, MOST)
        highest = tl.max(tl.load(of_rows + every_row, mask=every_row < stop, other=float("-inf")), 0) - UNIT
        together = highest - lowest < SPREAD
    for i in tl.range(start, stop, BLOCK_M, flatten=True):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for depth in range(0, d, BLOCK_K):
            acc = tl.dot(a.load([i, depth]), b.load([j, depth]).T, acc, input_precision=PRECISION)
        rows = i + tl.arange(0, BLOCK_M)
        by_row = tl.load(of_rows + rows, mask=rows < n, other=float("inf")) - UNIT
        if not COLUMNS:
            w = tl.exp2(acc * k - by_row[:, None])
        elif together:
            row_factors = tl.where(rows < n, tl.exp2(by_row - lowest), 0.0)
            w = tl.exp2(acc * k - by_row[:, None]) * (1.0 + row_factors[:, None] * column_factors[None, :])
        else:
            again = tl.load(of_columns + columns, mask=columns < m, other=float("inf")) - UNIT
            w = tl.exp2(acc * k - by_row[:, None]) + tl.exp2(acc * k - again[None, :])
        if EDGE:
            delta = (columns + ahead)[None, :] - rows[:, None]
            pull = tl.load(pulls + rows, mask=rows < n, other=0.0) * 2.0**UNIT
            w = tl.where((delta == partner) | (delta == -partner), -pull[:, None], w)
            if ONE_TOWER:
                w = tl.where(delta == 0, 0.0, w)
        weights.store([i, j], w.to(weights.dtype))
