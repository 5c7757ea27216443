"""What an import of the package loads, its names, which module may import which, SECURITY.md, and files of a release."""

import ast
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import contrastive_zoo as cz
from contrastive_zoo.testing.auditing.launch import local_store
from contrastive_zoo.testing.worlds import Worlds

PACKAGE = Path(cz.__file__).parent
NAME = PACKAGE.name

ROOMS = ["ranks", "engine", "loss_base", "losses", "wrapper", "metrics", "data", "adapters", "testing"]
"""Folders of the package; each imports only from those before it."""

OF_LOSSES = tuple(f"testing.{x}" for x in ("auditing", "catalogue", "check", "cli", "console", "loss_evidence"))
"""Modules of testing that show, list and find losses; loss_evidence tries whether the wrapper repairs one."""


@functools.cache
def modules(under: str = "") -> list[str]:
    files = sorted((PACKAGE / under.replace(".", "/")).rglob("*.py"))
    names = [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in files]
    return [name.removesuffix("__init__").rstrip(".") for name in names]


@functools.cache
def tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split("."))
    file = path.with_suffix(".py")  # beside which an older checkout may have left a folder of its caches
    return ast.parse((file if file.exists() else path / "__init__.py").read_text())


def imported(node: ast.AST) -> Iterator[str]:
    for x in ast.walk(node):
        if isinstance(x, ast.Import):
            yield from (alias.name for alias in x.names)
        elif isinstance(x, ast.ImportFrom):
            assert x.level == 0, "imports are absolute"
            yield from (f"{x.module}.{alias.name}" for alias in x.names)


@functools.cache
def imported_names(module: str) -> frozenset[str]:
    return frozenset(imported(tree(module)))


@functools.cache
def imported_modules(module: str) -> set[str]:
    found = {name.removeprefix(f"{NAME}.") for name in imported_names(module) if name.startswith(f"{NAME}.")}
    known = set(modules())
    return {name if name in known else name.rpartition(".")[0] for name in found}


def room(module: str) -> int:
    return ROOMS.index(module.partition(".")[0])


MEMORIES = {"losses.cross_batch_memory", "losses.nnclr", "losses.memory_queue"}  # which keep what all ranks have sent
FORMULAS = [module for module in modules("losses") if module not in {"losses", *MEMORIES}]


IMPORTS = """import json, sys
loaded = lambda *names: sorted({m.partition(".")[0] for m in sys.modules} & {*names})
inner = lambda room="": [m for m in sys.modules if m.startswith(f"contrastive_zoo.{room}")]
import contrastive_zoo as cz
found = {"alone": [*loaded("torch", "numpy", "jaxtyping"), *inner()]}

import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.distributed_c10d import _World
state = lambda: [Join.__enter__, Join.__exit__, _World.default_pg]
before, others = state(), {*sys.modules}
from contrastive_zoo.losses import NTXent
found["names"] = [cz.losses.NTXent is NTXent is cz.NTXent, "NTXent" in dir(cz)]
[getattr(cz, name) for name in cz.__all__]
new = {m.partition(".")[0] for m in {*sys.modules} - others}
optional = {"hypothesis", "pytest", "cloudpickle", "matplotlib", "typer", "faiss", "sklearn", "pandas", "scipy"}
found["optional"] = sorted(new & {*optional, "pytorch_metric_learning"}) + inner("testing.")
from contrastive_zoo.ranks.compat import default_group
imported = state() == before
with default_group(None): inside = state() == before
outside = state() == before
cz.DistributedLoss(cz.NTXent())
found["torch"] = [imported, inside, outside, state() == before]
found["names"].append(cz.testing.__name__)
print(json.dumps(found))"""


def test_what_an_import_loads_and_changes() -> None:
    """The plugin and the command line start without torch, in a third of the time; optional packages stay where they are.

    torch's join context is watched from the first wrapper on; the default process group is another within a call only.
    """
    run = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    names, states = [True, True, f"{NAME}.testing"], [True, False, True, False]
    assert json.loads(run.stdout) == {"alone": [], "names": names, "optional": [], "torch": states}


