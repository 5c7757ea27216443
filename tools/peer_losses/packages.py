"""The packages whose losses are compared, and how their loss code is loaded without what the packages depend on.

``python -m tools.peer_losses.packages FOLDER [FILE]`` installs those of ``.ci/peers.txt``, or of another file beside it,
each by itself: one that cannot be had stops no other, and its tests are skipped with its name.
"""

import importlib
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from tools.loading import load
from tools.pages import ROOT

FOLDER = ROOT / ".venv" / "peers"
PIP = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--retries=1", "--timeout=15"]
"""A machine without a network is told so by one retry, not by five."""


def required(file: str = "peers.txt") -> dict[str, str]:
    """Return the pinned version of each package of a file in ``.ci``."""
    lines = (ROOT / ".ci" / file).read_text(encoding="utf-8").splitlines()
    pinned = (line.partition("==") for line in lines if "==" in line)
    return {name.lower().replace("_", "-"): version for name, _, version in pinned}


def installed(*folders: Path | str) -> dict[str, str]:
    found = metadata.distributions(path=[*map(str, folders)])
    return {x.name.lower().replace("_", "-"): x.version for x in found if x.name}


def missing(folder: Path | str, packages: Mapping[str, str]) -> list[str]:
    """Return the requirements of packages that are not installed in this version."""
    found = installed(folder)
    return [f"{x}=={version}" for x, version in packages.items() if found.get(x.replace("_", "-")) != version]


def install(folder: Path | str, packages: Mapping[str, str]) -> list[str]:
    """Install what is missing, and return what could not be installed, each with pip's last line."""
    failed = []
    for requirement in missing(folder, packages):
        command = [sys.executable, *PIP, "--upgrade", "--target", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            failed.append(f"{requirement}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    return failed


WHOLE = {"pytorch_metric_learning", "sentence_transformers"}
"""Packages that are installed with all that they depend on."""


def loaded(module: str) -> ModuleType:
    """Return a module of a package in the folder or on the path.

    Raises:
        ModuleNotFoundError: there is no such package; the error has its name.
    """
    package = module.partition(".")[0]
    spec = PathFinder.find_spec(package, [str(FOLDER), *sys.path])
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not in {FOLDER}", name=package)
    (root,) = spec.submodule_search_locations
    return importlib.import_module(module) if package in WHOLE else load(Path(root).parent, module)


if __name__ == "__main__":
    into, *files = sys.argv[1:]
    Path(into).mkdir(parents=True, exist_ok=True)
    failed = install(into, required(*files))
    for line in failed:
        print("not installed, and left out:", line)
    sys.exit(bool(failed))
