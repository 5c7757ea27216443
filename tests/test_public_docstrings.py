"""Docstrings say which errors a function raises, and show an example that runs.

Doctests run with the modules; here only what has none is found, by reading the source.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import contrastive_zoo as cz

PACKAGE = Path(cz.__file__).parent
PAGES = PACKAGE.parent / "docs" / "pages" / "reference"

NOT_CALLED_BY_USERS = ("invariant", "app.command", "app.callback")
"""Decorators of functions whose docstring is shown elsewhere: the meaning of an invariant, the help of a command."""


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


def is_documented_elsewhere(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(x).startswith(NOT_CALLED_BY_USERS) for x in function.decorator_list)


def undocumented(tree: ast.Module) -> list[str]:
    """Return the functions that raise what their docstring does not name."""
    found = []
    for name, function, doc in functions(tree):
        section = doc.partition("Raises:")[2]
        if not is_documented_elsewhere(function):
            found += [f"{name}: {error}" for error in sorted(raised(function)) if error not in section]
    return found


def test_every_error_is_in_the_docstring() -> None:
    public, silent = public_names(), []
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        names = undocumented(ast.parse(path.read_text(encoding="utf-8")))
        silent += [f"{module}.{name}" for name in names if f"{module}.{re.split('[.:]', name)[0]}" in public]
    assert silent == []


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


# ------------------------------------------------------------------------------------------------------------ examples


def exports(room: str) -> list[ast.ImportFrom]:
    """Return the lines by which a room makes names of its modules public."""
    body = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")).body
    return [x for x in body if isinstance(x, ast.ImportFrom)]


def public_names() -> set[str]:
    """Return the names of the stub and of the reference, as modules of the package define them."""
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    rooms = {PACKAGE.name, f"{PACKAGE.name}.ranks"}  # of which the table names whole modules
    lines = [x for x in stub.body if isinstance(x, ast.ImportFrom) and x.module not in rooms]
    lines += [x for room in ("data", "engine", "metrics") for x in exports(room)]
    found = {f"{x.module}.{name.name}" for x in lines for name in x.names}
    found |= {f"{PACKAGE.name}.ranks.collectives.{name}" for name in cz.collectives.__all__}
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name, members in re.findall(r"^::: (\S+)(?:\n    options: {.*?members: \[([^\]]*)\])?", text, re.MULTILINE):
            is_module = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py").exists()
            listed = [f"{name}.{x.strip()}" for x in members.split(",")] if is_module and members else []
            if (
                name.split(".")[1] in ("collectives", "data", "engine", "metrics")
                and name.count(".") == 2
                and not is_module
            ):
                continue  # of the table of the room
            found |= {name, *listed} if name.count(".") > 1 and not is_module else set(listed)
    return {name.removeprefix(f"{PACKAGE.name}.") for name in found}


def definition(name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Return where a public name is defined; None for a constant."""
    module, _, last = name.rpartition(".")
    tree = ast.parse(PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
    for x in tree.body:
        if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == last:
            return x
    return None


def test_every_public_name_has_an_example() -> None:
    found = {name: definition(name) for name in public_names()}
    without = {name for name, x in found.items() if x is not None and ">>> " not in (ast.get_docstring(x) or "")}
    assert without == set(), "add an example"
    assert len([x for x in found.values() if x is not None]) > 100
