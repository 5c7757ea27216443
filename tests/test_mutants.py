"""The program that tests the tests: it plants its mutants, and the list of equivalent ones names mutants that exist."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contrastive_zoo.engine import batch, masked
from tools.mutants import __main__ as program
from tools.mutants.changes import PACKAGE, mutants_of
from tools.mutants.equivalent import EQUIVALENT
from tools.mutants.plant import NotPlantedError, Trace, functions, plant
from tools.mutants.suite import Measured, Suite

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")


@pytest.fixture
def _restored() -> Iterator[None]:
    found = [x for path in ("engine/masked.py", "engine/batch.py") for x in functions(str(PACKAGE / path))]
    before = [(x, x.__code__, x.__defaults__, x.__kwdefaults__) for x in found]
    negligible = batch._NEGLIGIBLE_COUNT
    yield
    for x, code, defaults, named in before:
        x.__code__, x.__defaults__, x.__kwdefaults__ = code, defaults, named
    batch._NEGLIGIBLE_COUNT = negligible


def plant_change(path: str, function: str, change: str) -> None:
    plant(path, next(x.number for x in mutants_of(path) if (x.place.function, x.change) == (function, change)))


@pytest.mark.usefixtures("_restored")
def test_code_is_planted() -> None:
    plant_change("engine/batch.py", "mean_divisor", "1 → 2")
    assert batch.mean_divisor(torch.ones(1)).item() == 2.0


@pytest.mark.usefixtures("_restored")
def test_a_default_is_planted() -> None:
    equal, every = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, dtype=torch.bool)
    plant_change("engine/masked.py", "masked_max", "False → True")
    (g,) = torch.autograd.grad(masked.masked_max(equal, every).sum(), equal)
    assert g.tolist() == [[1.0, 0.0]]


@pytest.mark.usefixtures("_restored")
def test_a_constant_is_planted() -> None:
    plant_change("engine/batch.py", "", "-100 → --100")
    assert batch.mean_divisor(torch.ones(1)).item() == torch.inf


def test_what_ran_at_import_is_not_planted() -> None:
    with pytest.raises(NotPlantedError, match="TYPE_CHECKING"):
        plant_change("wrapper/distributed.py", "", "if TYPE_CHECKING: → if True:")


def test_executed_lines_are_noted() -> None:
    with Trace() as trace:
        batch.mean_divisor(torch.ones(1))
    assert {path for path, _ in trace.lines} == {"engine/batch.py"}
    assert len(trace.lines) == 2  # the definition and its only statement


def test_one_case_of_every_test_comes_before_the_next_of_any() -> None:
    mutant = mutants_of("engine/batch.py")[-1]
    seconds = {"f::a[1]": 0.10, "f::a[2]": 0.11, "f::b": 0.2, "f::c": 0.3}
    lines = {mutant.path: [mutant.place.first]}
    known = {test: Measured(passed=True, seconds=x, lines=lines) for test, x in seconds.items()}
    items: Any = [SimpleNamespace(nodeid=test) for test in seconds]
    assert Suite(items, known).tests_of(mutant, Counter()) == ["f::a[1]", "f::b", "f::a[2]", "f::c"]
    assert Suite(items, known).tests_of(mutant, Counter({"f::c": 1}))[0] == "f::c"  # it has noticed another


def test_results_outlive_changes_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is still there, one has become code that no longer exists, and one is tried again."""
    first, second, third = mutants_of("engine/batch.py")[:3]
    monkeypatch.setattr(program, "mutants", lambda: [third, second, first])
    gone = first._replace(change="1 → 1000")
    run = program.Run(Namespace(seed=0), again=[third.name], results=[x._asdict() for x in (first, gone)])
    assert run.untried() == [third, second]
    assert run.results == [first._asdict()]


def test_equivalent_mutants_exist() -> None:
    assert EQUIVALENT.keys() <= {x.name for path in {name[0] for name in EQUIVALENT} for x in mutants_of(path)}
    assert all(reason.endswith(".") for reason in EQUIVALENT.values())
