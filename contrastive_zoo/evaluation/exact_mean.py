"""The mean of numbers on all ranks, the same bits for every split and order."""

from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from contrastive_zoo.evaluation.ranking import Floats
from contrastive_zoo.world import World

_UNIT = 2**52
_HALF = 2**26


class ExactMean:
    """Sums and counts of numbers from 0 to 1, by name. A number is rounded to a multiple of 2^-52, and integers are added.

    Examples:
        >>> means = ExactMean(["recall", "map"])
        >>> means.add("recall", np.array([0.5, 1.0]))
        >>> means.over_ranks(World())
        {'recall': 0.75, 'map': nan}
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.sums = dict.fromkeys(names, (0, 0, 0))

    def add(self, name: str, values: Floats) -> None:
        """Add numbers under a name."""
        units = np.rint(values * _UNIT).astype(np.int64)
        high, low, count = self.sums[name]
        self.sums[name] = high + int((units // _HALF).sum()), low + int((units % _HALF).sum()), count + len(units)

    def over_ranks(self, world: World) -> dict[str, float]:
        """Return the means over the numbers of all ranks; NaN where there are none."""
        by_rank = world.exchange([x for sums in self.sums.values() for x in sums])
        totals = [sum(x) for x in zip(*by_rank, strict=True)]
        columns = zip(self.sums, totals[0::3], totals[1::3], totals[2::3], strict=True)
        return {name: _mean(high * _HALF + low, count) for name, high, low, count in columns}


def _mean(units: int, count: int) -> float:
    return float(Fraction(units, count * _UNIT)) if count else float("nan")
