"""Time of one example on a live world: construct a small loss, run forward and backward, return the result.

python benchmarks/worlds.py
"""

import statistics
import time

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.gallery.recipe import GALLERY
from contrastive_zoo.testing.trial import UNCHANGED, measure
from contrastive_zoo.testing.worlds import Worlds

REPEATS = 200


def main() -> None:
    """Print the median and the 95th percentile for each W."""
    case = GALLERY["DistributedLoss, own loss"].case
    with Worlds() as worlds:
        for world_size in (1, 2, 3, 4):
            start = time.perf_counter()
            worlds.start(world_size)
            started = time.perf_counter() - start
            batch, seconds = GlobalBatch((3,) * world_size), []
            for _ in range(REPEATS):
                start = time.perf_counter()
                worlds.run(world_size, measure, case, batch, UNCHANGED)
                seconds.append(time.perf_counter() - start)
            seconds.sort()
            median, late = statistics.median(seconds), seconds[int(0.95 * REPEATS)]
            print(
                f"W={world_size}: {1e3 * median:.1f} ms an example (95 %: {1e3 * late:.1f} ms), started in {started:.2f} s"
            )


if __name__ == "__main__":
    main()
