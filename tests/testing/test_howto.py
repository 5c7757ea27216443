"""What the pages on testing teach runs, and what they show is what is measured."""

import pydoc
import re
from pathlib import Path

import pytest

from contrastive_zoo.testing import check
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.check import Report
from contrastive_zoo.testing.invariants import INVARIANTS
from contrastive_zoo.testing.mistakes import MISTAKES
from contrastive_zoo.testing.worlds import Worlds
from tests.testing.test_pytest_plugin import run  # noqa: F401 - a fixture
from tools import gallery_page
from tools.gallery.recipe import GALLERY, PEERS

pytestmark = pytest.mark.audit

pytest_plugins = ["pytester"]

PAGES = Path(__file__).parents[2] / "docs" / "pages"
HOWTO = re.findall(r"^```python\n(.*?)^```", (PAGES / "test-your-own.md").read_text(encoding="utf-8"), re.M | re.S)
TESTS = [block for block in HOWTO if "def test_" in block]


def test_the_first_file_has_ten_lines() -> None:
    assert len([line for line in TESTS[0].splitlines() if line.strip()]) <= 10


def test_the_files_of_the_howto_pass(run, pytester: pytest.Pytester) -> None:  # noqa: F811 - the fixture
    for name, block in enumerate(TESTS):
        pytester.makepyfile(**{f"test_howto_{name}": block})
    run("").assert_outcomes(passed=8)


def test_the_first_file_catches_a_loss_of_own_rows_only(
    run,  # noqa: F811 - the fixture
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "SHRINKING", 0.5)
    wrong = TESTS[0].replace("cz.DistributedLoss(my_loss)", "my_loss")
    assert wrong != TESTS[0]
    pytester.makepyfile(test_wrong=wrong)
    result = run("")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Diagnosis: local negatives: *Fix: wrap the one-process loss*"])


@pytest.fixture(scope="module")
def rows(worlds: Worlds) -> list[gallery_page.Row]:
    def row(name: str) -> gallery_page.Row:
        case = GALLERY[name].case
        measured = (gallery_page.measure(case, x, worlds) for x in (gallery_page.EVEN, gallery_page.UNEVEN))
        return gallery_page.Row(GALLERY[name], *measured, Report(name, (1, 2), "mean"))

    names = ["own slice", "own slice × W", "detached candidates", "mean of means", "DistributedLoss, any loss"]
    return [row(name) for name in names]


def test_a_recipe_is_measured_and_examined(worlds: Worlds) -> None:
    (row,) = gallery_page.measure_gallery(worlds, [GALLERY["DistributedLoss, any loss"]], max_examples=3)
    assert row.report.ok
    assert row.on_even == ("right", "right", "right")


def test_measurements_in_words(rows: list[gallery_page.Row]) -> None:
    own_slice, times_w, detached, mean_of_means, right = rows
    assert own_slice.on_even == ("right", "**1/W**", "right")
    assert times_w.on_even == ("**W×**", "right", "**W×**")
    assert (own_slice.on_uneven, times_w.on_uneven) == ("nothing", "nothing")
    assert re.fullmatch(r"\*\*wrong direction\*\* \(cos [\d.]+, \d+ % off\)", detached.on_even[1])
    assert mean_of_means.on_even == ("right", "right", "right")
    assert mean_of_means.on_uneven.startswith("value **wrong** (×")
    assert right.on_even == ("right", "right", "right")
    assert right.on_uneven == "nothing"
    page = gallery_page.gallery(rows)["wrong"]
    assert [row for row in rows if f"| *{row.recipe.name}*: " not in page] == [right]
    assert gallery_page.truth_table(rows).count("\n| ") == 1 + len(rows)


def test_the_stored_pages_are_of_this_gallery_and_these_invariants() -> None:
    page = (PAGES / "gallery.md").read_text(encoding="utf-8")
    assert [name for name, x in GALLERY.items() if x.mistake and f"| *{name}*: " not in page] == []
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| \*(.*)\* \|$", (PAGES / "how-it-is-tested.md").read_text(encoding="utf-8"), re.M
    )
    assert rows == [(invariant.name, invariant.catches) for invariant in INVARIANTS]


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda peer: peer.name)
def test_a_peer_runs(peer, worlds: Worlds) -> None:
    pytest.importorskip(peer.library)
    found = gallery_page.measure(peer.case, GlobalBatch((3, 3), d=3, seed=7), worlds)
    assert (found.failure is None) == (peer.mistake != "raises"), found


def test_the_fixes_name_what_exists() -> None:
    names = {name for mistake in MISTAKES.values() for name in re.findall(r"\bcontrastive_zoo(?:\.\w+)+", mistake.fix)}
    assert names
    assert [name for name in sorted(names) if pydoc.locate(name) is None] == []
