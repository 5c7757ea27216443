"""A short run of the whole demo: the right jobs agree, the wrong recipes drift, the pictures are there."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import contrastive_zoo.demo
from contrastive_zoo.cli import app
from contrastive_zoo.demo import TOLERANCE, _verdict, compare, demo
from contrastive_zoo.demo.recipes import RIGHT, WRONG

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def short():
    """Four steps of everything."""
    console = Console(file=io.StringIO(), width=80)
    digits = contrastive_zoo.demo.Digits.load()
    return digits, *compare(digits, console, steps=4)


def test_two_processes_end_where_one_does(short):
    _, right, _ = short
    assert [c.job.title for c in right] == [job.title for job in RIGHT]
    for c in right:
        assert len(c.together) == 2
        assert c.alone.parameters.dtype == torch.float64
        assert c.drift <= TOLERANCE
        assert c.disagreement == 0
        assert c.together[0].curve == pytest.approx(c.alone.curve, rel=1e-9)
        assert (c.alone.before[0] != c.alone.after[0]).any(), "nothing was learnt, so nothing was compared"


def test_the_wrong_recipes_drift(short):
    _, right, wrong = short
    assert [c.job.title for c in wrong] == [job.title for job in WRONG]
    for c in wrong:
        assert c.together[0].curve[0] == pytest.approx(right[0].alone.curve[0], rel=1e-9), "same start, same measure"
        assert c.drift > 1e-4
        assert c.disagreement == 0, "DDP keeps the ranks in step; it is the gradient that is wrong"


def test_it_prints_draws_and_succeeds(short, tmp_path, monkeypatch):
    _, right, wrong = short
    monkeypatch.setattr(contrastive_zoo.demo, "compare", lambda *_: (right, wrong))
    printed = io.StringIO()
    assert demo(tmp_path / "new" / "folder", Console(file=printed, width=80))
    for name in ("training_curves.png", "embeddings.png"):
        assert (tmp_path / "new" / "folder" / name).read_bytes().startswith(PNG)
    text = printed.getvalue()
    assert str(tmp_path / "new" / "folder") in text
    assert "Same training." in text
    for job in (*RIGHT, *WRONG):
        assert job.title in text
    assert max(map(len, text.partition("Pictures")[0].splitlines())) <= 80
    assert "…" not in text, "the table fits 80 columns"


@pytest.mark.parametrize("by", [1e-6, float("nan")])
def test_a_drift_is_a_failure(short, by):
    _, right, _ = short
    bent = replace(right[1].together[1], parameters=right[1].together[1].parameters + by)
    failed = replace(right[1], together=(right[1].together[0], bent))
    printed = io.StringIO()
    assert not _verdict((right[0], failed), Console(file=printed, width=200))
    assert "FAILED SupCon: W=2 (40% + 60% of every batch) ended" in printed.getvalue()


@pytest.mark.parametrize(("agree", "status"), [(True, 0), (False, 1)])
def test_the_exit_status_is_the_verdict(monkeypatch, tmp_path, agree, status):
    monkeypatch.setattr(contrastive_zoo.demo, "demo", lambda output: agree and output == tmp_path)
    assert CliRunner().invoke(app, ["demo", "--output", str(tmp_path)]).exit_code == status


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("contrastive_zoo.cli.find_spec", lambda name: None if name == "faiss" else object())
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "needs faiss: pip install contrastive_zoo[demo]" in result.output
