"""What the package costs to import, what it names, and which of its rooms may know which."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import contrastive_zoo as cz

PACKAGE = Path(cz.__file__).parent
NAME = PACKAGE.name

LAYERS = [
    {"_compat", "class_docstring", "compiling", "later"},
    {"world"},
    {"handshake", "gather_cache"},
    {"session"},
    {"collectives"},
    {"masks", "randomness", "averaging", "evaluation", "arguments", "loss_summary", "wrapped"},
    {"engine"},
    {"loss_base"},
    {"losses"},
    {"distributed"},
    {"mining", "memory", "gradcache"},
]
"""Arrows point from later ones to earlier ones."""

WHERE_ASKED_FOR = {"distributed": {"adapters.pml_native", "adapters.pml_sharded"}}
"""What a module of the core imports inside a function only: it needs a library that few have installed."""

ABOUT_LOSSES = {"testing.gallery", "testing.gallery_steps", "testing.recipe"}
"""The rooms of testing whose subject is particular losses: the exhibits."""


def modules(under: str = "") -> list[str]:
    """Names of all modules below a package of ours, without our own name."""
    files = sorted((PACKAGE / under.replace(".", "/")).rglob("*.py"))
    names = [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in files]
    return [name.removesuffix("__init__").rstrip(".") for name in names]


def tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def imported(node: ast.AST) -> Iterator[str]:
    """Full names of what is imported anywhere in it, ``from a import b`` as ``a.b``."""
    for x in ast.walk(node):
        if isinstance(x, ast.Import):
            yield from (alias.name for alias in x.names)
        elif isinstance(x, ast.ImportFrom):
            assert x.level == 0, "imports are absolute"
            yield from (f"{x.module}.{alias.name}" for alias in x.names)


def ours(module: str) -> set[str]:
    """Modules of ours that it imports, without our own name."""
    found = {name.removeprefix(f"{NAME}.") for name in imported(tree(module)) if name.startswith(f"{NAME}.")}
    known = set(modules())
    return {name if name in known else name.rpartition(".")[0] for name in found}


def layer(module: str) -> int | None:
    room = module.partition(".")[0]
    return next((i for i, rooms in enumerate(LAYERS) if room in rooms), None)


def fresh(script: str) -> list[str]:
    """What a new interpreter prints as JSON."""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


# -------------------------------------------------------------------------------------------------------------- names


def test_importing_the_package_imports_nothing_else() -> None:
    heavy = "{m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'jaxtyping'}"
    inner = "{m for m in sys.modules if m.startswith('contrastive_zoo.')}"
    script = f"import json, sys, contrastive_zoo; dir(contrastive_zoo); print(json.dumps([*{heavy}, *{inner}]))"
    assert fresh(script) == []


def test_using_the_library_imports_no_optional_package() -> None:
    optional = "{'hypothesis', 'pytest', 'cloudpickle', 'matplotlib', 'typer', 'rich', 'faiss', 'sklearn'}"
    optional += " | {'pytorch_metric_learning', 'pandas', 'scipy'}"
    script = (
        "import json, sys, torch; before = set(sys.modules)\n"
        "import contrastive_zoo\n"
        "[getattr(contrastive_zoo, name) for name in contrastive_zoo.__all__]\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "testing = {name for name in sys.modules if name.startswith('contrastive_zoo.testing')}\n"
        f"print(json.dumps(sorted(new & ({optional}) | testing)))"
    )
    assert fresh(script) == []


@pytest.mark.parametrize("name", cz.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    thing = getattr(cz, name)
    home = cz._HOMES.get(name)
    if home is None:
        assert name == "__version__"
        return
    assert getattr(importlib.import_module(home), name) is thing
    assert thing.__doc__
    if hasattr(thing, "__qualname__"):
        assert thing.__module__ == home, "its home is where it is defined"


def test_dir_lists_the_public_names() -> None:
    assert dir(cz) == sorted(cz.__all__)
    assert len(set(cz.__all__)) == len(cz.__all__)


def test_a_star_import_brings_them_all() -> None:
    found: dict[str, object] = {}
    exec(f"from {NAME} import *", found)
    assert set(cz.__all__) <= set(found)


def test_the_table_of_names_is_a_stub_that_exports_each_of_them() -> None:
    table = ast.parse((PACKAGE / "__init__.pyi").read_text())
    lines = [line for line in table.body if isinstance(line, ast.ImportFrom)]
    for line in lines:
        (name,) = line.names
        assert name.asname == name.name, f"{name.name} is exported only where it is imported as itself"
    assert sorted(cz._HOMES) == sorted(line.names[0].name for line in lines)


@pytest.mark.parametrize("name", ["NTXnet", "world", "torch"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    # submodules that somebody has imported are attributes of any package, but nothing is imported on the way
    script = "import json, contrastive_zoo\n"
    script += f"try: contrastive_zoo.{name}\nexcept AttributeError as error: print(json.dumps(str(error)))"
    assert fresh(script) == f"module 'contrastive_zoo' has no attribute {name!r}"


# -------------------------------------------------------------------------------------------------------------- arrows


@pytest.mark.parametrize("module", modules())
def test_the_package_imports_nothing_from_outside_the_wheel(module: str) -> None:
    assert not {name.partition(".")[0] for name in imported(tree(module))} & {"tools", "tests", "benchmarks"}


@pytest.mark.parametrize("module", modules("adapters"))
def test_adapters_do_not_import_what_tests_them(module: str) -> None:
    assert not {other for other in ours(module) if other.partition(".")[0] in ("testing", "cli", "demo")}


@pytest.mark.parametrize("module", [module for module in modules() if layer(module) is not None])
def test_arrows_point_one_way(module: str) -> None:
    here = layer(module)
    for other in ours(module) - WHERE_ASKED_FOR.get(module, set()):
        there = layer(other)
        assert there is not None, f"{module} imports {other}, which stands outside the core"
        same_room = module.partition(".")[0] == other.partition(".")[0]
        assert there < here or same_room, f"{module} imports {other}, which stands above or beside it"


@pytest.mark.parametrize("module", WHERE_ASKED_FOR)
def test_adapters_are_imported_where_they_are_asked_for(module: str) -> None:
    assert not [
        name
        for statement in tree(module).body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        for name in imported(statement)
        if ".adapters" in name
    ]


@pytest.mark.parametrize("module", modules())
def test_no_module_of_ours_is_imported_by_a_string(module: str) -> None:
    calls = [x for x in ast.walk(tree(module)) if isinstance(x, ast.Call) and "import_module" in ast.unparse(x.func)]
    assert not [ast.unparse(x) for x in calls if NAME in ast.unparse(x.args[0])]


def test_the_arrows_are_really_read() -> None:
    assert ours("losses.nt_xent") >= {"engine.softmax", "loss_base.loss", "world"}
    assert "distributed" in ours("testing.gallery")
    assert {layer(name) for name in ("world", "engine.rowwise", "distributed", "cli")} == {1, 6, 9, None}


@pytest.mark.parametrize("module", [*modules("losses"), *modules("loss_base")])
def test_losses_know_nothing_of_processes(module: str) -> None:
    """They pass a World on; the one exception is the warning that a bare loss sees its own rows only."""
    code = tree(module)
    assert not [name for name in imported(code) if name.startswith("torch.distributed")]
    allowed = {
        id(x) for f in ast.walk(code) if isinstance(f, ast.FunctionDef) and f.name == "local" for x in ast.walk(f)
    }
    for x in ast.walk(code):
        if id(x) in allowed:
            continue
        if isinstance(x, ast.Attribute):
            of_world = isinstance(x.value, ast.Name) and x.value.id == "world"
            assert not (of_world and x.attr in ("rank", "size", "group")), ast.unparse(x)
            assert x.attr not in ("get_rank", "get_world_size", "distributed"), ast.unparse(x)
        if isinstance(x, ast.Name):
            assert x.id not in ("rank", "world_size", "dist"), ast.unparse(x)


@pytest.mark.parametrize("module", [module for module in modules("testing") if module not in ABOUT_LOSSES])
def test_testing_knows_no_particular_loss(module: str) -> None:
    known = {other.partition(".")[0] for other in ours(module)}
    assert not known & {"losses", "engine", "distributed", "catalogue"}
    assert "" not in known, "names of the package itself are losses, too"
