"""Compute a loss of a small batch of unit embeddings, value and gradients at once: each operation's overhead counts."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Reduction
from contrastive_zoo.engine.precision import MIN_NORM, matmul_rounding, sum_dtype
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy
from contrastive_zoo.ranks import devices
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
    parameter, scale, _ = learnt = _learnt(temperature)
    keeps_logits = batch.local_slice is not None and parameter is not None
    terms: Callable[[Tensor], Terms] = partial(softmaxes, comparison=comparison)
    if isinstance(scale, float) and scale <= LARGEST_SCALE and devices.on_cpu(a):  # where an exponential takes time
        terms = partial(softmaxes_by_one_exponential, comparison=comparison, overwrite=not keeps_logits)
    sides, views = 2 if comparison == "rows and columns" else 1, comparison == "views"
    return _computed(batch, a, b, learnt, None, reduction, terms, views=views, sides=sides)


def small_batch_siglip(
    batch: Batch, a: Tensor, b: Tensor, *, temperature: float | Tensor, bias: float | Tensor, reduction: Reduction
) -> Float[Tensor, ""]:
    """Return ``softplus(-z * (S + bias)).sum(1)``, z = ±1, 1 on the diagonal, S of :func:`small_batch_info_nce`."""
    return _computed(batch, a, b, _learnt(temperature), bias, reduction, sigmoids)


Learnt = tuple[Tensor | None, float | Tensor, float | Tensor]


def _computed(
    batch: Batch, a: Tensor, b: Tensor, learnt: Learnt, bias: float | Tensor | None, reduction: Reduction,
    terms: Callable[[Tensor], Terms], *, views: bool = False, sides: int = 1,
) -> Tensor:  # fmt: skip
    """Return the mean over rows of the losses that ``terms`` returns, or their sum over ``sides`` directions."""
    how = terms, views, sides, reduction == "mean", batch.local_slice, torch.is_grad_enabled()
    arguments = a, b, learnt[0], bias, *learnt[1:], *how
    if devices.on_cpu(a) and not torch.is_autocast_enabled("cpu"):  # a context takes as long as a matmul here
        return _SmallBatch.apply(*arguments)
    with torch.autocast(a.device.type, enabled=False), matmul_rounding(a.dtype, a.device.type):
        return _SmallBatch.apply(*arguments)


def _learnt(temperature: float | Tensor) -> Learnt:
    """Return the parameter of the scale 1/t, the scale, and its derivative by the parameter.

    That of a LearnableTemperature is θ, t = exp(−θ), which saves autograd's steps.
    """
    if not isinstance(temperature, Tensor):
        return None, 1 / temperature, 0.0
    scale = _read_on_cpu((temperature if temperature.dtype.itemsize > 2 else temperature.float()).detach().reciprocal())
    log_scale = getattr(temperature, "log_scale", None)
    return (temperature, scale, -scale * scale) if log_scale is None else (log_scale, scale, scale)


def _read_on_cpu(x: Tensor) -> float | Tensor:
    """Return a number as Python's on a CPU, where its operations are faster, and x itself elsewhere."""
    return x.item() if devices.on_cpu(x) else x


