"""Train on one process and on two, compare, and draw: ``python -m examples.losses [name ...] [--out FOLDER]``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from contrastive_zoo.testing.worlds import Worlds
from examples.losses.result import difference, draw

TITLES = {
    "simclr": "SimCLR (NTXent)",
    "sup_con": "SupCon",
    "two_towers": "two towers (Clip)",
    "moco": "MoCo (InfoNCE, queue)",
    "pml_miner": "PML, with a miner",
}
"""Modules of this package with a function ``train``, and the titles of their pictures."""

TOLERANCE = 1e-8
"""Largest difference between one process and two; rounding grows over the steps of a training."""


def main() -> int:
    """Return 1 if a training on two processes is another one than on one."""
    parser = argparse.ArgumentParser(prog="python -m examples.losses", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(TITLES)}; none is all")
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    given = parser.parse_args()
    if unknown := set(given.name) - set(TITLES):
        parser.error(f"no such example: {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    failed = 0
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
            if given.out:
                given.out.mkdir(parents=True, exist_ok=True)
                draw(TITLES[name], one, several, given.out / f"example-{name.replace('_', '-')}.png")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
