"""What the pages on testing teach runs, and what they show is what is measured."""

import pydoc
import re
from pathlib import Path

import pytest

from contrastive_zoo.testing import check
from contrastive_zoo.testing.invariants import INVARIANTS
from contrastive_zoo.testing.mistakes import MISTAKES
from tests.testing.test_pytest_plugin import run  # noqa: F401 - a fixture
from tools.gallery.recipe import GALLERY

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
    result.stdout.fnmatch_lines(["*Diagnosis: local negatives: *", "*Fix: wrap the one-process loss*"])


def test_the_stored_pages_are_of_this_gallery_and_these_invariants() -> None:
    page = (PAGES / "gallery.md").read_text(encoding="utf-8")
    assert [name for name, x in GALLERY.items() if x.mistake and f"| *{name}*: " not in page] == []
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| \*(.*)\* \|$", (PAGES / "how-it-is-tested.md").read_text(encoding="utf-8"), re.M
    )
    assert rows == [(invariant.name, invariant.catches) for invariant in INVARIANTS]


def test_the_fixes_name_what_exists() -> None:
    names = {name for mistake in MISTAKES.values() for name in re.findall(r"\bcontrastive_zoo(?:\.\w+)+", mistake.fix)}
    assert names
    assert [name for name in sorted(names) if pydoc.locate(name) is None] == []
