"""Docstrings say which errors a function raises, and show an example that runs."""

import ast
import inspect
import pydoc
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import contrastive_zoo as cz

PAGES = Path(cz.__file__).parents[1] / "docs" / "pages" / "reference"


def raised(function: ast.FunctionDef) -> set[str]:
    """Return the errors that a function raises itself: names of classes, and ValueError for a refusal."""
    found: set[str] = set()

    def look(node: ast.AST) -> None:
        for x in ast.iter_child_nodes(node):
            if isinstance(x, ast.FunctionDef | ast.ClassDef | ast.Lambda):
                continue
            if isinstance(x, ast.Raise) and isinstance(x.exc, ast.Call):
                found.add(ast.unparse(x.exc.func).rpartition(".")[2])
            if isinstance(x, ast.Expr) and isinstance(x.value, ast.Call) and ast.unparse(x.value.func) == "refuse":
                found.add("ValueError")
            look(x)

    look(function)
    # an assertion is ours, not the user's; a function that makes the error has a small letter
    return {name for name in found - {"AssertionError"} if name[0].isupper()}


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Yield public functions and methods by name, with the docstrings that may say what they raise."""
    for x in tree.body:
        if isinstance(x, ast.FunctionDef) and not x.name.startswith(("_", "pytest_")):
            yield x.name, x, ast.get_docstring(x) or ""
        if isinstance(x, ast.ClassDef) and not x.name.startswith("_"):
            of_class = ast.get_docstring(x) or ""
            for y in x.body:
                if isinstance(y, ast.FunctionDef) and (not y.name.startswith("_") or y.name == "__init__"):
                    # a class says what its constructor and its calls refuse
                    shared = of_class if y.name in ("__init__", "forward", "inputs", "compute") else ""
                    yield f"{x.name}.{y.name}", y, shared + (ast.get_docstring(y) or "")


def undocumented(tree: ast.Module) -> list[str]:
    """Return the functions that raise what their docstring does not name."""
    return [
        f"{name}: {error}"
        for name, function, doc in functions(tree)
        for error in sorted(raised(function))
        if error not in doc.partition("Raises:")[2]
    ]


def public() -> dict[str, Any]:
    """Return the public functions and classes: those of the tables of names, and of the pages of the reference."""
    rooms = ("collectives", "data", "engine", "metrics")
    names = {*cz.__all__, *(f"{room}.{name}" for room in rooms for name in getattr(cz, room).__all__)}
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        listed = r"^::: contrastive_zoo\.(\S+)(?:\n    options: {.*?members: \[([^\]]*)\])?"
        for name, members in re.findall(listed, text, re.MULTILINE):
            is_module = inspect.ismodule(pydoc.locate(f"contrastive_zoo.{name}"))
            names |= {f"{name}.{x.strip()}" for x in members.split(",") if x} if is_module else {name}
    found = {name: pydoc.locate(f"contrastive_zoo.{name}") for name in names}
    return {name: x for name, x in found.items() if inspect.isclass(x) or inspect.isfunction(x)}


def test_every_public_name_has_its_errors_and_an_example_in_the_docstring() -> None:
    objects = public()
    assert len(objects) > 100
    sources = {name: ast.parse(textwrap.dedent(inspect.getsource(x))) for name, x in objects.items()}
    assert {name: silent for name, tree in sources.items() if (silent := undocumented(tree))} == {}
    assert [name for name, x in objects.items() if ">>> " not in (x.__doc__ or "")] == [], "add an example"


def test_an_error_without_a_word_is_found() -> None:
    source = """
def one(x):
    '''Return x.'''
    if x:
        raise ValueError("no")
class Two:
    '''Raises:
        TypeError: another one.
    '''
    def __init__(self):
        raise KeyError("no")
    def _private(self):
        raise KeyError("no")
def three():
    refuse("no")
"""
    assert undocumented(ast.parse(source)) == ["one: ValueError", "Two.__init__: KeyError", "three: ValueError"]
