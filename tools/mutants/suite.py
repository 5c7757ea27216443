"""The collected tests, run in forks: which lines does each of them execute, and which one notices a mutant?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.database
import pytest

from contrastive_zoo.testing import _rank
from tools.mutants.changes import Mutant
from tools.mutants.plant import COVERED, PLANTED, NotPlantedError, Trace, plant, rank_main

SECONDS_OF_TESTS = 40.0
"""The tests of one mutant: those that execute the changed lines, the quickest first, up to so many seconds in all."""

SECONDS = 150.0  # limit of the tests of one mutant: one that makes a test hang is ended
NOT_PLANTED = 3  # exit status of a fork that could not plant its mutant


class Measured(NamedTuple):
    """What is known of a test without a mutant; its lines are those of the mutated modules, by module."""

    passed: bool
    seconds: float
    lines: dict[str, list[int]]


class Suite:
    """The tests that pytest has collected, and what an earlier run has found out about them."""

    def __init__(self, items: Sequence[pytest.Item], known: dict[str, Measured]) -> None:
        self.items = {item.nodeid: item for item in items}
        self.known = known

    def prepare(self) -> None:
        """Let forks of this process plant mutants in their ranks, and remember no failing example."""
        hypothesis.database.DirectoryBasedExampleDatabase.save = lambda *_: None  # type: ignore[method-assign]  # writes nothing
        with _rank.prepared_forkserver(["tools.mutants.plant"]):
            forkserver.ensure_running()
        # a fork is not the parent of the server, and must not ask how its child is
        forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[method-assign]  # no-op
        _rank.main = rank_main

    def files(self) -> list[str]:
        return sorted({_file(test) for test in self.items.keys() - self.known.keys()})

    def measure(self, file: str) -> Fork:
        """Run the tests of a file without a mutant; the fork says what is to be known of them."""
        return Fork(lambda say: _measure([x for test, x in self.items.items() if _file(test) == file], say))

    def tests_of(self, mutant: Mutant, killers: Counter[str]) -> list[str]:
        """The tests that execute the changed lines, in the order in which they run: likely and quick ones first."""
        first, last = (mutant.place.first, mutant.place.last) if mutant.place.function else (0, sys.maxsize)
        reached = [
            test
            for test, x in self.known.items()
            if x.passed and test in self.items and any(first <= y <= last for y in x.lines.get(mutant.path, ()))
        ]
        cases, price = Counter[str](), dict[str, float]()
        for test in sorted(reached, key=lambda test: self.known[test].seconds):
            function = test.partition("[")[0]
            cases[function] += 1  # the tenth case of a test is less likely to notice what nine have not
            price[test] = (self.known[test].seconds + 0.05) * cases[function] / (1 + 10 * killers[test])
        reached.sort(key=price.__getitem__)
        total, chosen = 0.0, list[str]()
        for test in reached:
            total += self.known[test].seconds
            if total <= SECONDS_OF_TESTS or not chosen:
                chosen.append(test)
        return chosen

    def run(self, tests: Sequence[str], mutant: Mutant | None) -> Fork:
        """Run tests with a mutant, or without any, up to the first that fails; the fork says which it was."""
        return Fork(lambda say: _run([self.items[test] for test in tests], mutant, say))


def _file(test: str) -> str:
    return test.partition("::")[0]


def _measure(items: Sequence[pytest.Item], say: Callable[[str], None]) -> int:
    trace, found = Trace(), {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ[COVERED] = folder
        for item, following in zip_longest(items, items[1:]):
            shutil.rmtree(folder)
            os.mkdir(folder)
            trace.lines.clear()
            began, failed = time.monotonic(), item.session.testsfailed
            with trace:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds, passed = time.monotonic() - began, item.session.testsfailed == failed
            for path in Path(folder).iterdir():
                for of_job in path.read_text().splitlines():
                    trace.lines.update((file, line) for file, line in json.loads(of_job))
            lines: dict[str, list[int]] = {}
            for file, line in sorted(trace.lines):
                lines.setdefault(file, []).append(line)
            found[item.nodeid] = Measured(passed, round(seconds, 3), lines)
    say(json.dumps(found))
    return 0


def _run(items: Sequence[pytest.Item], mutant: Mutant | None, say: Callable[[str], None]) -> int:
    if mutant is not None:
        try:
            plant(mutant.path, mutant.number)
        except NotPlantedError:
            return NOT_PLANTED
        os.environ[PLANTED] = f"{mutant.path}:{mutant.number}"
    for item, following in zip_longest(items, items[1:]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.testsfailed:
            say(item.nodeid)
            return 1
    return 0


class Fork:
    """A process that runs a job and then ends, with its ranks; the job's argument sends a text to this process."""

    def __init__(self, job: Callable[[Callable[[str], None]], int]) -> None:
        self.began = time.monotonic()
        self._said = tempfile.NamedTemporaryFile("r+", prefix="mutants-")  # noqa: SIM115 - closed with the object
        self.pid = os.fork()
        if self.pid == 0:
            status = 4
            try:
                os.setsid()
                null = os.open(os.devnull, os.O_RDWR)
                if "MUTANTS_VERBOSE" not in os.environ:
                    os.dup2(null, 1)
                    os.dup2(null, 2)
                status = job(self._say)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def _say(self, text: str) -> None:
        self._said.write(text)
        self._said.flush()

    def status(self) -> int | None:
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    def kill(self) -> None:
        """End the process, whose ranks end with it."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def said(self) -> str:
        with self._said as file:
            file.seek(0)
            return file.read()


def finished(forks: Iterator[tuple[Any, Fork]], jobs: int, limit: float) -> Iterator[tuple[Any, int | None, Fork]]:
    """Run forks, ``jobs`` at a time, and yield each with its key and its exit status, None for one that was ended."""
    running = list(islice(forks, jobs))
    while running:
        for key, fork in list(running):
            status, late = fork.status(), time.monotonic() - fork.began > limit
            if status is not None or late:
                running.remove((key, fork))
                if status is None:
                    fork.kill()
                yield key, status, fork
        running += islice(forks, jobs - len(running))
        time.sleep(0.02)
