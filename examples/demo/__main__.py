"""The demonstration: ``python -m examples.demo [FOLDER] [--json]``, with the folder for its pictures."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from examples.demo import demo

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Compare one process with two.")
    parser.add_argument("folder", nargs="?", type=Path, default="demo-output", help="where its pictures are written")
    parser.add_argument("--json", action="store_true", help="print what was compared as JSON; words go to stderr")
    arguments = parser.parse_args()
    result = demo(arguments.folder, Console(stderr=arguments.json))
    if arguments.json:
        print(json.dumps(result, indent=2))
    sys.exit(not result["ok"])
