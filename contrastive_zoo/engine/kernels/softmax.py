"""Compute softmax losses in Triton: InfoNCE, CLIP and NT-Xent in two kernels and two matmuls of cuBLAS.

With S = scale · A Bᵀ, P_i the logit of the positive pair of row i, and R_i the log-sum-exp of the row's other logits, a
row's loss is log(1 + exp(R_i − P_i)): R_i does not contain the positive, so that a small loss is precise. Columns likewise.
Weights w_ij = exp(S_ij − log-sum-exp of row i) + the same of column j; the weight of a positive pair is minus the sum of
the others in its row and column. dA = scale · W B and dB = scale · Wᵀ A, up to the divisor of the mean and the incoming
gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from contrastive_zoo.engine.kernels.blocks import (
    Operand,
    Weights,
    add_product,
    as_scalar,
    blocks,
    check_inputs,
    precision_of,
    write_scaled,
)
from contrastive_zoo.engine.kernels.softmax_pairs import SoftmaxPairs
from contrastive_zoo.engine.kernels.softmax_tiles import NOTHING, finish
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.ranks.compiling import Function


def clip(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"], scale: float | Tensor) -> Float[Tensor, ""]:
    """Return the mean of ``cross_entropy(scale * a @ b.T, arange(n))`` and the same of the transposed logits.

    Args:
        a: float32, bfloat16 or float16; d at most 4,096; any strides.
        b: row i belongs to row i of a.
        scale: positive; a tensor gets a gradient.

    Returns:
        Nats, float32.

    Raises:
        ValueError: another shape or dtype, or rows on different devices.
    """
    check_inputs("clip", a, b, same_length=True)
    return _Softmax.apply(a, b, as_scalar(scale, a), True, False)


def info_nce(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], scale: float | Tensor) -> Float[Tensor, ""]:
    """Return ``cross_entropy(scale * a @ b.T, arange(n))``, as :func:`clip`; rows of b from n on are negatives of all rows.

    Raises:
        ValueError: what :func:`clip` refuses, or fewer rows of b than of a.
    """
    check_inputs("info_nce", a, b)
    if len(b) < len(a):
        raise ValueError(f"info_nce: every row of a needs its row of b, got {len(a)} and {len(b)} rows.")
    return _Softmax.apply(a, b, as_scalar(scale, a), False, False)


def nt_xent(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"], scale: float | Tensor) -> Float[Tensor, ""]:
    """Return ``cross_entropy((scale * z @ z.T).fill_diagonal_(-inf), partner)`` of ``z = cat([a, b])``, as :func:`clip`."""
    check_inputs("nt_xent", a, b, same_length=True)
    z = torch.cat([a, b])
    return _Softmax.apply(z, z, as_scalar(scale, a), True, True)


class _Softmax(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, symmetric: bool, one_tower: bool) -> Tensor:
        precision = precision_of(a)
        ctx.pairs = SoftmaxPairs(precision, symmetric, one_tower, len(a) // 2 if one_tower else 0)
        loss, *statistics = _losses(ctx.pairs, Operand.of(a, precision), Operand.of(b, precision), scale)
        ctx.save_for_backward(a, b, scale, *statistics)
        return loss.mean()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, *statistics = ctx.saved_tensors
        left, right = (Operand.of(x, ctx.pairs.precision) for x in (a, b))
        return *_gradients(ctx.pairs, left, right, scale, statistics, g), None, None


def _losses(pairs: SoftmaxPairs, a: Operand, b: Operand, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses of pairs, the sums of rows and of columns, and the weights of positive pairs."""
    partner, one_tower = pairs.partner, pairs.one_tower
    count = partner or len(a)
    buffer = a.rows.new_full((2, len(a) + 2 * len(b)), NOTHING.value, dtype=torch.float32)
    of_rows, of_columns, recomputed = buffer.split([len(a), len(b), len(b)], 1)
    if one_tower:
        of_columns = of_rows
    losses, positives, positive_weights = (a.rows.new_empty(k, dtype=torch.float32) for k in (count, len(a), len(a)))
    precision_lost = a.rows.new_zeros((), dtype=torch.int32)
    pairs.add_sums(a, b, scale, of_rows, of_columns, positives, precision_lost)
    if pairs.symmetric:
        # columns whose sums lost precision are recomputed as rows, each with its own maximum; else this does nothing
        pairs.swapped.add_sums(
            b, a, scale, recomputed, recomputed, torch.empty_like(positives), precision_lost, if_lost=True
        )
    finish[(cdiv(count, 128),)](
        of_rows, of_columns[:, partner:], recomputed[:, partner:], recomputed, precision_lost, positives, scale, losses,
        positive_weights, count, buffer.stride(0), buffer.stride(0), buffer.stride(0), partner,
        SIDES=2 if pairs.symmetric else 1, ONE_TOWER=one_tower, BLOCK=128,
    )  # fmt: skip
    return losses, of_rows, of_columns, positive_weights


def _gradients(
    pairs: SoftmaxPairs, a: Operand, b: Operand, scale: Tensor, statistics: Sequence[Tensor], g: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of a, of b unless it is a, and of scale."""
    weights, (of_rows, of_columns, positive_weights) = Weights.of(a, b), statistics
    factor = g * weights.unit / (len(a) * (2 if pairs.symmetric and not pairs.one_tower else 1))
    da, db = (torch.empty(x.rows.shape, dtype=x.rows.dtype, device=x.rows.device) for x in (a, b))
    dots = torch.empty(max(len(a), len(b)), dtype=torch.float32, device=da.device)
    of_b = torch.empty(b.rows.shape, dtype=torch.float32, device=da.device)
    of_a = of_b if pairs.one_tower else of_b.new_empty(min(weights.side, len(a)), a.width)
    for i, j in blocks(len(a), len(b), weights.side, upper=pairs.one_tower):
        w = weights.block(i, j)
        pairs.fill(w, i, j, a, b, scale, of_rows, of_columns, positive_weights, weights.bits)
        chunk = of_a[i] if pairs.one_tower else of_a[: len(w)]
        add_product(chunk, w, b.rows[j], first=j.start == 0)
        if i != j or not pairs.one_tower:
            add_product(of_b[j], w.T, a.rows[i], first=i.start == 0)
        if j.stop == len(b):  # these rows are complete
            write_scaled(chunk, a, scale, factor, da, dots, i)
    dscale = dots[: len(a)].sum()
    if pairs.one_tower:  # each pair appears in two rows
        return da, None, dscale / 2
    write_scaled(of_b, b, scale, factor, db, dots, slice(None))
    return da, db, dscale
