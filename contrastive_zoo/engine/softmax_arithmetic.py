"""Sum exponentials of a tile of logits in one of two ways: shifted by one number, or each with its own maximum.

Both classes have the same methods. ``empty`` is the accumulator before the first tile, ``transform`` changes a tile of
logits in place, ``add`` accumulates the tile over a dimension, ``merge`` joins two accumulators, ``log`` turns an
accumulator into log-sum-exps. For the backward pass ``statistics`` joins accumulators and the gradients of log-sum-exps,
[n, 2], ``coefficients`` prepares them, and from these ``weights`` computes G of a tile.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class _Sums:
    def statistics(self, total: Tensor, gradient: Tensor) -> Tensor:
        return torch.stack([total, gradient.to(total.dtype)], 1)


@dataclass(frozen=True)
class ShiftedSums(_Sums):
    """Accumulate sums of exp(s − u), with one exponential for rows, columns and both passes.

    G = exp(S − u) · (g_i / r_i + h_j / c_j) with the sums r and c. Their logarithms have an error of 4e-6 in float32
    where logits are about 64; the weights of a row, of which they would be the divisor, would not add up to g_i.
    """

    u: float

    @classmethod
    def for_logits_up_to(cls, largest: float, dtype: torch.dtype) -> "ShiftedSums":
        """Choose u so that neither a logit up to ``largest`` nor a sum of many overflows."""
        return cls(max(0.0, largest - shift_window(dtype)[1]))

    def empty(self, count: int, like: Tensor) -> Tensor:
        return like.new_zeros(count)

    def transform(self, s: Tensor) -> None:
        (s.sub_(self.u) if self.u else s).exp_()

    def add(self, total: Tensor, e: Tensor, dim: int) -> None:
        total += e.sum(dim)

    def merge(self, total: Tensor, part: Tensor) -> Tensor:
        return total + part

    def log(self, total: Tensor) -> Tensor:
        return total.log() + self.u

    def coefficients(self, statistics: Tensor) -> Tensor:
        total, gradient = statistics.unbind(1)
        return (gradient / total).masked_fill_(total == 0, 0)

    def weights(self, e: Tensor, rows: Tensor, columns: Tensor | None, out: Tensor) -> Tensor:
        if columns is None:
            return torch.mul(e, rows[:, None], out=out)
        return torch.add(rows[:, None], columns, out=out).mul_(e)


class ExactSums(_Sums):
    """Accumulate log-sum-exps of s, with a maximum for every row and column of a tile."""

    def empty(self, count: int, like: Tensor) -> Tensor:
        return like.new_full((count,), -torch.inf)

    def transform(self, s: Tensor) -> None:
        pass

    def add(self, total: Tensor, s: Tensor, dim: int) -> None:
        torch.logaddexp(total, s.logsumexp(dim), out=total)

    def merge(self, total: Tensor, part: Tensor) -> Tensor:
        return torch.logaddexp(total, part)

    def log(self, total: Tensor) -> Tensor:
        return total

    def coefficients(self, statistics: Tensor) -> Tensor:
        log_sum_exp, gradient = statistics.unbind(1)
        # exp(s − inf) = 0 for an empty sum, where −inf would give NaN
        return torch.stack([log_sum_exp.masked_fill(log_sum_exp == -torch.inf, torch.inf), gradient], 1)

    def weights(self, s: Tensor, rows: Tensor, columns: Tensor | None, out: Tensor) -> Tensor:
        torch.sub(s, rows[:, :1], out=out).exp_().mul_(rows[:, 1:])
        return out if columns is None else out.addcmul_((s - columns[:, 0]).exp_(), columns[:, 1])


Arithmetic = ShiftedSums | ExactSums


def shift_window(dtype: torch.dtype) -> tuple[float, float]:
    """Return how far below u a log-sum-exp may lie without loss, and how far above u a logit without overflow, in nats.

    In float32 a term underflows 87 below u: where the log-sum-exp is 49 below it, such a term is e⁻³⁸ of the sum. At the
    temperature 0.01 u is 47, so that the log-sum-exp of a solved batch is above u − 49 even where no other row is near.
    """
    span = math.log(torch.finfo(dtype).max)
    return 0.55 * span, 0.6 * span
