"""Train on one process and on two, compare, and draw: ``python -m examples.losses [name ...] [--out FOLDER]``."""

import argparse
import importlib
import sys
import time
from pathlib import Path

from contrastive_zoo.testing.worlds import Worlds
from examples.losses.digits import difference, draw
from tools.pages import PAGES, fill, table

LOSSES = {
    "simclr": ("SimCLR (NTXent)", "NTXent"),
    "sup_con": ("SupCon", "SupCon"),
    "two_towers": ("two towers (Clip)", "Clip"),
    "moco": ("MoCo (InfoNCE, queue)", "InfoNCE with a queue"),
    "pml_miner": ("PML, with a miner", "pytorch-metric-learning's MultiSimilarityLoss, with its miner"),
}
"""Modules of this package with a function ``train``, the titles of their pictures, and their losses for the table."""

COLUMNS = ("example", "loss", "recall@1 before", "after", "difference, W = 2 from W = 1")
TOLERANCE = 1e-8  # largest difference between one process and two; rounding grows over the steps of a training


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.losses", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(LOSSES)}; none is all")
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    parser.add_argument("--docs", action="store_true", help="write the table and the pictures of the page")
    given = parser.parse_args()
    if unknown := set(given.name) - set(LOSSES):
        parser.error(f"no such example: {', '.join(sorted(unknown))}; there are {', '.join(LOSSES)}")
    failed, rows = 0, []
    folder = PAGES / "figures" if given.docs else given.out
    print(f"{'example':<24} {'recall@1 before':>15} {'after':>8} {'difference':>11} {'seconds':>8}")
    with Worlds(timeout=300) as worlds:
        for name in given.name or LOSSES:
            title, loss = LOSSES[name]
            train, start = importlib.import_module(f"examples.losses.{name}").train, time.perf_counter()
            one, several = worlds.run(1, train)[0], worlds.run(2, train)[0]
            far = difference(one, several)
            failed += not far <= TOLERANCE
            recalls = f"{one.recall_before:>15.3f} {one.recall_after:>8.3f}"
            print(f"{title:<24} {recalls} {far:>11.0e} {time.perf_counter() - start:>8.0f}", flush=True)
            rows.append([f"`{name}`", loss, f"{one.recall_before:.3f}", f"{one.recall_after:.3f}", f"{far:.0e}"])
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
                draw(title, one, several, folder / f"example-{name.replace('_', '-')}.png")
    if given.docs and len(rows) == len(LOSSES):
        fill(PAGES / "examples.md", {"results": table(COLUMNS, rows)})
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
