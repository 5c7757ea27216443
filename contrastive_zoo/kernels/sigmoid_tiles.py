"""The Triton kernel of the sigmoid loss: losses and weights of a block of pairs, in one sweep.

With x = scale · a_i·b_j + bias, y = 1 for the pair i = j and −1 for others: loss softplus(−y x), weight −y σ(−y x).
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from contrastive_zoo.kernels.walk import LOG2E, on_diagonal, own_tiles

@triton.jit
def log1p(e):
    """Of 0 ≤ e ≤ 1: e times a polynomial, fitted to the least relative error, 3e-8; small e keep their digits."""
    p = 0.07822417467832565 + e * (-0.029504146426916122 + e * 0.0052324216812849045)
    p = 0.19105935096740723 + e * (-0.13663095235824585 + e * p)
    p = 0.3331909477710724 + e * (-0.24842964112758636 + e * p)
    return e * (0.9999999403953552 + e * (-0.4999949336051941 + e * p))


@triton.jit
def sigmoid_pairs(
    a,  # [n, d]
    b,  # [m, d]
    weights,  # [n, m], if GRADIENT
    scale,
    bias,
    sums,  # [2, programs]: losses; weights
    n,
    m,
    d,
    ahead,
    chunk,
    EDGE: tl.constexpr,  # 0: programs that need no mask, 1: the others, 2: all
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
    ragged = (j + BLOCK_N > m) | (stop - (stop - start) % BLOCK_M + BLOCK_M > n) & ((stop - start) % BLOCK_M > 0)
    if EDGE < 2:
        if (on_diagonal(start, stop, j + ahead, 0, False, BLOCK_N) | ragged) != (EDGE == 1):
            return
    k, shift = tl.load(scale) * LOG2E, tl.load(bias) * LOG2E
    columns = j + tl.arange(0, BLOCK_N)
    loss = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.range(start, stop, BLOCK_M, flatten=True):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for depth in range(0, d, BLOCK_K):
            acc = tl.dot(a.load([i, depth]), b.load([j, depth]).T, acc, input_precision=PRECISION)
        rows = i + tl.arange(0, BLOCK_M)
        x = acc * k + shift
        if EDGE:
            pair = (columns + ahead)[None, :] == rows[:, None]
            there = (rows < n)[:, None] & (columns < m)[None, :]
            x = tl.where(there, tl.where(pair, -x, x), float("-inf"))
        e = tl.exp2(-tl.abs(x))
        loss += tl.sum(tl.maximum(x, 0.0) * (1.0 / LOG2E) + log1p(e), 1)
        if GRADIENT:
            w = tl.where(x > 0, 1.0, e) / (1.0 + e)
            if EDGE:
                w = tl.where(pair, -w, w)
            total += tl.sum(w, 1)
            weights.store([i, j], (w * 2.0**UNIT).to(weights.dtype))
    programs = tl.num_programs(0)
    tl.store(sums + tl.program_id(0), tl.sum(loss, 0))
    if GRADIENT:
        tl.store(sums + programs + tl.program_id(0), tl.sum(total, 0))
