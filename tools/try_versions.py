"""Try the package with other versions of Python and of its dependencies: ``python -m tools.try_versions``.

Each row of the matrix gets a fresh environment, which is removed afterwards: the package with its extras is installed, a
loss is computed, the command line checks a loss on two processes, and tests run. ``uv`` installs the packages and finds
the interpreters; on Linux, torch from the default index brings several GB of packages for GPUs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tools.pages import ROOT
from tools.try_release import VALUE, run

EXTRAS = "cli,testing,pml,mining,plot"
TEST_TOOLS = ("beartype>=0.20", "psutil>=6", "scipy>=1.13", "jsonschema>=4.23", "scikit-learn>=1.5")

TESTS = (
    "tests/test_collectives.py",
    "tests/test_distributed.py",
    "tests/test_handshake.py",
    "tests/test_state.py",
    "tests/test_extremes.py",
)
"""What every row runs."""


class Row(NamedTuple):
    """One environment; every other direct dependency is the lowest that pyproject.toml allows, or the newest."""

    python: str
    torch: str
    lowest: bool = False

    def __str__(self) -> str:
        return f"Python {self.python}, {self.torch}, the {'lowest' if self.lowest else 'newest'} of all others"


MATRIX = (
    Row("3.10", "torch==2.6.0", lowest=True),
    Row("3.11", "torch==2.9.1"),
    Row("3.12", "torch==2.13.0"),
    Row("3.13", "torch"),
)


def try_row(row: Row, tests: tuple[str, ...]) -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run("uv", "venv", "--quiet", "--python", row.python, folder + "/env")
        programs = Path(folder, "env", "bin")
        python, resolution = programs / "python", "lowest-direct" if row.lowest else "highest"
        target = ("--python", python, "--resolution", resolution, "--quiet")
        run("uv", "pip", "install", *target, row.torch, f"{ROOT}[{EXTRAS}]", *TEST_TOOLS)
        print(f"{row}: installed in {time.perf_counter() - start:.0f} s", flush=True)
        print(" ", run(python, "-c", VALUE), flush=True)
        versions = "import torch, numpy; print('torch', torch.__version__, 'numpy', numpy.__version__)"
        print(" ", run(python, "-c", versions))
        print(" ", run(programs / "contrastive-zoo", "check", "nt-xent", "--world-size", "1", "2", "--examples", "3"))
        print(" ", run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="one row of this version of Python; without it, all rows")
    parser.add_argument("--torch", default="torch", help="the requirement of that row")
    parser.add_argument("--lowest", action="store_true", help="with the lowest versions of all direct dependencies")
    parser.add_argument("--tests", nargs="*", default=TESTS)
    options = parser.parse_args()
    rows = (Row(options.python, options.torch, options.lowest),) if options.python else MATRIX
    failed = []
    for row in rows:
        try:
            try_row(row, tuple(options.tests))
        except subprocess.CalledProcessError as error:
            failed.append(f"{row}: {' '.join(error.cmd[:6])}")
    if failed:
        sys.exit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()
