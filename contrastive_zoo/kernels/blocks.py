"""How a matrix of pairs is cut for a GPU, and what every loss does to a block of it: operands, launches, sums of products."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import cdiv
from triton.tools.tensor_descriptor import TensorDescriptor

WEIGHT_BYTES = 512 * 2**20
"""How large a block of weights may be. A smaller one costs more passes over the float32 gradients: a block of 16,384² in
bfloat16 adds 2 · 16,384 · d numbers for every 2 · 16,384² · d multiplications."""

PARTIAL_BYTES = 128 * 2**20
"""How large the partial log-sum-exps of a block may be: 65,536 rows of 512 blocks of columns."""

MOST_TILES = 16
"""Tiles that one program walks at most. Each ends with sums over its columns, which cross threads; a sixteenth of that a
tile is little, and 16 tiles still leave 8,192 programs of 65,536² pairs to balance."""

PROGRAMS = 8 * 132
"""Programs that a launch has at least, where tiles suffice: eight rounds on an H100, so that the last one costs little."""

LARGEST_WIDTH = 4096
"""Columns that embeddings may have."""


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time: rows × columns pairs, ``depth`` numbers of each row at a step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """As a launch takes them."""
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.columns,
            "BLOCK_K": self.depth,
            "GROUP": 16,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def tiles(dtype: torch.dtype, precision: str, capability: int) -> tuple[Tile, Tile]:
    """Tiles without and with masks, as large as registers allow without spills (a table of the tests)."""
    if dtype == torch.float32 and precision == "ieee":
        return Tile(64, 128, 16, 8, 2), Tile(64, 128, 16, 8, 2)
    depth = 64 if dtype != torch.float32 else 32
    small = Tile(128, 128, depth, 8, 3)
    return (Tile(256, 128, depth, 8, 3) if capability >= 90 else small), small


@dataclass(frozen=True)
class Operand:
    """Rows as kernels read them: last stride 1, others a multiple of 16 bytes, which copies of tiles ask for."""

    rows: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Operand":
        """A view of x where its strides allow it, or a copy."""
        step = 16 // x.element_size()
        if x.stride(1) == 1 and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0:
            return cls(x)
        room = x.new_empty(len(x), cdiv(x.shape[1], step) * step)
        return cls(room[:, : x.shape[1]].copy_(x))

    def tiles(self, part: slice, height: int, width: int) -> TensorDescriptor:
        """Some rows, to be read in tiles of this size."""
        rows = self.rows[part]
        return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [height, width])


def blocks(n: int, m: int, side: int, *, upper: bool = False) -> Iterator[tuple[slice, slice]]:
    """Blocks of an n × m matrix, row by row; with ``upper`` those on and above the diagonal alone."""
    for i in range(0, n, side):
        for j in range(i if upper else 0, m, side):
            yield slice(i, min(n, i + side)), slice(j, min(m, j + side))


def weight_side(dtype: torch.dtype) -> int:
    """Height and width of a block of weights."""
    return 2 ** int(math.log2(WEIGHT_BYTES // dtype.itemsize) / 2)


def chunk(n: int, m: int, tile: Tile) -> int:
    """How many rows a program takes."""
    found = cdiv(n, tile.rows) * cdiv(m, tile.columns)
    return tile.rows * max(1, min(MOST_TILES, found // PROGRAMS))


def add_product(out: Tensor, x: Tensor, y: Tensor, *, first: bool) -> None:
    """``out += x @ y`` with sums in float32; ``out = x @ y`` if it is the first."""
    beta = 0 if first else 1
    if out.dtype == x.dtype:
        out.addmm_(x, y, beta=beta)
    elif out.is_cuda:
        torch.addmm(out, x, y, out_dtype=out.dtype, beta=beta, out=out)
    else:
        out.addmm_(x.to(out.dtype), y.to(out.dtype), beta=beta)
