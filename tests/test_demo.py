"""A short run of the whole demo: right jobs agree with one process, wrong recipes differ, pictures are written."""

import io
from pathlib import Path

import pytest

from examples import demo


def test_right_jobs_are_the_same_on_two_processes_and_wrong_recipes_are_not(tmp_path: Path) -> None:
    out = io.StringIO()
    found = demo.demo(tmp_path / "new" / "folder", out, epochs=1)
    assert found["ok"] is True
    assert found["right"].keys() == {job.title for job in demo.RIGHT}
    assert max(x["difference"] for x in found["right"].values()) <= demo.TOLERANCE
    assert min(x["difference"] for x in found["wrong"].values()) > 1e-4
    for job in (*demo.RIGHT, *demo.WRONG):
        assert job.title in out.getvalue()
        assert (tmp_path / "new" / "folder" / f"{job.picture}.png").read_bytes().startswith(b"\x89PNG")
    assert "Same training" in out.getvalue()
    assert max(map(len, out.getvalue().partition("Pictures")[0].splitlines())) <= 80


@pytest.mark.parametrize("far", [1e-6, float("nan")])
def test_a_difference_is_a_failure(far: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "difference", lambda *_: far)
    monkeypatch.setattr(demo, "RIGHT", demo.RIGHT[1:2])
    monkeypatch.setattr(demo, "WRONG", ())
    out = io.StringIO()
    assert demo.demo(tmp_path, out, epochs=1)["ok"] is False
    assert "FAILED" in out.getvalue()
