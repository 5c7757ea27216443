"""Normal random numbers computed on a device from a seed that is there, so that the host reads nothing."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.random_keys import GAMMA, MULTIPLIERS


def device_keys(seed: Int[Tensor, ""], count: int) -> Int[Tensor, " count"]:
    """Return ``random_keys(seed, np.arange(count))`` of :mod:`contrastive_zoo.random_keys`: its bits, as int64.

    Examples:
        >>> import numpy as np
        >>> from contrastive_zoo.random_keys import random_keys
        >>> device_keys(torch.tensor(3), 2).tolist() == random_keys(3, np.arange(2)).view(np.int64).tolist()
        True
    """
    index = torch.arange(count, device=seed.device)
    return _mixed_on_device(_mixed_on_device(seed) + _mixed_on_device(index + _signed(GAMMA)))


def normal_numbers(seed: Int[Tensor, ""], *shape: int) -> Float[Tensor, "..."]:
    """Return standard normal numbers in float32 that are a function of the seed, on its device.

    A generator of the device would need its seed on the host, and draws other numbers on another model of GPU. These are
    √2 erf⁻¹(u) for u uniform in 2²³ steps, so at most 5.3 in size.

    Args:
        seed: an integer on the device.
        shape: of the result.

    Examples:
        >>> normal_numbers(torch.tensor(0), 2, 2)
        tensor([[...]])
    """
    steps = device_keys(seed, math.prod(shape)).bitwise_right_shift(64 - _BITS).bitwise_and(2**_BITS - 1)
    uniform = (2 * steps + 1 - 2**_BITS).to(torch.float32) / 2**_BITS  # exact, and never 1 or −1
    return (math.sqrt(2) * uniform.erfinv()).view(shape)


_BITS = 23
"""Of the uniform numbers: 2 k + 1 of k in 23 bits fills the 24 bits of a float32."""


def _mixed_on_device(x: Tensor) -> Tensor:
    """Return the finalizer of SplitMix64, in int64 that wraps around."""
    x = x + _signed(GAMMA)
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        x = (x ^ _shifted(x, shift)) * _signed(multiplier)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Return x shifted to the right with zeros; torch repeats the sign."""
    return x.bitwise_right_shift(count).bitwise_and(2 ** (64 - count) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
