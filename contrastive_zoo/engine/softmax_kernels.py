"""Compute the log-sum-exps of one rank, and their gradients, by Triton kernels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from contrastive_zoo.engine.exchange import RankBlock, lengths, merge_at_owners
from contrastive_zoo.engine.kernels.blocks import NO_PARTNER, Operand, as_scalar
from contrastive_zoo.engine.kernels.softmax import SoftmaxPairs
from contrastive_zoo.engine.kernels.softmax_tiles import NOTHING
from contrastive_zoo.engine.precision import MIN_NORM
from contrastive_zoo.engine.softmax_sweep import Pass, SoftmaxSweep
from contrastive_zoo.ranks.transport import gather_rows

# the exponent by which weights of an empty sum are 0; unlike those of infinity, differences are numbers
EMPTY = 2.0**20
SMALLEST = 2.0**-126  # the least unit of weights, so that gradients of 0 are not divided by 0


class ExponentSums:
    """Accumulate sums of exponentials [n, 2], integer exponents and mantissas, a view of the [2, n] that kernels write."""

    def empty(self, count: int, like: Tensor) -> Tensor:
        total = like.new_zeros(2, count)
        total[0] = NOTHING.value
        return total.T

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        exponents, mantissas = torch.stack([*parts]).unbind(2)
        highest = exponents.amax(0)
        return torch.stack([highest, (mantissas * torch.exp2(exponents - highest)).sum(0)], 1)

    def log(self, total: Tensor) -> Tensor:
        """Return log-sum-exps in nats, in float64: at t = 0.01 float32 would round them, and a small loss, by 4e-6."""
        exponent, mantissa = total.double().unbind(1)
        return (exponent + mantissa.log2()) * math.log(2)

    def coefficients(self, statistics: Tensor, unit: Tensor) -> Tensor:
        """Return exponents and factors, [2, n]: G = factor · 2^(logit in bits − exponent), in the given unit."""
        exponent, mantissa, gradient = statistics.unbind(1)
        fraction, more = torch.frexp(mantissa)
        empty = mantissa == 0
        factor = (gradient / (fraction * unit)).masked_fill(empty, 0)
        return torch.stack([(exponent + more).masked_fill(empty, EMPTY), factor])


@dataclass(frozen=True, kw_only=True)
class KernelSweep(SoftmaxSweep):
    """Compute the blocks of this rank by kernels. Rows have one partner at most."""

    exact_sums = ExponentSums()

    def largest_logit(self, rows: Tensor, columns: Tensor, scale: float | Tensor) -> None:
        """Return None: each row and column of a tile has a maximum of its own."""

    def sums(self, arguments: Pass, cached: object) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """Return sums of local rows, and of local columns, over all others but partners; no tiles."""
        arithmetic, rows, exchange, scale = arguments
        a, factor = self.operand(rows), as_scalar(scale, rows)
        total, parts = arithmetic.empty(len(rows), rows), []
        for blocks_here, columns in exchange.windows(self.dtype or rows.dtype):
            column_total = arithmetic.empty(len(columns), rows)
            if len(rows) and len(columns):
                pairs = self._pairs(a, columns, blocks_here, factor, self.columnwise)
                pairs.add_precise_sums(total.T, column_total.T)
            parts += column_total.split(lengths(blocks_here))
        if not self.columnwise:
            return total, None, []
        local = arithmetic.merge([total, parts[0]]) if self.one_tower else parts[0]
        local = merge_at_owners(local, parts[1:], exchange.blocks[1:], self.world, arithmetic.merge)
        return (local, None, []) if self.one_tower else (total, local, [])

    def gradients(
        self, arguments: Pass, row_statistics: Tensor, column_statistics: Tensor | None,
        drows: Tensor, dcolumns: Tensor | None, products: Tensor, stored: object,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Do as the sweep of tiles; this rank's Σ G_ij a_i·b_j, times a scale that is a number, is added to ``products``."""
        arithmetic, rows, exchange, scale = arguments
        symmetric, factor = column_statistics is not None, as_scalar(scale, rows)
        columns_of_all = row_statistics[:0]
        if column_statistics is not None:
            columns_of_all = gather_rows(column_statistics, self.column_shards, self.world)
        weighed = [rows.new_full((1,), SMALLEST), row_statistics[:, 2], columns_of_all[:, 2]]
        unit = torch.cat(weighed).abs().amax()
        # float16 can hold weights in units of the power of two above the largest gradient, alike on any number of ranks
        unit = torch.ldexp(torch.ones_like(unit), torch.frexp(unit).exponent)
        row_weights, column_weights = (arithmetic.coefficients(x, unit) for x in (row_statistics, columns_of_all))
        by_rank = column_weights.split(self.column_shards.sizes if symmetric else [0] * self.world.size, 1)
        restored, total = unit if isinstance(scale, Tensor) else unit * scale, torch.zeros_like(products)
        # a ring adds other ranks' gradients of the local rows to ``drows`` in the meantime
        a, of_rows = self.operand(rows), torch.zeros_like(rows) if dcolumns is drows else drows.zero_()
        for blocks_here, columns in exchange.windows(self.dtype or rows.dtype):
            pairs, parts = self._pairs(a, columns, blocks_here, factor, symmetric), lengths(blocks_here)
            of_window = torch.cat([by_rank[x.ahead][:, x.columns] for x in blocks_here], 1)
            first = parts.pop(0) if pairs.one_tower else 0  # of columns that are the rows, gradients are in ``of_rows``
            of_columns = None if dcolumns is None else rows.new_zeros(sum(parts), rows.shape[1])
            for diagonal, i, j in self._pieces(blocks_here):
                piece = pairs.part(i, j, one_tower=diagonal)
                target = None if of_columns is None else of_columns[j.start - first : j.stop - first]
                if len(piece.a) and len(piece.b):
                    weights = row_weights[:, i], of_window[:, j]
                    piece.add_gradients(weights, of_rows[i], of_rows if diagonal else target, total)
            if dcolumns is None or of_columns is None:
                continue
            gradients = iter(of_columns.mul_((restored / pairs.b.factors[first:])[:, None]).split(parts))
            if pairs.one_tower:
                dcolumns.zero_()
            elif self._is_local(blocks_here[0]):
                dcolumns.copy_(next(gradients))
            yield from gradients
        products += total * restored
        of_rows.mul_((restored / a.factors)[:, None])
        if dcolumns is drows:
            drows += of_rows

    def dscale(self, rows: Tensor, drows: Tensor, products: Tensor) -> Tensor:
        return products

    def _pairs(
        self, a: Operand, columns: Tensor, blocks_here: Sequence[RankBlock], scale: Tensor, symmetric: bool
    ) -> SoftmaxPairs:
        """Return the pairs of the local rows and the columns of some blocks, of which the last may have fewer rows."""
        has_local, last = self._is_local(blocks_here[0]), blocks_here[-1]
        one_tower = self.one_tower and has_local
        start = len(columns) - lengths(blocks_here)[-1]
        return SoftmaxPairs(
            a, self.operand(columns), scale, symmetric, one_tower, side=int(one_tower),
            partner=self.partners.offsets[0] if has_local and self.partners.offsets else NO_PARTNER,
            local=self.column_shards.size if has_local else 0,
            corner=(last.rows.stop, start) if last.rows.stop < len(a) else (NO_PARTNER, NO_PARTNER),
            excluded=self._excluded_of(blocks_here),
        )  # fmt: skip

    def _is_local(self, block: RankBlock) -> bool:
        return block.ahead == self.column_shards.rank

    def _pieces(self, blocks_here: Sequence[RankBlock]) -> Iterator[tuple[bool, slice, slice]]:
        """Yield whether columns are the rows, rows and columns of the rectangles that the pairs consist of."""
        start = 0
        for (diagonal, rows), piece in groupby(blocks_here, lambda x: (self.one_tower and self._is_local(x), x.rows)):
            columns = sum(lengths([*piece]))
            yield diagonal, rows, slice(start, start + columns)
            start += columns

    def _excluded_of(self, blocks_here: Sequence[RankBlock]) -> Tensor | None:
        """Return the excluded columns of rows as indices of the columns of these blocks; −1 where they have none."""
        if self.excluded is None:
            return None
        columns, start = torch.full_like(self.excluded, -1), 0
        for block, length in zip(blocks_here, lengths(blocks_here), strict=True):
            of_block = self.excluded - (sum(self.column_shards.sizes[: block.ahead]) + block.columns.start)
            columns = torch.where((of_block >= 0) & (of_block < length), of_block + start, columns)
            start += length
        return columns.int()

    def operand(self, rows: Tensor) -> Operand:
        return Operand.of(rows.to(self.dtype or rows.dtype), min_norm=MIN_NORM if self.normalizes else None)
