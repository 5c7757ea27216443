"""The program that tests the tests: it tells a noticed mutant from a survivor, and lists equivalent ones that exist."""

from pathlib import Path

import pytest

from tools.mutants import __main__ as program
from tools.mutants.changes import mutants_of
from tools.pages import ROOT

pytestmark = pytest.mark.figures

SOURCE = "def smaller(a, b):\n    return a < b\n\n\ndef unused():\n    return 7\n"
TEST = "from package.engine.tiny import smaller\n\n\ndef test_smaller():\n    assert not smaller(1, 1)\n"


def test_a_mutant_is_caught_survives_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module_of_tool in ("changes", "__main__"):
        monkeypatch.setattr(f"tools.mutants.{module_of_tool}.PACKAGE", tmp_path / "package")
    module = tmp_path / "package" / "engine" / "tiny.py"
    module.parent.mkdir(parents=True)
    module.write_text(SOURCE)
    (tmp_path / "test_tiny.py").write_text(TEST)
    smaller, seven = mutants_of("engine/tiny.py")
    assert (smaller.change, seven.change) == ("a < b → a <= b", "7 → 8")
    with program.planted(smaller, tmp_path):
        assert program.verdict(["test_tiny.py"], tmp_path) == {"verdict": "caught", "by": "test_tiny.py::test_smaller"}
        assert program.verdict(["test_tiny.py"], tmp_path, seconds=0.01)["verdict"] == "timed out"
    assert module.read_text() == SOURCE
    with program.planted(seven, tmp_path):
        assert program.verdict(["test_tiny.py"], tmp_path)["verdict"] == "survived"


def test_equivalent_mutants_exist_and_every_room_has_its_tests() -> None:
    listed = program.equivalent()
    assert listed.keys() <= {x.name for path in {name[0] for name in listed} for x in mutants_of(path)}
    assert all(reason.endswith(".") for reason in listed.values())
    tests = {f"tests/{x}" for of_room in program.TESTS.values() for x in of_room.split()}
    assert [x for x in tests if not (ROOT / x).exists()] == []
