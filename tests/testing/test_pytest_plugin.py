"""The plugin, in pytest sessions of its own; what the pages on testing teach runs and shows what is measured."""

import importlib
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from contrastive_zoo.testing import check
from contrastive_zoo.testing.invariants import INVARIANTS
from tools.gallery.recipe import GALLERY

pytest_plugins = ["pytester"]

PLUGIN = "contrastive_zoo.testing.pytest_plugin"
HEADER = """
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
"""


PAGES = Path(__file__).parents[2] / "docs" / "pages"
HOWTO = (PAGES / "test-your-own.md").read_text(encoding="utf-8")
TESTS = [block for block in re.findall(r"^```python\n(.*?)^```", HOWTO, re.M | re.S) if "def test_" in block]


@pytest.fixture
def run(request: pytest.FixtureRequest):
    for name in ("numpy.fft", "torch._dynamo"):  # not to be imported twice: pytester forgets what it sees imported
        importlib.import_module(name)
    pytester = request.getfixturevalue("pytester")
    installed = any(entry.name == "contrastive_zoo" for entry in entry_points(group="pytest11"))
    flags = [*([] if installed else ["-p", PLUGIN]), "--strict-markers", "-Werror", "-ra", "-pno:cacheprovider"]

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(HEADER + source)
        return pytester.runpytest_inprocess(*flags, *options)

    return run


def test_a_marked_test_runs_on_every_rank(run) -> None:
    result = run(
        """
        import os

        @pytest.fixture(autouse=True)
        def setting(monkeypatch):
            monkeypatch.setenv("BY_A_FIXTURE", "1")

        @pytest.fixture
        def rows(world_size, rank):
            return {"x": torch.ones(world_size), "rank": rank}

        @pytest.mark.world_sizes(1, 2, 3)
        def test_ranks(rank, world_size, rows, tmp_path):
            (tmp_path / str(rank)).touch()
            dist.barrier()
            assert {x.name for x in tmp_path.iterdir()} == {str(r) for r in range(world_size)}
            assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
            assert (rank, world_size) == (rows["rank"], rows["x"].sum())
            assert "BY_A_FIXTURE" not in os.environ

        @pytest.mark.world_sizes(1, 2)
        @pytest.mark.parametrize("d", [3, 4], ids=lambda d: f"d={d}")
        def test_product(d, world_size):
            x = torch.ones(d)
            dist.all_reduce(x)
            assert x.sum() == d * world_size

        class TestMethods:
            def setup_method(self): self.x = 3

            @pytest.mark.world_sizes(2)
            def test_method(self, rank):
                assert self.x == 3

        def test_elsewhere(worlds):
            assert worlds.run(2, lambda: dist.get_rank()) == [0, 1]
        """.replace("\n        ", "\n"),
        "-v",
    )
    result.assert_outcomes(passed=9)
    result.stdout.fnmatch_lines([f"*test_ranks[[]W={size}]*" for size in (1, 2, 3)] + ["*test_product[[]W=2-d=4]*"])


def test_a_failure_shows_the_ranks_that_failed(run) -> None:
    result = run(
        """
@pytest.mark.world_sizes(2)
def test_one(rank):
    assert rank == 0, "not rank 0"

@pytest.mark.xfail(raises=KeyError)
@pytest.mark.world_sizes(2)
def test_both(rank):
    raise ValueError(f"by {rank}")
"""
    )
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    one, both = text.split("_ test_both[W=2] _")
    assert "W=2: rank 1 raised AssertionError: not rank 0" in one
    assert "rank 1:\nTraceback (most recent call last):" in one
    assert "assert 1 == 0" in one
    assert "rank 0:\nTraceback" not in one
    assert all(f"rank {rank}:\nTraceback" in both and f"ValueError: by {rank}" in both for rank in (0, 1))
    assert "pytest_plugin.py" not in text  # nothing of ours between the reader and the line that failed


@pytest.mark.audit
def test_a_hang_ends_and_the_next_test_runs(run) -> None:
    result = run(
        """
def wait(rank):
    if rank == 0:
        dist.barrier()

@pytest.mark.world_sizes(2)
def test_hang(rank):
    wait(rank)

@pytest.mark.world_sizes(2, timeout=3)
def test_marked(rank):
    wait(rank) or rank and pytest.skip("not here")

@pytest.mark.world_sizes(2, timeout=60)
def test_next():
    dist.barrier()
""",
        "--world-timeout=3.5",
    )
    result.assert_outcomes(failed=2, passed=1)
    for seconds in (3.5, 3):
        result.stdout.fnmatch_lines(f"*no answer within {seconds} s. rank 0 waits in barrier*Rank 1 never entered *")
    result.stdout.fnmatch_lines("rank 1 called pytest.skip: not here")


