"""Compute the sigmoid loss in Triton, block by block: losses and gradients in one sweep, since a pair's gradient depends
on no other pair.
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
    tiles_for,
)
from contrastive_zoo.engine.kernels.sigmoid_tiles import sigmoid_pairs
from contrastive_zoo.engine.precision import inverse_norms

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
    """Add the losses of all pairs and the sums of their weights to ``totals``; and W b and Wᵀ a to gradients, if asked.

    Columns are ``ahead`` after rows of the same index: row i is the positive of column i − ahead. ``totals`` are [2],
    gradients [n, d] and [m, d] in float32.
    """
    precision = precision_of(a.rows)
    plain, edges = tiles_for(a.rows, precision, "sigmoid_pairs")
    weights = Weights.of(a, b) if gradients else Weights(a.rows, UNWEIGHTED_SIDE, 0)
    for i, j in blocks(len(a), len(b), weights.side):
        n, m = i.stop - i.start, j.stop - j.start
        rows = rows_per_program(n, m, plain)
        programs = cdiv(n, rows) * cdiv(m, plain.columns)
        sums = totals.new_empty(2, programs)
        w = weights.block(i, j)
        for edge, tile in launches(n, m, plain, edges):
            sigmoid_pairs[(programs,)](
                a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth),
                Operand(w).tiles(slice(None), tile.rows, tile.columns // 2), scale, bias, sums, n, m, a.width,
                j.start - i.start + ahead, rows,
                EDGE=edge, GRADIENT=gradients is not None, PRECISION=precision, UNIT=weights.bits, **tile.options,
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
        prepared = self._prepared(anchors)
        self.anchors, self.learns = Operand.of(prepared, precision_of(prepared)), learns
        self.scale, self.bias = as_scalar(scale, anchors), as_scalar(bias, anchors)
        self.totals = anchors.new_zeros(2)
        self.losses, self.dbias = self.totals[:1], self.totals[1]
        self.danchors = torch.zeros_like(anchors) if learns else anchors[:0]

    def _prepared(self, rows: Tensor) -> Tensor:
        return (rows * inverse_norms(rows)[:, None] if self.normalizes else rows).to(self.dtype)

    def parts(self, exchange: GatherExchange | Ring, dlocal: Tensor) -> Iterator[Tensor]:
        """Add the pairs with all candidates; yield gradients of other ranks' candidates, add those of the local ones."""
        for blocks_here, candidates in exchange.windows(self._prepared):
            local, (first, *others) = blocks_here[0] is exchange.blocks[0], lengths(blocks_here)
            total = self.danchors.new_zeros(len(candidates), dlocal.shape[1]) if self.learns else self.danchors
            if len(self.anchors) and len(candidates):
                add_pairs(
                    self.anchors, Operand.of(candidates, precision_of(candidates)), self.scale, self.bias, self.totals,
                    [self.danchors, total] if self.learns else None, ahead=0 if local else NO_PARTNER,
                )  # fmt: skip
            if self.learns and local:
                dlocal += total[:first]
                yield from total[first:].split(others)
            elif self.learns:
                yield total
