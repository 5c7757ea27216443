"""The table of the zoo: every row makes a loss, formulas are rendered whole, docstrings name errors and show examples."""

import ast
import html
import importlib
import inspect
import pydoc
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.catalogue import CATALOGUE
from tools import docstrings
from tools.formulas import latex, mathml
from tools.zoo_page import as_markdown

PAGE = Path(__file__).parent.parent / "docs" / "pages" / "zoo.md"
COMPOSED = {"Matryoshka", "WeightedSum", "CrossBatchMemory", "RowLoss", "ClassLoss", "DistributedLoss"}


def test_every_loss_has_a_row() -> None:
    public = {name: getattr(cz, name) for name in cz.__all__}
    losses = {name for name, found in public.items() if isinstance(found, type) and issubclass(found, Loss)}
    missing = losses - {entry.cls for entry in CATALOGUE.values()} - COMPOSED
    assert not missing, f"{missing}: add a row to contrastive_zoo/testing/catalogue.md"
    for entry in CATALOGUE.values():  # tests/test_fuzz.py calls each
        assert docstrings.summary(entry.loss).endswith(".")
        urls = re.findall(r"https?://\S+", docstrings.source(entry.loss))
        assert urls
        assert all(re.search(r"abs/\d{4}\.\d{4,5}[,;]?$|(?<!arxiv\.org)/\S+\w[,;]?$", url) for url in urls), urls
        assert entry.family
        assert entry.engine


def test_every_loss_of_the_package_is_public() -> None:
    for file in (Path(cz.__file__).parent / "losses").glob("[!_]*.py"):
        module = importlib.import_module(f"contrastive_zoo.losses.{file.stem}")
        classes = {x for x in vars(module).values() if isinstance(x, type) and issubclass(x, Loss)}
        names = {x.__name__ for x in classes if x.__module__ == module.__name__ and x.__name__[0] != "_"}
        names -= {"LateInteractionLoss"}  # which others extend
        assert names <= set(cz.__all__), f"add {names} to contrastive_zoo/losses/__init__.py"


@pytest.mark.parametrize("cls", {entry.loss: None for entry in CATALOGUE.values()}, ids=lambda cls: cls.__name__)
def test_the_docstring_says_what_the_constructor_and_a_call_take(cls: type[Loss]) -> None:
    doc = inspect.getdoc(cls) or ""
    example = doc.partition("\nExamples:")[2].partition("\nSource:")[0]
    assert f"{cls.__name__}(" in example
    if "\nSource:" not in doc:  # it has the docstring of the class that it extends
        return
    args = doc.partition("\nArgs:")[2].partition("\nRaises:")[0]
    found = re.findall(r"^    (\w+): ", args, re.MULTILINE)
    assert set(found) == {name for name, x in cls.fields.items() if x.init}  # inherited ones, too
    assert issubclass(cls, cz.RowLoss) or "Called as ``loss(" in doc  # a RowLoss's docstring says how it is called
    assert "world: " not in doc, "DistributedLoss passes it"


def test_no_docstring_has_more_than_300_words() -> None:
    """What is longer belongs on a page."""
    package = Path(cz.__file__).parent
    nodes = [x for file in package.rglob("*.py") for x in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    documented = [x for x in nodes if isinstance(x, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    assert [x for x in documented if len((ast.get_docstring(x) or "").split()) > 300] == []


def test_the_page_is_of_this_table() -> None:
    assert as_markdown() in PAGE.read_text(encoding="utf-8"), "run: python -m tools.zoo_page"


_SIGNS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ᵀ₀₁₂₃₄₅₆₇₈₉·Σ'ẑ", "+−0123456789T0123456789⋅∑′z")


def characters(text: str) -> list[str]:
    """Return the characters of a formula without the notation of scripts, sorted: a script may stand before another."""
    return sorted(re.sub(r"[_^{}\s]", "", text).translate(_SIGNS))


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_formula_is_rendered_whole(name: str) -> None:
    pytest.importorskip("latex2mathml")
    text = docstrings.formula(CATALOGUE[name].loss)
    assert text
    shown = html.unescape(re.sub(r"<[^>]+>", "", mathml(text))).replace("^", "").replace("-", "−")
    assert characters(shown) == characters(text)


def test_a_page_renders_formulas_of_the_catalogue_alone() -> None:
    pytest.importorskip("latex2mathml")
    hooks = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "hooks.py"))
    block = '<div class="language-text highlight"><pre><span></span><code>{}\n</code></pre></div>'
    of_hcl = docstrings.formula(cz.HCL)
    page = hooks["on_page_content"](block.format(html.escape(of_hcl)) + block.format("a = b"))
    assert page == mathml(of_hcl) + block.format("a = b")


def test_scripts_belong_to_their_letters() -> None:
    assert latex("h⁺_l") == "h ^{+} _{l}"
    assert latex("mean_{i, j∈{a,b}} x_max") == r"\operatorname*{mean} _{ i , j \in \{ a , b \} } \  x _{\max}"


PAGES = Path(cz.__file__).parents[1] / "docs" / "pages" / "reference"


def raised(function: ast.FunctionDef) -> set[str]:
    found, nodes = set[str](), [*ast.iter_child_nodes(function)]
    while nodes:
        match x := nodes.pop():
            case ast.FunctionDef() | ast.ClassDef() | ast.Lambda():
                continue
            case ast.Raise(exc=ast.Call(func=error)):
                found.add(ast.unparse(error).rpartition(".")[2])
            case ast.Expr(value=ast.Call(func=ast.Name(id="refuse"))):
                found.add("ValueError")
        nodes += ast.iter_child_nodes(x)
    # an assertion is ours, not the user's; a function that makes the error has a small letter
    return {name for name in found - {"AssertionError"} if name[0].isupper()}


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, str]]:
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
    raises = [(name, doc.partition("Raises:")[2], sorted(raised(function))) for name, function, doc in functions(tree)]
    return [f"{name}: {error}" for name, documented, errors in raises for error in errors if error not in documented]


def public() -> dict[str, Any]:
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


def file_of(x: Any) -> str:
    return inspect.getfile(inspect.unwrap(x))


def test_every_public_name_has_its_errors_and_an_example_in_the_docstring() -> None:
    objects = public()
    assert len(objects) > 90
    trees = {file: ast.parse(Path(file).read_text(encoding="utf-8")) for file in {*map(file_of, objects.values())}}
    for name, x in objects.items():  # inspect.getsource() would parse a file for each class in it
        (definition,) = [y for y in trees[file_of(x)].body if getattr(y, "name", "") == x.__name__]
        assert undocumented(ast.Module([definition], [])) == [], name
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
