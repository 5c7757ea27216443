"""Compute losses and weights of a block of pairs in one sweep: the Triton kernel of the sigmoid loss.

With x = scale · a_i·b_j + bias: loss softplus(x), weight σ(x). Positive pairs are left out.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from contrastive_zoo.engine.kernels.blocks import LOG2E, on_diagonal, own_tiles, store_halves, sum_in_threads


@triton.jit
def log1p(e):
    """Return log(1 + e) for 0 ≤ e ≤ 1: e times a polynomial with minimax relative error 2e-7, precise for small e, too."""
    p = -0.10767960548400879 + e * (0.044088102877140045 + e * -0.008538773283362389)
    p = 0.3327547013759613 + e * (-0.24495412409305573 + e * (0.1774509698152542 + e * p))
    return e * (0.9999998211860657 + e * (-0.4999740421772003 + e * p))


@triton.jit
def sigmoid_pairs(
    a,  # [n, d]
    b,  # [m, d]
    weights,  # [n, m]; not written without GRADIENT
    row_norms,  # [n]: factors of products, as for ``softmax_tiles``
    column_norms,  # [m]
    scale,
    bias,
    sums,  # [3, programs]: losses; weights; weights times products, before weights are rounded
    n,
    m,
    d,
    ahead,
    chunk,
    EDGE: tl.constexpr,  # 0: programs without masks, 1: the other programs, 2: all
    GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,  # weights are stored in units of 2^−UNIT
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
):
    start, stop, block = own_tiles(n, m, chunk, BLOCK_N, GROUP)
    j = block * BLOCK_N
    if EDGE < 2:
        ragged = (j + BLOCK_N > m) | (start + chunk > n)
        if (on_diagonal(start, stop, j + ahead, 0, False, BLOCK_N) | ragged) != (EDGE == 1):
            return
    k, shift = tl.load(scale) * LOG2E, tl.load(bias) * LOG2E
    columns = j + tl.arange(0, BLOCK_N)
    loss = tl.zeros((BLOCK_M,), tl.float32)
    positive_part = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    products = tl.zeros((WARPS, 8, 4), tl.float32)
    norms = tl.load(column_norms + columns, mask=columns < m, other=0.0)
    for i in tl.range(start, stop, BLOCK_M, flatten=True):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for depth in range(0, d, BLOCK_K):
            acc = tl.dot(a.load([i, depth]), b.load([j, depth]).T, acc, input_precision=PRECISION)
        rows = i + tl.arange(0, BLOCK_M)
        norms_of_rows = tl.load(row_norms + rows, mask=rows < n, other=0.0)
        acc *= norms[None, :]
        x = acc * (k * norms_of_rows)[:, None] + shift
        if EDGE:
            pair = (columns + ahead)[None, :] == rows[:, None]
            x = tl.where((rows < n)[:, None] & (columns < m)[None, :] & ~pair, x, float("-inf"))
        positive_part += tl.sum(tl.maximum(x, 0.0), 1)
        e = tl.exp2(-tl.abs(x))
        loss += tl.sum(log1p(e), 1)
        if GRADIENT:
            # rsqrt squared, since a division takes four operations, mostly for values beyond 2¹²⁶
            q = tl.rsqrt(1.0 + e)
            w = tl.where(x < 0, e, 1.0) * q * q
            total += tl.sum(w, 1)
            w *= norms_of_rows[:, None]
            products += sum_in_threads(w * acc, BLOCK_M, BLOCK_N, WARPS)
            store_halves(weights, w * (2.0**UNIT * norms)[None, :], i, j, BLOCK_M, BLOCK_N)
    programs = tl.num_programs(0)
    tl.store(sums + tl.program_id(0), tl.sum(loss + positive_part * (1.0 / LOG2E), 0))
    if GRADIENT:
        tl.store(sums + programs + tl.program_id(0), tl.sum(total, 0))
        tl.store(sums + 2 * programs + tl.program_id(0), tl.sum(tl.sum(tl.sum(products, 2), 1), 0))
