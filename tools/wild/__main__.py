"""Run the doctor on the loss code of public trainers: ``python -m tools.wild FOLDER [--docs] [--only NAME] [--json FILE]``.

FOLDER holds clones that are named owner+name. Their code is loaded by file and runs only in the ranks of this program.
"""

import argparse
import json
from pathlib import Path

from contrastive_zoo.testing.worlds import Worlds
from tools.pages import PAGES, fill
from tools.wild.measurement import Row, measured
from tools.wild.page import counts, page
from tools.wild.projects import entries


def main() -> None:
    """Measure all entries, print a line for each, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of clones")
    parser.add_argument("--docs", action="store_true", help="write docs/pages/in-the-wild.md")
    parser.add_argument("--only", default="", help="part of the names of entries to run")
    parser.add_argument("--json", type=Path, help="a file with rows of earlier runs, which are not run again")
    options = parser.parse_args()
    earlier = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {}
    result = []
    with Worlds(timeout=6.0, grace=0.3) as worlds:
        for entry in entries():
            if options.only not in entry.name:
                continue
            if entry.name not in earlier:
                earlier[entry.name] = measured(entry, options.folder, worlds).as_dict()
                if options.json:
                    options.json.write_text(json.dumps(earlier, indent=1))
            row = Row(**earlier[entry.name])
            print(f"{entry.name}: {row.verdict or row.why_not} ({row.seconds} s)", flush=True)
            result.append(row)
    print(counts(result))
    if options.docs:
        fill(PAGES / "in-the-wild.md", {"wild": page(result)})


if __name__ == "__main__":
    main()
