"""Write conformance vectors: ``python -m tools.vectors [FOLDER]``."""

import sys
from pathlib import Path

from tools.vectors import write_vectors

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "vectors")
    summary = write_vectors(folder)
    print(
        f"{summary.cases} cases in {folder}. NumPy formulas repeat {summary.repeated} of them; "
        f"largest error {summary.largest_error:.0e}."
    )
