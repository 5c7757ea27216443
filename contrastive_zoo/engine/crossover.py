"""Up to how many embeddings operations on the whole matrix are quicker than Triton kernels, by measured times.

``kernel_times.json`` holds the milliseconds of a step by loss and by embeddings of a side, NT-Xent's of both views together;
null where a size is not measured. ``python benchmarks/crossover.py`` measures them and writes the file.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("kernel_times.json")

Times = Mapping[str, Mapping[str, float | None]]
"""Of one loss: by size, milliseconds of ``"kernels"`` and of the ``"matrix"``."""


def largest_matrix(by_loss: Mapping[str, Times]) -> int:
    """Return the number of embeddings of a side up to which no loss's kernels are quicker."""
    return min(map(_crossing, by_loss.values()))


def _crossing(times: Times) -> int:
    """Return where the times of the two cross, taken as straight between measured sizes, on logarithmic axes."""
    measured = [(int(size), x["kernels"], x["matrix"]) for size, x in times.items()]
    gains = sorted((n, math.log(kernels / matrix)) for n, kernels, matrix in measured if kernels and matrix)
    last = max((index for index, (_, gain) in enumerate(gains) if gain > 0), default=-1)
    if last == -1:  # kernels are quicker at every measured size
        return 0
    if last == len(gains) - 1:
        return gains[last][0]
    (n, above), (m, below) = gains[last : last + 2]
    return int(n * (m / n) ** (above / (above - below)))


LARGEST_MATRIX = largest_matrix(json.loads(FILE.read_text(encoding="utf-8"))["ms"])
"""What decides between the two on an accelerator."""
