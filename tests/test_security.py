"""The statements of SECURITY.md."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import contrastive_zoo as cz
from contrastive_zoo.testing.auditing.launch import local_store
from contrastive_zoo.testing.worlds import Worlds
from tests.test_package import imported

PACKAGE = Path(cz.__file__).parent
PROGRAMS = {"testing", "__main__.py"}
"""Parts of the package that users start; the others are the library."""

PICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
OBJECTS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
           "recv_object_list"}  # fmt: skip
RUNNING = {"eval", "exec", "compile", "open", "torch.load", "np.load", "os.system", "os.popen", "os.fork"}
"""Functions that run code, start processes, unpickle or open files."""


def library() -> list[Path]:
    """The modules of the library."""
    return [x for x in PACKAGE.rglob("*.py") if x.relative_to(PACKAGE).parts[0] not in PROGRAMS]


def called(tree: ast.Module) -> Iterator[str]:
    """Yield what a module calls: the whole expression, and the name of a method or of a module's function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
            yield ast.unparse(node.func).rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""


def test_the_library_pickles_nothing_and_starts_nothing() -> None:
    names = {str(x.relative_to(PACKAGE)) for x in library()}
    assert {"ranks/handshake.py", "ranks/world.py", "ranks/messages.py", "adapters/sentence_transformers.py"} <= names
    refused = PICKLING | {"subprocess", "socket", "tempfile", "urllib", "requests", "http"}
    for path in library():
        tree = ast.parse(path.read_text())
        assert not {x.partition(".")[0] for x in imported(tree)} & refused, path
        calls = list(called(tree))
        assert not set(calls) & OBJECTS, path
        assert not set(calls[::2]) & RUNNING, path  # model.eval() is none


def test_such_calls_are_noticed() -> None:
    tree = ast.parse("import pickle\ndist.all_gather_object(x, y)\neval('1')\nmodel.eval()\ntorch.load(f)")
    assert set(imported(tree)) & PICKLING == {"pickle"}
    assert set(called(tree)) & OBJECTS == {"all_gather_object"}
    assert set(list(called(tree))[::2]) & RUNNING == {"eval", "torch.load"}


def listening(process: psutil.Process) -> list[str]:
    """The addresses at which a process listens."""
    return [x.laddr.ip for x in process.net_connections() if x.status == psutil.CONN_LISTEN]


def test_ranks_of_the_test_pool_listen_on_this_machine_only(worlds: Worlds) -> None:
    pids = worlds.run(2, os.getpid)
    addresses = [address for pid in pids for address in listening(psutil.Process(pid))]
    assert addresses
    assert set(addresses) <= {"127.0.0.1", "::1"}


def test_the_store_of_an_audit_listens_on_this_machine_only() -> None:
    before = listening(psutil.Process())
    store = local_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    new = listening(psutil.Process())[len(before) :] or listening(psutil.Process())
    assert set(new) <= {"127.0.0.1", "::1"}


def test_the_pool_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Worlds() as pool:
        pool.run(2, os.getpid)
        assert [x.stat().st_mode & 0o777 for x in tmp_path.iterdir()] == [0o700]
    assert list(tmp_path.iterdir()) == []
