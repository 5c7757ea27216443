"""Convert float32 sums to gradients in the dtype of the embeddings: the Triton kernel that ends every backward pass."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def scaled_rows(
    x,  # [n, d], float32
    rows,  # [n, d]: the embeddings whose gradient is computed
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
    """Write ``out = scale * factor * x`` and ``dots = factor * (x * rows).sum(1)``, reading each element once."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    multiplier = tl.load(factor)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, d, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)
        inside = (i < n)[:, None] & (columns < d)[None, :]
        values = tl.load(x + i[:, None] * d + columns[None, :], mask=inside, other=0.0) * multiplier
        row = tl.load(rows + i[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(values * row, 1)
        tl.store(out + i[:, None] * d + columns[None, :], values * tl.load(scale), mask=inside)
    tl.store(dots + i, total, mask=i < n)
