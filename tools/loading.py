"""Load one file of a package, without the packages that its loss does not need."""

import importlib
import importlib.machinery
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

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
    """A package whose ``__init__`` does not run; a name of it is looked up in its files, and is a stand-in if none has it.

    A package that the loss does not need has no files.
    """

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
    """Import from the folder inside; afterwards no stand-in has remained.

    Modules of the package remain, since functions may import others of them when they are called.
    """
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
    """Return a module of a package in a folder.

    Raises:
        ModuleNotFoundError: the folder has no such file.
    """
    if not folder.joinpath(*module.split(".")).with_suffix(".py").is_file():
        raise ModuleNotFoundError(f"no {module} in {folder.name}", name=module)
    with _importing_from(_Finder(folder, module.partition(".")[0])):
        return importlib.import_module(module)
