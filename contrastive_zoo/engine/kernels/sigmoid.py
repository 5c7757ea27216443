"""Compute the sigmoid loss of negative pairs in Triton, block by block: losses and gradients in one sweep, since a pair's
gradient depends on no other pair.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from triton import cdiv

from contrastive_zoo.engine.exchange import GatherExchange, Ring, lengths
from contrastive_zoo.engine.kernels.blocks import (
    NO_PARTNER,
    Operand,
    Weights,
    add_product,
    as_scalar,
    blocks,
    launches,
    precision_of,
    rows_per_program,
    tiled,
    tiles_for,
)
from contrastive_zoo.engine.kernels.sigmoid_tiles import sigmoid_pairs

UNWEIGHTED_SIDE = 2**16  # height and width of a block without weights


def add_pairs(
    a: Operand,
    b: Operand,
    scale: Tensor,
    bias: Tensor,
    totals: Tensor,
    gradients: Sequence[Tensor] | None,
    *,
    ahead: int = 0,
) -> None:
    """Add the losses of all negative pairs to ``totals``; and if asked Σ w, Σ w · a·b, and W b and Wᵀ a to gradients.

    Columns are ``ahead`` after rows of the same index: row i is the positive of column i − ahead. ``totals`` are [3],
    gradients [n, d] and [m, d] in float32, of the rows as read: they lack the reciprocal of the factor of each row.
    """
    precision = precision_of(a.rows)
    plain, edges = tiles_for(a.rows, precision, "sigmoid_pairs")
    weights = Weights.of(a, b) if gradients else Weights(a.rows, UNWEIGHTED_SIDE, 0)
    for i, j in blocks(len(a), len(b), weights.side):
        n, m = i.stop - i.start, j.stop - j.start
        rows = rows_per_program(n, m, plain)
        programs = cdiv(n, rows) * cdiv(m, plain.columns)
        sums = totals.new_zeros(3, programs)
        w = weights.block(i, j)
        for edge, tile in launches(n, m, plain, edges):
            sigmoid_pairs[(programs,)](
                a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth),
                tiled(w, tile.rows, tile.columns // 2), a.factors[i], b.factors[j], scale, bias, sums, n, m, a.width,
                j.start - i.start + ahead, rows,
                EDGE=edge, GRADIENT=gradients is not None, PRECISION=precision, UNIT=weights.bits,
                WARPS=min(tile.warps, tile.rows // 16), **tile.options,
            )  # fmt: skip
        totals += sums.sum(1)
        if gradients is not None:
            add_product(gradients[0][i], w, b.rows[j], alpha=weights.unit)
            add_product(gradients[1][j], w.T, a.rows[i], alpha=weights.unit)


class KernelBlock:
    """Hold the local anchors, and the totals of their pairs with the candidates seen so far."""

    def __init__(
        self, anchors: Tensor, scale: Tensor, bias: Tensor, learns: bool, normalizes: bool, dtype: torch.dtype | None
    ) -> None:
        self.normalizes, self.dtype = normalizes, dtype or anchors.dtype
        self.anchors, self.learns = self._operand(anchors), learns
        self.scale, self.bias = as_scalar(scale, anchors), as_scalar(bias, anchors)
        self.totals = anchors.new_zeros(3)
        self.losses, self.dbias, self.products = self.totals[:1], self.totals[1], self.totals[2]
        self.danchors = torch.zeros_like(anchors) if learns else anchors[:0]

    def _operand(self, rows: Tensor) -> Operand:
        x = rows.to(self.dtype)
        return Operand.of(x, precision_of(x), unit_norm=self.normalizes)

    def parts(self, exchange: GatherExchange | Ring, dlocal: Tensor) -> Iterator[Tensor]:
        """Add the pairs with all candidates; yield gradients of other ranks' candidates, add those of the local ones."""
        for blocks_here, candidates in exchange.windows(lambda x: x.to(self.dtype)):
            local, (first, *others) = blocks_here[0] is exchange.blocks[0], lengths(blocks_here)
            total = self.danchors.new_zeros(len(candidates), dlocal.shape[1]) if self.learns else self.danchors
            columns = self._operand(candidates)
            if len(self.anchors) and len(candidates):
                add_pairs(
                    self.anchors, columns, self.scale, self.bias, self.totals,
                    [self.danchors, total] if self.learns else None, ahead=0 if local else NO_PARTNER,
                )  # fmt: skip
            if self.learns:
                total /= columns.factors[:, None]
            if self.learns and local:
                dlocal += total[:first]
                yield from total[first:].split(others)
            elif self.learns:
                yield total
        if self.learns:
            self.danchors /= self.anchors.factors[:, None]