def test_ranks_may_be_threads(run) -> None:
    test = """
import threading

@pytest.mark.world_sizes(2)
def test(rank):
    assert threading.current_thread().name == f"rank {rank}"
"""
    run(test).assert_outcomes(failed=1)
    run(test, "--world-threads").assert_outcomes(passed=1)


def test_skips_and_expected_failures(run) -> None:
    result = run(
        """
import warnings

@pytest.mark.world_sizes(2)
def test_all():
    pytest.importorskip("no_such_module")

@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("fails", [False, True])
def test_one(rank, fails):
    if rank == 1:
        pytest.skip("nothing to see")
    assert not fails

@pytest.mark.world_sizes(2)
def test_expected():
    pytest.xfail("known")

@pytest.mark.xfail(raises=UserWarning, strict=True)
@pytest.mark.world_sizes(2)
def test_error_of_all_ranks():
    warnings.warn("with -W error")

@pytest.mark.skip(reason="early")
@pytest.mark.world_sizes(2)
def test_skipped():
    assert False
"""
    )
    result.assert_outcomes(skipped=2, failed=2, xfailed=2)
    called = "rank 1 called pytest.skip: nothing to see"
    result.stdout.fnmatch_lines([f"W=2: {called}. The other ranks returned.", called, "SKIPPED*'no_such_module'*"])


def test_misuse_is_named(run) -> None:
    result = run(
        """
import unittest

@pytest.mark.world_sizes(2)
def test_would_leak(monkeypatch):
    pass

@pytest.mark.world_sizes(2)
async def test_async():
    pass

@pytest.mark.world_sizes(2)
@given(n=st.integers())
def test_drawn(n):
    pass

class TestOld(unittest.TestCase):
    @pytest.mark.world_sizes(2)
    def test_case(self):
        pass
"""
    )
    result.assert_outcomes(failed=1, errors=3)
    result.stdout.fnmatch_lines_random(
        [
            "test_would_leak*: its arguments are evaluated in this process*: MonkeyPatch acts on pytest's process; *",
            "*cannot run an async test on ranks*",
            "*would draw another example on each rank. Use the fixture worlds instead*",
            "*not those of a unittest.TestCase.",
        ]
    )


def test_marks_that_make_no_sense(run, pytester: pytest.Pytester) -> None:
    marks = {"()": [], "(0)": [0], "('2')": ["2"], "(2, seconds=3)": "seconds as well"}
    test = "@pytest.mark.world_sizes{}\ndef test(): pass"
    pytester.makepyfile(**{f"test_{i}": HEADER + test.format(mark) for i, mark in enumerate(marks)})
    result = run("")
    result.assert_outcomes(errors=len(marks))
    text = result.stdout.str()
    assert all(re.search(rf"world_sizes takes .*{re.escape(str(x))}", text) for x in marks.values()), text


def test_it_costs_nothing_until_used() -> None:
    code = f"import sys, {PLUGIN}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = {"torch", "numpy", "hypothesis", "cloudpickle", "contrastive_zoo.testing.worlds"}
    assert heavy.isdisjoint(found.stdout.split())


@pytest.mark.audit
def test_the_files_of_the_howto_pass_and_the_first_catches_a_loss_of_own_rows_only(run, pytester, monkeypatch) -> None:
    monkeypatch.setattr(check, "SHRINKING", 0.5)
    first = TESTS[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 10
    wrong = first.replace("cz.DistributedLoss(my_loss)", "my_loss")
    assert wrong != first
    pytester.makepyfile(test_wrong=wrong, **{f"test_howto_{name}": block for name, block in enumerate(TESTS)})
    result = run("")
    result.assert_outcomes(passed=8, failed=1)
    for words in ("*Diagnosis: local negatives: *", "*Fix: wrap the one-process loss*", "FAILED test_wrong*"):
        result.stdout.fnmatch_lines(words)


@pytest.mark.audit
def test_the_stored_pages_are_of_this_gallery_and_these_invariants() -> None:
    gallery, tested = ((PAGES / f"{x}.md").read_text(encoding="utf-8") for x in ("gallery", "how-it-is-tested"))
    assert [name for name, x in GALLERY.items() if x.mistake and f"| *{name}*: " not in gallery] == []
    rows = re.findall(r"^\| `(\w+)` \|.*\| \*(.*)\* \|$", tested, re.M)
    assert rows == [(invariant.name, invariant.catches) for invariant in INVARIANTS]
