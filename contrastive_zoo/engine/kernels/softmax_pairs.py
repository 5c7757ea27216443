"""Process all pairs of rows and columns in Triton, block by block: sums of exponentials, and weights of the gradient."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton import cdiv

from contrastive_zoo.engine.kernels.blocks import (
    MAX_TILES,
    PARTIAL_BYTES,
    Operand,
    Tile,
    blocks,
    launches,
    rows_per_program,
    tiles_for,
)
from contrastive_zoo.engine.kernels.softmax_tiles import NOTHING, log_sum_exps, merge, softmax_weights


@dataclass(frozen=True)
class SoftmaxPairs:
    """The pairs of some rows and columns. Sums of exponentials are two numbers each, see ``softmax_tiles``."""

    precision: str
    symmetric: bool
    """Whether columns have softmaxes over rows, too."""
    one_tower: bool
    """Whether the columns are the rows; then only pairs above the diagonal are computed, and serve both of their rows."""
    partner: int
    """How far after a row's own index the column of its positive is."""
    excluded: Tensor | None = None
    """[n], a column that the sum of a row leaves out, as the column's sum does the row; another number for none."""

    @property
    def swapped(self) -> "SoftmaxPairs":
        """The same pairs with columns as rows, to compute sums of columns with a maximum of each.

        Sums of columns that lost precision are recomputed so. Excluded pairs are those of the rows of one tower.
        """
        return replace(self, symmetric=False)

    def transposed(self, columns: int) -> "SoftmaxPairs":
        """The same for a block of other rows than columns: the excluded row of each column."""
        if self.excluded is None:
            return self.swapped
        inside = (self.excluded >= 0) & (self.excluded < columns)
        rows = torch.arange(len(inside), dtype=torch.int32, device=inside.device)
        of_columns = torch.full_like(rows[:1], -1).expand(columns + 1).clone()
        of_columns.scatter_(0, self.excluded.where(inside, columns).long(), rows)
        return replace(self.swapped, excluded=of_columns[:columns])

    def _excluded(self, i: slice, j: slice) -> Tensor | None:
        """Return excluded columns of rows i, relative to columns j."""
        return None if self.excluded is None else self.excluded[i] - j.start

    def _launches(self, n: int, m: int, plain: Tile, edges: Tile) -> list[tuple[int, Tile]]:
        """Return the launches of a block; any tile may have an excluded pair, so that all need masks."""
        return launches(n, m, plain, edges) if self.excluded is None else [(2, edges)]

    def add_sums(
        self,
        a: Operand,
        b: Operand,
        scale: Tensor,
        of_rows: Tensor,
        of_columns: Tensor,
        positives: Tensor,
        precision_lost: Tensor,
        if_lost: bool = False,
    ) -> None:
        """Add the sums of all pairs to ``of_rows`` and ``of_columns``, and write the dot products of positive pairs.

        Args:
            a: the rows.
            b: the columns.
            scale: the factor of dot products.
            of_rows: [2, n], sums of exponentials.
            of_columns: [2, m]; with one tower ``of_rows``.
            positives: [n].
            precision_lost: set to 1 if a sum of a column may lack terms.
            if_lost: whether to do nothing unless it is 1.
        """
        plain, edges = tiles_for(a.rows, self.precision)
        side = math.isqrt(PARTIAL_BYTES * plain.columns // 8) // plain.rows * plain.rows
        # one tower needs only pairs above the diagonal; a recomputed sum covers a whole row
        upper = self.one_tower and not if_lost
        for i, j in blocks(len(a), len(b), side, upper=upper):
            n, m = i.stop - i.start, j.stop - j.start
            rows = rows_per_program(n, m, plain)
            shape = (2, cdiv(m, plain.columns), n)
            by_row = of_rows.new_full(shape, NOTHING.value) if upper and i == j else of_rows.new_empty(shape)
            by_column = of_rows.new_empty(2, cdiv(n, rows), m) if self.symmetric else by_row
            excluded = self._excluded(i, j)
            for edge, tile in self._launches(n, m, plain, edges):
                log_sum_exps[(cdiv(n, rows) * cdiv(m, tile.columns),)](
                    a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth), scale,
                    by_row, by_column, positives[i], positives if excluded is None else excluded, precision_lost, n, m,
                    a.width, j.start - i.start, self.partner, rows,
                    EDGE=edge, ONE_TOWER=self.one_tower, UPPER=upper and i == j, COLUMNS=self.symmetric,
                    EXCLUDED=excluded is not None, IF_LOST=if_lost, PRECISION=self.precision,
                    WARPS=min(tile.warps, tile.rows // 16), **tile.options,
                )  # fmt: skip
            merged = [(by_row, of_rows[:, i]), (by_column, of_columns[:, j])]
            for parts, out in merged[: 2 if self.symmetric else 1]:
                merge[(cdiv(out.shape[1], 32),)](
                    parts, out, precision_lost, parts.shape[1], out.shape[1], out.stride(0),
                    IF_LOST=if_lost, BLOCK_N=32, BLOCK_P=64, num_warps=4,
                )  # fmt: skip

    def fill(
        self,
        w: Tensor,
        i: slice,
        j: slice,
        a: Operand,
        b: Operand,
        scale: Tensor,
        of_rows: Tensor,
        of_columns: Tensor,
        positive_weights: Tensor,
        bits: int,
    ) -> None:
        """Write the weights of rows i and columns j into ``w``, in units of 2^−bits.

        Args:
            w: the block.
            i: its rows.
            j: its columns.
            a: all rows.
            b: all columns.
            scale: the factor of dot products.
            of_rows: [2, n], exponents and factors: the weight of a pair is factor · 2^(logit in bits − exponent), and the
                same of its column.
            of_columns: [2, m].
            positive_weights: [n], negated weights of positive pairs.
            bits: of the unit.
        """
        n, m = w.shape
        plain, edges = tiles_for(a.rows, self.precision)
        rows, excluded = rows_per_program(n, m, plain), self._excluded(i, j)
        for edge, tile in self._launches(n, m, plain, edges):
            softmax_weights[(cdiv(n, rows) * cdiv(m, tile.columns),)](
                a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth),
                Operand(w).tiles(slice(None), tile.rows, tile.columns // 2), scale, of_rows[:, i], of_columns[:, j],
                positive_weights[i], positive_weights if excluded is None else excluded, n, m, a.width,
                of_rows.stride(0), of_columns.stride(0), j.start - i.start, self.partner, rows,
                EDGE=edge, ONE_TOWER=self.one_tower, COLUMNS=self.symmetric, EXCLUDED=excluded is not None,
                PRECISION=self.precision, UNIT=bits, MAX_ROWS=MAX_TILES * plain.rows, **tile.options,
            )  # fmt: skip
