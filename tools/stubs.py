"""Type stubs of the losses that are declared with a function, for editors and type checkers.

``class NTXent(Loss, function=nt_xent)`` takes its settings from the function when Python runs it, which no type checker
sees. The stub beside the module writes them out: the constructor, the call, the attributes and the docstring.

    python tools/stubs.py          write them
    python tools/stubs.py --check  say which are out of date, and change nothing
"""

import argparse
import ast
import importlib
import inspect
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "contrastive_zoo"
HEADER = "# Written by tools/stubs.py from the module beside it: `make stubs`.\n"
sys.path.insert(0, str(PACKAGE.parent))  # the package beside this file, wherever another one is installed


def modules() -> Iterator[Path]:
    """Modules with a public class that is declared with its function."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if any(_function(x) for x in ast.parse(path.read_text()).body):
            yield path


def stubs(paths: Iterable[Path]) -> dict[Path, str]:
    """The stub of each module, by its path, after ruff."""
    with tempfile.TemporaryDirectory() as name:
        written = {Path(name, x.relative_to(PACKAGE.parent)).with_suffix(".pyi"): x for x in paths}
        for place, path in written.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(stub(path))
        own = f"lint.isort.known-first-party = ['{PACKAGE.name}']"
        settings = ("--quiet", "--no-cache", f"--config={PACKAGE.parent / 'pyproject.toml'}", f"--config={own}", ".")
        for command in (("check", "--fix", "--select=F401,I"), ("format",)):
            subprocess.run([sys.executable, "-m", "ruff", *command, *settings], cwd=name, check=True)
        return {path.with_suffix(".pyi"): HEADER + place.read_text() for place, path in written.items()}


def stub(path: Path) -> str:
    """The declarations of a module: its imports, aliases and public functions, and classes with their constructors."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    module, tree = importlib.import_module(name), ast.parse(path.read_text())
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    imports = ast.parse("from torch import Tensor, nn\nfrom contrastive_zoo.world import World").body
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif _is_alias(node):
            body.append(node)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            body.append(_declared(node))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            cls = getattr(module, node.name)
            imports += _imports_of_constructor(cls)
            body.append(_class(node, cls, functions))
    return "\n".join(ast.unparse(ast.fix_missing_locations(x)) for x in (*imports, *body))


def _function(node: ast.stmt) -> str | None:
    """The name of the function that a public class is declared with."""
    if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
        return None
    return next((ast.unparse(x.value) for x in node.keywords if x.arg == "function"), None)


def _is_alias(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)


def _declared(node: ast.FunctionDef) -> ast.FunctionDef:
    """A function without its body, which keeps its docstring."""
    doc = ast.get_docstring(node)
    kept = [x for x in node.decorator_list if ast.unparse(x) in ("property", "staticmethod", "classmethod")]
    return ast.FunctionDef(node.name, node.args, [_docstring(doc) if doc else _dots()], kept, node.returns, None)


def _class(node: ast.ClassDef, cls: Any, functions: dict[str, ast.FunctionDef]) -> ast.ClassDef:
    """A class with its docstring and, where its settings are a function's, its attributes, constructor and call."""
    body: list[ast.stmt] = [_docstring(cls.__doc__)] if cls.__doc__ else []
    if (declared_with := _function(node)) is not None:
        arguments = _constructor(cls, functions[declared_with])
        taken = [*arguments.args[1:], *arguments.kwonlyargs]
        body += [ast.AnnAssign(ast.Name(x.arg), x.annotation or ast.Name("object"), None, 1) for x in taken]
        body += [x for x in _attributes(node) if x.target.id not in {y.arg for y in taken}]
        body.append(_method("__init__", arguments, "None"))
        body.append(_method("__call__", _call(functions[declared_with]), "Tensor"))
    else:
        body += _attributes(node)
    methods = [x for x in node.body if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")]
    body += [_declared(x) for x in methods if x.name != "forward"]
    empty: dict[str, Any] = {"type_params": []} if sys.version_info >= (3, 12) else {}
    return ast.ClassDef(node.name, node.bases, [], body or [_dots()], [], **empty)


def _attributes(node: ast.ClassDef) -> list[Any]:
    """Annotated ones, without their values."""
    found = [x for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)]
    return [ast.AnnAssign(x.target, x.annotation, None, 1) for x in found]


