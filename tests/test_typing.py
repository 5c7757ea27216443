"""Type checkers see what Python does: names, settings, their types and what a call returns."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pages

USER = Path(__file__).parent / "typing" / "user.py"

COMMANDS = {"mypy": ["mypy", USER], "pyright": ["pyright", "--outputjson", "--pythonpath", sys.executable, USER]}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each checker prints; both run at once. One that finds errors is none that fails."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": USER.parents[2]}
    installed = filter(find_spec, COMMANDS)
    running = {name: subprocess.Popen([sys.executable, "-m", *COMMANDS[name]], **pipes) for name in installed}
    found = {}
    for name, process in running.items():
        found[name], errors = process.communicate(timeout=600)
        assert process.returncode in (0, 1), errors
    return found


def errors_of(checker: str, text: str) -> dict[int, str]:
    if checker == "mypy":
        found = re.findall(r"^\S+user\.py:(\d+): error: (.*)$", text, re.MULTILINE)
        return {int(line): message for line, message in found}
    errors = [x for x in json.loads(text)["generalDiagnostics"] if x["severity"] == "error"]
    return {x["range"]["start"]["line"] + 1: x["message"] for x in errors}


@pytest.mark.parametrize("checker", COMMANDS)
def test_a_users_mistakes_are_found_and_nothing_else(checker: str, printed: dict[str, str]) -> None:
    pytest.importorskip(checker)
    expected = {i for i, line in enumerate(USER.read_text().splitlines(), 1) if line.endswith("# error")}
    assert len(expected) > 20
    found = errors_of(checker, printed[checker])
    assert found.keys() - expected == set(), {line: found[line] for line in found.keys() - expected}
    assert expected - found.keys() == set(), "mistakes that it does not see"
