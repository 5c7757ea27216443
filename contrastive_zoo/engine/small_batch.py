"""Compute a loss of a small batch of unit embeddings, value and gradients at once: each operation's overhead counts."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Reduction
from contrastive_zoo.engine.precision import MIN_NORM, at_least_float32, matmul_rounding, sum_dtype
from contrastive_zoo.engine.softmax_arithmetic import LOG2E, cross_entropy
from contrastive_zoo.ranks.compiling import Function, differentiable_once

Comparison = Literal["rows", "rows and columns", "views"]
"""The softmaxes of the loss: of each row over the columns; also of each column over the rows; or of all rows of two
views over each other."""

Terms = tuple[Tensor, Callable[[], Tensor]]

LARGEST_SCALE = 40.0  # up to here exponentials of unit embeddings' logits, and their sums, are finite in float32


def small_batch_info_nce(
    batch: Batch,
    a: Float[Tensor, "n d"],
    b: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor,
    comparison: Comparison,
    reduction: Reduction,
) -> Float[Tensor, ""]:
    """Return ``logsumexp(S, 1) - S.diagonal()`` with S = unit(a) unit(b)ᵀ / t, its mean with that of Sᵀ, or NT-Xent.

    Rows ``batch.local_slice`` of either side get a gradient, others zeros: a rank that computes all needs that of its own.
    """
    scale, is_learnt, bits = _scale(temperature), isinstance(temperature, Tensor), 1.0
    terms: Callable[[Tensor], Terms]
    if isinstance(scale, float) and scale <= LARGEST_SCALE and a.is_cpu:  # where an exponential takes time
        overwrite = batch.local_slice is None or not is_learnt
        terms, bits = partial(softmaxes_by_one_exponential, comparison=comparison, overwrite=overwrite), LOG2E
    else:
        terms = partial(softmaxes, comparison=comparison)
    sides, views = 2 if comparison == "rows and columns" else 1, comparison == "views"
    return _computed(batch, a, b, temperature, scale, None, reduction, terms, views=views, sides=sides, bits=bits)


def small_batch_siglip(
    batch: Batch, a: Tensor, b: Tensor, *, temperature: float | Tensor, bias: float | Tensor, reduction: Reduction
) -> Float[Tensor, ""]:
    """Return ``softplus(-z * (S + bias)).sum(1)``, z = ±1, 1 on the diagonal, S of :func:`small_batch_info_nce`."""
    return _computed(batch, a, b, temperature, _scale(temperature), bias, reduction, sigmoids)


class _How(NamedTuple):
    """What a loss is, but for tensors that autograd knows."""

    scale: float | Tensor  # 1 / t
    terms: Callable[[Tensor], Terms]
    views: bool  # whether both sides are compared with both
    sides: int  # the directions that losses are added up over
    mean: bool
    local_slice: slice | None
    learns: bool  # a leaf may have requires_grad under no_grad, too
    bits: float  # a factor of the logits that ``terms`` takes: 1, or from nats to bits


def _computed(
    batch: Batch, a: Tensor, b: Tensor, temperature: float | Tensor, scale: float | Tensor, bias: float | Tensor | None,
    reduction: Reduction, terms: Callable[[Tensor], Terms], *, views: bool = False, sides: int = 1, bits: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return the mean over rows of the losses that ``terms`` returns, or their sum over ``sides`` directions."""
    how = _How(scale, terms, views, sides, reduction == "mean", batch.local_slice, torch.is_grad_enabled(), bits)
    if a.is_cpu and not torch.is_autocast_enabled("cpu"):  # a context takes as long as a matmul here
        return _SmallBatch.apply(a, b, temperature, bias, how)
    rounding = None if a.is_cpu else a.dtype  # there matmuls take unit embeddings, which are not rounded
    with torch.autocast(a.device.type, enabled=False), matmul_rounding(rounding, a.device.type):
        return _SmallBatch.apply(a, b, temperature, bias, how)


def _scale(temperature: float | Tensor) -> float | Tensor:
    """Return 1/t."""
    if not isinstance(temperature, Tensor):
        return 1 / temperature
    read = _read_on_cpu(temperature.detach())
    return 1 / read if isinstance(read, float) else at_least_float32(read).reciprocal()


def _read_on_cpu(x: Tensor) -> float | Tensor:
    """Return a number as Python's on a CPU, where its operations are faster, and x itself elsewhere."""
    return x.item() if x.is_cpu else x


