"""Compare losses of other libraries under DistributedLoss with the same losses on one process, in a table.

``python -m tools.peer_losses --docs`` measures all, and writes docs/pages/everybody-elses-losses.md. The libraries are
those of ``python -m tools.peer_losses.packages .venv/peers``, and sentence-transformers.
"""

import argparse
import sys

from contrastive_zoo.testing.worlds import Worlds
from tools.comparison import measure
from tools.pages import PAGES, fill
from tools.peer_losses.losses import runs, table
from tools.peer_losses.packages import FOLDER, missing, required
from tools.peer_losses.page import page


def main() -> None:
    """Measure all losses, print the differences, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write the page")
    options = parser.parse_args()
    if absent := missing(FOLDER, required()):
        sys.exit(f"not in {FOLDER}: {', '.join(absent)}")
    with Worlds(timeout=120.0) as worlds:
        worlds.start(1, 2, 3, imports=["sentence_transformers"])
        rows = measure(worlds, table(), runs)
    wrong = [(peer, run, why) for peer, of in rows for run, x in of.items() if (why := peer.wrong(x))]
    for peer, run, why in wrong:
        print(f"{peer.package} {peer}, {run}: {why}")
    print(f"{len(rows)} losses, {sum(len(of) for _, of in rows)} comparisons, {len(wrong)} different")
    if options.docs:
        fill(PAGES / "everybody-elses-losses.md", {"peers": page(rows)})


if __name__ == "__main__":
    main()
