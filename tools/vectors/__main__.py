"""Write conformance vectors: ``python -m tools.vectors [FOLDER]``."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile

from tools.vectors import write_vectors


def writable(name: str) -> Path:
    """Return the folder, which is created; the program ends in words if nothing can be written into it."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write into {name}: {error.strerror}") from None
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.vectors", description="Write conformance vectors.")
    parser.add_argument("folder", nargs="?", type=writable, default="vectors", help="where they are written")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    arguments = parser.parse_args()
    summary = write_vectors(arguments.folder)
    if arguments.json:
        print(json.dumps({"folder": str(arguments.folder), **asdict(summary)}, indent=2))
    else:
        print(
            f"{summary.cases} cases in {arguments.folder}. NumPy formulas repeat {summary.repeated} of them; "
            f"largest error {summary.largest_error:.0e}."
        )
