"""Time two programs side by side on a machine whose speed drifts: they run in turns of a second or two.

A program is a group of processes that stop themselves at the start line (:func:`start_line`). Only one group runs at a
time; the others are stopped. Both meet the same good and bad minutes, so that the ratio of their times is steady where
each time is not.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path


@dataclass(frozen=True)
class Group:
    """The processes of one program, and the connection on which the first of them says that the program is done."""

    processes: Sequence[BaseProcess]
    done: Connection

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, number)

    def wait_at_start_line(self, timeout: float) -> None:
        """Wait until every process has stopped itself; raise TimeoutError or RuntimeError if one does not."""
        until = time.monotonic() + timeout
        for process in self.processes:
            while _state(process) != "T":
                if process.exitcode is not None:
                    raise RuntimeError(f"a process ended with {process.exitcode} before its start")
                if time.monotonic() > until:
                    raise TimeoutError(f"a process was not ready in {timeout} s")
                time.sleep(0.05)


def _state(process: BaseProcess) -> str:
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def start_line() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def in_turns(*groups: Group, turn: float = 1.5, timeout: float = 600.0) -> list[float]:
    """Run groups in turns until each is done; return the seconds that each ran."""
    for group in groups:
        group.wait_at_start_line(timeout)
    seconds, running = [0.0] * len(groups), set(range(len(groups)))
    while running:
        for i in sorted(running):
            group, start = groups[i], time.perf_counter()
            group.send(signal.SIGCONT)
            finished = group.done.poll(turn)
            seconds[i] += time.perf_counter() - start
            if finished:
                running.discard(i)
            elif all(process.exitcode is not None for process in group.processes):
                raise RuntimeError("a program ended without a result")
            else:
                group.send(signal.SIGSTOP)
    return seconds
