"""The command line, as a user runs it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from unittest.mock import Mock

import pytest
import torch

import contrastive_zoo
from contrastive_zoo.testing import check, cli
from contrastive_zoo.testing.auditing import launch
from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.evidence import Ratio
from contrastive_zoo.testing.report import AuditReport, Quantity, WorldReport
from tests.interpreter import python

Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(check, "SHRINKING", 0.5)
        monkeypatch.setenv("COLUMNS", "400")  # a path that is broken into lines would not be found
        monkeypatch.setattr(sys, "argv", ["contrastive-zoo", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, error = (" ".join(text.replace("│", " ").split()) for text in capsys.readouterr())
        return int(end.value.code or 0), out, error

    return run


QUICK = ("--world-size", "1", "2", "--examples", "3")


def test_one_of_ours_is_found_right(tmp_path: Path, here: Here) -> None:
    settings = ("--set", "temperature=0.5", "--json", str(tmp_path / "report.json"))
    code, out, error = here("check", "nt-xent", *QUICK, "--threads", *settings)
    assert code == 0, out + error
    assert "is the same function on any number of processes" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"]
    assert (report["loss"], report["world_sizes"]) == ("nt-xent(temperature=0.5)", [1, 2])


def test_a_function_of_the_users_own_file_is_found_wrong(tmp_path: Path, monkeypatch, here: Here) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_mean.py").write_text("from tools.gallery import make\nmake_it = lambda: make('mean of means')\n")
    code, out, error = here("check", "own_mean:make_it", *QUICK)
    assert code == 1, out + error
    for words in ("mean of means", "Fix: divide the global sum by the global count.", "W=2, shards ["):
        assert words in out


@pytest.mark.parametrize("wrap", [False, True])
def test_a_loss_of_pytorch_metric_learning(wrap: bool, here: Here) -> None:
    options = ("--threads", "--json", "-", *["--wrap"] * wrap)
    code, out, error = here("check", "pytorch_metric_learning.losses:ContrastiveLoss", *QUICK, *options)
    assert code == (0 if wrap else 1), out + error
    assert (json.loads(out)["diagnosis"] or {"mistake": ""})["mistake"] == ("" if wrap else "local negatives")


@pytest.mark.audit
def test_json_on_the_output_is_json_whatever_the_loss_prints(tmp_path: Path) -> None:
    source = """
        import os
        print("imported")
        def make_it():
            def loss(view1, view2):
                print("called")
                os.write(1, b"from C")
                return (view1 - view2).square().sum()
            return loss
    """
    (tmp_path / "own_noisy.py").write_text(dedent(source), encoding="utf-8")
    options = ["-W", "1", "--examples", "1", "--json", "-"]
    command = [sys.executable, "-m", "contrastive_zoo", "check", "own_noisy:make_it", *options]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, check=True)
    assert json.loads(done.stdout)["ok"] is True
    for words in ("imported", "called", "from C"):
        assert words in done.stderr


BROKEN_MODULES = {
    "syntax": "def make(:\n    pass\n",
    "raising": "raise RuntimeError('at import')\n",
    "instance": "import torch\nmake = torch.nn.SoftMarginLoss()\n",
    "function": "def make(view1, view2):\n    return 0 * view1.sum()\n",
}


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("check syntax:make", 2, "syntax.py, line 1: "),
        ("check raising:make", 2, "importing raising raised RuntimeError: at import"),
        ("check instance:make", 2, "is a SoftMarginLoss; pass a function"),
        ("check function:make", 2, "make() missing 2 required positional arguments"),
        ("check nothing", 2, "neither module:function"),
        ("check", 2, "Missing argument"),
        ("check nt-xent --call pairs", 2, "call is one of"),
        ("check nt-xnt", 2, "Did you mean nt-xent?"),
        ("check contrastive_zoo:ArcFace", 2, "missing a required argument: 'num_classes'"),
        ("check train.py", 2, "contrastive-zoo audit train.py"),
        ("check nt-xent --json /no/such/folder/report.json", 2, "No such file or directory"),
        ("explain triplet --ring -W 8", 2, "without ring"),
        ("explain nt-xent --set temperature=-.5", 2, "got -0.5"),
        ("explain nt-xnt", 2, "nt-xent"),
        ("explain clip --ring -W 8 --rows 4096", 0, "ring: ring=True"),
        *((f"explain {name} --width 16", 0, "of 16 features") for name in CATALOGUE),
        ("explain pytorch_metric_learning.losses:TripletMarginLoss --call labels -W 4", 0, "TripletMarginLoss, 4"),
    ],
)
def test_a_command_answers_in_words(command: str, code: int, words: str, here: Here, tmp_path, monkeypatch) -> None:
    for module, source in BROKEN_MODULES.items():
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    found, out, error = here(*command.split())
    assert (found, words in (error if code else out)) == (code, True), out + error


@pytest.mark.parametrize(
    ("given", "expected", "sizes"),
    [
        ("train.py --lr 0.1 -W 2 4", "train.py --lr 0.1", [2, 4]),
        ("-m my.training run --fast", "-m my.training run --fast", (2,)),
        ("-W 3 -- train.py --steps 100 -W 2 4", "train.py --steps 100 -W 2 4", [3]),
    ],
)
def test_an_audited_script_gets_its_own_arguments(given: str, expected: str, sizes, here: Here, monkeypatch) -> None:
    monkeypatch.setattr(launch, "audit_script", audit := Mock(return_value=AuditReport("", [])))
    code, *_ = here("audit", *given.split())
    assert (code, audit.call_args.args) == (2, (expected.split(),))  # nothing was compared
    assert audit.call_args.kwargs["world_sizes"] == sizes


def test_tables_fit_80_columns() -> None:
    quantities = [Quantity(f"other parameters {x}", Ratio(-1.0, -1.0, 0.5), 1e-9) for x in ("after the step", "equal")]
    report = AuditReport("train.py", [WorldReport(2, 3, quantities=[*quantities, Quantity("value", reason="no")])])
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("  other parameters after the step no ") for line in lines) == 1


def test_without_its_extra_the_command_says_one_line() -> None:
    code = "import sys; sys.modules['typer'] = None; from contrastive_zoo.__main__ import main; main()"
    done = python("-c", code)
    text = "the command contrastive-zoo needs typer: pip install 'contrastive_zoo[cli,testing]'"
    assert (done.returncode, done.stderr.strip()) == (2, text)


def test_a_step_is_explained_as_by_the_function(here: Here) -> None:
    options = ["--rows", "4096", "--width", "768", "--world-size", "64", "--device", "cuda", "--dtype", "bfloat16"]
    x = torch.empty(4096, 768, device="meta")
    found = contrastive_zoo.explain(contrastive_zoo.NTXent(), x, x, world_size=64, device="cuda", dtype=torch.bfloat16)
    assert here("explain", "nt-xent", *options) == (0, " ".join(str(found).split()), "")