class _SmallBatch(Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, parameter: Tensor | None, bias: float | Tensor | None, scale: float | Tensor,
        slope: float | Tensor, terms: Callable[[Tensor], Terms], views: bool, sides: int, mean: bool,
        local_slice: slice | None, learns: bool,
    ) -> Tensor:  # fmt: skip
        """Compute a loss; ``slope`` is the derivative of the scale by the parameter, and a leaf may learn under no_grad."""
        rows = torch.cat([a, b])
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        # or may have: an accelerator is not read
        has_zero_row = not devices.on_cpu(norm) or norm.amin().item() < MIN_NORM
        divisor = norm.clamp(min=MIN_NORM) if has_zero_row else norm
        # a matmul of 16 bits would round unit embeddings: it takes them as they came
        is_narrow = a.dtype.itemsize < 4 and not devices.on_cpu(a)
        z = rows / divisor if is_narrow else rows.div_(divisor)
        q, k = (z, z) if views else z.chunk(2)
        if is_narrow:
            (x, y), (of_x, of_y) = ((rows, rows), (divisor, divisor)) if views else (rows.chunk(2), divisor.chunk(2))
            logits = _scaled_products(x, y, scale).div_(of_x).div_(of_y.T)
        else:
            logits = _scaled_products(q, k, scale)
        losses, weights = terms(logits if bias is None else logits + bias)
        drows = None
        if learns and any(ctx.needs_input_grad):
            w, count = weights(), losses.numel() if mean else sides
            dz = _gradient_of_rows(w, q, k, local_slice, views, count)
            radial = (z * dz).sum(1, keepdim=True)
            if ctx.needs_input_grad[2] and local_slice is None:
                # the rows of a side have each pair once, those of two views twice
                of_pairs = (radial if views else radial[: len(a)]).sum()
                ctx.dparameter = _read_on_cpu(of_pairs) * (slope / 2 if views else slope)
            elif ctx.needs_input_grad[2]:
                ctx.dparameter = _read_on_cpu((w * logits).sum()) * (slope / scale / (count * (2 if views else 1)))
            if ctx.needs_input_grad[3]:
                ctx.dbias = _read_on_cpu(w.sum()) / count
            if has_zero_row:
                radial.masked_fill_(norm < MIN_NORM, 0)
            drows = dz.addcmul_(z, radial, value=-1).div_(divisor / scale)
        ctx.save_for_backward(a, b, parameter, bias if isinstance(bias, Tensor) else None, drows)
        return losses.mean() if mean else (losses.sum(dtype=sum_dtype(losses)) / sides).to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, drows = ctx.saved_tensors
        factor = g.detach()
        of_rows = (drows * factor).to(inputs[0].dtype).chunk(2)
        dparameter = factor * ctx.dparameter if ctx.needs_input_grad[2] else None
        gradients = (*of_rows, dparameter, factor * ctx.dbias if ctx.needs_input_grad[3] else None)
        if torch.is_grad_enabled():
            inputs = [x for x in inputs if x is not None]
            gradients = tuple(differentiable_once(x, *inputs) for x in gradients)
        return *gradients, *[None] * 8


def _scaled_products(q: Tensor, k: Tensor, scale: float | Tensor) -> Tensor:
    if isinstance(scale, Tensor):
        return torch.mm(q, k.T).mul_(scale)
    return q.new_empty(len(q), len(k)).addmm_(q, k.T, beta=0, alpha=scale)


def _gradient_of_rows(w: Tensor, q: Tensor, k: Tensor, local_slice: slice | None, views: bool, count: int) -> Tensor:
    """Return the gradient of Σ losses / count, over the scale, by the unit rows of both sides; zeros but for own rows."""
    dz = (q.new_empty if local_slice is None else q.new_zeros)(len(q) * (1 if views else 2), q.shape[1])
    if views and local_slice is None:
        return dz.addmm_(w, q, beta=0, alpha=1 / count)
    weights, others = (w.chunk(2), (q, q)) if views else ((w, w.T), (k, q))
    for dx, of_side, other in zip(dz.chunk(2), weights, others, strict=True):
        if local_slice is not None:
            dx, of_side = dx[local_slice], of_side[local_slice]
        dx.addmm_(of_side, other, beta=0, alpha=1 / count)
    return dz


def softmaxes_by_one_exponential(logits: Tensor, comparison: Comparison, *, overwrite: bool) -> Terms:
    """Return cross-entropies of logits of at most 40: one exponential serves rows and columns, and both passes."""
    n, views = len(logits), comparison == "views"
    e = logits.exp_() if overwrite else logits.exp()
    positive = e.diagonal(n // 2 if views else 0).clone()
    diagonal = e.as_strided((2, 2, n // 2), (n // 2 * n, n // 2, n + 1)) if views else e.diagonal()
    diagonal.zero_()  # the sums leave the positive out, so that it cancels nowhere
    others = torch.stack([e.sum(1), e.sum(0)]) if comparison == "rows and columns" else e.sum(1).view(-1, len(positive))

    def weights() -> Tensor:
        inverse = (others + positive).reciprocal_()
        of_positives = (inverse * others).sum(0)  # minus the sum of the others' weights
        if views:
            flat = inverse.view(-1)
            w = torch.add(flat[:, None], flat).mul_(e)
        else:
            of_rows = inverse[0].unsqueeze(1)
            w = e.mul_(of_rows if comparison == "rows" else of_rows + inverse[1])
        _of_pairs(w, views=views).sub_(of_positives)
        return w

    return (others / positive).log1p_(), weights


def softmaxes(logits: Tensor, comparison: Comparison) -> Terms:
    """Return cross-entropies of logits of any size, in few operations. Of two views' logits the diagonal is overwritten."""
    views, both = comparison == "views", comparison == "rows and columns"
    if views:  # a finite number, whose product with the weight 0 is 0
        logits.fill_diagonal_(torch.finfo(logits.dtype).min)
    shares = torch.log_softmax(torch.stack([logits, logits.T]) if both else logits, -1)
    w = shares.exp()
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
    n, width = len(x) // 2, len(x)
    return x.as_strided((2, n), (n * width - n, width + 1), n) if views else x.diagonal(dim1=-2, dim2=-1)
