"""Share Triton code between kernels: the tiles of a program, and the tiles with pairs that need a mask."""

# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
"""log₂ e: nats to bits."""


@triton.jit
def own_tiles(n, m, chunk, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return first row, end row and column block of this program: ``chunk`` rows of one block of columns.

    ``GROUP`` column blocks run at the same time, so that they share rows in the L2 cache, which also holds their columns.
    """
    chunks, column_blocks = tl.cdiv(n, chunk), tl.cdiv(m, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * chunks) * GROUP
    width = min(column_blocks - first, GROUP)
    within = program % (GROUP * chunks)
    start = within // width * chunk
    return start, min(start + chunk, n), first + within % width


@triton.jit
def on_diagonal(start, stop, j, partner, ONE_TOWER: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return whether rows start … stop − 1 and columns j … j + BLOCK_N − 1 have a pair with |j − i| = partner, or i = j."""
    result = _crosses(start, stop, j, partner, BLOCK_N) | _crosses(start, stop, j, -partner, BLOCK_N)
    if ONE_TOWER:
        result |= _crosses(start, stop, j, 0, BLOCK_N)
    return result


@triton.jit
def _crosses(start, stop, j, partner, BLOCK_N: tl.constexpr):
    return (start + partner < j + BLOCK_N) & (j < stop + partner)


@triton.jit
def store_halves(out, w, i, j, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile in two halves through shared memory for one half, which leaves room for a fourth pipeline stage.

    This saves a tenth of the time of the weights of 65,536² pairs on an H100.
    """
    halves = tl.permute(tl.reshape(w.to(out.dtype), (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    out.store([i, j], left)
    out.store([i, j + BLOCK_N // 2], right)
