"""SigLIP's loss in Triton: losses and gradients in one sweep, since no pair's gradient depends on another pair."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.kernels import blocks as _blocks
from contrastive_zoo.kernels.blocks import Operand, add_product, blocks, chunk, weight_side
from contrastive_zoo.kernels.checks import as_scalar, checked, precision_of, tiles_for
from contrastive_zoo.kernels.sigmoid_tiles import sigmoid_pairs


def siglip(
    a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], scale: float | Tensor, bias: float | Tensor
) -> Float[Tensor, ""]:
    """``softplus(-y * (scale * a @ b.T + bias)).sum() / n``, y = 1 for pairs i = j and −1 for others.

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
    checked("siglip", a, b)
    learns = torch.is_grad_enabled()
    return _Sigmoid.apply(a, b, as_scalar(scale, a), as_scalar(bias, a), learns)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, learns: bool) -> Tensor:
        left, right, precision = Operand.of(a), Operand.of(b), precision_of(a)
        gradient = learns and any(ctx.needs_input_grad)
        # weights are 1 for pairs that are all wrong, and may be 1e-9: float16 needs them larger
        side, unit = weight_side(a.dtype), 14 if a.dtype == torch.float16 else 0
        step = 16 // a.element_size()
        room = a.new_empty(min(side, len(a)), cdiv(min(side, len(b)), step) * step) if gradient else a
        da, db = (torch.empty(x.shape, device=x.device) if gradient else None for x in (a, b))
        loss, dbias = torch.zeros((2,), device=a.device, dtype=torch.float32).unbind()
        for_all, for_edges = tiles_for(a, precision)
        for i, j in blocks(len(a), len(b), side):
            n, m = i.stop - i.start, j.stop - j.start
            rows = chunk(n, m, for_all)
            programs = cdiv(n, rows) * cdiv(m, for_all.columns)
            sums = loss.new_empty(2, programs)
            w = room[:n, :m]
            launches = [(2, for_edges)] if n <= rows or for_all == for_edges else [(0, for_all), (1, for_edges)]
            for edge, tile in launches:
                sigmoid_pairs[(programs,)](
                    left.tiles(i, tile.rows, tile.depth), right.tiles(j, tile.columns, tile.depth),
                    Operand(w).tiles(slice(None), tile.rows, tile.columns), scale, bias, sums, n, m, a.shape[1],
                    j.start - i.start, rows,
                    EDGE=edge, GRADIENT=gradient, PRECISION=precision, UNIT=unit, **tile.options,
                )  # fmt: skip
            loss += sums[0].sum()
            if gradient:
                dbias += sums[1].sum()
                add_product(da[i], w, right.rows[j], first=j.start == 0)
                add_product(db[j], w.T, left.rows[i], first=i.start == 0)
        if gradient:
            ctx.save_for_backward(a, b, scale, da, db, dbias)
            ctx.unit = 2.0**-unit
        return loss / len(a)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, da, db, dbias = ctx.saved_tensors
        g = g / len(a)
        factor = g * scale * ctx.unit
        dscale = sum(torch.linalg.vecdot(x, y.float()).sum() for x, y in zip(da.split(2**14), a.split(2**14), strict=True))
        of_a, of_b = (torch.mul(x, factor, out=torch.empty_like(y)) for x, y in ((da, a), (db, b)))
        return of_a, of_b, dscale * g * ctx.unit, dbias * g, None
