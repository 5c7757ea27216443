"""Type checkers see what Python does: names, settings, their types and what a call returns."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USER = Path(__file__).parent / "typing" / "user.py"


def ran(*command: str) -> str:
    """What it prints; a checker that finds errors is none that fails."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def mypy() -> dict[int, str]:
    """Errors by their lines."""
    found = re.findall(r"^\S+user\.py:(\d+): error: (.*)$", ran("mypy", str(USER)), re.MULTILINE)
    return {int(line): message for line, message in found}


def pyright() -> dict[int, str]:
    report = json.loads(ran("pyright", "--outputjson", "--pythonpath", sys.executable, str(USER)))
    errors = [x for x in report["generalDiagnostics"] if x["severity"] == "error"]
    return {x["range"]["start"]["line"] + 1: x["message"] for x in errors}


@pytest.mark.parametrize("checker", [mypy, pyright], ids=lambda x: x.__name__)
def test_a_users_mistakes_are_found_and_nothing_else(checker: Callable[[], dict[int, str]]) -> None:
    pytest.importorskip(checker.__name__)
    expected = {i for i, line in enumerate(USER.read_text().splitlines(), 1) if line.endswith("# error")}
    assert len(expected) > 20
    found = checker()
    assert found.keys() - expected == set(), {line: found[line] for line in found.keys() - expected}
    assert expected - found.keys() == set(), "mistakes that it does not see"
