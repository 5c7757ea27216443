"""Sweep over the tiles of the similarity matrix that one rank computes: log-sum-exps forward, gradients backward."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import clear_excluded
from contrastive_zoo.engine.exchange import GatherExchange, Operand, RankBlock, Ring, Sweep, merge_at_owners
from contrastive_zoo.engine.softmax_arithmetic import LOG2E, ExactSums, shift_window
from contrastive_zoo.engine.tiling import CachedLogits, tile_of, tile_scratch, tiles
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.transport import gather_rows, reduced_everywhere


@dataclass(frozen=True)
class Partners:
    """The columns i + offset of the local block are the partners of row i, for each offset.

    Sweeps leave them out of the sums: a partner's logit would cancel against the log-sum-exp that contains it, and its
    weight 1 − p against the others' weights, of which float32 holds no digit where a batch is solved at a low temperature.
    """

    offsets: Sequence[int] = ()

    def products(self, rows: Tensor, columns: Tensor) -> list[Tensor]:
        """Return the products of rows and their partners, by offset."""
        return [torch.linalg.vecdot(x, y) for x, y in self._pairs(rows, columns)]

    def add_gradients(
        self, weights: Sequence[Tensor], rows: Tensor, columns: Tensor, drows: Tensor, dcolumns: Tensor | None
    ) -> None:
        """Add the gradients of the weighted sums of :meth:`products`, without rounding weights to 16 bits."""
        targets = self._pairs(drows, columns if dcolumns is None else dcolumns)
        for weight, (x, y), (dx, dy) in zip(weights, self._pairs(rows, columns), targets, strict=True):
            dx.addcmul_(y, weight[:, None])
            if dcolumns is not None:
                dy.addcmul_(x, weight[:, None])

    def _pairs(self, rows: Tensor, columns: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the rows that have a partner, and the partners, by offset."""
        partners = [columns[offset:][: len(rows)] for offset in self.offsets]
        return [(rows[: len(x)], x) for x in partners]

    def fill(self, tile: Tensor, value: float | bool, i: slice, j: slice, *, mirrored: bool) -> None:
        """Write a value over partners in the tile of rows i and columns j; ``mirrored``: on one tower's diagonal."""
        down, right = tile.stride()
        for offset in self.offsets:
            first, last = max(i.start, j.start - offset), min(i.stop, j.stop - offset)
            row, column = first - i.start, first + offset - j.start
            for below, after in ((row, column), (column, row))[: 1 + mirrored]:
                if first < last:
                    start = tile.storage_offset() + below * down + after * right
                    tile.as_strided((last - first,), (down + right,), start).fill_(value)


class Pass(NamedTuple):
    """What either pass over the tiles takes: the arithmetic of sums, the local rows, other columns and the scale."""

    arithmetic: Any
    rows: Tensor
    exchange: GatherExchange | Ring
    scale: float | Tensor


