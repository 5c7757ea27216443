"""Compare every loss of pytorch-metric-learning under DistributedLoss with the same loss on one process, in a table.

``python -m tools.pml_matrix --docs docs/pages/pytorch-metric-learning.md`` measures and writes it.

The table covers every loss, miner, reducer, distance and regularizer that the library exports. ``BUILT`` holds constructors
of losses with required arguments, ``BASES`` the exports that are not compared. An export that is in neither and cannot be
constructed without arguments is a row with the error.
"""

import argparse
from pathlib import Path

from contrastive_zoo.testing.worlds import Worlds
from tools.pages import fill
from tools.pml_matrix.cases import cases
from tools.pml_matrix.measurement import measure
from tools.pml_matrix.page import page


def main() -> None:
    """Measure all cases, print the differences, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, help="the page with the part `matrix`")
    path = parser.parse_args().docs
    with Worlds() as worlds:
        rows = measure(worlds, cases())
    for row in rows:
        for shards, why in row.wrong.items():
            print(f"{row.case}, shards {list(shards)}: {why}")
    compared = sum(len(row.verdicts) for row in rows)
    print(f"{len(rows)} cases, {compared} comparisons, {sum(len(row.wrong) for row in rows)} different")
    if path is not None:
        fill(path, {"matrix": page(rows)})


if __name__ == "__main__":
    main()
