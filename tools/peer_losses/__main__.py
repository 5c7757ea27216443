"""Compare losses of other libraries under DistributedLoss, and what replaces those of trainers, with one process.

``python -m tools.peer_losses`` prints what differs. The libraries are sentence-transformers, and those that
``python -m tools.peer_losses.packages .venv/peers`` installs.
"""

import sys

from contrastive_zoo.testing.worlds import Worlds
from tools.comparison import measure
from tools.peer_losses.losses import runs, table
from tools.peer_losses.packages import FOLDER, missing, required
from tools.peer_losses.trainers import REPLACEMENTS, and_alone, replaced


def main() -> int:
    """Measure all losses and print the differences; return 1 if there is any."""
    if absent := missing(FOLDER, required()):
        sys.exit(f"not in {FOLDER}: {', '.join(absent)}")
    with Worlds(timeout=120.0) as worlds:
        worlds.start(1, 2, 3, imports=["sentence_transformers"])
        rows = measure(worlds, table(), runs)
        of_trainers = measure(worlds, REPLACEMENTS, and_alone, replaced)
    every = [(peer, run, x) for peer, of in (*rows, *of_trainers) for run, x in of.items()]
    wrong = [f"{peer.package} {peer}, {run}: {why}" for peer, run, x in every if (why := peer.wrong(x))]
    print(*wrong, f"{len(every)} comparisons, {len(wrong)} different", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
