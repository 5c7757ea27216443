"""Compute the sigmoid loss in Triton, block by block: losses and gradients in one sweep, since a pair's gradient depends
on no other pair.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

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
    write_scaled,
)
from contrastive_zoo.engine.kernels.sigmoid_tiles import sigmoid_pairs
from contrastive_zoo.engine.precision import inverse_norms, without_autocast
from contrastive_zoo.ranks.compiling import Function

UNWEIGHTED_SIDE = 2**16  # height and width of a block without weights


def add_pairs(
    a: Operand,
    b: Operand,
    scale: Tensor,
    bias: Tensor,
    totals: Tensor,
    gradients: Sequence[Tensor] | None,
    *,
    precision: str,
    ahead: int = 0,
    first: bool = False,
) -> None:
    """Add the losses of all pairs and the sums of their weights to ``totals``; and W b and Wᵀ a to gradients, if asked.

    Columns are ``ahead`` after rows of the same index: row i is the positive of column i − ahead. ``totals`` are [2],
    gradients [n, d] and [m, d] in float32; ``first`` says whether they are overwritten.
    """
    plain, edges = tiles_for(a.rows, precision)
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
            add_product(gradients[0][i], w, b.rows[j], first=first and j.start == 0, alpha=weights.unit)
            add_product(gradients[1][j], w.T, a.rows[i], first=first and i.start == 0, alpha=weights.unit)


def siglip(
    a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], scale: float | Tensor, bias: float | Tensor
) -> Float[Tensor, ""]:
    """Return ``softplus(-y * (scale * a @ b.T + bias)).sum() / n``, y = 1 for pairs i = j and −1 for others.

    Rows are float32, bfloat16 or float16 of any strides, d at most 4,096. A scale or bias that is a tensor gets a gradient.
    The result has float32, in nats per row of a.
    """
    return _Sigmoid.apply(a, b, as_scalar(scale, a), as_scalar(bias, a), torch.is_grad_enabled())


class _Sigmoid(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, learns: bool) -> Tensor:
        """Compute the loss and its gradients, if ``learns``: a leaf has ``requires_grad`` under ``no_grad``, too."""
        learns &= any(ctx.needs_input_grad)
        precision = precision_of(a)
        left, right = (Operand.of(x, precision) for x in (a, b))
        sums = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (a, b)] if learns else None
        totals = torch.zeros(2, dtype=torch.float32, device=a.device)
        add_pairs(left, right, scale, bias, totals, sums, precision=precision, first=True)
        loss, dbias = (totals / len(a)).unbind()
        ctx.save_for_backward(a, b, scale, *(sums or (None, None)), dbias)
        return loss.clone()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, sums_a, sums_b, dbias = ctx.saved_tensors
        factor = g / len(a)
        da, db = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, b))
        dots = torch.empty(max(len(a), len(b)), dtype=torch.float32, device=a.device)
        write_scaled(sums_b, Operand.of(b, "ieee"), scale, factor, db, dots, slice(None))
        write_scaled(sums_a, Operand.of(a, "ieee"), scale, factor, da, dots, slice(None))
        return da, db, dots[: len(a)].sum(), g * dbias, None


class KernelBlock:
    """Hold the local anchors and the totals of their pairs with candidates seen so far, as the torch engine does."""

    def __init__(
        self, anchors: Tensor, scale: Tensor, bias: Tensor, learns: bool, normalizes: bool, dtype: torch.dtype | None
    ) -> None:
        self.normalizes, self.dtype = normalizes, dtype or anchors.dtype
        self.anchors, self.learns = self._operand(anchors), learns
        self.scale, self.bias = as_scalar(scale, anchors), as_scalar(bias, anchors)
        self.totals = anchors.new_zeros(2)
        self.losses, self.dbias = self.totals[:1], self.totals[1]
        self.danchors = torch.zeros_like(anchors) if learns else anchors[:0]

    def _operand(self, rows: Tensor) -> Operand:
        rows = (rows * inverse_norms(rows)[:, None] if self.normalizes else rows).to(self.dtype)
        return Operand.of(rows, precision_of(rows))

    def add(self, candidates: Tensor, ids: object, dcandidates: Tensor, *, local: bool) -> None:
        """Add the pairs with some candidates; gradients are added to ``dcandidates``."""
        if not len(self.anchors) or not len(candidates):
            return
        add_pairs(
            self.anchors, self._operand(candidates), self.scale, self.bias, self.totals,
            [self.danchors, dcandidates] if self.learns else None,
            precision=precision_of(self.anchors.rows), ahead=0 if local else NO_PARTNER,
        )  # fmt: skip
