"""Run the doctor on the loss code of public trainers: ``python -m tools.wild FOLDER [--docs] [--only NAME]``.

FOLDER holds clones that are named owner+name. Their code is loaded by file and runs only in the ranks of this program.
"""

import argparse
from pathlib import Path

from contrastive_zoo.testing.worlds import Worlds
from tools.pages import PAGES, fill
from tools.wild.measurement import measured
from tools.wild.page import counts, page
from tools.wild.projects import entries


def main() -> None:
    """Measure all entries, print a line for each, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of clones")
    parser.add_argument("--docs", action="store_true", help="write docs/pages/in-the-wild.md")
    parser.add_argument("--only", default="", help="part of the names of entries to run")
    options = parser.parse_args()
    rows = []
    with Worlds(timeout=6.0, grace=0.3) as worlds:
        for entry in entries():
            if options.only in entry.name:
                row = measured(entry, options.folder, worlds)
                print(f"{entry.name}: {row.verdict or row.why_not} ({row.seconds} s)", flush=True)
                rows.append(row)
    print(counts(rows))
    if options.docs:
        fill(PAGES / "in-the-wild.md", {"wild": page(rows)})


if __name__ == "__main__":
    main()
