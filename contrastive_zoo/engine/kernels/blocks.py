"""Cut a matrix of pairs for a GPU, and prepare what every loss needs per block: operands, launches, matmuls."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastive_zoo.ranks.devices import float32_matmuls

# mypy: ignore-errors


LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)  # log₂ e: nats to bits


@triton.jit
def own_tiles(n, m, chunk, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return first row, end row and column block of a program; ``GROUP`` column blocks share rows in the L2 cache."""
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
def sum_in_threads(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Return the sum of a tile as one number of each thread, [WARPS, 8, 4]: no thread waits for another."""
    parts = tl.reshape(x, (BLOCK_M // (16 * WARPS), WARPS, 2, 8, BLOCK_N // 8, 4, 2))
    return tl.sum(tl.sum(tl.sum(tl.sum(parts, 6), 4), 2), 0)


@triton.jit
def store_halves(out, w, i, j, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile in two halves: room for a fourth pipeline stage saves a tenth of the time of 65,536² pairs on an H100."""
    halves = tl.permute(tl.reshape(w.to(out.dtype), (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    out.store([i, j], left)
    out.store([i, j + BLOCK_N // 2], right)


@triton.jit
def _copied_tile(source, out):
    out.store([0, 0], source.load([0, 0]))


def launch_smallest(device: torch.device) -> None:
    """Copy a tile by descriptors, and multiply 16 bits into float32, which torch 2.8 is the first to do on a GPU."""
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    _copied_tile[(1,)](tiled(x, 16, 16), tiled(torch.empty_like(x), 16, 16), num_warps=4)
    if x.is_cuda:
        torch.mm(x, x, out_dtype=torch.float32)


def cdiv(n: int, m: int) -> int:
    """Return n / m, rounded up; on the host triton.cdiv takes 30 times as long."""
    return -(-n // m)


# Largest size of a block of weights. A smaller block needs more passes over the float32 gradients: a block of 16,384² in
# bfloat16 adds 2 · 16,384 · d elements per 2 · 16,384² · d multiplications.
WEIGHT_BYTES = 512 * 2**20
# Largest size of the partial sums of a block's rows: 65,536 rows of 512 blocks of columns, 8 bytes each.
PARTIAL_BYTES = 256 * 2**20
# Largest number of tiles per program. A program ends with sums over its columns, which cross threads; over 16 tiles
# this cost is small, and 65,536² pairs still make 8,192 programs to balance.
MAX_TILES = 16
# Fewest programs per launch, if there are enough tiles: eight rounds on an H100, so that the last round costs little.
MIN_PROGRAMS = 8 * 132
# Up to so many pairs run in one launch with masks: a second launch would cost more than the masks.
SINGLE_LAUNCH_PAIRS = 3000**2
# An offset of columns from rows that no pair has: no pair of a block of another rank's columns is positive.
NO_PARTNER = 2**30


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time: rows × columns pairs, ``depth`` elements of each row per step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @cached_property
    def options(self) -> dict[str, Any]:
        blocks = {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth, "GROUP": 16}
        warps = {"WARPS": min(self.warps, self.rows // 16), "num_warps": self.warps}
        return {**blocks, **warps, "num_stages": self.stages}


# Rows of a tile of 16-bit embeddings without masks on compute capability 9.0: the most with which no kernel spills
# registers. Weights need some for their products, so they have fewer rows. Some versions of Triton allow fewer still.
MOST_ROWS = {"log_sum_exps": 256}
MOST_ROWS_OF_VERSION = {"3.4": {"log_sum_exps": 128}, "3.5": {"log_sum_exps": 128}, "3.9": {"softmax_weights": 64}}
ROWS = 128  # of other kernels


@cache
def tiles(dtype: torch.dtype, precision: str, capability: int, kernel: str = "") -> tuple[Tile, Tile]:
    """Return the tiles without and with masks, as large as registers allow without spills, which tests count."""
    if dtype == torch.float32 and precision == "ieee":
        return Tile(64, 64, 16, 8, 2), Tile(64, 64, 16, 8, 2)
    depth = 128 // dtype.itemsize
    if capability < 90:  # correct but not measured: these devices read tiles without asynchronous copies
        return Tile(64, 64, depth, 8, 3), Tile(64, 64, depth, 8, 3)
    version = ".".join(triton.__version__.split(".")[:2])
    most = (MOST_ROWS | MOST_ROWS_OF_VERSION.get(version, {})).get(kernel, ROWS)
    return Tile(most if dtype.itemsize == 2 else 128, 128, depth, 8, 4), Tile(64, 128, depth, 8, 3)


@dataclass(frozen=True)
class Operand:
    """Rows in the layout that copies of tiles need: last stride 1, other strides a multiple of 16 bytes."""

    rows: Tensor
    factors: Tensor  # [n], float32: products are those of rows, times the factors of both rows
    precision: str  # of products

    @classmethod
    def of(cls, x: Tensor, *, min_norm: float | None = None) -> "Operand":
        """Return a view of x if its strides allow it, or a copy; with ``min_norm`` products are those of unit rows.

        Unit rows of 16 bits would be rounded. Rows are multiplied by powers of two instead, so that their norms are in
        [1, 2), and factors in (½, 1]: weights that are multiplied by these fit into float16. Rows become float16, too:
        weights have their dtype, and a rounding to bfloat16 nearly doubled the error of a solved batch's gradients.

        With TF32, tensor cores truncate a float32, so x is rounded first: SigLIP's error would be 700 times as large.
        """
        precision = precision_of(x)
        if x.dtype == torch.float32 and precision == "tf32":
            x = ((x.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)
        step, factors = 16 // x.element_size(), x.new_ones(len(x), dtype=torch.float32)
        dtype = x.dtype if min_norm is None else torch.float16
        padded = x.new_empty(len(x), cdiv(x.shape[1], step) * step, dtype=dtype)[:, : x.shape[1]]
        if min_norm is not None:
            norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).clamp_(min=min_norm)
            mantissa, exponent = torch.frexp(norms)  # in [½, 1)
            powers = torch.ldexp(factors, 1 - exponent)
            return cls(padded.copy_(x.float() * powers[:, None]), 0.5 / mantissa, precision)
        if x.stride(1) == 1 and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0:
            return cls(x, factors, precision)
        return cls(padded.copy_(x), factors, precision)

    def __getitem__(self, part: slice) -> "Operand":
        return Operand(self.rows[part], self.factors[part], self.precision)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    def tiles(self, part: slice, height: int, width: int) -> TensorDescriptor:
        return tiled(self.rows[part], height, width)


def tiled(x: Tensor, height: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [height, width])


def blocks(n: int, m: int, side: int, *, upper: bool = False) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks of an n × m matrix row by row; with ``upper`` only those on and above the diagonal."""
    for i in range(0, n, side):
        for j in range(i if upper else 0, m, side):
            yield slice(i, min(n, i + side)), slice(j, min(m, j + side))


def rows_per_program(n: int, m: int, tile: Tile) -> int:
    count = cdiv(n, tile.rows) * cdiv(m, tile.columns)
    return tile.rows * max(1, min(MAX_TILES, count // MIN_PROGRAMS))


def launches(n: int, m: int, plain: Tile, edges: Tile) -> list[tuple[int, Tile]]:
    """Return ``EDGE`` and tile of a block's launches: one without masks and one with, or a single one for a small block."""
    return [(2, edges)] if n * m <= SINGLE_LAUNCH_PAIRS or plain == edges else [(0, plain), (1, edges)]


@dataclass(frozen=True)
class Weights:
    """A buffer for a block of weights, in units of 2^−bits."""

    buffer: Tensor
    side: int
    bits: int

    @classmethod
    def of(cls, a: Operand, b: Operand) -> "Weights":
        """Return a buffer in the rows' dtype; float16, imprecise below 2⁻¹⁴, stores weights, at most 2, in units of 2⁻¹⁴."""
        rows, step = a.rows, 16 // a.rows.element_size()
        side = 2 ** int(math.log2(WEIGHT_BYTES // rows.element_size()) / 2)
        buffer = rows.new_empty(min(side, len(a)), cdiv(min(side, len(b)), step) * step)
        return cls(buffer, side, 14 if rows.dtype == torch.float16 else 0)

    @property
    def unit(self) -> float:
        return 2.0**-self.bits

    def block(self, i: slice, j: slice) -> Tensor:
        return self.buffer[: i.stop - i.start, : j.stop - j.start]


def add_product(out: Tensor, x: Tensor, y: Tensor, *, alpha: float = 1.0) -> None:
    """Compute ``out += alpha * x @ y`` with float32 accumulation."""
    if out.dtype == x.dtype or not out.is_cuda:
        out.addmm_(x.to(out.dtype), y.to(out.dtype), alpha=alpha)
    else:
        torch.addmm(out, x, y, out_dtype=out.dtype, alpha=alpha, out=out)


def as_scalar(x: float | Tensor, like: Tensor) -> Tensor:
    """Return a number as a float32 tensor on the device of ``like``, without synchronisation."""
    if isinstance(x, Tensor):
        return x.reshape(()).to(like.device, torch.float32)
    return torch.full((), x, dtype=torch.float32, device=like.device)


def precision_of(x: Tensor) -> str:
    return "tf32" if x.dtype != torch.float32 else float32_matmuls()


def tiles_for(x: Tensor, kernel: str = "") -> tuple[Tile, Tile]:
    return tiles(x.dtype, precision_of(x), _capability(x.get_device()), kernel)


@cache
def _capability(device: int) -> int:
    """Return 90 for compute capability 9.0; 80 without a GPU, and for 12.x, whose shared memory is too small."""
    major, minor = torch.cuda.get_device_capability(device) if device >= 0 else (8, 0)
    return 80 if major >= 12 else 10 * major + minor
