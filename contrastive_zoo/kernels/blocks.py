"""How a matrix of pairs is cut for a GPU, and what every loss does to a block: operands, launches, sums of products."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import cdiv
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastive_zoo.kernels.row_tiles import scaled_rows

WEIGHT_BYTES = 512 * 2**20
"""How large a block of weights may be. A smaller one costs more passes over the float32 gradients: a block of 16,384² in
bfloat16 adds 2 · 16,384 · d numbers for every 2 · 16,384² · d multiplications."""

PARTIAL_BYTES = 256 * 2**20
"""How large the partial sums of a block's rows may be: 65,536 rows of 512 blocks of columns, 8 bytes each."""

MOST_TILES = 16
"""Tiles that one program walks at most. Each ends with sums over its columns, which cross threads; a sixteenth of that a
tile is little, and 16 tiles still leave 8,192 programs of 65,536² pairs to balance."""

PROGRAMS = 8 * 132
"""Programs that a launch has at least, where tiles suffice: eight rounds on an H100, so that the last one costs little."""

FEW_PAIRS = 3000**2
"""So few pairs take one launch with masks: a second launch would cost more than masks do."""

LARGEST_WIDTH = 4096
"""Columns that embeddings may have."""


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of embeddings."""


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
        return Tile(64, 64, 16, 8, 2), Tile(64, 64, 16, 8, 2)
    depth = 128 // dtype.itemsize
    if capability < 90:  # correct there, but measured on nothing: tiles are read without copies ahead
        return Tile(64, 64, depth, 8, 3), Tile(64, 64, depth, 8, 3)
    edges = Tile(64, 128, depth, 8, 3)
    return Tile(256 if dtype.itemsize == 2 else 128, 128, depth, 8, 4), edges


@dataclass(frozen=True)
class Operand:
    """Rows as kernels read them: last stride 1, others a multiple of 16 bytes, which copies of tiles ask for."""

    rows: Tensor

    @classmethod
    def of(cls, x: Tensor, precision: str) -> "Operand":
        """A view of x where its strides allow it, or a copy.

        Matrix units cut the lower 13 bits of a float32 off where the precision is TF32, which makes every product
        smaller; x is rounded to what they read instead (without: 700 times the error of SigLIP's loss).
        """
        if x.dtype == torch.float32 and precision == "tf32":
            x = ((x.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)
        step = 16 // x.element_size()
        if x.stride(1) == 1 and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0:
            return cls(x)
        room = x.new_empty(len(x), cdiv(x.shape[1], step) * step)
        return cls(room[:, : x.shape[1]].copy_(x))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.rows.shape[1]

    def tiles(self, part: slice, height: int, width: int) -> TensorDescriptor:
        """Some rows, to be read in tiles of this size."""
        rows = self.rows[part]
        return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [height, width])


def blocks(n: int, m: int, side: int, *, upper: bool = False) -> Iterator[tuple[slice, slice]]:
    """Blocks of an n × m matrix, row by row; with ``upper`` those on and above the diagonal alone."""
    for i in range(0, n, side):
        for j in range(i if upper else 0, m, side):
            yield slice(i, min(n, i + side)), slice(j, min(m, j + side))


def chunk(n: int, m: int, tile: Tile) -> int:
    """How many rows a program takes."""
    found = cdiv(n, tile.rows) * cdiv(m, tile.columns)
    return tile.rows * max(1, min(MOST_TILES, found // PROGRAMS))


def launches(n: int, m: int, plain: Tile, edges: Tile) -> list[tuple[int, Tile]]:
    """``EDGE`` and tile of the launches that a block takes: one without masks and one with; of few pairs one for all."""
    return [(2, edges)] if n * m <= FEW_PAIRS or plain == edges else [(0, plain), (1, edges)]


@dataclass(frozen=True)
class Weights:
    """Memory for a block of weights, in units of 2^−bits."""

    room: Tensor
    side: int
    bits: int

    @classmethod
    def of(cls, a: Operand, b: Operand) -> "Weights":
        """As large as the budget allows and the pairs need, in the dtype of the rows.

        A weight is 2 at most, and about 1/n where all pairs are alike: float16, whose digits dwindle below 2⁻¹⁴, holds
        it in units of 2⁻¹⁴, at most 32,768 of them.
        """
        rows, step = a.rows, 16 // a.rows.element_size()
        side = 2 ** int(math.log2(WEIGHT_BYTES // rows.element_size()) / 2)
        room = rows.new_empty(min(side, len(a)), cdiv(min(side, len(b)), step) * step)
        return cls(room, side, 14 if rows.dtype == torch.float16 else 0)

    @property
    def unit(self) -> float:
        """What a stored weight of 1 is."""
        return 2.0**-self.bits

    def block(self, i: slice, j: slice) -> Tensor:
        """Of these rows and columns."""
        return self.room[: i.stop - i.start, : j.stop - j.start]


def add_product(out: Tensor, x: Tensor, y: Tensor, *, first: bool) -> None:
    """``out += x @ y`` with sums in float32; ``out = x @ y`` if it is the first."""
    beta = 0 if first else 1
    if out.dtype == x.dtype:
        out.addmm_(x, y, beta=beta)
    elif out.is_cuda:
        torch.addmm(out, x, y, out_dtype=out.dtype, beta=beta, out=out)
    else:
        out.addmm_(x.to(out.dtype), y.to(out.dtype), beta=beta)


def scaled(x: Tensor, of: Operand, scale: Tensor, factor: Tensor, out: Tensor, dots: Tensor, part: slice) -> None:
    """``out[part] = scale * factor * x`` and ``dots[part] = factor * (x * of[part]).sum(1)``."""
    n, width = x.shape
    scaled_rows[(cdiv(n, 4),)](
        x, of.rows[part], out[part], dots[part], scale, factor, n, width, of.rows.stride(0),
        BLOCK_M=4, BLOCK_D=1024, num_warps=4,
    )  # fmt: skip


def checked(name: str, a: Tensor, b: Tensor, *, same_length: bool = False) -> None:
    """Complain of rows that the kernels cannot compare.

    Raises:
        ValueError: says what came and what was expected.
    """
    got = f"got {_kind(a)} and {_kind(b)}"
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or not len(a) or not len(b):
        raise ValueError(f"{name}: a and b are [n, d] and [m, d] of at least one row, {got}.")
    if same_length and len(a) != len(b):
        raise ValueError(f"{name}: a and b have as many rows, {got}.")
    if a.dtype not in DTYPES or a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"{name}: a and b are both float32, bfloat16 or float16, on one device, {got}.")
    if not 1 <= a.shape[1] <= LARGEST_WIDTH:
        raise ValueError(f"{name}: rows have 1 to {LARGEST_WIDTH} numbers, {got}.")


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}"


def as_scalar(x: float | Tensor, like: Tensor) -> Tensor:
    """A number as a float32 tensor on the device, without waiting for it."""
    if isinstance(x, Tensor):
        return x.reshape(()).to(like.device, torch.float32)
    return torch.full((), x, dtype=torch.float32, device=like.device)


def precision_of(x: Tensor) -> str:
    """How float32 products round: as ``torch.get_float32_matmul_precision()`` says."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" and x.dtype == torch.float32 else "tf32"


def tiles_for(x: Tensor, precision: str) -> tuple[Tile, Tile]:
    """Tiles without and with masks on the device of x."""
    return tiles(x.dtype, precision, _capability(x.get_device()))


@cache
def _capability(device: int) -> int:
    """90 for 9.0; what is not on a GPU is the interpreter's, and as small as possible."""
    major, minor = torch.cuda.get_device_capability(device) if device >= 0 else (8, 0)
    return 10 * major + minor
