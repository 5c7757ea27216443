"""Train on one process and on two, compare, and draw: ``python -m examples.losses [name ...] [--out FOLDER]``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from contrastive_zoo.testing.worlds import Worlds
from examples.losses.result import difference, draw
from tools.pages import PAGES, fill, table

TITLES = {
    "simclr": "SimCLR (NTXent)",
    "sup_con": "SupCon",
    "two_towers": "two towers (Clip)",
    "moco": "MoCo (InfoNCE, queue)",
    "pml_miner": "PML, with a miner",
}
"""Modules of this package with a function ``train``, and the titles of their pictures."""

LOSSES = {
    "simclr": "NTXent",
    "sup_con": "SupCon",
    "two_towers": "Clip",
    "moco": "InfoNCE with a queue",
    "pml_miner": "pytorch-metric-learning's MultiSimilarityLoss, with its miner",
}
"""What each example trains with, for the table."""

COLUMNS = ("example", "loss", "recall@1 before", "after", "difference, W = 2 from W = 1")
TOLERANCE = 1e-8
"""Largest difference between one process and two; rounding grows over the steps of a training."""


def main() -> int:
    """Return 1 if a training on two processes is another one than on one."""
    parser = argparse.ArgumentParser(prog="python -m examples.losses", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(TITLES)}; none is all")
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    parser.add_argument("--docs", action="store_true", help="write the table and the pictures of the page")
    given = parser.parse_args()
    if unknown := set(given.name) - set(TITLES):
        parser.error(f"no such example: {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    failed, rows = 0, []
    folder = PAGES / "figures" if given.docs else given.out
    print(f"{'example':<24} {'recall@1 before':>15} {'after':>8} {'difference':>11} {'seconds':>8}")
    with Worlds(timeout=300) as worlds:
        for name in given.name or TITLES:
            train, start = importlib.import_module(f"examples.losses.{name}").train, time.perf_counter()
            one, several = worlds.run(1, train)[0], worlds.run(2, train)[0]
            far = difference(one, several)
            failed += not far <= TOLERANCE
            print(
                f"{TITLES[name]:<24} {one.recall_before:>15.3f} {one.recall_after:>8.3f} {far:>11.0e} "
                f"{time.perf_counter() - start:>8.0f}",
                flush=True,
            )
            rows.append(
                [f"`{name}`", LOSSES[name], f"{one.recall_before:.3f}", f"{one.recall_after:.3f}", f"{far:.0e}"]
            )
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
                draw(TITLES[name], one, several, folder / f"example-{name.replace('_', '-')}.png")
    if given.docs and len(rows) == len(TITLES):
        fill(PAGES / "examples.md", {"results": table(COLUMNS, rows)})
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
