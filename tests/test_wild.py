"""The wild report tells a right loss from a wrong one in a folder of clones, and says why an entry did not run."""

import inspect
from pathlib import Path

import pytest

from contrastive_zoo.testing.worlds import Worlds
from tools.wild import adapters
from tools.wild.__main__ import counts, page
from tools.wild.measurement import RIGHT, measured
from tools.wild.projects import Entry, entries

LOSS = """
import a_package_that_is_not_installed as missing
import torch
from a_package_that_is_not_installed import Base, register
from tiny.gather import gather

@register("losses")
class Model(Base, option=True):
    logger: missing.Logger | None = None

def right(view1, view2):
    return (gather(view1).mean(0) @ gather(view2).mean(0)).cuda()

def local(view1, view2):
    return view1.mean(0) @ view2.mean(0)
"""
GATHER = """
from contrastive_zoo.ranks.collectives import all_gather

def gather(x):
    return all_gather(x)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "someone+tiny" / "src" / "tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package is not imported as a whole')")
    (package / "loss.py").write_text(LOSS)
    (package / "gather.py").write_text(GATHER)
    return tmp_path


def entry(name: str, project: str = "someone/tiny") -> Entry:
    place = {"file": "src/tiny/loss.py", "line": f"def {name}(", "source": "src"}
    return Entry(project, "0123456", name, **place, adapter="function", settings={"name": name})


def test_a_right_and_a_wrong_loss_are_told_apart(folder: Path, worlds: Worlds) -> None:
    right, local = (measured(entry(name), folder, worlds, 1, (1, 2)) for name in ("right", "local"))
    assert (right.verdict, *right.columns[:2]) == (RIGHT, "right", "right")
    assert local.verdict == "local negatives"
    assert "**" in local.columns[0]
    assert local.fix
    assert (right.line_number, local.line_number) == (11, 14)
    text = page([right, local])
    assert "https://github.com/someone/tiny/blob/0123456/src/tiny/loss.py#L14" in text
    assert counts([right, local]).splitlines() == [
        "2 losses of 1 projects ran; 0 entries did not.",
        "",
        "- wrong on equal shards: 1 losses of 1 projects",
        "- raise, hang or end a process on uneven shards: 0 losses of 0 projects",
        "- right: 1 losses of 1 projects",
        "- diagnoses: 1 local negatives",
    ]


def test_what_does_not_run_is_a_row_that_says_why(folder: Path, worlds: Worlds) -> None:
    missing = measured(entry("right", project="someone/else"), folder, worlds)
    assert missing.why_not == "no such file in the folder: someone+else/src/tiny/loss.py"
    unknown = measured(entry("renamed"), folder, worlds, 1, (1, 2))
    assert "renamed" in unknown.why_not
    assert "someone+else" in page([missing, unknown])


def test_every_entry_runs_or_says_why_not() -> None:
    table = entries()
    assert len({x.name for x in table}) == len(table)
    assert all(hasattr(adapters, x.adapter) != bool(x.why_not) for x in table)
    assert {type(x.line_number(Path("none"))) for x in table} == {int}
    used = {x.adapter for x in table} | {"unit", "bare", "synchronised_norm", "with_collectives_of_mmengine"}
    defined = {
        name for name, x in vars(adapters).items() if inspect.isfunction(x) and x.__module__ == adapters.__name__
    }
    assert defined <= used
