"""Compare losses of other libraries under DistributedLoss, and what replaces those of trainers, with one process.

``python -m tools.peer_losses`` prints what differs; ``--docs`` writes docs/pages/everybody-elses-losses.md. The libraries
are those of ``python -m tools.peer_losses.packages .venv/peers``, and sentence-transformers.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from contrastive_zoo.testing.worlds import Worlds
from tools import pages
from tools.comparison import GROUPS, Compared, Run, measure, worst
from tools.peer_losses.losses import LEFT_OUT, PeerLoss, runs, table
from tools.peer_losses.packages import FOLDER, missing, required
from tools.peer_losses.trainers import REPLACEMENTS, and_alone, replaced

SHOWN = GROUPS[:3]


def page(rows: Sequence[tuple[PeerLoss, Mapping[Run, Compared]]]) -> str:
    sizes = sorted({len(run.steps[0]) for _, compared in rows for run in compared})

    def errors(compared: Mapping[Run, Compared], size: int) -> list[str]:
        of_size = worst([x for run, x in compared.items() if len(run.steps[0]) == size])
        numbers = [of_size.differences.get(group) for group in SHOWN]
        return ["–" if x is None else "0" if x == 0 else f"{x:.0e}" for x in numbers]

    groups = ("value", "encoder", "own parameters")
    head = ["library", "loss", "call", *(f"W = {size}: {group}" for size in sizes for group in groups)]
    lines = [
        [peer.package, f"`{peer}`", f"`{peer.call}`", *(cell for size in sizes for cell in errors(compared, size))]
        for peer, compared in rows
    ]
    installed = {**required(), "sentence-transformers": version("sentence-transformers")}
    packages = {peer.package for peer, _ in rows}
    versions = ", ".join(f"{name} {number}" for name, number in installed.items() if name in packages)
    summary = "The largest errors on two and three ranks, relative to the larger of 1 and the expected"
    left_out = "\n".join(f"- {name.replace(' ', ' `', 1)}`: {why}." for name, why in LEFT_OUT.items())
    return (
        f'{len(rows)} losses. {versions}.\n\n<details markdown="1">\n<summary>{summary}</summary>\n\n'
        f"{pages.table(head, lines, texts=3)}\n\n</details>\n\nNot compared:\n\n{left_out}"
    )


def main() -> int:
    """Measure all losses, print the differences, and write the page; return 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write the page")
    options = parser.parse_args()
    if absent := missing(FOLDER, required()):
        sys.exit(f"not in {FOLDER}: {', '.join(absent)}")
    with Worlds(timeout=120.0) as worlds:
        worlds.start(1, 2, 3, imports=["sentence_transformers"])
        rows = measure(worlds, table(), runs)
        of_trainers = measure(worlds, REPLACEMENTS, and_alone, replaced)
    every = [(peer, run, x) for peer, of in (*rows, *of_trainers) for run, x in of.items()]
    wrong = [f"{peer.package} {peer}, {run}: {why}" for peer, run, x in every if (why := peer.wrong(x))]
    print(*wrong, f"{len(every)} comparisons, {len(wrong)} different", sep="\n")
    if options.docs:
        pages.fill(pages.PAGES / "everybody-elses-losses.md", {"peers": page(rows)})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
