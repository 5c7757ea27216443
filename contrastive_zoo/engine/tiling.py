"""Pieces of a similarity matrix: tiles that fit a cache, panels of whole rows."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

PANEL_BYTES = 32 * 2**20
"""How large one panel of similarities may be."""

TILE_BYTES = 4 * 2**20
"""How large a tile of similarities may be, to stay in a processor's cache; a GPU's are 32 times as large."""


def tiles(rows: int, columns: int, like: Tensor, *, upper: bool = False) -> Iterator[tuple[slice, slice]]:
    """Pieces of a matrix that fit a cache, strip by strip; with ``upper`` those on and above the diagonal alone.

    Tiles on the diagonal are then square.

    Example:
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
    """Height and width of a tile: powers of two, two or four times as wide as high."""
    room = tile_bytes(like) // like.dtype.itemsize
    height = 2 ** max(0, int(math.log2(max(1, room // 2)) / 2))
    return height, max(1, room // height)


def tile_bytes(like: Tensor) -> int:
    """How large a tile may be on this device.

    Example:
        >>> tile_bytes(torch.empty(0)) == TILE_BYTES
        True
    """
    return TILE_BYTES if like.device.type == "cpu" else 32 * TILE_BYTES


def panels(rows: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of rows, each so low that its similarities to all columns fit into :data:`PANEL_BYTES`.

    Example:
        >>> list(panels(3, PANEL_BYTES, torch.float32))
        [slice(0, 1, None), slice(1, 2, None), slice(2, 3, None)]
    """
    height = max(1, PANEL_BYTES // max(1, columns * dtype.itemsize))
    for start in range(0, rows, height):
        yield slice(start, min(rows, start + height))
