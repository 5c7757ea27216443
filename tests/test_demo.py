"""A short run of the whole demo: right jobs agree with one process, wrong recipes differ, pictures are written."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import examples.demo
from examples.demo import TOLERANCE, _verdict, compare, demo
from examples.demo.recipes import RIGHT, WRONG

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def short():
    """Return the digits and the comparisons of all jobs after four steps."""
    console = Console(file=io.StringIO(), width=80)
    digits = examples.demo.training.Digits.load()
    return digits, *compare(digits, console, steps=4)


def test_two_processes_end_with_the_parameters_of_one(short):
    _, right, _ = short
    assert [c.job.title for c in right] == [job.title for job in RIGHT]
    for c in right:
        assert len(c.two_processes) == 2
        assert c.one_process.parameters.dtype == torch.float64
        assert c.difference <= TOLERANCE
        assert c.difference_between_ranks == 0
        assert c.two_processes[0].curve == pytest.approx(c.one_process.curve, rel=1e-9)
        assert (c.one_process.before[0] != c.one_process.after[0]).any(), (
            "the parameters did not change, so the comparison says nothing"
        )


def test_the_wrong_recipes_differ(short):
    _, right, wrong = short
    assert [c.job.title for c in wrong] == [job.title for job in WRONG]
    for c in wrong:
        assert c.two_processes[0].curve[0] == pytest.approx(right[0].one_process.curve[0], rel=1e-9), (
            "same parameters, same held-out loss"
        )
        assert c.difference > 1e-4
        assert c.difference_between_ranks == 0, "DDP makes the ranks equal; the gradient is wrong"


def test_it_prints_draws_and_succeeds(short, tmp_path, monkeypatch):
    _, right, wrong = short
    monkeypatch.setattr(examples.demo, "compare", lambda *_: (right, wrong))
    printed = io.StringIO()
    result = demo(tmp_path / "new" / "folder", Console(file=printed, width=80))
    assert result["ok"] is True
    assert max(x["difference"] for x in json.loads(json.dumps(result))["right"].values()) <= TOLERANCE
    assert min(x["difference"] for x in result["wrong"].values()) > 1e-4
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
def test_a_difference_is_a_failure(short, by):
    _, right, _ = short
    changed = replace(right[1].two_processes[1], parameters=right[1].two_processes[1].parameters + by)
    failed = replace(right[1], two_processes=(right[1].two_processes[0], changed))
    printed = io.StringIO()
    assert not _verdict((right[0], failed), Console(file=printed, width=200))
    assert "FAILED SupCon: W=2 (40% + 60% of every batch) differs" in printed.getvalue()
