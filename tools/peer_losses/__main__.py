"""Compare losses of other libraries under DistributedLoss with the same losses on one process, in a table.

``python -m tools.peer_losses --docs`` measures all, and writes docs/pages/everybody-elses-losses.md. The libraries are
those of ``python -m tools.peer_losses.packages .venv/peers``, and sentence-transformers.
"""

import argparse
import sys

from contrastive_zoo.testing.worlds import Worlds
from tools.pages import PAGES, fill
from tools.peer_losses.losses import table
from tools.peer_losses.measurement import measure
from tools.peer_losses.packages import FOLDER, missing, required
from tools.peer_losses.page import page


def main() -> None:
    """Measure all losses, print the differences, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write the page")
    options = parser.parse_args()
    if absent := missing(FOLDER, required()):
        sys.exit(f"not in {FOLDER}: {', '.join(absent)}")
    peers = table()
    with Worlds(timeout=120.0) as worlds:
        worlds.start(1, 2, 3, imports=["sentence_transformers"])
        rows = list(zip(peers, measure(worlds, peers), strict=True))
    wrong = [(peer, size, why) for peer, of in rows for size, x in of.items() if (why := x.wrong(peer))]
    for peer, size, why in wrong:
        print(f"{peer.package} {peer} on {size} ranks: {why}")
    print(f"{len(peers)} losses, {sum(len(of) for _, of in rows)} comparisons, {len(wrong)} different")
    if options.docs:
        fill(PAGES / "everybody-elses-losses.md", {"peers": page(rows)})


if __name__ == "__main__":
    main()