class _SmallBatch(Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, temperature: float | Tensor, bias: float | Tensor | None, how: _How
    ) -> Tensor:
        scale, terms, views, sides, mean, local_slice, learns, bits = how
        rows = torch.cat([a, b])
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        # or may have: an accelerator is not read
        has_zero_row = not norm.is_cpu or norm.amin().item() < MIN_NORM
        divisor = norm.clamp(min=MIN_NORM) if has_zero_row else norm
        # a matmul of 16 bits would round unit embeddings: it takes them as they came
        is_narrow = a.dtype.itemsize < 4 and not a.is_cpu
        z = rows / divisor if is_narrow else rows.div_(divisor)
        q, k = (z, z) if views else z.chunk(2)
        if is_narrow:
            (x, y), (of_x, of_y) = ((rows, rows), (divisor, divisor)) if views else (rows.chunk(2), divisor.chunk(2))
            logits = _scaled_products(x, y, scale, bits).div_(of_x).div_(of_y.T)
        else:
            logits = _scaled_products(q, k, scale, bits)
        losses, weights = terms(logits if bias is None else logits + bias)
        drows = None
        if learns and any(ctx.needs_input_grad):
            w, count = weights(), losses.numel() if mean else sides
            dz = _gradient_of_rows(w, q, k, local_slice, views, count)
            radial = (z * dz).sum(1, keepdim=True)
            if ctx.needs_input_grad[2] and local_slice is None:
                # each pair is in a row of either side, or in two rows of two views
                ctx.dtemperature = _read_on_cpu(radial.sum()) * (-scale * scale / 2)
            elif ctx.needs_input_grad[2]:
                ctx.dtemperature = _read_on_cpu((w * logits).sum()) * (-scale / (bits * count * (2 if views else 1)))
            if ctx.needs_input_grad[3]:
                ctx.dbias = _read_on_cpu(w.sum()) / count
            if has_zero_row:
                radial.masked_fill_(norm < MIN_NORM, 0)
            drows = dz.addcmul_(z, radial, value=-1).div_(divisor / scale)
        learnt = (x if isinstance(x, Tensor) else None for x in (temperature, bias))
        ctx.save_for_backward(a, b, *learnt, drows)
        return losses.mean() if mean else (losses.sum(dtype=sum_dtype(losses)) / sides).to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, drows = ctx.saved_tensors
        factor = g.detach()
        of_rows = (drows * factor).to(inputs[0].dtype).chunk(2)
        dtemperature = factor * ctx.dtemperature if ctx.needs_input_grad[2] else None
        gradients = (*of_rows, dtemperature, factor * ctx.dbias if ctx.needs_input_grad[3] else None)
        if torch.is_grad_enabled():
            inputs = [x for x in inputs if x is not None]
            gradients = tuple(differentiable_once(x, *inputs) for x in gradients)
        return *gradients, None


def _scaled_products(q: Tensor, k: Tensor, scale: float | Tensor, bits: float) -> Tensor:
    if isinstance(scale, Tensor):  # of logits in nats
        return torch.mm(q, k.T).mul_(scale)
    return q.new_empty(q.shape[0], k.shape[0]).addmm_(q, k.T, beta=0, alpha=scale * bits)


def _gradient_of_rows(w: Tensor, q: Tensor, k: Tensor, local_slice: slice | None, views: bool, count: int) -> Tensor:
    """Return the gradient of Σ losses / count, over the scale, by the unit rows of both sides; zeros but for own rows."""
    dz = (q.new_empty if local_slice is None else q.new_zeros)(q.shape[0] * (1 if views else 2), q.shape[1])
    if views and local_slice is None:
        return dz.addmm_(w, q, beta=0, alpha=1 / count)
    weights, others = (w.chunk(2), (q, q)) if views else ((w, w.T), (k, q))
    for dx, of_side, other in zip(dz.chunk(2), weights, others, strict=True):
        if local_slice is not None:
            dx, of_side = dx[local_slice], of_side[local_slice]
        dx.addmm_(of_side, other, beta=0, alpha=1 / count)
    return dz


def softmaxes_by_one_exponential(logits: Tensor, comparison: Comparison, *, overwrite: bool) -> Terms:
    """Return cross-entropies of logits in bits, up to 40 nats: one exponential serves all sums, and both passes."""
    views = comparison == "views"
    e = logits.exp2_() if overwrite else logits.exp2()
    of_pairs = _of_pairs(e, views=views)
    positive = of_pairs.clone()
    of_pairs.zero_()  # the sums leave the positive out, so that it cancels nowhere
    if views:
        e.fill_diagonal_(0)
    others = (
        torch.stack([e.sum(1), e.sum(0)]) if comparison == "rows and columns" else e.sum(1).view(-1, positive.shape[-1])
    )

    def weights() -> Tensor:
        inverse = (others + positive).reciprocal_()
        of_positives = (inverse * others).sum(0)  # minus the sum of the others' weights
        of_rows = inverse.view(-1, 1) if views else inverse[0].unsqueeze(1)
        e.mul_(of_rows if comparison == "rows" else of_rows + (inverse.view(-1) if views else inverse[1]))
        of_pairs.sub_(of_positives)
        return e

    return (others / positive).log1p_(), weights


def softmaxes(logits: Tensor, comparison: Comparison) -> Terms:
    """Return cross-entropies of logits of any size, in few operations. Of two views' logits the diagonal is overwritten."""
    views, both = comparison == "views", comparison == "rows and columns"
    if views:  # a finite number, whose product with the weight 0 is 0
        logits.fill_diagonal_(torch.finfo(logits.dtype).min)
    shares = torch.log_softmax(torch.stack([logits, logits.T]) if both else logits, -1)
    w = (shares * LOG2E).exp2_() if shares.is_cpu else shares.exp()
    of_pairs = _of_pairs(w, views=views)
    of_pairs.zero_()  # the sums leave the positive out, so that it cancels nowhere
    others = w.sum(-1).view_as(of_pairs)

    def weights() -> Tensor:
        of_pairs.sub_(others)
        if views:
            return w + w.T
        return w[0].add_(w[1].T) if both else w

    return cross_entropy(_of_pairs(shares, views=views), others.log()), weights


def sigmoids(logits: Tensor) -> Terms:
    """Return binary cross-entropies, summed over the pairs of a row, of which that on the diagonal is positive."""
    positive = logits.diagonal()
    positive.neg_()

    def weights() -> Tensor:
        logits.sigmoid_()
        positive.neg_()
        return logits

    return F.softplus(logits, threshold=40).sum(1), weights


def _of_pairs(x: Tensor, *, views: bool) -> Tensor:
    """Return a view of the positives: the diagonal of each matrix, or of the blocks of one view with the other."""
    if not views:
        return x.diagonal(dim1=-2, dim2=-1)
    n, width = len(x) // 2, len(x)
    return x.as_strided((2, n), (n * width - n, width + 1), n)
