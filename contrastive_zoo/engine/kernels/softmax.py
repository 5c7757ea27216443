"""Compute softmax losses in Triton: InfoNCE, CLIP, NT-Xent and SupCon in two kernels and two matmuls of cuBLAS.

With S = scale · A Bᵀ, P_i the logit of the positive pair of row i, and R_i the log-sum-exp of the row's other logits, a
row's loss is log(1 + exp(R_i − P_i)): R_i does not contain the positive, so that a small loss is precise. Columns likewise.
Weights w_ij = exp(S_ij − log-sum-exp of row i) + the same of column j, each times a gradient; dA = scale · W B and
dB = scale · Wᵀ A. The gradient of the scale Σ w_ij a_i·b_j is small beside its terms where embeddings are alike, so weights
are multiplied before they are rounded to 16 bits.

Columns of all ranks that were gathered are one matrix, those of this rank first: as many launches as on one process. In a
ring each rank's columns are one, as they arrive.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.engine.exchange import GatherExchange, RankBlock, Ring, lengths, merge_at_owners
from contrastive_zoo.engine.kernels.blocks import (
    MAX_TILES,
    NO_PARTNER,
    PARTIAL_BYTES,
    Operand,
    Weights,
    add_product,
    as_scalar,
    blocks,
    cdiv,
    launches,
    rows_per_program,
    tiled,
    tiles_for,
)
from contrastive_zoo.engine.kernels.softmax_tiles import NOTHING, log_sum_exps, merge, softmax_weights
from contrastive_zoo.engine.softmax_arithmetic import Sums
from contrastive_zoo.engine.softmax_sweep import SoftmaxSweep
from contrastive_zoo.ranks.transport import gather_rows


@dataclass(frozen=True)
class SoftmaxPairs:
    """The pairs of rows a and columns b. Sums of exponentials are two numbers each, see ``softmax_tiles``."""

    a: Operand
    b: Operand
    scale: Tensor
    symmetric: bool  # whether columns have softmaxes over rows, too
    one_tower: bool = False  # whether the first columns are the rows
    side: int = 0  # 1: sums are over pairs of a column after the row only, −1: before it, 0: over all
    partner: int = NO_PARTNER  # how far after a row's own index the column of its positive is
    local: int = 0  # of so many columns, the first, a row may have a positive
    corner: tuple[int, int] = (NO_PARTNER, NO_PARTNER)  # sums leave out pairs of a row and a column from here on
    excluded: Tensor | None = None
    """[n], a column that the sum of a row leaves out, as the column's sum does the row; another number for none."""

    @property
    def swapped(self) -> "SoftmaxPairs":
        """The same pairs with columns as rows: sums of columns that lost precision are recomputed with a maximum of each."""
        excluded = None if self.excluded is None else self._excluded_rows()
        side, corner = -self.side, (self.corner[1], self.corner[0])
        return replace(self, a=self.b, b=self.a, symmetric=False, side=side, corner=corner, excluded=excluded)

    def part(self, i: slice, j: slice, *, one_tower: bool) -> "SoftmaxPairs":
        """Return the pairs of some rows, from the first on, and some columns: all of this rank's, or none."""
        excluded = None if self.excluded is None else self.excluded[i] - j.start
        partner = self.partner if j.start < self.local else NO_PARTNER
        return replace(self, a=self.a[i], b=self.b[j], one_tower=one_tower, partner=partner, excluded=excluded)

    def _excluded_rows(self) -> Tensor:
        assert self.excluded is not None
        columns = len(self.b)
        inside = (self.excluded >= 0) & (self.excluded < columns)
        rows = torch.arange(len(inside), dtype=torch.int32, device=inside.device)
        of_columns = torch.full_like(rows[:1], -1).expand(columns + 1).clone()
        return of_columns.scatter_(0, self.excluded.where(inside, columns).long(), rows)[:columns]

    def add_sums(self, of_rows: Tensor, of_columns: Tensor, precision_lost: Tensor, *, if_lost: bool = False) -> None:
        """Add the sums [2, ·] of all pairs but positive ones to ``of_rows`` and ``of_columns``.

        ``precision_lost`` is set to 1 if a sum of a column may lack terms. With ``if_lost`` nothing is done unless it is 1.
        """
        a, b = self.a, self.b
        plain, edges = tiles_for(a.rows, "log_sum_exps")
        side = math.isqrt(PARTIAL_BYTES * plain.columns // 8) // plain.rows * plain.rows
        partial = self.side != 0 or self.corner[0] < len(a)
        for i, j in blocks(len(a), len(b), side, upper=self.side == 1):
            n, m = i.stop - i.start, j.stop - j.start
            rows = rows_per_program(n, m, plain)
            shape = (2, cdiv(m, plain.columns), n)
            by_row = of_rows.new_full(shape, NOTHING.value) if partial else of_rows.new_empty(shape)
            by_column = of_rows.new_empty(2, cdiv(n, rows), m) if self.symmetric else by_row
            excluded = None if self.excluded is None else self.excluded[i] - j.start
            # a sum is seldom lost, and any tile may have an excluded pair
            of_block = [(2, edges)] if if_lost or excluded is not None else launches(n, m, plain, edges)
            for edge, tile in of_block:
                log_sum_exps[(cdiv(n, rows) * cdiv(m, tile.columns),)](
                    a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth), a.factors[i],
                    b.factors[j], self.scale, by_row, by_column, a.factors if excluded is None else excluded,
                    precision_lost, n, m, a.width, j.start - i.start, self.partner, self.local - j.start,
                    self.corner[0] - i.start, self.corner[1] - j.start, rows,
                    EDGE=edge, ONE_TOWER=self.one_tower, SIDE=self.side, COLUMNS=self.symmetric,
                    EXCLUDED=excluded is not None, IF_LOST=if_lost, PRECISION=self.a.precision,
                    **tile.options,
                )  # fmt: skip
            merged = [(by_row, of_rows[:, i]), (by_column, of_columns[:, j])]
            for parts, out in merged[: 2 if self.symmetric else 1]:
                merge[(cdiv(out.shape[1], 32),)](
                    parts, out, precision_lost, parts.shape[1], out.shape[1], out.stride(0),
                    IF_LOST=if_lost, BLOCK_N=32, BLOCK_P=64, num_warps=4,
                )  # fmt: skip

    def add_precise_sums(self, of_rows: Tensor, of_columns: Tensor) -> None:
        """Add sums as :meth:`add_sums`, but recompute those of columns if one lost precision, each with its own maximum."""
        precision_lost = of_rows.new_zeros((), dtype=torch.int32)
        self.add_sums(of_rows, of_columns, precision_lost)
        if not self.symmetric:
            return
        recomputed = torch.full_like(of_columns, NOTHING.value)
        self.swapped.add_sums(recomputed, recomputed, precision_lost, if_lost=True)  # or does nothing
        of_columns.copy_(torch.where(precision_lost > 0, recomputed, of_columns))

    def add_gradients(
        self, statistics: tuple[Tensor, Tensor], of_rows: Tensor, of_columns: Tensor | None, dscale: Tensor
    ) -> None:
        """Add W B to ``of_rows``, Wᵀ A to ``of_columns`` and Σ w · a·b, not rounded, to ``dscale``.

        A and B are the rows as read; gradients lack the reciprocal of the factor of each row. With one tower both
        gradients are ``of_rows``, and each pair counts once. ``statistics`` are [2, n] and [2, m], exponents and factors:
        the weight of a pair is factor · 2^(logit in bits − exponent), and the same of its column, times the factors of
        both operands; 0 of positive pairs.
        """
        a, b, weights, (by_row, by_column) = self.a, self.b, Weights.of(self.a, self.b), statistics
        plain, edges = tiles_for(a.rows, "softmax_weights")
        for i, j in blocks(len(a), len(b), weights.side, upper=self.one_tower):
            w, both = weights.block(i, j), self.one_tower and i == j  # pairs of two rows appear twice in w
            n, m = w.shape
            rows = rows_per_program(n, m, plain)
            excluded = None if self.excluded is None else self.excluded[i] - j.start
            products = dscale.new_empty(cdiv(n, rows) * cdiv(m, plain.columns))
            for edge, tile in launches(n, m, plain, edges) if excluded is None else [(2, edges)]:
                softmax_weights[(len(products),)](
                    a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth),
                    tiled(w, tile.rows, tile.columns // 2), a.factors[i], b.factors[j], self.scale, by_row[:, i],
                    by_column[:, j], products, products if excluded is None else excluded, n, m, a.width,
                    by_row.stride(0), by_column.stride(0), j.start - i.start, self.partner, self.local - j.start, rows,
                    EDGE=edge, ONE_TOWER=self.one_tower, COLUMNS=self.symmetric, EXCLUDED=excluded is not None,
                    PRECISION=a.precision, UNIT=weights.bits, MAX_ROWS=MAX_TILES * plain.rows, **tile.options,
                )  # fmt: skip
            dscale.add_(products.sum(), alpha=0.5 if both else 1.0)
            add_product(of_rows[i], w, b.rows[j], alpha=weights.unit)
            if of_columns is not None and not both:
                add_product(of_columns[j], w.T, a.rows[i], alpha=weights.unit)


