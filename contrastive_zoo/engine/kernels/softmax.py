"""Compute softmax losses in Triton: InfoNCE, CLIP, NT-Xent and SupCon in two kernels and two matmuls of cuBLAS.

Weights w_ij = exp(S_ij − log-sum-exp of row i) + the same of column j, each times a gradient; dA = scale · W B and
dB = scale · Wᵀ A. The gradient of the scale Σ w_ij a_i·b_j is small beside its terms where embeddings are alike, so weights
are multiplied before they are rounded to 16 bits.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contrastive_zoo.engine.kernels.blocks import (
    MAX_TILES,
    NO_PARTNER,
    PARTIAL_BYTES,
    Operand,
    Weights,
    add_product,
    blocks,
    cdiv,
    launches,
    rows_per_program,
    tiled,
    tiles_for,
)
from contrastive_zoo.engine.kernels.softmax_tiles import NOTHING, log_sum_exps, merge, softmax_weights


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
        """Add the sums [2, ·] of all pairs but positive ones; note if a sum of a column may lack terms."""
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

        A and B are the rows as read; gradients lack the reciprocal of the factor of each row. ``statistics`` are [2, n] and
        [2, m], exponents and factors: the weight of a pair is factor · 2^(logit in bits − exponent), and the same of its
        column, times the factors of both operands; 0 of positive pairs.
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
