"""The split of a global batch over ranks, evenly or by weights."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from contrastive_zoo.row_checks import described


@lru_cache(maxsize=1024)  # most batches of an epoch have one size
def rank_bounds(total: int, weights: tuple[float, ...]) -> list[int]:
    """Return W + 1 bounds: rank r takes samples ``bounds[r]`` … ``bounds[r + 1] − 1`` of ``total``.

    ``bounds[r] = ⌈total · (w₀ + … + wᵣ₋₁) / (w₀ + … + w_W₋₁)⌉``, computed with fractions, so that no rounding depends on
    the machine. Each rank's number of samples differs from its exact share by less than 1.

    Examples:
        >>> rank_bounds(5, (1, 1))
        [0, 3, 5]
        >>> rank_bounds(1, (1, 1, 1))
        [0, 1, 1, 1]
        >>> rank_bounds(8, (1, 0.5, 0.5))
        [0, 4, 6, 8]
    """
    sums = [Fraction(0), *accumulate(map(Fraction, weights))]
    return [math.ceil(total * x / sums[-1]) for x in sums]


def weights_problem(weights: Sequence[float] | None, world_size: int) -> str | None:
    """Return why these are not the ranks' weights, in words; None if they are.

    Examples:
        >>> weights_problem((1.0, 0.5), 3)
        'rank_weights are one number per rank, got 2 for W = 3. Pass one weight for each rank, or None for an even split.'
    """
    if weights is None:
        return None
    if not isinstance(weights, (list, tuple)) or not all(isinstance(x, (int, float)) for x in weights):
        return f"rank_weights are a list of one number per rank, got {described(weights)}."
    if len(weights) != world_size:
        return (
            f"rank_weights are one number per rank, got {len(weights)} for W = {world_size}. Pass one weight for each "
            "rank, or None for an even split."
        )
    if not all(math.isfinite(x) and x >= 0 for x in weights) or not any(weights):
        return f"rank_weights are finite, at least 0, and not all 0, got {list(weights)}."
    return None
