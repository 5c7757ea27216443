"""Plant mutants in the modules that ranks rest on, and run the tests that execute the changed lines.

python -m tools.mutants --count 200 --seed 0 --out mutants.json      # continues where an earlier run of it was stopped
python -m tools.mutants --again --out mutants.json                   # first the survivors, once there are new tests
python -m tools.mutants --report mutants.json                        # the score
python -m tools.mutants --report mutants.json --docs                 # writes it to docs/pages/how-it-is-tested.md

A mutant is one change of the syntax tree: a comparison, an operator, a number, a truth value, a condition, a maximum for a
minimum, or a statement left out. Texts of errors, docstrings, annotations and assertions stay as they are. The first run
measures which lines each test executes, on its ranks, too, and keeps that beside the output. It takes Python 3.11.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools import pages
from tools.mutants import report
from tools.mutants.changes import PACKAGE, ROOT, Mutant, modules, mutants

if TYPE_CHECKING:
    from tools.mutants.suite import Suite

FILES = [
    "tests/adapters/test_native.py",
    "tests/engine",
    "tests/kernels/test_implementation.py",
    "tests/losses",
    "tests/test_accelerated_ranks.py",
    "tests/test_accelerator.py",
    "tests/test_averaging.py",
    "tests/test_bad_input.py",
    "tests/test_collectives.py",
    "tests/test_distributed.py",
    "tests/test_failed_calls.py",
    "tests/test_faults.py",
    "tests/test_gradcache.py",
    "tests/test_handshake.py",
    "tests/test_late_checks.py",
    "tests/test_later_steps.py",
    "tests/test_masks.py",
    "tests/test_monitor.py",
    "tests/test_precision.py",
    "tests/test_repr.py",
    "tests/test_solved_batches.py",
    "tests/test_state.py",
]
"""The tests of the mutated modules, beside their doctests. Of whole trainings there are more; these are the quick ones."""

CONTROLS = 10  # after so many mutants the tests of one run without it: they must pass
BATCH = 8  # after so many mutants the output is written
WORLD_TIMEOUT = 20  # seconds of a job of several ranks


@dataclass
class Run:
    """A pytest session that tries mutants in place of running its tests, first those named in ``again``."""

    options: argparse.Namespace
    again: list[tuple[str, str, str]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    controls: list[dict[str, Any]] = field(default_factory=list)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        # not before: the tests import the package with shapes checked
        from tools.mutants.suite import Measured, Suite

        covered = self.options.out.with_suffix(".tests.json")
        known = {k: Measured(*x) for k, x in json.loads(covered.read_text()).items()} if covered.exists() else {}
        if self.options.out.exists():
            saved = json.loads(self.options.out.read_text())
            self.results, self.controls = saved["results"], saved["controls"]
        suite = Suite(session.items, known)
        suite.prepare()
        self.measure(suite, covered)
        end = time.monotonic() + 60 * self.options.minutes
        todo = self.untried()
        while len(self.results) < self.options.count and todo and time.monotonic() < end:
            size = min(BATCH, self.options.count - len(self.results))
            self.attempt(suite, todo[:size])
            self.save()
            todo = todo[size:]
        return True

    def untried(self) -> list[Mutant]:
        """Forget results of mutants that the code no longer has; return all others that it has, in random order."""
        every = {x.name: x for x in mutants()}
        self.results = [x for x in self.results if report.name_of(x) in every]
        for result in self.results:
            del every[report.name_of(result)]
        again = [every.pop(name) for name in self.again if name in every]
        todo = list(every.values())
        random.Random(self.options.seed).shuffle(todo)
        return again + todo

    def measure(self, suite: Suite, covered: Path) -> None:
        """Measure the files that are new, and keep what is known of their tests."""
        from tools.mutants.suite import Measured, finished

        forks = ((file, suite.measure(file)) for file in suite.files())
        for file, status, fork in finished(forks, self.options.jobs, 900.0):
            assert status == 0, f"{file} was not measured, exit status {status}"
            found = {test: Measured(*x) for test, x in json.loads(fork.said()).items()}
            suite.known |= found
            covered.write_text(json.dumps(suite.known))
            failing = [test for test, x in found.items() if not x.passed]
            print(f"{file}: {len(found)} tests, {len(failing)} fail without a mutant {failing}", file=sys.stderr)

    def attempt(self, suite: Suite, batch: list[Mutant]) -> None:
        """Try mutants, and now and then no mutant."""
        from tools.mutants.suite import NOT_PLANTED, SECONDS, finished

        killers = Counter(x["by"] for x in self.results if x["by"])
        forks = ((key, suite.run(key[2], key[0] if key[1] else None)) for key in self.jobs(suite, batch, killers))
        for (mutant, is_planted, tests), status, fork in finished(forks, self.options.jobs, SECONDS):
            if status == NOT_PLANTED:
                continue
            verdict = "timed out" if status is None else "caught" if status else "survived"
            seconds = round(time.monotonic() - fork.began, 2)
            outcome = {"verdict": verdict, "by": fork.said(), "seconds": seconds, "tests": len(tests)}
            (self.results if is_planted else self.controls).append(mutant._asdict() | outcome)

    def jobs(
        self, suite: Suite, batch: list[Mutant], killers: Counter[str]
    ) -> Iterator[tuple[Mutant, bool, list[str]]]:
        for mutant in batch:
            tests = suite.tests_of(mutant, killers)
            yield mutant, True, tests
            if len(self.results) // CONTROLS > len(self.controls):
                yield mutant, False, tests

    def save(self) -> None:
        self.options.out.write_text(json.dumps({"results": self.results, "controls": self.controls}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tried at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--report", type=Path, nargs="+", help="outputs to report together")
    parser.add_argument("--docs", action="store_true", help="write the report to the page")
    parser.add_argument("--again", action="store_true", help="try the survivors of --out again")
    options = parser.parse_args()
    run = Run(options)
    if options.report:
        for path in options.report:
            saved = json.loads(path.read_text())
            run.results += saved["results"]
            run.controls += saved["controls"]
    else:
        if options.again:
            saved = json.loads(options.out.read_text())
            run.again = [report.name_of(x) for x in saved["results"] if report.outcome(x) == "survived"]
            saved["results"] = [x for x in saved["results"] if report.name_of(x) not in run.again]
            options.out.write_text(json.dumps(saved))
        settings = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--world-timeout={WORLD_TIMEOUT}"]
        files = [*FILES, *(f"{PACKAGE.name}/{path}" for path in modules())]
        status = pytest.main([*settings, f"--rootdir={ROOT}", *files], plugins=[run])
        assert status in (0, 5), f"pytest ended with {status}"
    table, summary = report.table(run.results), report.summary(run.results, run.controls)
    print(f"{table}\n\n{summary}\n{report.survivors(run.results)}")
    if options.docs:
        pages.fill(pages.PAGES / "how-it-is-tested.md", {"mutants": f"{summary}\n\n{table}"})


if __name__ == "__main__":
    main()