def test_every_public_name_exists_and_has_a_docstring() -> None:
    assert dir(cz) == sorted(cz.__all__)
    for name in set(cz.__all__) - {"__version__"}:
        thing = getattr(cz, name)
        assert thing.__doc__, name
        home = importlib.import_module(getattr(thing, "__module__", NAME))
        assert getattr(home, name) is thing, f"{name}: the module is the one that defines the name"
    starred: dict[str, object] = {}
    exec(f"from {NAME} import *", starred)
    assert set(cz.__all__) <= set(starred)


def test_type_checkers_know_each_name() -> None:
    """Type checkers take a name as public if it is imported as itself, or by a star: only losses are."""
    aliases = [x for line in tree("public").body if isinstance(line, ast.ImportFrom) for x in line.names]
    assert [x.name for x in aliases if x.asname != x.name] == ["*"]
    assert {x.name for x in aliases} - {"*"} | set(cz.losses.__all__) == set(cz.__all__) - {"__version__"}
    homes = {name: getattr(getattr(cz, name), "__module__", "") for name in cz.__all__}
    assert {name for name, home in homes.items() if home.startswith(f"{NAME}.losses.")} == {*cz.losses.__all__}
    assert all(getattr(cz.losses, name) is getattr(cz, name) for name in cz.losses.__all__)


def test_the_root_holds_five_files_and_the_rooms_of_which_each_has_a_sentence_on_its_door() -> None:
    held = {x.name for x in PACKAGE.iterdir() if x.name != "__pycache__"}
    assert held == {"__init__.py", "__main__.py", "public.py", "py.typed", *ROOMS}
    sentences = {name: (ast.get_docstring(tree(name)) or "").partition("\n")[0] for name in ROOMS}
    assert {name: text for name, text in sentences.items() if not 30 < len(text) < 130} == {}


def test_imports_point_to_rooms_before_in_no_circle() -> None:
    """Modules of the engine's room call kernels, and not the reverse; nothing outside the wheel is imported."""
    arrows = {module: imported_modules(module) - {module, ""} for module in modules()}
    of_rooms = [(x, other) for x in modules() if x not in ("", "__main__", "public") for other in arrows[x]]
    assert ("losses.nt_xent", "engine.batch") in of_rooms
    assert [(x, other) for x, other in of_rooms if room(other) > room(x)] == []
    of_kernels = [other for x, other in of_rooms if x.startswith("engine.kernels")]
    assert of_kernels
    assert [other for other in of_kernels if not other.startswith(("ranks.", "engine.kernels"))] == []
    outside = {"tools", "tests", "benchmarks"}
    assert [x for x in modules() if {name.partition(".")[0] for name in imported_names(x)} & outside] == []
    while free := [module for module, others in arrows.items() if not others & arrows.keys()]:
        for module in free:
            del arrows[module]
    assert not arrows, "each of these imports one of the others"


def test_no_module_of_the_package_is_imported_by_a_string() -> None:
    calls = [(x, module) for module in modules() for x in ast.walk(tree(module)) if isinstance(x, ast.Call)]
    assert [m for x, m in calls if "import_module" in ast.unparse(x.func) and NAME in ast.unparse(x.args[0])] == []


OF_A_FORMULA = {"ranks.row_checks", "ranks.devices", "ranks.random_keys"}
"""What a loss may import of the room of ranks: checks of its own rows; its batch has the sums over ranks."""

RANKS = {"get_rank", "get_world_size", "distributed", "world_size", "dist", "world.rank", "world.size", "world.group"}


def words(code: ast.Module) -> set[str]:
    """The words of a module, but for the warning that a loss without wrapper sees local samples only."""
    warning = [f for f in ast.walk(code) if isinstance(f, ast.FunctionDef) and f.name == "local"]
    nodes = {x for x in ast.walk(code) if not isinstance(x, ast.keyword)} - {x for f in warning for x in ast.walk(f)}
    found = {ast.unparse(x) for x in nodes if isinstance(x, ast.Attribute)}
    return found.union(*({getattr(x, name, None) for x in nodes} for name in ("id", "arg", "name", "attr")))