@dataclass(frozen=True, kw_only=True)
class SoftmaxSweep(Sweep):
    """Compute all tiles of this rank."""

    exact_sums: ClassVar[Any] = ExactSums()  # the arithmetic of logits without a bound

    partners: Partners  # the columns that are left out of a row's sum, and whose logits are returned
    columnwise: bool = True
    excluded: Tensor | None = None
    """With one tower [n], the row of all ranks that each row's sum also leaves out, and the reverse; or the row itself."""

    def largest_logit(self, rows: Tensor, columns: Tensor, scale: float | Tensor) -> float | None:
        """Return an upper bound of all ranks' logits; None, on every rank, where an accelerator would have to be read."""
        if isinstance(scale, Tensor):
            return None
        if self.unit_norm:
            # a bound too large for one shift would need the sums to be read
            return scale if devices.on_cpu(rows) or scale <= shift_window(rows.dtype)[0] else None
        if not devices.on_cpu(rows):
            return None
        norms = [torch.linalg.vector_norm(x, dim=1).max() if len(x) else x.new_zeros(()) for x in (rows, columns)]
        return scale * reduced_everywhere(torch.stack(norms), "max", self.world).prod().item()

    def lost_precision(self, r: Tensor, c: Tensor | None, largest: float, scale: float | Tensor) -> bool:
        """Return whether a sum of shifted exponentials is so small that its terms may have underflowed, on any rank."""
        window = shift_window(r.dtype)[0]
        if self.unit_norm and largest <= window and not isinstance(scale, Tensor):  # which ranks may round differently
            return False
        lowest = min(x.min().item() if len(x) else math.inf for x in (r, r if c is None else c))
        precise = r.new_tensor(lowest >= math.exp(-window), dtype=torch.float32)
        return not reduced_everywhere(precise, "min", self.world).item()

    def _excluded_columns(self, block: RankBlock) -> Tensor | None:
        """Return the excluded rows of a block's rows, as indices of its columns; outside of them where it has none."""
        if self.excluded is None:
            return None
        first = sum(self.column_shards.sizes[: block.ahead]) + block.columns.start
        return self.excluded[block.rows] - first

    def _tiles(self, arguments: Pass) -> Iterator[tuple[int, RankBlock, Tensor, Iterator[tuple[slice, slice, bool]]]]:
        """Yield each block, its columns, and its tiles: their rows and columns, and whether they are on the diagonal."""
        for index, (block, columns) in enumerate(zip(arguments.exchange.blocks, arguments.exchange, strict=True)):
            upper = self.one_tower and index == 0
            cut = tiles(block.rows.stop - block.rows.start, len(columns), arguments.rows, upper=upper)
            yield index, block, columns, ((i, j, upper and i == j) for i, j in cut)

    def _write_logits(
        self, out: Tensor, left: Operand, right: Operand, scale: float | Tensor, i: slice, j: slice,
        excluded: Tensor | None, *, local: bool, diagonal: bool,
    ) -> None:  # fmt: skip
        """Write logits of rows i and columns j, in bits, into ``out``; −inf where a sum leaves them out."""
        a, b, scale = left[i], right[j], scale * LOG2E
        if a.inverse is not None:  # long embeddings' products may overflow if they are scaled before
            torch.mm(a.rows, b.rows.T, out=out)
            Operand(a.rows, scale * a.inverse).normalize(out, b)
        elif isinstance(scale, Tensor):
            torch.mm(a.rows, b.rows.T, out=out).mul_(scale)
        else:
            torch.addmm(out, a.rows, b.rows.T, beta=0, alpha=scale, out=out)
        if excluded is not None:
            clear_excluded(out, excluded[i] - j.start, -torch.inf)
        if diagonal:
            out.fill_diagonal_(-torch.inf)
        if local:
            self.partners.fill(out, -torch.inf, i, j, mirrored=diagonal)

    def sums(self, arguments: Pass, cached: CachedLogits) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """Return sums of local rows and of local columns over all but partners, and tiles, None where they do not fit."""
        arithmetic, rows, exchange, scale = arguments
        scratch, total = tile_scratch(rows, max(self.column_shards.sizes)), arithmetic.empty(len(rows), rows)
        parts: list[Tensor] = []
        stored: list[Tensor | None] = []
        for index, block, columns, cut in self._tiles(arguments):
            left, right = self.operand(rows[block.rows]), self.operand(columns)
            row_total, excluded = total[block.rows], self._excluded_columns(block)
            column_total = total if self.one_tower and index == 0 else arithmetic.empty(len(columns), rows)
            for i, j, diagonal in cut:
                tile = tile_of(scratch, i, j)
                keep = cached.reserve(tile.nbytes)
                s = torch.empty_like(tile) if keep else tile
                self._write_logits(s, left, right, scale, i, j, excluded, local=index == 0, diagonal=diagonal)
                arithmetic.transform(s, diagonal=diagonal)
                arithmetic.add(row_total[i], s, 1)
                if self.columnwise and not diagonal:
                    arithmetic.add(column_total[j], s, 0)
                stored.append(s if keep else None)
            parts.append(column_total)
        if not self.columnwise:
            return total, None, stored
        column_total = merge_at_owners(parts[0], parts[1:], exchange.blocks[1:], self.world, arithmetic.merge)
        return total, None if self.one_tower else column_total, stored

    def gradients(
        self, arguments: Pass, row_statistics: Tensor, column_statistics: Tensor | None,
        drows: Tensor, dcolumns: Tensor | None, products: Tensor, stored: Sequence[Tensor | None],
    ) -> Iterator[Tensor]:  # fmt: skip
        """Write G B and the local Gᵀ A, and add Σ G_ij a_i·b_j if the sweep sums it itself; yield the other Gᵀ A.

        The caller multiplies these by a scale that is a tensor. Statistics are sums and gradients of their logarithms.
        """
        arithmetic, rows, _, scale = arguments
        alpha = 1.0 if isinstance(scale, Tensor) else scale
        scratch, out = (tile_scratch(rows, max(self.column_shards.sizes)) for _ in range(2))
        row_weights, column_weights = arithmetic.coefficients(row_statistics), None
        if column_statistics is not None:
            column_statistics = gather_rows(column_statistics, self.column_shards, self.world)
            column_weights = arithmetic.coefficients(column_statistics).split(self.column_shards.sizes)
        cached = iter(stored)
        for index, block, columns, cut in self._tiles(arguments):
            left, right = self.operand(rows[block.rows]), self.operand(columns)
            block_weights, block_drows = row_weights[block.rows], drows[block.rows]
            excluded = self._excluded_columns(block)
            by_column = None if column_weights is None else column_weights[block.ahead][block.columns]
            part = dcolumns if index == 0 or dcolumns is None else gradient_buffer(columns, block)
            for i, j, diagonal in cut:
                a, b, s = left[i], right[j], next(cached)
                if s is None:
                    s = tile_of(scratch, i, j)
                    self._write_logits(s, left, right, scale, i, j, excluded, local=index == 0, diagonal=diagonal)
                    arithmetic.transform(s, diagonal=diagonal)
                of_columns = None if by_column is None else by_column[j]
                weights = arithmetic.weights(s, block_weights[i], of_columns, tile_of(out, i, j))
                if b.inverse is not None:
                    weights.mul_(b.inverse)
                # the first matmul into a buffer overwrites its content
                block_drows[i].addmm_(weights, b.rows, beta=0 if index == j.start == 0 else 1, alpha=alpha)
                if part is not None and not diagonal:
                    if a.inverse is not None:
                        weights.div_(b.inverse).mul_(a.inverse[:, None])
                    part[j].addmm_(weights.T, a.rows, beta=0 if i.start == 0 else 1, alpha=alpha)
            if index and part is not None:
                yield part

    def dscale(self, rows: Tensor, drows: Tensor, products: Tensor) -> Tensor:
        """Return Σ G_ij a_i·b_j from the complete G B, with one tower of pairs of which each appears in two rows."""
        return torch.dot(rows.flatten(), drows.flatten()) / (2 if self.one_tower else 1)


def gradient_buffer(like: Tensor, block: RankBlock) -> Tensor:
    """Return uninitialised memory for the gradient of a block's rows or columns; zeros if the block has no pairs."""
    some = block.rows.start < block.rows.stop and block.columns.start < block.columns.stop
    return torch.empty_like(like) if some else torch.zeros_like(like)
