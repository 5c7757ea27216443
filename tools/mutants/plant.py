"""Plant a mutant in a live process: the functions that it changes get new code, constants and defaults new values.

Nothing is imported again, so a mutant costs no more than its tests. The ranks of a pool of worlds plant it as they start.
"""

import ast
import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from contrastive_zoo.testing import _rank
from tools.mutants.changes import PACKAGE, modules, mutants_of, mutated, original

PLANTED = "CONTRASTIVE_ZOO_MUTANT"
"""The environment variable that tells ranks which mutant to plant: ``path:number``."""
COVERED = "CONTRASTIVE_ZOO_COVERED"
"""The environment variable that names the folder where ranks write the lines that they executed."""

Lines = set[tuple[str, int]]


class NotPlantedError(Exception):
    """The mutant is in code that ran when its module was imported."""


def module_name(path: str) -> str:
    """The name of a module for :mod:`importlib`.

    Examples:
        >>> module_name("engine/exchange.py")
        'contrastive_zoo.engine.exchange'
    """
    return f"{PACKAGE.name}.{path.removesuffix('.py').replace('/', '.')}"


def plant(path: str, number: int) -> None:
    """Change this process; raise NotPlantedError if the mutant is in code that ran when its module was imported."""
    module = importlib.import_module(module_name(path))
    file = str(module.__file__)
    trees = original(path), mutated(path, number)
    before, after = (compile(x, file, "exec", dont_inherit=True) for x in trees)
    changed = {(x.co_qualname, x.co_firstlineno): y for x, y in _differences(before, after)}
    planted = 0
    for function in functions(file):
        code = changed.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if code is not None:
            function.__code__ = code
            planted += 1
    if not planted and not _redefine(module, *trees, mutants_of(path)[number].place.function):
        raise NotPlantedError(f"{path}: {mutants_of(path)[number].change}")


def _differences(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the functions whose code differs, outer ones first."""
    if before == after:
        return
    yield before, after
    inner = [[x for x in code.co_consts if isinstance(x, CodeType)] for code in (before, after)]
    if len(inner[0]) == len(inner[1]):
        for pair in zip(*inner, strict=True):
            yield from _differences(*pair)


def functions(file: str) -> list[FunctionType]:
    """All functions of a file that exist, also those that a decorator holds."""
    gc.unfreeze()  # frozen objects are not listed
    return [x for x in gc.get_objects() if type(x) is FunctionType and x.__code__.co_filename == file]


def _redefine(module: Any, before: ast.Module, after: ast.Module, function: str) -> bool:
    """Set what a definition has evaluated again: a module's constant, or the defaults of a function."""
    if not function:
        pairs = zip(before.body, after.body, strict=True)
        return any(_rebind(module, y) for x, y in pairs if ast.dump(x) != ast.dump(y))
    for node in ast.walk(after):
        if isinstance(node, ast.FunctionDef) and function.endswith(node.name):
            first_line = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            for x in functions(str(module.__file__)):
                if (x.__code__.co_qualname, x.__code__.co_firstlineno) == (function, first_line):
                    x.__defaults__ = tuple(_value(module, d) for d in node.args.defaults) or None
                    x.__kwdefaults__ = {arg.arg: _value(module, d) for arg, d in named if d is not None} or None
                    return True
    return False


def _rebind(module: Any, statement: ast.stmt) -> bool:
    """Give a constant its changed value wherever it was imported; False if it is no constant."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
    if not (isinstance(target, ast.Name) and isinstance(getattr(module, target.id), (bool, int, float, dict))):
        return False
    old, new = getattr(module, target.id), _value(module, statement.value)
    for name, other in list(sys.modules.items()):
        if name.startswith(PACKAGE.name) and vars(other).get(target.id) is old:
            setattr(other, target.id, new)
    return True


def _value(module: Any, expression: ast.expr | None) -> Any:
    assert expression is not None
    return eval(compile(ast.Expression(expression), "<mutant>", "eval"), vars(module))


# --- the ranks ------------------------------------------------------------------------------------------------------


def rank_main(
    pipe: connection.Connection, rank: int, world_size: int, directory: str, threads: int, environment: dict[str, str]
) -> None:
    """Plant the mutant that the environment names, or note the lines that jobs execute, and be a rank."""
    if which := environment.get(PLANTED):
        path, _, number = which.partition(":")
        plant(path, int(number))
    if folder := environment.get(COVERED):
        _note_lines(Path(folder))
    _rank.main(pipe, rank, world_size, directory, threads, environment)


def _note_lines(folder: Path) -> None:
    run, seen = _rank._run_job, Trace()

    def noting(header: bytes, job: bytes) -> Any:
        seen.lines.clear()
        try:
            with seen:
                return run(header, job)
        finally:
            with (folder / str(os.getpid())).open("a") as file:
                file.write(json.dumps(sorted(seen.lines)) + "\n")

    _rank._run_job = noting


class Trace:
    """A context within which executed lines of the mutated modules are noted, in this thread."""

    def __init__(self) -> None:
        self.lines: Lines = set()
        self._files: dict[str, str] = {str(PACKAGE / path): path for path in modules()}

    def __enter__(self) -> "Trace":
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, value: Any) -> Any:
        path = self._files.get(frame.f_code.co_filename)
        if path is None:
            return None
        add = self.lines.add

        def line(frame: FrameType, event: str, value: Any) -> Any:
            add((path, frame.f_lineno))
            return line

        add((path, frame.f_lineno))
        return line


for _path in modules():  # ranks are forked from a process that has imported this module
    importlib.import_module(module_name(_path))
