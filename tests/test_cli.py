"""The command line, as a user runs it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from contrastive_zoo import cli, console
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.check import Finding, Report
from contrastive_zoo.testing.diagnosis import DIAGNOSES
from contrastive_zoo.testing.invariants import INVARIANTS


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "contrastive_zoo.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The same in this process: its exit code, and what it prints in one line."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["contrastive-zoo", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, error = (" ".join(text.replace("│", " ").split()) for text in capsys.readouterr())
        return int(end.value.code or 0), out, error

    return run


QUICK = ("--world-size", "1", "2", "--examples", "3")


def test_one_of_ours_is_found_right(tmp_path: Path) -> None:
    done = run("check", "nt-xent", *QUICK, "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is the same function on any number of processes" in " ".join(done.stdout.split())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"]
    assert report["world_sizes"] == [1, 2]


def test_a_loss_of_the_users_own_file_is_found_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from contrastive_zoo.testing.gallery import make\ndef make_loss():\n    return make('mean of means')\n"
    )
    done = run("check", "mine:make_loss", *QUICK, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "mean of means" in done.stdout
    assert "Fix: divide the global sum by the global count." in done.stdout
    assert "W=2, shards [" in done.stdout


@pytest.mark.parametrize("wrap", [False, True])
def test_a_loss_of_pytorch_metric_learning(wrap: bool) -> None:
    done = run("check", "pytorch_metric_learning.losses:ContrastiveLoss", *QUICK, *["--wrap"] * wrap)
    assert done.returncode == (0 if wrap else 1), done.stdout + done.stderr
    assert wrap or "local negatives" in done.stdout


def test_what_a_dying_process_says_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    batch = GlobalBatch((1, 2))
    finding = Finding(INVARIANTS[0], "rank 1 died [/some/path.cc:537] [bold]", batch)
    console.show(Report("a[b]c", (1, 2), "mean", 3, [finding], DIAGNOSES["hang"], 1.0))
    shown = " ".join(capsys.readouterr().out.split())
    assert "[/some/path.cc:537]" in shown
    assert "a[b]c is not" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "nothing"], "neither module:function"),
        (["check", "nothing:at_all"], "No module named"),
        (["check"], "missing target"),
        (["check", "nt-xent", "--call", "pairs"], "call is one of"),
        (["check", "--explain", "nothing"], "no invariant"),
    ],
)
def test_what_cannot_be_checked_exits_with_2(arguments: list[str], words: str, here: Here) -> None:
    code, _, error = here(*arguments)
    assert code == 2
    assert words in error


def test_a_invariant_is_explained(here: Here) -> None:
    code, out, _ = here("check", "--explain", "same_value")
    assert code == 0
    assert "what one process computes" in out


def test_the_zoo_is_listed() -> None:
    done = run("list")
    assert done.returncode == 0
    assert "nt-xent" in done.stdout
    assert "sup-con" in done.stdout
