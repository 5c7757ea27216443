"""Compare every loss of pytorch-metric-learning under DistributedLoss with the same loss on one process, in a table.

``python -m tools.pml_matrix --docs`` measures and writes docs/pages/pytorch-metric-learning.md.

The table covers every loss, miner, reducer, distance and regularizer that the library exports. ``BUILT`` holds constructors
of what has required arguments, ``BASES`` the exports that are not compared. An export that is in neither and cannot be
constructed without arguments is a row with the error.
"""

import argparse

from contrastive_zoo.testing.worlds import Worlds
from tools.comparison import measure
from tools.pages import PAGES, fill
from tools.pml_matrix.cases import all_runs, cases
from tools.pml_matrix.page import page, verdict


def main() -> None:
    """Measure all cases, print the differences, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write the page")
    docs = parser.parse_args().docs
    with Worlds() as worlds:
        rows = measure(worlds, cases(), all_runs)
    different = [why for mark, why in (verdict(*row) for row in rows) if mark == "✗"]
    print(*different, sep="\n")
    print(f"{len(rows)} cases, {sum(len(of) for _, of in rows)} comparisons, {len(different)} different")
    if docs:
        fill(PAGES / "pytorch-metric-learning.md", {"matrix": page(rows)})


if __name__ == "__main__":
    main()
