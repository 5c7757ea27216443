"""Random numbers as a function of a key, on the host and on a device, the same for every split over ranks."""

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

# the constants of SplitMix64, as int64
GAMMA, MULTIPLIERS = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def random_keys(seed: int, *coordinates: ArrayLike) -> NDArray[np.uint64]:
    """Return a 64-bit random number for each element of the broadcast coordinates, which are integers.

    They depend on the seed and the coordinates alone, so a rank computes those of its own samples without drawing the
    others'. Sorting samples by their keys shuffles them. Each coordinate is mixed in by the finalizer of SplitMix64.

    Raises:
        ValueError: a negative seed.

    Examples:
        >>> keys = random_keys(0, 3, np.arange(5))
        >>> bool((keys[2:] == random_keys(0, 3, np.arange(2, 5))).all())
        True
        >>> np.argsort(keys)
        array([3, 0, 2, 4, 1])

    Source: Steele, Lea & Flood 2014, Fast splittable pseudorandom number generators, https://doi.org/10.1145/2714064.2660195;
    Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3, https://doi.org/10.1145/2063384.2063405
    """
    if seed < 0:
        raise ValueError(f"random_keys: a seed is at least 0, got {seed}.")
    state = torch.tensor((int(seed) + 2**63) % 2**64 - 2**63, device="cpu")
    for x in coordinates:
        coordinate = torch.from_numpy(np.asarray(x).astype(np.uint64).view(np.int64))
        state = _mixed(state) + _mixed(coordinate + GAMMA)
    keys: NDArray[np.int64] = _mixed(state).numpy()
    return keys.view(np.uint64)


def device_keys(seed: Int[Tensor, ""], count: int) -> Int[Tensor, " count"]:
    """Return ``random_keys(seed, np.arange(count))`` of :mod:`contrastive_zoo.ranks.random_keys`: its bits, as int64."""
    index = torch.arange(count, device=seed.device)
    return _mixed(_mixed(seed) + _mixed(index + GAMMA))


def normal_numbers(seed: Int[Tensor, ""], *shape: int) -> Float[Tensor, "..."]:
    """Return standard normal numbers, √2 erf⁻¹(u) in float32, that depend on the seed alone, not on the model of GPU."""
    steps = device_keys(seed, math.prod(shape)).bitwise_right_shift(64 - _BITS).bitwise_and(2**_BITS - 1)
    uniform = (2 * steps + 1 - 2**_BITS).to(torch.float32) / 2**_BITS  # exact, and never 1 or −1
    return (math.sqrt(2) * uniform.erfinv()).view(shape)


_BITS = 23  # of the uniform numbers: 2 k + 1 of k in 23 bits fills the 24 bits of a float32


def _mixed(x: Tensor) -> Tensor:
    """Return the finalizer of SplitMix64, in int64 that wraps around."""
    x = x + GAMMA
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        x = (x ^ _shifted(x, shift)) * multiplier
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Return x shifted to the right with zeros; torch repeats the sign."""
    return x.bitwise_right_shift(count).bitwise_and(2 ** (64 - count) - 1)
