"""Compute SigLIP's loss in Triton: losses and gradients in one sweep, since no pair's gradient depends on another pair."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.kernels.blocks import (
    Operand,
    Weights,
    add_product,
    as_scalar,
    blocks,
    check_inputs,
    launches,
    precision_of,
    rows_per_program,
    tiles_for,
    write_scaled,
)
from contrastive_zoo.kernels.sigmoid_tiles import sigmoid_pairs

UNWEIGHTED_SIDE = 2**16
"""Height and width of a block without weights."""


def siglip(
    a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], scale: float | Tensor, bias: float | Tensor
) -> Float[Tensor, ""]:
    """Return ``softplus(-y * (scale * a @ b.T + bias)).sum() / n``, y = 1 for pairs i = j and −1 for others.

    Args:
        a: float32, bfloat16 or float16; d at most 4,096; any strides.
        b: row i belongs to row i of a.
        scale: a tensor gets a gradient.
        bias: a tensor gets a gradient.

    Returns:
        Nats per row of a, float32.

    Raises:
        ValueError: another shape or dtype, or rows on different devices.
    """
    check_inputs("siglip", a, b)
    return _Sigmoid.apply(a, b, as_scalar(scale, a), as_scalar(bias, a), torch.is_grad_enabled())


class _Sigmoid(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, learns: bool) -> Tensor:
        """Compute the loss and its gradients.

        ``learns``: whether gradients may be needed; a leaf has ``requires_grad`` under ``no_grad``, too.
        """
        ctx.learns = learns and any(ctx.needs_input_grad)
        precision = precision_of(a)
        left, right = (Operand.of(x, precision) for x in (a, b))
        plain, edges = tiles_for(a, precision)
        weights = Weights.of(left, right) if ctx.learns else Weights(a, UNWEIGHTED_SIDE, 0)
        sums_a, sums_b = (
            torch.empty(x.shape if ctx.learns else 0, dtype=torch.float32, device=x.device) for x in (a, b)
        )
        totals = torch.zeros(2, dtype=torch.float32, device=a.device)
        for i, j in blocks(len(a), len(b), weights.side):
            n, m = i.stop - i.start, j.stop - j.start
            rows = rows_per_program(n, m, plain)
            programs = cdiv(n, rows) * cdiv(m, plain.columns)
            sums = totals.new_empty(2, programs)
            w = weights.block(i, j)
            for edge, tile in launches(n, m, plain, edges):
                sigmoid_pairs[(programs,)](
                    left.tiles(i, tile.rows, tile.depth), right.tiles(j, tile.columns, tile.depth),
                    Operand(w).tiles(slice(None), tile.rows, tile.columns // 2), scale, bias, sums, n, m, left.width,
                    j.start - i.start, rows,
                    EDGE=edge, GRADIENT=ctx.learns, PRECISION=precision, UNIT=weights.bits, **tile.options,
                )  # fmt: skip
            totals += sums.sum(1)
            if ctx.learns:
                add_product(sums_a[i], w, right.rows[j], first=j.start == 0)
                add_product(sums_b[j], w.T, left.rows[i], first=i.start == 0)
        loss, dbias = (totals / len(a)).unbind()
        ctx.save_for_backward(a, b, scale, sums_a, sums_b, dbias)
        ctx.unit = weights.unit / len(a)
        return loss.clone()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, sums_a, sums_b, dbias = ctx.saved_tensors
        factor = g * ctx.unit
        da, db = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, b))
        dots = torch.empty(max(len(a), len(b)), dtype=torch.float32, device=a.device)
        write_scaled(sums_b, Operand.of(b, "ieee"), scale, factor, db, dots, slice(None))
        write_scaled(sums_a, Operand.of(a, "ieee"), scale, factor, da, dots, slice(None))
        return da, db, dots[: len(a)].sum(), g * dbias, None
