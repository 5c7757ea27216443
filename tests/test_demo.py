"""A short run of the whole demo, and of the example of retrieval: right jobs agree with one process, wrong ones differ."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from contrastive_zoo.testing.worlds import Worlds

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("pytorch_metric_learning")

from examples import demo, text_retrieval
from examples.docstrings import texts

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "pages" / "index.md"


def test_right_jobs_are_the_same_on_two_processes_and_wrong_recipes_are_not(tmp_path: Path) -> None:
    out = io.StringIO()
    found = demo.demo(tmp_path / "new" / "folder", out, epochs=1)
    assert found["ok"] is True
    assert found["right"].keys() == {job.title for job in demo.RIGHT}
    assert max(x["difference"] for x in found["right"].values()) <= demo.TOLERANCE
    assert min(x["difference"] for x in found["wrong"].values()) > 1e-4
    for job in (*demo.RIGHT, *demo.WRONG):
        assert job.title in out.getvalue()
        assert job in demo.WRONG or f"| `{job.name}` |" in PAGE.read_text(encoding="utf-8")
        picture = tmp_path / "new" / "folder" / f"example-{job.name.replace('_', '-')}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Same training" in out.getvalue()
    assert max(map(len, out.getvalue().partition("Pictures")[0].splitlines())) <= 80


def test_a_difference_that_is_no_number_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "difference", lambda *_: float("nan"))
    out = io.StringIO()
    assert demo.demo(tmp_path, out, epochs=1, jobs=demo.RIGHT[1:2])["ok"] is False
    assert "FAILED" in out.getvalue()


def test_the_notebook_prints_what_it_stores() -> None:
    cells = json.loads((ROOT / "examples" / "gradient_table.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        source = "".join(cell["source"])
        stored = "".join("".join(x.get("text", "")) for x in cell["outputs"] if x["output_type"] == "stream")
        if "matplotlib" in source:
            assert any("image/png" in x.get("data", {}) for x in cell["outputs"])
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(source, "notebook", "exec"), namespace)
        assert out.getvalue() == stored


def test_training_on_docstrings_is_the_same_on_two_processes(worlds: Worlds) -> None:
    short = text_retrieval.Settings(epochs=2, width=8, mine_every=2, learning_rate=1e-2, chunk_tokens=400, chunks=5)
    data = texts(("logging", "json"))
    (expected,) = worlds.run(1, text_retrieval.train, data, short)
    for found in worlds.run(2, text_retrieval.train, data, short):
        assert (found.weights - expected.weights).abs().max() <= 1e-10
        assert found.losses == pytest.approx(expected.losses, abs=1e-10)
        assert found.scores == expected.scores
    assert sum(expected.losses[-3:]) < sum(expected.losses[:3])
    local = text_retrieval.train(data, short._replace(epochs=1), local=True)
    assert abs(local.losses[0] - expected.losses[0]) > 0.1  # fewer negatives