def test_losses_depend_on_no_rank_no_message_and_no_implementation() -> None:
    """The base of all losses passes a World on; a formula does not even do that."""
    for module in (*modules("loss_base"), *FORMULAS):
        code, others = tree(module), imported_modules(module)
        assert not [name for name in imported(code) if name.startswith("torch.distributed")], module
        assert not words(code) & RANKS, module
        if module in FORMULAS:
            assert {x for x in others if x.startswith("ranks")} <= OF_A_FORMULA, module
            assert not words(code) & {"rank", "world", "forward"}, module
            assert not {x for x in others if x.startswith(("engine.kernels", "engine.implementation", "engine.small_"))}


def test_proofs_do_not_depend_on_losses() -> None:
    for module in (x for x in modules("testing") if not x.startswith(OF_LOSSES)):
        names = imported_modules(module)
        assert not {x for x in names if x.startswith(("losses", "engine", "wrapper.distributed", "testing.catalogue"))}
        assert "" not in names, "names of the package itself include losses"


if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_written_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    for file, line in {"CITATION.cff": r"^version: (.+)$", "CHANGELOG.md": r"^## \[(\d[^\]]*)\]"}.items():
        latest, *_ = re.findall(line, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert latest == cz.__version__


def test_the_package_page_has_no_relative_link() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    assert [x for x in re.findall(r"\]\(([^)]+)\)", page) if not re.match(r"https?://|#", x)] == []
    assert "(`docs/pages/which-all-gather.md`)" in page


def test_the_extras_are_explained_once() -> None:
    listed: list[str] = []
    for name in ("README.md", "CONTRIBUTING.md"):
        rows = (ROOT / name).read_text(encoding="utf-8").partition("| extra | for |\n")[2].partition("\n\n")[0]
        listed += re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
    assert sorted(listed) == sorted(PROJECT["project"]["optional-dependencies"])


LIBRARY = [x for x in modules() if x.partition(".")[0] not in ("testing", "__main__")]
"""Modules but for those that users start as programs."""

PICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
OBJECTS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
           "recv_object_list"}  # fmt: skip
RUNNING = {"eval", "exec", "compile", "open", "torch.load", "np.load", "os.system", "os.popen", "os.fork"}
"""Functions that run code, start processes, unpickle or open files."""


def called(code: ast.Module) -> Iterator[str]:
    for node in ast.walk(code):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
            yield ast.unparse(node.func).rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""


def test_the_library_pickles_nothing_and_starts_nothing() -> None:
    assert {"ranks.handshake", "ranks.world", "ranks.messages", "adapters.sentence_transformers"} <= {*LIBRARY}
    refused = PICKLING | {"subprocess", "socket", "tempfile", "urllib", "requests", "http"}
    for module in LIBRARY:
        assert not {x.partition(".")[0] for x in imported_names(module)} & refused, module
        calls = list(called(tree(module)))
        assert not set(calls) & OBJECTS, module
        assert not set(calls[::2]) & RUNNING, module  # model.eval() is none


def test_such_calls_and_words_are_noticed() -> None:
    code = ast.parse("import pickle\ndist.all_gather_object(x, y)\neval('1')\nmodel.eval()\ntorch.load(f)")
    assert set(imported(code)) & PICKLING == {"pickle"}
    assert set(called(code)) & OBJECTS == {"all_gather_object"}
    assert set(list(called(code))[::2]) & RUNNING == {"eval", "torch.load"}
    code = ast.parse("def f(world): world.rank, dist.x, a.get_world_size()\ndef local(): get_rank()")
    assert words(code) & {*RANKS, "world"} == {"world", "world.rank", "dist", "get_world_size"}


def listening(*pids: int) -> set[Any]:
    connections = [x for pid in pids for x in psutil.Process(pid).net_connections()]
    return {x.laddr for x in connections if x.status == psutil.CONN_LISTEN}


def test_ranks_of_the_test_pool_and_the_store_of_an_audit_listen_on_this_machine_only(worlds: Worlds) -> None:
    before = listening(os.getpid())
    store = local_store()
    of_ranks, of_store = listening(*worlds.run(2, os.getpid)), listening(os.getpid()) - before
    assert of_ranks
    assert store.port in {x.port for x in of_store}
    assert {x.ip for x in of_ranks | of_store} <= {"127.0.0.1", "::1"}


def test_the_pool_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Worlds() as pool:
        pool.run(2, os.getpid)
        assert [x.stat().st_mode & 0o777 for x in tmp_path.iterdir()] == [0o700]
    assert list(tmp_path.iterdir()) == []
