"""The tutorial: what its commands print is what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import python, torchrun
from tests.test_recipes import PROGRAM

pytest.importorskip("sklearn")
pytest.importorskip("nbformat")

from tools.notebook import ROOT, as_notebook

pytestmark = [pytest.mark.pages, pytest.mark.filterwarnings("ignore")]

PAGE = ROOT / "docs" / "pages" / "from-one-gpu-to-many.md"


def run(command: str) -> str:
    """Run a command of the page in the current folder and return its output."""
    program, *words = command.split()
    with pytest.MonkeyPatch.context() as patch:
        while "=" in program:
            patch.setenv(*program.split("="))
            program, *words = words
        if program == "torchrun":
            *_, processes = words[:3]
            done = torchrun(int(processes), "-c", PROGRAM.format("float32"), *words[3:])
        elif program == "python":
            done = python(*words)
        else:
            arguments = [sys.executable, "-m", "contrastive_zoo", *words]
            done = subprocess.run(arguments, text=True, capture_output=True, timeout=600, check=False)
    assert program == "contrastive-zoo" or done.returncode == 0, done.stderr
    return "\n".join(line.rstrip() for line in done.stdout.splitlines() if not line.startswith("[Gloo]"))


def without_measurements(text: str) -> str:
    """Return a text without seconds and errors, which differ from machine to machine."""
    return re.sub(r"\d+\.\d s|\d+e[+-]\d+", "#", text)


def test_the_tutorial_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    cells = [x for x in as_notebook(PAGE.read_text(encoding="utf-8")).cells if x.cell_type == "code"]
    outputs = 0
    for cell in cells:
        if cell.source.startswith("%%writefile"):
            first, _, text = cell.source.partition("\n")
            (tmp_path / first.split()[1]).write_text(text + "\n", encoding="utf-8")
        elif cell.outputs:
            commands = cell.source.replace("!", "").splitlines()
            printed = without_measurements("\n".join(map(run, commands)))
            parts = without_measurements(cell.outputs[0].text.strip()).split("\n…\n")
            missing = [part for part in parts if part not in printed]
            assert not missing, f"{cell.source} printed\n{printed}"
            outputs += 1
    assert outputs == 12
    assert cells[-1].source == "!python same.py one.pt many.pt"
    assert cells[-1].outputs[0].text == "same\n"


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 2500
