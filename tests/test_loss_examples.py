"""The examples of losses learn the same on two processes; the notebook prints what it stores."""

import contextlib
import importlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from examples.losses.__main__ import LOSSES, TOLERANCE
from examples.losses.digits import difference, draw

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "pages" / "examples.md"


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_train_as_one(name: str, worlds: Any, tmp_path: Path) -> None:
    if name == "pml_miner":
        pytest.importorskip("pytorch_metric_learning")
    train = importlib.import_module(f"examples.losses.{name}").train
    one, several = worlds.run(1, train, epochs=1)[0], worlds.run(2, train, epochs=1)[1]
    assert len(one.losses) == 5
    assert difference(one, several) < TOLERANCE
    draw(name, one, several, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert f"| `{name}` |" in PAGE.read_text(encoding="utf-8")


def test_the_page_shows_the_text_of_an_example() -> None:
    source = (ROOT / "examples" / "losses" / "sup_con.py").read_text(encoding="utf-8")
    assert source.strip() in PAGE.read_text(encoding="utf-8")


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
