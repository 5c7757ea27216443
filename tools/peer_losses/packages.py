"""The packages whose losses are compared, and how their loss code is loaded without what the packages depend on.

``python -m tools.peer_losses.packages FOLDER [FILE]`` installs those of ``.ci/peers.txt``, or of another file beside it,
each by itself: one that cannot be had stops no other, and its tests are skipped with its name.
"""

import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

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


def _all_documents(input_ids: torch.Tensor, skiplist: Sequence[int]) -> torch.Tensor:
    assert not len(skiplist)
    return torch.ones_like(input_ids, dtype=torch.bool)


@dataclass(frozen=True)
class Bare:
    """What of a package is loaded without its own code."""

    packages: tuple[str, ...] = ("",)
    """Packages in it whose ``__init__`` needs other libraries; an empty one stands in."""
    homes: Mapping[str, str] = field(default_factory=dict)
    """Of a package in it that is empty, the module that has its names."""
    stand_ins: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Modules whose names are imported, and that the losses do not need."""


BARE: dict[str, Bare] = {
    # lightly.models.utils is a module, which a loss imports and, without a memory bank, does not use
    "lightly": Bare(("", ".loss", ".models", ".models.modules", ".models.utils", ".utils")),
    "open_clip": Bare(),
    "info_nce": Bare(),  # all of it is its __init__, which is loaded as a module of this name
    "colpali_engine": Bare(("", ".loss", ".utils")),
    "solo": Bare(("", ".losses")),
    "stable_pretraining": Bare(
        ("", ".losses", ".utils"),
        {".utils": ".utils.distributed"},
        {"loguru": lambda: SimpleNamespace(logger=logging.getLogger("loguru"))},
    ),
    "pylate": Bare(
        ("", ".losses", ".utils"),
        {".utils": ".utils.distributed"},
        {"pylate.models": lambda: SimpleNamespace(ColBERT=SimpleNamespace(skiplist_mask=_all_documents))},
    ),
    "tevatron": Bare(),
    "FlagEmbedding": Bare(
        (
            *("", ".abc", ".abc.finetune", ".abc.finetune.embedder", ".finetune", ".finetune.embedder"),
            *(".finetune.embedder.encoder_only", ".finetune.embedder.encoder_only.base"),
        ),
        {".abc.finetune.embedder": ".abc.finetune.embedder.AbsModeling"},
    ),
    "swift": Bare(
        ("", ".loss"),
        stand_ins={
            "swift.sequence_parallel": lambda: SimpleNamespace(sequence_parallel=SimpleNamespace()),
            "swift.utils": lambda: SimpleNamespace(get_dist_setting=lambda: (0, 0, 1, 1)),
        },
    ),
    "nemo_automodel": Bare(("", ".components", ".components.loss")),
}


def opened(package: str, folder: Path | str = FOLDER) -> bool:
    """Return whether a package is in the folder, or importable, and make its files importable without its ``__init__``."""
    found = PathFinder.find_spec(package, [str(folder), *sys.path])
    if found is None or not found.submodule_search_locations:
        return False
    (root,) = found.submodule_search_locations
    bare = BARE[package]
    for name in (package + part for part in bare.packages):
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = ["/".join([root, *name.split(".")[1:]])]
    for part, home in bare.homes.items():
        sys.modules[package + part].__dict__["__getattr__"] = _names_of(package + home)
    for name, make in bare.stand_ins.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(vars(make()))
    return True


def _names_of(module: str) -> Callable[[str], Any]:
    def name(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(module), name)

    return name


def loaded(module: str, folder: Path | str = FOLDER) -> ModuleType:
    """Return a module of a package in the folder, or of one that is installed whole."""
    package = module.partition(".")[0]
    if package in BARE and package not in sys.modules and not opened(package, folder):
        raise ModuleNotFoundError(f"{package} is not in {folder}", name=package)
    return importlib.import_module(module)


if __name__ == "__main__":
    into, *files = sys.argv[1:]
    Path(into).mkdir(parents=True, exist_ok=True)
    failed = install(into, required(*files))
    for line in failed:
        print("not installed, and left out:", line)
    sys.exit(bool(failed))
