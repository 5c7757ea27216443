"""Up to how many embeddings operations on the whole matrix are quicker than Triton kernels, by measured times."""

import math
from collections.abc import Mapping

Times = Mapping[int, tuple[float, float]]
"""Of one loss: by embeddings of a side, NT-Xent's of both views together, milliseconds of kernels and of the matrix."""

H100: Mapping[str, Times] = {
    "CLIP": {1024: (1.47, 1.05), 2048: (2.07, 0.80), 16_384: (3.76, 12.7)},
    "SigLIP": {1024: (1.41, 0.77), 2048: (1.44, 0.59), 16_384: (2.53, 10.3)},
    "NT-Xent": {1024: (1.88, 0.79), 2048: (1.44, 1.10), 16_384: (3.30, 6.41)},
}
"""A step in bfloat16, d = 768; ``python benchmarks/gpu.py --crossover`` measures such a table.
``LARGEST_MATRIX`` of ``engine/implementation.py`` follows from it."""


def largest_matrix(by_loss: Mapping[str, Times]) -> int:
    """Return the number of embeddings of a side up to which no loss's kernels are quicker."""
    return min(map(_crossing, by_loss.values()))


def _crossing(times: Times) -> int:
    """Return where the times of the two cross, taken as straight between measured sizes, on logarithmic axes."""
    gains = sorted((n, math.log(kernels / matrix)) for n, (kernels, matrix) in times.items())
    last = max((index for index, (_, gain) in enumerate(gains) if gain > 0), default=-1)
    if last == -1:  # kernels are quicker at every measured size
        return 0
    if last == len(gains) - 1:
        return gains[last][0]
    (n, above), (m, below) = gains[last : last + 2]
    return int(n * (m / n) ** (above / (above - below)))