EMPTY = (
    2.0**20
)  # the exponent by which weights of an empty sum are 0; unlike those of infinity, differences are numbers
SMALLEST = 2.0**-126  # the least unit of weights, so that gradients of 0 are not divided by 0


class ExponentSums(Sums):
    """Accumulate sums of exponentials [n, 2], integer exponents and mantissas, a view of the [2, n] that kernels write.

    The methods are those of :mod:`contrastive_zoo.engine.softmax_arithmetic`, but for what kernels do themselves.
    """

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

    def sums(
        self, arithmetic: Any, rows: Tensor, exchange: GatherExchange | Ring, scale: float | Tensor, cached: object
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """Return sums of local rows, and of local columns, over all others but partners; no tiles."""
        a, factor = self.operand(rows), as_scalar(scale, rows)
        total, parts = arithmetic.empty(len(rows), rows), []
        for blocks_here, columns in exchange.windows(self._narrow):
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
        self,
        arithmetic: Any,
        rows: Tensor,
        exchange: GatherExchange | Ring,
        scale: float | Tensor,
        row_statistics: Tensor,
        column_statistics: Tensor | None,
        drows: Tensor,
        dcolumns: Tensor | None,
        stored: object,
        products: Tensor,
    ) -> Iterator[Tensor]:
        """Write G B into ``drows`` and Gᵀ A of the local columns into ``dcolumns``; yield Gᵀ A of each other block.

        Weights are in units of the power of two above the largest gradient, which float16 can hold: on any number of ranks
        they are rounded alike. Σ G_ij a_i·b_j of this rank, times a scale that is a number, is added to ``products``.
        """
        symmetric, factor = column_statistics is not None, as_scalar(scale, rows)
        columns_of_all = row_statistics[:0] if column_statistics is None else column_statistics
        if symmetric:
            columns_of_all = gather_rows(columns_of_all, self.column_shards, self.world)
        weighed = [rows.new_full((1,), SMALLEST), row_statistics[:, 2], columns_of_all[:, 2]]
        unit = torch.cat(weighed).abs().amax()
        unit = torch.ldexp(torch.ones_like(unit), torch.frexp(unit).exponent)
        row_weights, column_weights = (arithmetic.coefficients(x, unit) for x in (row_statistics, columns_of_all))
        by_rank = column_weights.split(self.column_shards.sizes if symmetric else [0] * self.world.size, 1)
        restored, total = unit if isinstance(scale, Tensor) else unit * scale, torch.zeros_like(products)
        # a ring adds other ranks' gradients of the local rows to ``drows`` in the meantime
        a, of_rows = self.operand(rows), torch.zeros_like(rows) if dcolumns is drows else drows.zero_()
        for blocks_here, columns in exchange.windows(self._narrow):
            pairs, parts = self._pairs(a, columns, blocks_here, factor, symmetric), lengths(blocks_here)
            of_window = torch.cat([by_rank[x.ahead][:, x.columns] for x in blocks_here], 1)
            first = parts.pop(0) if pairs.one_tower else 0  # of columns that are the rows, gradients are in ``of_rows``
            of_columns = None if dcolumns is None else rows.new_zeros(sum(parts), rows.shape[1])
            for diagonal, i, j in self._pieces(blocks_here):
                piece = pairs.part(i, j, one_tower=diagonal)
                target = None if of_columns is None else of_columns[j.start - first : j.stop - first]
                if len(piece.a) and len(piece.b):
                    statistics = row_weights[:, i], of_window[:, j]
                    piece.add_gradients(statistics, of_rows[i], of_rows if diagonal else target, total)
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

    def _narrow(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype or rows.dtype)

    def operand(self, rows: Tensor) -> Operand:
        return Operand.of(self._narrow(rows), unit_norm=self.normalizes)
