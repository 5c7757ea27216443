"""Take the logits of partners out of the tiles of a similarity matrix: their exponentials are no part of the sums.

A partner's logit cancels against the log-sum-exp that contains it, and its weight 1 − p against the sum of the others'
weights. Where a batch is solved at a low temperature, float32 holds no digit of either difference. Without the partners,
every term of the loss and of its gradient keeps its relative error: see :mod:`contrastive_zoo.engine.softmax_arithmetic`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partners:
    """The columns stride · i + offset of the local block are the partners of row i, for each offset.

    Examples:
        >>> partners, s = Partners((0,)), torch.ones(2, 2)
        >>> logits = partners.empty(s, 2, 2)
        >>> partners.take(s, slice(0, 2), slice(0, 2), logits, mirrored=False)
        >>> s, logits
        (tensor([[-inf, 1.],
                [1., -inf]]), [tensor([1., 1.])])
    """

    offsets: Sequence[int] = ()
    stride: int = 1

    def empty(self, like: Tensor, rows: int, columns: int) -> list[Tensor]:
        """Return memory for the logits of the partners of so many rows among so many columns, by offset."""
        counts = (
            max(0, min(rows, columns - offset)) for offset in self.offsets
        )  # of n · stride columns all rows have one
        return [like.new_zeros(count) for count in counts]

    def take(self, tile: Tensor, i: slice, j: slice, logits: Sequence[Tensor], *, mirrored: bool) -> None:
        """Move the logits of partners from a tile of the local block to ``logits``; −inf takes their place.

        The tile is that of rows i and columns j. ``mirrored`` says whether rows are also partners of columns, as in a tile
        on the diagonal of one tower.
        """
        for index, rows, entries in self._entries(tile, i, j, mirrored):
            logits[index][rows] = entries
            entries.fill_(-torch.inf)

    def put(self, tile: Tensor, i: slice, j: slice, values: Sequence[Tensor], *, mirrored: bool) -> None:
        """Overwrite the entries of partners with ``values``; arguments are those of :meth:`take`."""
        for index, rows, entries in self._entries(tile, i, j, mirrored):
            entries.copy_(values[index][rows])

    def _entries(self, tile: Tensor, i: slice, j: slice, mirrored: bool) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield the index of each offset with partners in the tile, their rows, and a view of their entries."""
        for index, offset in enumerate(self.offsets):
            first, last = (-((offset - start) // self.stride) for start in (j.start, j.stop))
            rows = slice(max(i.start, first), min(i.stop, last))
            if rows.start < rows.stop:
                row, column = rows.start - i.start, offset + self.stride * rows.start - j.start
                yield index, rows, self._diagonal(tile, rows, row, column)
                if mirrored:
                    yield index, rows, self._diagonal(tile, rows, column, row)

    def _diagonal(self, tile: Tensor, rows: slice, row: int, column: int) -> Tensor:
        """Return a view of as many entries as rows, from a place on."""
        down, right = tile.stride()
        start = tile.storage_offset() + row * down + column * right
        return tile.as_strided((rows.stop - rows.start,), (down + self.stride * right,), start)
