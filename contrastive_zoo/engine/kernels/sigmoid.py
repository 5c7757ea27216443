"""Compute the sigmoid loss of negative pairs in Triton, block by block, losses and gradients in one sweep."""

import torch
from torch import Tensor

from contrastive_zoo.engine.kernels.blocks import (
    NO_PARTNER,
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
from contrastive_zoo.engine.kernels.sigmoid_tiles import sigmoid_pairs

UNWEIGHTED_SIDE = 2**16  # height and width of a block without weights


class KernelBlock:
    """Hold the local anchors, and the totals of their pairs with the candidates seen so far."""

    def __init__(
        self, anchors: Tensor, scale: Tensor, bias: Tensor, learns: bool, min_norm: float | None, dtype: torch.dtype
    ) -> None:
        """Kernels multiply embeddings in this dtype, as :meth:`Operand.of` with ``min_norm`` prepares them."""
        self.min_norm, self.dtype = min_norm, dtype
        self.anchors, self.learns = self._operand(anchors), learns
        self.scale, self.bias = as_scalar(scale, anchors), as_scalar(bias, anchors)
        self.totals = anchors.new_zeros(3)
        self.losses, self.dbias, self.products = self.totals[:1], self.totals[1], self.totals[2]
        self.danchors = torch.zeros_like(anchors) if learns else anchors[:0]

    def _operand(self, rows: Tensor) -> Operand:
        return Operand.of(rows.to(self.dtype), min_norm=self.min_norm)

    def _add_pairs(self, b: Operand, of_columns: Tensor, ahead: int) -> None:
        """Add the pairs of each row i with some columns but i − ``ahead``; gradients lack 1 / the rows' factors."""
        a = self.anchors
        plain, edges = tiles_for(a.rows, "sigmoid_pairs")
        weights = Weights.of(a, b) if self.learns else Weights(a.rows, UNWEIGHTED_SIDE, 0)
        for i, j in blocks(len(a), len(b), weights.side):
            n, m = i.stop - i.start, j.stop - j.start
            rows = rows_per_program(n, m, plain)
            programs = cdiv(n, rows) * cdiv(m, plain.columns)
            sums = self.totals.new_zeros(3, programs)
            w = weights.block(i, j)
            for edge, tile in launches(n, m, plain, edges):
                sigmoid_pairs[(programs,)](
                    a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth),
                    tiled(w, tile.rows, tile.columns // 2), a.factors[i], b.factors[j], self.scale, self.bias, sums,
                    n, m, a.width, j.start - i.start + ahead, rows,
                    EDGE=edge, GRADIENT=self.learns, PRECISION=a.precision, UNIT=weights.bits, **tile.options,
                )  # fmt: skip
            self.totals += sums.sum(1)
            if self.learns:
                add_product(self.danchors[i], w, b.rows[j], alpha=weights.unit)
                add_product(of_columns[j], w.T, a.rows[i], alpha=weights.unit)

    def add(self, candidates: Tensor, *, local: bool) -> Tensor:
        """Add the pairs with some candidates, of which the first are the local ones or none; return their gradients."""
        total = self.danchors.new_zeros(len(candidates), candidates.shape[1]) if self.learns else self.danchors
        columns = self._operand(candidates)
        if len(self.anchors) and len(candidates):
            self._add_pairs(columns, total, 0 if local else NO_PARTNER)
        return total.div_(columns.factors[:, None]) if self.learns else total

    def finish(self) -> None:
        """Complete the gradients of the anchors, after the last candidates."""
        self.danchors /= self.anchors.factors[:, None]
