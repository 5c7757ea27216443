"""One world: W processes, and the parent's ends of the pipes to them."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from contrastive_zoo.testing import _rank
from contrastive_zoo.testing._outcome import Outcome
from contrastive_zoo.testing._stack import Where, read_stack

LONGEST_WAIT = 3600.0
"""Seconds of one wait for answers: an infinite timeout is not accepted by the operating system."""


class World:
    """W processes that share a process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.directory = tempfile.mkdtemp(prefix="contrastive-zoo-")
        self.processes: list[BaseProcess] = []
        self.pipes: list[connection.Connection] = []

    def launch(self, threads: int, imports: Sequence[str]) -> None:
        """Start the processes; :meth:`collect` then returns when all have joined."""
        for rank in range(self.world_size):
            process, pipe = _rank.launch(rank, self.world_size, self.directory, threads, imports)
            self.processes.append(process)
            self.pipes.append(pipe)

    def is_idle(self) -> bool:
        """Return whether all ranks are alive and silent, as they should be between two jobs."""
        return not connection.wait([*self.pipes, *(process.sentinel for process in self.processes)], timeout=0)

    def send(self, job: bytes, local_args: Sequence[bytes]) -> None:
        """Send a job to all ranks, with arguments that are the same on all ranks or one for each."""
        for rank, pipe in enumerate(self.pipes):
            # sys.path is sent with each job, so that the ranks can import what the caller can import by now.
            header = pickle.dumps((sys.path, local_args[rank % len(local_args)]))
            with contextlib.suppress(OSError):  # collect reports a rank that has died
                pipe.send_bytes(header)
                pipe.send_bytes(job)

    def collect(self, timeout: float, grace: float, on_message: Callable[[int, Any], None] | None = None) -> Outcome:
        """Wait for the answers of all ranks, at most ``timeout`` seconds, and ``grace`` more after a failure."""
        outcome = Outcome(self.world_size, timeout)
        deadline = time.monotonic() + timeout
        pending = set(range(self.world_size))
        while pending and (left := deadline - time.monotonic()) > 0:
            # The sentinel as well: a grandchild may hold the pipe open after the rank has died.
            handles: dict[Any, int] = {
                handle: r for r in pending for handle in (self.pipes[r], self.processes[r].sentinel)
            }
            for rank in sorted({handles[handle] for handle in connection.wait(handles, min(left, LONGEST_WAIT))}):
                answer = self._receive(rank)
                if answer is not None and answer.kind == "message":
                    if on_message is not None:
                        on_message(rank, answer.value)
                    continue
                pending.discard(rank)
                if answer is None:
                    outcome.add_death(rank, self.processes[rank].exitcode)
                else:
                    outcome.add_answer(rank, answer)
                if rank in outcome.failures:
                    deadline = min(deadline, time.monotonic() + grace)
        outcome.stuck = self._locate(sorted(pending))
        return outcome

    def _receive(self, rank: int) -> _rank.Answer | None:
        """Return the next answer of a rank; None when it has died."""
        payload = None
        with contextlib.suppress(EOFError, OSError):
            if self.pipes[rank].poll():
                payload = self.pipes[rank].recv_bytes()
        if payload is None:
            self.processes[rank].join(timeout=1.0)  # the pipe breaks a moment before the exit code is available
            return None
        return pickle.loads(payload)

    def _locate(self, ranks: Sequence[int]) -> dict[int, Where]:
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        return {rank: read_stack(self.directory, rank) for rank in ranks}

    def kill(self) -> None:
        """Kill all ranks and remove their files."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)
