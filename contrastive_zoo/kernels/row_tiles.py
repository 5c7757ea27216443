"""The Triton kernel that ends every backward pass: sums of float32 become gradients of the dtype asked for."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def scaled_rows(
    x,  # [n, d], float32
    rows,  # [n, d]: what the gradient is of
    out,  # [n, d]
    dots,  # [n]
    scale,
    factor,
    n,
    d,
    stride,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``out = scale * factor * x`` and ``dots = factor * (x * rows).sum(1)``, reading each number once."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    by = tl.load(factor)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, d, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)
        there = (i < n)[:, None] & (columns < d)[None, :]
        found = tl.load(x + i[:, None] * d + columns[None, :], mask=there, other=0.0) * by
        row = tl.load(rows + i[:, None] * stride + columns[None, :], mask=there, other=0.0).to(tl.float32)
        total += tl.sum(found * row, 1)
        tl.store(out + i[:, None] * d + columns[None, :], found * tl.load(scale), mask=there)
    tl.store(dots + i, total, mask=i < n)