def _constructor(cls: Any, function: ast.FunctionDef) -> ast.arguments:
    """The constructor's arguments, in the order of the signature that Python shows."""
    own, of_function = _written(_own_constructor(cls).args), _written(function.args)
    found = ast.arguments([], [ast.arg("self")], None, [], [], None, [])
    for parameter in inspect.signature(cls).parameters.values():
        source, name = (own, parameter.name) if parameter.name in own else (of_function, parameter.name)
        annotation, default = source.get(name, ("bool", "True"))
        if source is of_function and "Tensor" in annotation:  # asked for its value at every call
            annotation += " | nn.Module"
        arg = ast.arg(name, ast.parse(annotation, mode="eval").body)
        value = ast.parse(default, mode="eval").body if default else None
        if parameter.kind is parameter.KEYWORD_ONLY:
            found.kwonlyargs.append(arg)
            found.kw_defaults.append(value)
        else:
            found.args.append(arg)
            found.defaults += [value] if value else []
    return found


def _call(function: ast.FunctionDef) -> ast.arguments:
    """What an instance is called with: what the function compares, and the world."""
    of = function.args
    world, none = ast.arg("world", ast.parse("World | None", mode="eval").body), ast.Constant(None)
    return ast.arguments([], [ast.arg("self"), *of.args], of.vararg, [world], [none], None, of.defaults)


def _written(arguments: ast.arguments) -> dict[str, tuple[str, str]]:
    """Annotation and default of each argument, as they stand in the source."""
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [
        *zip(arguments.args, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {
        x.arg: (ast.unparse(x.annotation) if x.annotation else "object", ast.unparse(value) if value else "")
        for x, value in pairs
        if x.arg != "self"
    }


def _home_of_constructor(cls: Any) -> Any:
    return next(base for base in cls.__mro__ if "__init__" in vars(base))


def _own_constructor(cls: Any) -> ast.FunctionDef:
    source = inspect.cleandoc("\n" + inspect.getsource(_home_of_constructor(cls).__init__))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    return node


def _imports_of_constructor(cls: Any) -> list[ast.stmt]:
    """Those of the module that defines it: its annotations may need some of them."""
    tree = ast.parse(Path(inspect.getfile(_home_of_constructor(cls))).read_text())
    used = {x.id for x in ast.walk(_own_constructor(cls).args) if isinstance(x, ast.Name)}
    imports = [x for x in tree.body if isinstance(x, ast.ImportFrom)]
    return [ast.ImportFrom(x.module, names, 0) for x in imports if (names := [y for y in x.names if y.name in used])]


def _method(name: str, arguments: ast.arguments, returns: str) -> ast.FunctionDef:
    return ast.FunctionDef(name, arguments, [_dots()], [], ast.Name(returns), None)


def _docstring(text: str) -> ast.stmt:
    text = inspect.cleandoc(text)
    return ast.Expr(ast.Constant(text + "\n" * ("\n" in text)))


def _dots() -> ast.stmt:
    return ast.Expr(ast.Constant(...))


def outdated() -> dict[Path, str | None]:
    """What the stubs that are out of date should be: their text, or None for one without a module."""
    wanted = stubs(modules())
    there = {x for x in PACKAGE.rglob("*.pyi") if x.read_text().startswith(HEADER)}
    changed = {x: text for x, text in wanted.items() if x not in there or x.read_text() != text}
    return {x: changed.get(x) for x in sorted((there - set(wanted)) | set(changed))}


def main() -> int:
    """Write the stubs, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    found = outdated()
    for path, text in found.items():
        print(f"{path.relative_to(PACKAGE.parent)} is out of date" if check else path.relative_to(PACKAGE.parent))
        if not check and text is not None:
            path.write_text(text)
        elif not check:
            path.unlink()
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
