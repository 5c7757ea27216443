"""The packages whose losses are compared, and how their loss code is loaded without what the packages depend on.

``make .venv/.peers-installed`` installs those of ``.ci/peers.txt``, each by itself: one that cannot be had stops no other,
and its tests are skipped with its name.
"""

import importlib
import importlib.machinery
import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.pages import ROOT

FOLDER = ROOT / ".venv" / "peers"


def required(file: str = "peers.txt") -> dict[str, str]:
    lines = (ROOT / ".ci" / file).read_text(encoding="utf-8").splitlines()
    pinned = (line.partition("==") for line in lines if "==" in line)
    return {name.lower().replace("_", "-"): version for name, _, version in pinned}


def installed(*folders: Path | str) -> dict[str, str]:
    found = metadata.distributions(path=[*map(str, folders)])
    return {x.name.lower().replace("_", "-"): x.version for x in found if x.name}


def missing(folder: Path | str, packages: Mapping[str, str]) -> list[str]:
    found = installed(folder)
    return [f"{x}=={version}" for x, version in packages.items() if found.get(x.replace("_", "-")) != version]


HEAVY = {
    "PIL", "accelerate", "datasets", "lightly", "lightning", "pandas", "pytorch_lightning", "scipy", "sentence_transformers",
    "skimage", "sklearn", "timm", "torch.utils.tensorboard", "torchmetrics", "torchvision", "transformers", "wandb",
}  # fmt: skip
"""Packages that are stand-ins even where they are installed; so is every package that is not installed."""


class StandIn:
    """A name of a package that the loss does not need: a base class, a decorator, an annotation, a logger."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *args: Any, **settings: Any) -> Any:
        is_decorator = len(args) == 1 and not settings and callable(args[0])
        return args[0] if is_decorator else StandIn()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type("StandIn", (), {"__init_subclass__": classmethod(lambda cls, **settings: None)}),)

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __getitem__(self, item: Any) -> "StandIn":
        return self

    def __or__(self, other: Any) -> "StandIn":
        return self

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Package(types.ModuleType):
    """A package whose ``__init__`` does not run; a name of it is looked up in its files, and is a stand-in if none has
    it."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for folder in map(Path, self.__path__):
            if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
                raise AttributeError(name)  # Python imports it
            for file in sorted(folder.glob("*.py")):
                text = file.read_text(encoding="utf-8")
                if file.stem != "__init__" and re.search(rf"(def|class) {name}[(:]", text):
                    return getattr(importlib.import_module(f"{self.__name__}.{file.stem}"), name)
        return StandIn()


class _PackageLoader(Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Finder(MetaPathFinder):
    """Finds the files of one package of a folder first; then what is installed; all else are stand-ins."""

    def __init__(self, folder: Path, package: str) -> None:
        self.folder, self.package = folder, package

    def owns(self, name: str) -> bool:
        return name.partition(".")[0] == self.package

    def is_heavy(self, name: str) -> bool:
        return not self.owns(name) and not {name, name.partition(".")[0]}.isdisjoint(HEAVY)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        place = self.folder.joinpath(*name.split("."))
        if self.owns(name) and (file := place.with_suffix(".py")).is_file():
            return spec_from_file_location(name, file)
        is_folder = self.owns(name) and place.is_dir()
        if not self.owns(name) and not self.is_heavy(name) and _is_installed(name.partition(".")[0]):
            return None
        spec = importlib.machinery.ModuleSpec(name, _PackageLoader(), is_package=True)
        spec.submodule_search_locations = [str(place)] if is_folder else []
        return spec


def _is_installed(top: str) -> bool:
    return top in sys.stdlib_module_names or importlib.machinery.PathFinder.find_spec(top) is not None


@contextmanager
def _importing_from(finder: _Finder) -> Iterator[None]:
    """Import from the folder inside; afterwards no stand-in has remained."""
    before = dict(sys.modules)
    for name in before:
        if finder.is_heavy(name):
            del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Package) and not finder.owns(name):
                del sys.modules[name]
        sys.modules.update(before)


@cache
def load(folder: Path, module: str) -> types.ModuleType:
    """Return a module of a package in a folder."""
    if not folder.joinpath(*module.split(".")).with_suffix(".py").is_file():
        raise ModuleNotFoundError(f"no {module} in {folder.name}", name=module)
    with _importing_from(_Finder(folder, module.partition(".")[0])):
        return importlib.import_module(module)


WHOLE = {"pytorch_metric_learning", "sentence_transformers"}
"""Packages that are installed with all that they depend on."""


def loaded(module: str) -> ModuleType:
    """Return a module of a package in the folder or on the path."""
    package = module.partition(".")[0]
    spec = PathFinder.find_spec(package, [str(FOLDER), *sys.path])
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not in {FOLDER}", name=package)
    (root,) = spec.submodule_search_locations
    return importlib.import_module(module) if package in WHOLE else load(Path(root).parent, module)
