"""Write conformance vectors: ``python -m tools.vectors [FOLDER]``."""

import argparse
import json
from pathlib import Path

from tools.vectors import write_vectors

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.vectors", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("vectors"), help="where they are written")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    arguments = parser.parse_args()
    cases = write_vectors(arguments.folder)
    summary = json.dumps({"folder": str(arguments.folder), "cases": cases}, indent=2)
    print(summary if arguments.json else f"{cases} cases in {arguments.folder}.")
