"""The mutants of a module: each is one change of its syntax tree."""

import ast
import builtins
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from tools.pages import ROOT

PACKAGE = ROOT / "contrastive_zoo"
MODULES = (
    "engine/*.py", "ranks/adjoints.py", "ranks/collectives.py", "ranks/handshake.py",
    "ranks/transport.py", "wrapper/distributed.py", "wrapper/step.py",
)  # fmt: skip
"""The modules that are mutated, relative to the package."""

SWAPPED_NAMES = {
    "max": "min", "min": "max", "any": "all", "all": "any", "amax": "amin", "amin": "amax", "sum": "mean",
    "clamp": "abs", "zeros_like": "ones_like", "ones_like": "zeros_like", "exp": "expm1", "log": "log1p",
}  # fmt: skip
SWAPPED_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or,
    ast.Or: ast.And, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Add,
}  # fmt: skip

_LEFT_OUT = {"annotation", "returns", "decorator_list", "bases", "keywords", "type_params"}
"""Parts of definitions that are not changed; a call's keywords are."""


Name = tuple[str, str, str]
"""Module, function and change, which stay the same when lines of the module move."""


class Place(NamedTuple):
    """The qualified name of the function around a node, and the line of its statement."""

    function: str
    line: int


class Mutant(NamedTuple):
    """One change: the module, the number of the change in it, its place, and what is changed, in words."""

    path: str
    number: int
    place: Place
    change: str

    @property
    def name(self) -> Name:
        return self.path, self.place.function, self.change


def modules() -> list[str]:
    found = sorted({path for pattern in MODULES for path in PACKAGE.glob(pattern)})
    return [str(path.relative_to(PACKAGE)) for path in found if path.name != "__init__.py"]


def mutants_of(path: str) -> list[Mutant]:
    found, seen = [], Counter[tuple[str, str]]()
    for number, (place, words) in enumerate(changes(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))):
        seen[place.function, words] += 1
        again = seen[place.function, words]
        found.append(Mutant(path, number, place, words if again == 1 else f"{words} ({again})"))
    return found


def mutated(source: str, wanted: int) -> ast.Module:
    tree = ast.parse(source)
    next(islice(changes(tree), wanted, None))  # the iterator stops while the tree is changed
    return ast.fix_missing_locations(tree)


def changes(tree: ast.Module) -> Iterator[tuple[Place, str]]:
    """Yield the place of each change of a tree in turn, and words; the tree is changed while it is visited.

    Examples:
        >>> [words for _, words in changes(ast.parse("x = f(a < 1)"))]
        ['a < 1 → a <= 1', '1 → 2']
    """
    for node, place in _code(tree, Place("", 0)):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED_OPERATORS:
            swapped = [SWAPPED_OPERATORS[type(node.ops[0])](), *node.ops[1:]]
            yield from _changed(node, place, "ops", swapped)
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAPPED_OPERATORS:
            yield from _changed(node, place, "op", SWAPPED_OPERATORS[type(node.op)]())
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
            yield from _changed(node, place, "operand", ast.UnaryOp(node.op, node.operand))
        if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            other = not node.value if isinstance(node.value, bool) else node.value + 1
            yield from _changed(node, place, "value", other)
        if isinstance(node, (ast.If, ast.IfExp)):
            yield from _changed(node, place, "test", ast.Constant(value=True))
        if isinstance(node, ast.Attribute) and node.attr in SWAPPED_NAMES:
            yield from _changed(node, place, "attr", SWAPPED_NAMES[node.attr])
        if isinstance(node, ast.Name) and hasattr(builtins, SWAPPED_NAMES.get(node.id, "")):
            yield from _changed(node, place, "id", SWAPPED_NAMES[node.id])
        yield from _without_statements(node, place)


def _changed(node: ast.AST, place: Place, name: str, value: Any) -> Iterator[tuple[Place, str]]:
    before, text = getattr(node, name), _first_line(node)
    setattr(node, name, value)
    yield place, f"{text} → {_first_line(node)}"
    setattr(node, name, before)


def _without_statements(node: ast.AST, place: Place) -> Iterator[tuple[Place, str]]:
    """Leave out each statement of a block that is a call or an augmented assignment."""
    for name in ("body", "orelse", "finalbody"):
        block: Any = getattr(node, name, [])
        for i, statement in enumerate(block if isinstance(block, list) else []):
            if isinstance(statement, (ast.Expr, ast.AugAssign)) and not _is_text(statement):
                setattr(node, name, [*block[:i], ast.copy_location(ast.Pass(), statement), *block[i + 1 :]])
                yield place._replace(line=statement.lineno), f"left out: {_first_line(statement)}"
                setattr(node, name, block)


def _code(node: ast.AST, place: Place, prefix: str = "") -> Iterator[tuple[ast.AST, Place]]:
    """Yield all nodes but docstrings, annotations, errors, assertions, imports, decorators and bodies of classes."""
    if isinstance(node, ast.stmt):
        place = place._replace(line=node.lineno)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        place = Place(prefix + node.name, node.lineno)
        prefix = f"{place.function}." if isinstance(node, ast.ClassDef) else f"{place.function}.<locals>."
    yield node, place
    left_out = _LEFT_OUT if not isinstance(node, ast.Call) else set()
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            skipped = isinstance(child, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom))
            skipped |= isinstance(child, ast.keyword) and child.arg == "strict"  # zip's assertion
            of_class = isinstance(node, ast.ClassDef) and not isinstance(child, ast.FunctionDef)
            if isinstance(child, ast.AST) and not (skipped or of_class or name in left_out or _is_text(child)):
                yield from _code(child, place, prefix)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.Yield))
