"""Compute InfoNCE of a small batch on one process, value and gradients at once: there each operation's overhead counts.

:mod:`contrastive_zoo.engine.softmax` computes the same values for large batches, for batches that are split over ranks,
for temperatures so low that one exponential overflows, and where each anchor's loss is returned.
"""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo import devices
from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.dense_mode import is_dense, is_small_batch
from contrastive_zoo.engine.derivatives import differentiable_once
from contrastive_zoo.engine.precision import at_least_float32, rounded, without_autocast
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.unit_rows import MIN_NORM
from contrastive_zoo.world import World

Comparison = Literal["rows", "rows and columns", "views"]
"""The softmaxes of the loss: of each row over the columns; also of each column over the rows; or of all rows of two
views over each other."""

_MIN_TEMPERATURE = 1 / 40
"""The exponentials of unit rows' logits, up to exp(1/t), and their sums are finite in float32 from here on."""


def uses_small_batch_path(
    a: Tensor, temperature: float | Tensor, comparison: Comparison, reduction: Reduction, world: World
) -> bool:
    """Return whether :func:`small_batch_info_nce` computes a loss of unit rows, with as many rows as ``a`` on each side."""
    similarities = (len(a) * (2 if comparison == "views" else 1)) ** 2
    if world.size > 1 or is_dense() or not len(a) or not is_small_batch(similarities // 4) or reduction == "none":
        return False
    if not devices.on_cpu(a):  # it reads the temperature and the norms
        return False
    return (temperature.item() if isinstance(temperature, Tensor) else temperature) >= _MIN_TEMPERATURE


def small_batch_info_nce(
    a: Float[Tensor, "n d"],
    b: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor,
    comparison: Comparison,
    reduction: Reduction,
    own: slice | None = None,
) -> Float[Tensor, ""]:
    """Return ``logsumexp(S, 1) - S.diagonal()`` with S = unit(a) unit(b)ᵀ / t, its mean with that of Sᵀ, or NT-Xent.

    Args:
        a: row i belongs to row i of b.
        b: the other tower, or the other view.
        temperature: t, at least 1/40.
        comparison: the softmaxes of the loss.
        reduction: mean or sum over rows; over the rows of both views for ``"views"``.
        own: the rows of either side that get a gradient, others get zeros: a rank that computes the loss of all ranks' rows
            needs that of its own. None: all.

    Returns:
        Nats.

    Examples:
        >>> settings = {"temperature": 1.0, "reduction": "sum"}
        >>> small_batch_info_nce(torch.eye(2), torch.eye(2), comparison="rows", **settings)   # 2 (log(e + 1) − 1)
        tensor(0.6265)
        >>> small_batch_info_nce(torch.eye(2), torch.eye(2), comparison="views", **settings)   # 4 (log(e + 2) − 1)
        tensor(2.2058)
    """
    dtype, a, b = a.dtype, at_least_float32(a), at_least_float32(b)
    # the value of a LearnableTemperature carries its parameter θ, t = exp(−θ): differentiating by θ saves autograd's steps
    log_scale = getattr(temperature, "log_scale", None)
    parameter = torch.as_tensor(temperature if log_scale is None else log_scale, dtype=a.dtype, device=a.device)
    # 1 / t is rounded to the digits of t, as in logit_scale
    t = 1 / temperature.detach().reciprocal().item() if isinstance(temperature, Tensor) else temperature
    settings = _Settings(
        t, t**2 if log_scale is None else -t, comparison, reduction == "mean", dtype, own, torch.is_grad_enabled()
    )
    return _SmallBatchInfoNCE.apply(a, b, parameter, settings)


class _Settings(NamedTuple):
    """How a loss is computed, besides the parameter of its temperature.

    ``parameter`` is t or the θ that t is made of; the derivative of S by it is −S t / rate. ``learns`` says whether
    gradients may be needed: a leaf has ``requires_grad`` under ``no_grad``, too.
    """

    t: float
    rate: float
    comparison: Comparison
    mean: bool
    dtype: torch.dtype
    own: slice | None
    learns: bool


class _SmallBatchInfoNCE(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, parameter: Tensor, settings: _Settings) -> Tensor:
        """Compute the loss and its gradients."""
        t, rate, comparison, mean, dtype, own, learns = settings
        keeps_logits = own is not None and learns and ctx.needs_input_grad[2]
        n, views, sides = a.shape[0], comparison == "views", 2 if comparison == "rows and columns" else 1
        rows = torch.cat([a, b])
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        has_zero_row = norm.amin().item() < MIN_NORM
        z = rows.div_(norm.clamp_(min=MIN_NORM) if has_zero_row else norm)
        factors = rounded(z, dtype)
        q, k = (factors, factors) if views else factors.chunk(2)
        logits = torch.mm(q / t, k.T)
        e = logits.exp() if keeps_logits else logits.exp_()
        positive = e.diagonal(n if views else 0).clone()
        _diagonals(e, views).zero_()  # the sums leave the positive out, so that it cancels nowhere
        others = torch.stack([e.sum(1), e.sum(0)]) if sides == 2 else e.sum(1).view(-1, n)  # [1 or 2, n]
        losses = (others / positive).log1p_()
        if learns and any(ctx.needs_input_grad):
            count = losses.numel() if mean else sides  # the loss is a mean of so many softmaxes, or their sum by it
            w = _weights(e, positive, others, comparison)
            dz = _gradient_of_rows(w, q, k, own, comparison)
            radial = torch.linalg.vecdot(z, dz).unsqueeze(1)
            if ctx.needs_input_grad[2]:  # each pair appears in two rows
                of_all_rows = radial if factors is z else torch.linalg.vecdot(factors, dz)
                twice = (1 if views else 2) * t * logits.mul_(w).sum() if keeps_logits else of_all_rows.sum()
                ctx.dparameter = twice.item() / (-2 * rate * count)
            if has_zero_row:
                radial = radial.where(norm > MIN_NORM, 0)
            drows = dz.addcmul_(z, radial, value=-1).div_(norm * (t * count))
            ctx.save_for_backward(a, b, parameter, drows)
        return losses.mean() if mean else (losses.sum(dtype=torch.float64) / sides).to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, parameter, drows = ctx.saved_tensors
        factor = g.detach()
        gradients = *(drows * factor).chunk(2), factor * ctx.dparameter if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled():
            gradients = tuple(differentiable_once(x, a, b, parameter) for x in gradients)
        return *gradients, None


def _diagonals(x: Tensor, views: bool) -> Tensor:
    """Return a view of the entries of pairs, and with two views of rows with themselves."""
    n, width = len(x) // 2, len(x)
    return x.as_strided((2, 2, n), (n * width, n, width + 1)) if views else x.diagonal()


def _weights(e: Tensor, positive: Tensor, others: Tensor, comparison: Comparison) -> Tensor:
    """Return the derivative of Σ losses by the logits, for two views by both logits of a pair; e is overwritten.

    ``others`` are the sums without the positive, which e no longer holds. The weight of a positive is minus the sum of
    the others' weights.
    """
    n, inverse = len(e), (others + positive).reciprocal_()
    of_positives = (inverse * others).sum(0)
    if comparison == "views":
        flat = inverse.view(-1)
        w = torch.add(flat[:, None], flat).mul_(e)
        w.as_strided((2, n // 2), (n * n // 2 - n // 2, n + 1), n // 2).sub_(of_positives)
        return w
    of_rows = inverse[0].unsqueeze(1)
    w = e.mul_(of_rows if comparison == "rows" else of_rows + inverse[1])
    w.diagonal().sub_(of_positives)
    return w


def _gradient_of_rows(w: Tensor, q: Tensor, k: Tensor, own: slice | None, comparison: Comparison) -> Tensor:
    """Return the gradient of Σ losses, times t, with respect to the unit rows of both sides; zeros but for the own rows."""
    views = comparison == "views"
    if views and own is None:
        return w @ q
    dz = (q.new_empty if own is None else q.new_zeros)(len(q) * (1 if views else 2), q.shape[1])
    weights, others = (w.chunk(2), (q, q)) if views else ((w, w.T), (k, q))
    for dx, of_side, other in zip(dz.chunk(2), weights, others, strict=True):
        if own is None:
            torch.mm(of_side, other, out=dx)
        else:
            torch.mm(of_side[own], other, out=dx[own])
    return dz
