"""Examples of trainers: short, documented, and exact; a deviation is found."""

import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from examples.__main__ import main
from examples.run import EXAMPLES, Outcome, measure, recipe_of, setups
from examples.setup import Deviation, Setup, Trained
from tests.interpreter import torchrun
from tools.trainers_page import right_table, wrong_table

pytestmark = pytest.mark.filterwarnings("ignore")  # trainers warn when they are imported

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "pages"


def test_every_set_up_is_on_the_page_of_its_trainer() -> None:
    for example in EXAMPLES:
        page = (PAGES / "trainers" / f"{recipe_of(example)}.md").read_text(encoding="utf-8")
        try:
            available = setups(example)
        except ModuleNotFoundError:
            continue
        assert [x.name for x in available if f"| {x.name} |" not in page] == [], "run: python -m tools.trainers_page"
        assert len({x.name for x in available}) == len(available)


def test_a_higher_bound_has_a_reason_and_a_mistake_a_fix() -> None:
    for setup in setups("ddp") + setups("amp") + setups("mistakes"):
        assert setup.bound <= 1e-9 or setup.note
        assert bool(setup.mistake) == bool(setup.fix)


def test_an_example_runs_under_torchrun() -> None:
    done = torchrun(2, "-m", "examples", "ddp", "--setup", "the loss in the model")
    assert done.returncode == 0, done.stderr
    found = re.search("the loss in the model: encoder (.*), loss parameters (.*)", done.stdout)
    assert found, done.stdout
    assert max(map(float, found.groups())) < 1e-9


def test_an_unknown_example_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["examples", "ddpp"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no such example: ddpp" in capsys.readouterr().err


def test_a_deviation_is_relative_to_the_training() -> None:
    before, after = Trained([torch.zeros(2)], [torch.zeros(1)]), Trained([torch.ones(2)], [torch.ones(1)])
    assert Deviation.between(after, before, after) == (0, 0)
    assert Deviation.between(before, before, after) == (1, 1)
    assert Deviation.between(Trained([torch.ones(2)], [torch.tensor([1.5])]), before, after) == (0, 0.5)


def test_an_outcome_is_ok_within_its_bound_only() -> None:
    right, wrong = Setup("a", train=lambda: None), Setup("b", train=lambda: None, mistake="m", fix="f")
    assert Outcome("x", right, Deviation(1e-10, 1e-9)).ok
    assert not Outcome("x", right, Deviation(1e-10, 2e-9)).ok
    assert not Outcome("x", right, Deviation(float("nan"), 0)).ok
    assert not Outcome("x", right, Deviation(0, float("nan"))).ok
    assert not Outcome("x", right, None, "ValueError: refused").ok
    assert Outcome("x", wrong, Deviation(0, 0.1)).ok
    assert Outcome("x", wrong, None, "ValueError: refused").ok
    assert not Outcome("x", wrong, None, "RuntimeError: gloo").ok
    assert not Outcome("x", wrong, Deviation(1e-12, 0)).ok


def test_tables_separate_mistakes_from_right_set_ups() -> None:
    outcomes = [
        Outcome("x", Setup("good", train=lambda: None), Deviation(1e-16, 2e-16)),
        Outcome("x", Setup("bad", train=lambda: None, mistake="m", fix="f"), Deviation(0.123, 1)),
        Outcome("x", Setup("stopped", train=lambda: None, mistake="m", fix="f"), None, "ValueError: no"),
    ]
    assert right_table(outcomes).splitlines()[2:] == ["| good | 1e-16 | 2e-16 | 2 | 1e-09 |"]
    assert wrong_table(outcomes).splitlines()[2:] == [
        "| bad | 12 % | 100 % | m | f |",
        "| stopped | refused | refused | m | f |",
    ]


def test_an_example_without_its_library_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def missing(example: str) -> list[Setup]:
        raise ModuleNotFoundError("No module named 'lightning'", name="lightning")

    monkeypatch.setattr("examples.run.setups", missing)
    assert list(measure(["lightning_module"])) == []
    assert "lightning is not installed" in capsys.readouterr().err
