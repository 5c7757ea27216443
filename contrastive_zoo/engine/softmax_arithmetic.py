"""Cross-entropies from log-sum-exps, and the exponentials of a tile: shifted by one number, or each row by its own maximum.

``transform`` changes a tile of logits in place, ``add`` accumulates it over a dimension, ``log`` turns accumulators into
log-sum-exps in nats, ``coefficients`` prepares their :func:`statistics` for ``weights``, which computes G of a tile.

Logits of a tile are in bits: log₂ e times those in nats. On a CPU with MKL, ``torch.exp2`` takes a quarter of the time of
``torch.exp``. Where results are denormal, as at a temperature of 0.01, it takes a hundredth.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from contrastive_zoo.engine.implementation import is_dense

LOG2E = math.log2(math.e)


def smooths(label_smoothing: object) -> bool:
    """Return whether label smoothing changes a loss; a tensor may."""
    return not isinstance(label_smoothing, int | float) or label_smoothing > 0


def cross_entropy(positive: Float[Tensor, "*n"], others: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return ``logaddexp(others, positive) - positive``, as softplus(others − positive), in nats.

    With σ the share of the others, the gradient is σ and −σ, as small as the loss. The plain formula has p − 1 in place of
    −σ, of which rounding leaves no digit once σ is below 1e-7. ``others`` may be −inf, which gives 0.
    """
    # from 40 on softplus is the identity in float64, too; torch's threshold of 20 is off by 2e-9
    return F.softplus(others - positive, threshold=40)


def cross_entropy_of_several(positives: Float[Tensor, "k n"], others: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return ``logaddexp(others, positives.logsumexp(0)) - positives.mean(0)``: the mean over k positives of a softmax."""
    if len(positives) == 1:  # a log-sum-exp of one number is that number up to rounding
        return cross_entropy(positives[0], others)
    total = positives.logsumexp(0)
    return cross_entropy(total, others) + (total - positives.mean(0))


def log_sum_exp(x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Return ``x.logsumexp(dim)``; −inf, with gradient 0 instead of NaN, where all terms are −inf."""
    empty = (x == -torch.inf).all(dim, keepdim=True)
    return x.masked_fill(empty, 0).logsumexp(dim).masked_fill(empty.squeeze(dim), -torch.inf)


def log_sum_of_inversions(s: Float[Tensor, " N"], y: Shaped[Tensor, " N"]) -> Float[Tensor, ""]:
    """Return log(1 + Σ_{i, j: y_i < y_j} exp(s_i − s_j)), the penalty of pairs in the wrong order."""
    if is_dense():
        terms = (s[:, None] - s).masked_fill(y[:, None] >= y, -torch.inf).flatten()
    else:
        y, order = y.sort(stable=True)
        s = s[order]
        sums = torch.cat([(-s.flip(0)).logcumsumexp(0).flip(0), s.new_full((1,), -torch.inf)])
        terms = s + sums[torch.searchsorted(y, y, right=True)]  # over the pairs with a strictly larger score
    return torch.cat([s.new_zeros(1), terms]).logsumexp(0)


def statistics(total: Tensor, gradient: Tensor) -> Tensor:
    """Join sums, one or several numbers each, and the gradients of their logarithms."""
    return torch.column_stack([total, gradient.to(total.dtype)])


@dataclass(frozen=True)
class ShiftedSums:
    """Accumulate sums of 2^(s − u), with one exponential for rows, columns and both passes.

    G = 2^(S − u) · (g_i / r_i + h_j / c_j) with the sums r and c, whose logarithms have an error of 4e-6 in float32.
    """

    u: float

    def empty(self, count: int, like: Tensor) -> Tensor:
        return like.new_zeros(count)

    def transform(self, s: Tensor, *, diagonal: bool) -> None:
        (s.sub_(self.u) if self.u else s).exp2_()

    def add(self, total: Tensor, e: Tensor, dim: int) -> None:
        total += e.sum(dim)

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        return functools.reduce(torch.add, parts)

    def log(self, total: Tensor) -> Tensor:
        return (total.log2() + self.u) / LOG2E

    def coefficients(self, statistics: Tensor) -> Tensor:
        total, gradient = statistics.unbind(1)
        return (gradient / total).masked_fill_(total == 0, 0)

    def weights(self, e: Tensor, rows: Tensor, columns: Tensor | None, out: Tensor) -> Tensor:
        if columns is None:
            return torch.mul(e, rows[:, None], out=out)
        return torch.add(rows[:, None], columns, out=out).mul_(e)


class ExactSums:
    """Accumulate log-sum-exps of s, with a maximum for every row and column of a tile."""

    def empty(self, count: int, like: Tensor) -> Tensor:
        return like.new_full((count,), -torch.inf)

    def transform(self, s: Tensor, *, diagonal: bool) -> None:
        if diagonal:  # s_ij and s_ji may differ in their last bit: of large logits 2^(s_ij − c_j) may then exceed 1
            s.triu_().add_(s.T.clone().tril_(-1))

    def add(self, total: Tensor, s: Tensor, dim: int) -> None:
        top = s.amax(dim, keepdim=True)
        top.masked_fill_(top.isinf(), 0)
        sums = (s - top).exp2_().sum(dim)
        torch.logaddexp2(total, sums.log2_().add_(top.squeeze(dim)), out=total)

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        return functools.reduce(torch.logaddexp2, parts)

    def log(self, total: Tensor) -> Tensor:
        return total / LOG2E

    def coefficients(self, statistics: Tensor) -> Tensor:
        log_sum_exp, gradient = statistics.unbind(1)
        # 2^(s − inf) = 0 for an empty sum, where −inf would give NaN
        return torch.stack([log_sum_exp.masked_fill(log_sum_exp == -torch.inf, torch.inf), gradient], 1)

    def weights(self, s: Tensor, rows: Tensor, columns: Tensor | None, out: Tensor) -> Tensor:
        torch.sub(s, rows[:, :1], out=out).exp2_().mul_(rows[:, 1:])
        return out if columns is None else out.addcmul_((s - columns[:, 0]).exp2_(), columns[:, 1])


def shift_window(dtype: torch.dtype) -> tuple[float, float]:
    """Return how far below u a log-sum-exp may lie without loss, and how far above u a logit without overflow, in nats.

    In float32 a term underflows 87 below u: where the log-sum-exp is 49 below it, such a term is e⁻³⁸ of the sum.
    """
    span = math.log(torch.finfo(dtype).max)
    return 0.55 * span, 0.6 * span
