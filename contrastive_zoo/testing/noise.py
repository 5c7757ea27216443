"""The tolerance of a comparison: how much a right result changes when its inputs are rounded differently.

A check and an audit repeat another number of times, but draw the same changes, and multiply by the same factors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NOISE_FACTOR, ROUNDING_FACTOR = 10.0, 100.0
"""A tolerance is this often the largest difference between repetitions, plus this often the unit of rounding."""


def noisy(x: Tensor, generator: torch.Generator, eps: float) -> Tensor:
    """Return floating numbers with a change of up to half a unit of rounding."""
    if not x.is_floating_point():
        return x
    change = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) * 2 - 1
    return (x * (1 + eps / 2 * change)).to(x.dtype)


def tolerance(
    differences: Sequence[float], eps: float, *, noise_factor: float = NOISE_FACTOR, floor: float = 0.0
) -> float:
    """Return the largest difference of a right result, from those between repetitions and the unit of rounding."""
    return max(noise_factor * max(differences, default=0.0), floor) + ROUNDING_FACTOR * eps
