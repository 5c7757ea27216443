"""Random numbers that are a function of their coordinates: equal on every rank, for any split, in any version of NumPy."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

GAMMA, MULTIPLIERS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The constants of SplitMix64."""

_STEP, _MIX1, _MIX2 = (np.uint64(x) for x in (GAMMA, *MULTIPLIERS))


def random_keys(seed: int, *coordinates: ArrayLike) -> NDArray[np.uint64]:
    """Return a 64-bit random number for each element of the broadcast coordinates, which are integers.

    A generator's numbers depend on how many were drawn before; these depend on the seed and the coordinates alone, so a
    rank computes those of its own samples without drawing the others'. Sorting samples by their keys shuffles them. Each
    coordinate is mixed in by the finalizer of SplitMix64.

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
    state = np.asarray(int(seed) % 2**64, np.uint64)
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        for x in coordinates:
            state = _mixed(state) + _mixed(np.asarray(x).astype(np.uint64) + _STEP)
        return _mixed(state)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _STEP
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))
