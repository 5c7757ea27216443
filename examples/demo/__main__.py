"""The demonstration: ``python -m examples.demo [FOLDER]``, with the folder for its pictures."""

import sys
from pathlib import Path

from examples.demo import demo

if __name__ == "__main__":
    sys.exit(0 if demo(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output")) else 1)
