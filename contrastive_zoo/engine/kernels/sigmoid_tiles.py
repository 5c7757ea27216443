"""Compute losses and weights of a block of pairs in one sweep: the Triton kernel of the sigmoid loss.

With x = scale · a_i·b_j + bias, y = 1 for the pair i = j and −1 for others: loss softplus(−y x), weight −y σ(−y x).
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from contrastive_zoo.engine.kernels.blocks import LOG2E, on_diagonal, own_tiles, store_halves

SIGN: tl.constexpr = tl.constexpr(-(2**31))  # the sign bit of a float32


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
    scale,
    bias,
    sums,  # [2, programs]: losses; weights
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
    for i in tl.range(start, stop, BLOCK_M, flatten=True):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for depth in range(0, d, BLOCK_K):
            acc = tl.dot(a.load([i, depth]), b.load([j, depth]).T, acc, input_precision=PRECISION)
        rows = i + tl.arange(0, BLOCK_M)
        x = acc * k + shift
        if EDGE:
            pair = (columns + ahead)[None, :] == rows[:, None]
            inside = (rows < n)[:, None] & (columns < m)[None, :]
            x = tl.where(inside, tl.where(pair, -x, x), float("-inf"))
        positive_part += tl.sum(tl.maximum(x, 0.0), 1)
        # exp(−|x|) with the sign of x in its sign bit: x itself would not fit into registers, too
        bits = tl.exp2(-tl.abs(x)).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & SIGN)
        e = bits.to(tl.float32, bitcast=True)
        loss += tl.sum(log1p(tl.abs(e)), 1)
        if GRADIENT:
            negative = e.to(tl.int32, bitcast=True) < 0  # true for −0, unlike e < 0
            q = tl.rsqrt(
                1.0 + tl.abs(e)
            )  # rsqrt squared, since a division takes four operations, mostly for values beyond 2¹²⁶
            w = tl.where(negative, -e, 1.0) * q * q
            if EDGE:
                w = tl.where(pair, -w, w)
            total += tl.sum(w, 1)
            store_halves(weights, w * 2.0**UNIT, i, j, BLOCK_M, BLOCK_N)
    programs = tl.num_programs(0)
    tl.store(sums + tl.program_id(0), tl.sum(loss + positive_part * (1.0 / LOG2E), 0))
    if GRADIENT:
        tl.store(sums + programs + tl.program_id(0), tl.sum(total, 0))
