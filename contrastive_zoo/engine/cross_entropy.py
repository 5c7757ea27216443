"""Compute cross-entropies from the positive's logit and the log-sum-exp of the others, so that nothing cancels."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from contrastive_zoo.engine.implementation import is_dense


def cross_entropy(positive: Float[Tensor, "*n"], others: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return ``logaddexp(others, positive) - positive``, as softplus(others − positive).

    With σ the share of the others in the softmax, the gradient is σ by ``others`` and −σ by ``positive``: as small as
    the loss, with its relative error. The plain formula has p − 1 in place of −σ, of which rounding leaves no digit
    once σ is below 1e-7.

    Args:
        positive: the logits of positives, or the log-sum-exps of several; finite.
        others: log-sum-exps of the other candidates; −inf where there are none, which gives 0.

    Returns:
        Nats.

    Examples:
        >>> cross_entropy(torch.tensor([60.0, 0.0]), torch.tensor([20.0, -torch.inf]))   # e⁻⁴⁰, where 60 − 60 gives 0
        tensor([4.2484e-18, 0.0000e+00])
    """
    # from 40 on softplus is the identity in float64, too; torch's threshold of 20 is off by 2e-9
    return F.softplus(others - positive, threshold=40)


def cross_entropy_of_several(positives: Float[Tensor, "k n"], others: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return ``logaddexp(others, positives.logsumexp(0)) - positives.mean(0)``: the mean over k positives of a softmax.

    Args:
        positives: the logits of k ≥ 1 positives of each anchor.
        others: log-sum-exps of the candidates that are no positives.

    Returns:
        Nats.

    Examples:
        >>> cross_entropy_of_several(torch.zeros(2, 1), torch.zeros(1))   # log 3
        tensor([1.0986])
    """
    if len(positives) == 1:  # a log-sum-exp of one number is that number up to rounding
        return cross_entropy(positives[0], others)
    total = positives.logsumexp(0)
    return cross_entropy(total, others) + (total - positives.mean(0))


def log_sum_exp(x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Return ``x.logsumexp(dim)``; −inf, with gradient 0 instead of NaN, where all terms are −inf.

    Examples:
        >>> x = torch.full((2, 1), -torch.inf, requires_grad=True)
        >>> torch.autograd.grad(log_sum_exp(x, 0).sum(), x)[0].flatten()
        tensor([0., 0.])
    """
    empty = (x == -torch.inf).all(dim, keepdim=True)
    return x.masked_fill(empty, 0).logsumexp(dim).masked_fill(empty.squeeze(dim), -torch.inf)


def log_sum_of_inversions(s: Float[Tensor, " N"], y: Shaped[Tensor, " N"]) -> Float[Tensor, ""]:
    """Return log(1 + Σ_{i, j: y_i < y_j} exp(s_i − s_j)), the penalty of pairs in the wrong order.

    Examples:
        >>> log_sum_of_inversions(torch.zeros(2), torch.tensor([0.2, 0.9]))   # log 2
        tensor(0.6931)
    """
    if is_dense():
        terms = (s[:, None] - s).masked_fill(y[:, None] >= y, -torch.inf).flatten()
    else:
        y, order = y.sort(stable=True)
        s = s[order]
        sums = torch.cat([(-s.flip(0)).logcumsumexp(0).flip(0), s.new_full((1,), -torch.inf)])
        terms = s + sums[torch.searchsorted(y, y, right=True)]  # over the pairs with a strictly larger score
    return torch.cat([s.new_zeros(1), terms]).logsumexp(0)
