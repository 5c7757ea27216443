"""Cut a similarity matrix into tiles that fit a cache, or into blocks of whole rows."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_BYTES = 32 * 2**20
"""Largest size of one block of similarities."""

TILE_BYTES = 4 * 2**20
"""Largest size of a tile of similarities, so that it stays in a CPU's cache; a GPU's tiles are 32 times as large."""


def tiles(rows: int, columns: int, like: Tensor, *, upper: bool = False) -> Iterator[tuple[slice, slice]]:
    """Yield the tiles of a matrix strip by strip; with ``upper`` only those on and above the diagonal.

    Tiles on the diagonal are then square.

    Examples:
        >>> list(tiles(2, 3, torch.empty(0)))
        [(slice(0, 2, None), slice(0, 3, None))]
    """
    height, width = tile_shape(like)
    for top in range(0, rows, height):
        strip, left = slice(top, min(rows, top + height)), 0
        if upper:
            yield strip, strip
            left = strip.stop
        for start in range(left, columns, width):
            yield strip, slice(start, min(columns, start + width))


def tile_shape(like: Tensor) -> tuple[int, int]:
    """Return height and width of a tile: powers of two, the width two or four times the height.

    Examples:
        >>> tile_shape(torch.empty(0, dtype=torch.float64)), tile_shape(torch.empty(0))
        ((512, 1024), (512, 2048))
    """
    elements = tile_bytes(like) // like.dtype.itemsize
    height = 2 ** max(0, int(math.log2(max(1, elements // 2)) / 2))
    return height, max(1, elements // height)


def tile_bytes(like: Tensor) -> int:
    """Return the largest size of a tile on this device.

    Examples:
        >>> tile_bytes(torch.empty(0)) == TILE_BYTES
        True
    """
    return TILE_BYTES if like.device.type == "cpu" else 32 * TILE_BYTES


def row_blocks(rows: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """Yield slices of rows whose similarities to all columns fit into :data:`BLOCK_BYTES`.

    Examples:
        >>> list(row_blocks(3, BLOCK_BYTES, torch.float32))
        [slice(0, 1, None), slice(1, 2, None), slice(2, 3, None)]
    """
    height = max(1, BLOCK_BYTES // max(1, columns * dtype.itemsize))
    for start in range(0, rows, height):
        yield slice(start, min(rows, start + height))


class ScratchBuffer:
    """Hold memory for one tile at a time, with its views cached by shape.

    Examples:
        >>> ScratchBuffer(torch.empty(6)).tile(slice(0, 2), slice(3, 6)).shape
        torch.Size([2, 3])
    """

    def __init__(self, elements: Tensor) -> None:
        self.elements = elements
        self.views: dict[tuple[int, int], Tensor] = {}

    def tile(self, i: slice, j: slice) -> Tensor:
        """Return a view of the buffer in the shape of rows i and columns j."""
        shape = i.stop - i.start, j.stop - j.start
        if shape not in self.views:
            self.views[shape] = self.elements[: math.prod(shape)].view(shape)
        return self.views[shape]
