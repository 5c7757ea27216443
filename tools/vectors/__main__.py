"""Write conformance vectors: ``python -m tools.vectors [FOLDER]``."""

import sys
from pathlib import Path

from tools.vectors import write_vectors

if __name__ == "__main__":
    folder = Path(*(sys.argv[1:] or ["vectors"]))
    print(f"{write_vectors(folder)} cases in {folder}.")
