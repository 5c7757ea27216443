"""The tolerance of a comparison: how much a right result changes when its inputs are rounded differently."""

from collections.abc import Sequence

import torch
from torch import Tensor

REPETITIONS = 5
"""Repetitions with changes of up to half a unit of rounding, from which a tolerance is derived."""

NOISE_FACTOR, ROUNDING_FACTOR = 10.0, 100.0
"""A tolerance is this often the largest difference between repetitions, plus this often the unit of rounding."""


def noisy(x: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
    """Return floating numbers with a change of up to half a unit of rounding of their dtype, or of another one."""
    if not x.is_floating_point():
        return x
    change = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) * 2 - 1
    return (x * (1 + torch.finfo(dtype or x.dtype).eps / 2 * change)).to(x.dtype)


def tolerance(differences: Sequence[float], eps: float) -> float:
    """Return the largest difference of a right result, from those between repetitions and the unit of rounding."""
    return NOISE_FACTOR * max(differences, default=0.0) + ROUNDING_FACTOR * eps
