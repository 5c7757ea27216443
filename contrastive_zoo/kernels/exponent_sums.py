"""Sums of exponentials as two numbers each, mantissa · 2^exponent, between kernels, ranks and torch."""

import math

import torch
from torch import Tensor

from contrastive_zoo.kernels.softmax_tiles import NOTHING

EMPTY = 2.0**20
"""The exponent by which weights of an empty sum are 0: large, and unlike infinity its differences are numbers."""


class ExponentSums:
    """Accumulate sums of exponentials [n, 2], integer exponents and mantissas, a view of the [2, n] that kernels write.

    The methods are those of :mod:`contrastive_zoo.engine.softmax_arithmetic`, but for what kernels do themselves.

    Examples:
        >>> sums = ExponentSums()
        >>> total = sums.merge(torch.tensor([[2.0, 0.75]]), torch.tensor([[3.0, 0.5]]))   # 3 + 4
        >>> total, sums.log(total).exp()
        (tensor([[3.0000, 0.8750]]), tensor([7.0000], dtype=torch.float64))
    """

    def empty(self, count: int, like: Tensor) -> Tensor:
        total = like.new_zeros(2, count)
        total[0] = NOTHING.value
        return total.T

    def merge(self, total: Tensor, part: Tensor) -> Tensor:
        exponent = torch.maximum(total[:, 0], part[:, 0])
        first, second = (x[:, 1] * torch.exp2(x[:, 0] - exponent) for x in (total, part))
        return torch.stack([exponent, first + second], 1)

    def log(self, total: Tensor) -> Tensor:
        """Return log-sum-exps in nats, in float64: at t = 0.01 float32 would round them, and a small loss, by 4e-6."""
        exponent, mantissa = total.double().unbind(1)
        return (exponent + mantissa.log2()) * math.log(2)

    def statistics(self, total: Tensor, gradient: Tensor) -> Tensor:
        return torch.cat([total, gradient.to(total.dtype)[:, None]], 1)

    def coefficients(self, statistics: Tensor, unit: Tensor) -> Tensor:
        """Return exponents and factors, [2, n]: G = factor · 2^(logit in bits − exponent), in the given unit."""
        exponent, mantissa, gradient = statistics.unbind(1)
        fraction, more = torch.frexp(mantissa)
        empty = mantissa == 0
        factor = (gradient / (fraction * unit)).masked_fill(empty, 0)
        return torch.stack([(exponent + more).masked_fill(empty, EMPTY), factor])
