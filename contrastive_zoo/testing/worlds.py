"""Live process groups of any size for tests, the command line and the demo: real processes over gloo, 0.1 s each."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, NoReturn, TypeVar

from contrastive_zoo.testing import _rank
from contrastive_zoo.testing._rank import Where, report

__all__ = ["RankError", "Where", "WorldTimeout", "Worlds", "report"]

R = TypeVar("R")

START_TIMEOUT = 120.0  # seconds; the first start of all imports torch, perhaps from a cold disk


class RankError(RuntimeError):
    """A job failed on some rank.

    Attributes:
        errors: rank -> the exception raised there, root causes first. ChildProcessError for a rank that died,
            RuntimeError with the same text for an exception that cannot be pickled.
        stuck: rank -> where it waited, for the ranks that had not answered.
    """

    def __init__(
        self, message: str, errors: dict[int, BaseException] | None = None, stuck: dict[int, Where] | None = None
    ) -> None:
        super().__init__(message)
        self.errors = errors or {}
        self.stuck = stuck or {}


class WorldTimeout(RankError):  # noqa: N818
    """A job timed out although no rank failed: usually one rank skipped a collective."""


class Worlds:
    """A pool of live worlds, one for each size asked for so far.

    A world is started by the first job that needs it and serves all later ones. When a job leaves its ranks out of
    step, the world is killed and the next job gets a new one. Nothing outlives :meth:`close`, nor the caller, however
    it ends. One job at a time: a pool is not to be shared between threads.

    Args:
        timeout: seconds for a job, unless :meth:`run` says otherwise; ``math.inf`` to wait forever.
        grace: seconds that the other ranks get to answer once one has failed.
        threads: torch threads of each rank.

    Example:
        >>> import torch
        >>> def total(start):
        ...     x = torch.tensor(start + torch.distributed.get_rank())
        ...     torch.distributed.all_reduce(x)
        ...     return x.item()
        >>> with Worlds() as worlds:
        ...     worlds.run(2, total, 10)
        [21, 21]
    """

    def __init__(self, *, timeout: float = 30.0, grace: float = 1.0, threads: int = 1) -> None:
        self.timeout = timeout
        self.grace = grace
        self.threads = threads
        self._live: dict[int, _World] = {}
        self._finalizer = weakref.finalize(self, _kill_all, self._live, os.getpid())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pool of worlds belongs to the process that made it")

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every rank. Closing twice is fine, running after it is not."""
        self._finalizer()

    def start(self, *sizes: int) -> None:
        """Start worlds of these sizes now, side by side, rather than with their first job.

        Raises:
            ValueError: a size below 1, or the pool is closed.
            RankError: a rank did not come up.
        """
        if not self._finalizer.alive:
            raise ValueError("Worlds: this pool is closed. Run the job inside the with block, or make a new pool.")
        for size in sizes:
            if size < 1:
                raise ValueError(f"Worlds: a world has at least one rank, got W={size}.")
        for size in sizes:
            if size in self._live and not self._live[size].whole():
                self._discard(size)  # a rank died between two jobs, by the OOM killer say
        fresh = [size for size in dict.fromkeys(sizes) if size not in self._live]
        try:
            for size in fresh:
                self._live[size] = _World(size)
                self._live[size].launch(self.threads)
            for size in fresh:
                self._live[size].collect(START_TIMEOUT, self.grace).results()
        except BaseException:
            for size in fresh:
                self._discard(size)
            raise

    def run(
        self,
        world_size: int,
        fn: Callable[..., R],
        /,
        *args: Any,
        each: Sequence[Sequence[Any]] | None = None,
        timeout: float | None = None,
        on_message: Callable[[int, Any], None] | None = None,
        **kwargs: Any,
    ) -> list[R]:
        """Call ``fn(*args, *each[rank], **kwargs)`` once on every rank of a world.

        Functions, closures and lambdas are pickled by value if the ranks cannot import them. Tensors are returned by
        value and detached. Every job begins with gradients enabled and float32 as the default dtype; the random
        state is the rank's own.

        Args:
            world_size: W >= 1. A world of one is a process and a process group, too.
            fn: what a rank does; inside, ``torch.distributed`` is initialised.
            each: one sequence of further positional arguments per rank.
            timeout: seconds; the pool's by default.
            on_message: called with (rank, message) for every :func:`report` while the job goes on.

        Returns:
            What the ranks returned, in rank order.

        Raises:
            ValueError: no such world, ``each`` not of length W, or the pool is closed.
            TypeError: the job cannot be pickled.
            RankError: a rank raised or died.
            WorldTimeout: the job was not done in time.

        Example:
            >>> with Worlds() as worlds:
            ...     worlds.run(2, lambda base, own: base + own, 10, each=[(1,), (2,)])
            [11, 12]
        """
        if each is not None and len(each) != world_size:
            raise ValueError(f"Worlds.run: each needs one sequence of arguments per rank, got {len(each)} for "
                             f"W={world_size}.")  # fmt: skip
        try:
            job = _rank.dumps((fn, args, kwargs))
            owns = [_rank.dumps(tuple(own)) for own in each or [()]]
        except Exception as error:  # pickling runs anybody's __reduce__
            raise TypeError(
                f"Worlds.run: {getattr(fn, '__qualname__', fn)} or its arguments cannot be pickled: {error}. "
                "What lives in one process (a lock, a file, a pool of worlds) must be made inside the function."
            ) from error
        self.start(world_size)
        world = self._live[world_size]
        try:
            world.send(job, owns)
            outcome = world.collect(self.timeout if timeout is None else timeout, self.grace, on_message)
            if not outcome.in_step():
                self._discard(world_size)
        except BaseException:  # Ctrl-C, or on_message raised: the ranks are in the middle of something
            self._discard(world_size)
            raise
        return outcome.results()

    def _discard(self, size: int) -> None:
        if size in self._live:
            self._live.pop(size).kill()


def _kill_all(live: dict[int, _World], owner: int) -> None:
    if os.getpid() == owner:  # a fork of the caller must not kill the caller's ranks on its way out
        while live:
            live.popitem()[1].kill()


# --- one world ------------------------------------------------------------------------------------------------------


class _World:
    """W processes and the parent's ends of the pipes to them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.directory = tempfile.mkdtemp(prefix="contrastive-zoo-")
        self.processes: list[BaseProcess] = []
        self.pipes: list[connection.Connection] = []

    def launch(self, threads: int) -> None:
        for rank in range(self.size):
            process, pipe = _rank.launch(rank, self.size, self.directory, threads)
            self.processes.append(process)
            self.pipes.append(pipe)

    def whole(self) -> bool:
        """Whether all its ranks are alive and silent, as between two jobs they should be."""
        return not connection.wait([*self.pipes, *(process.sentinel for process in self.processes)], timeout=0)

    def send(self, job: bytes, owns: Sequence[bytes]) -> None:
        for rank, pipe in enumerate(self.pipes):
            # sys.path goes along: what the caller can import by now, the ranks can, too.
            header = pickle.dumps((sys.path, owns[rank % len(owns)]))
            with contextlib.suppress(OSError):  # a rank that is gone shows when we collect
                pipe.send_bytes(header)
                pipe.send_bytes(job)

    def collect(self, timeout: float, grace: float, on_message: Callable[[int, Any], None] | None = None) -> _Outcome:
        outcome = _Outcome(self.size, timeout)
        deadline = time.monotonic() + timeout
        pending = set(range(self.size))
        while pending and (left := deadline - time.monotonic()) > 0:
            # The sentinel as well: a grandchild may hold the pipe open after the rank has died.
            handles: dict[Any, int] = {
                handle: r for r in pending for handle in (self.pipes[r], self.processes[r].sentinel)
            }
            for rank in sorted({handles[handle] for handle in connection.wait(handles, min(left, 3600.0))}):
                answer = self._receive(rank)
                if answer is not None and answer.kind == "message":
                    if on_message is not None:
                        on_message(rank, answer.value)
                    continue
                pending.discard(rank)
                if answer is None:
                    outcome.died(rank, self.processes[rank].exitcode)
                else:
                    outcome.answered(rank, answer)
                if rank in outcome.failures:
                    deadline = min(deadline, time.monotonic() + grace)
        outcome.stuck = self._locate(sorted(pending))
        return outcome

    def _receive(self, rank: int) -> _rank.Answer | None:
        """The rank's next word; None when it has died."""
        payload = None
        with contextlib.suppress(EOFError, OSError):
            if self.pipes[rank].poll():
                payload = self.pipes[rank].recv_bytes()
        if payload is None:
            self.processes[rank].join(timeout=1.0)  # the pipe breaks a moment before the exit code is known
            return None
        return pickle.loads(payload)

    def _locate(self, ranks: Sequence[int]) -> dict[int, Where]:
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        return {rank: _rank.read_stack(self.directory, rank) for rank in ranks}

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)


# --- what came of a job ---------------------------------------------------------------------------------------------


class _Failure(NamedTuple):
    weight: int  # 0: the rank died, 1: it raised, 2: it raised because a peer had gone
    summary: str
    traceback: str
    error: BaseException


@dataclass
class _Outcome:
    size: int
    timeout: float
    returned: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, _Failure] = field(default_factory=dict)
    stuck: dict[int, Where] = field(default_factory=dict)
    steps: set[int | None] = field(default_factory=set)

    def died(self, rank: int, exitcode: int | None) -> None:
        text = f"died (exit code {exitcode})"
        self.failures[rank] = _Failure(0, text, "", ChildProcessError(f"rank {rank} {text}"))

    def answered(self, rank: int, answer: _rank.Answer) -> None:
        self.steps.add(answer.step)
        if answer.kind == "returned":
            self.returned[rank] = answer.value
            return
        summary, traceback, pickled = answer.value
        error: BaseException = RuntimeError(summary)
        with contextlib.suppress(Exception):  # an exception class whose pickle does not load
            error = pickle.loads(pickled)
        weight = 2 if "gloo/" in summary else 1  # gloo signs its errors with the path of its source
        self.failures[rank] = _Failure(weight, f"raised {summary}", traceback, error)

    def in_step(self) -> bool:
        """Whether the next job finds every rank ready, and no collective half done.

        Where all ranks raised they must also have begun equally many. Where all returned the counts may differ:
        sends and receives count, too.
        """
        if self.stuck or None in self.steps or (self.returned and self.failures):
            return False
        return not self.failures or (len(self.steps) == 1 and all(f.weight == 1 for f in self.failures.values()))

    def results(self) -> list[Any]:
        if not self.failures and not self.stuck:
            return [self.returned[rank] for rank in range(self.size)]
        failures = dict(sorted(self.failures.items(), key=lambda item: (item[1].weight, item[0])))
        errors = {rank: failure.error for rank, failure in failures.items()}
        waits = {rank: f"rank {rank} {where}" for rank, where in self.stuck.items()}
        if not failures:
            ranks = "; ".join(waits.get(rank, f"rank {rank} has returned") for rank in range(self.size))
            finding = _rank.finding(self.size, self.stuck)
            raise WorldTimeout(
                f"W={self.size}: no answer within {self.timeout:g} s. {ranks}. {finding}", {}, self.stuck
            )
        firsts = [f"rank {rank} {failure.summary.partition(chr(10))[0]}" for rank, failure in failures.items()]
        tracebacks = [f"\n\nrank {rank}:\n{f.traceback.rstrip()}" for rank, f in failures.items() if f.traceback]
        raise RankError(
            f"W={self.size}: {'; '.join([*firsts, *waits.values()])}{''.join(tracebacks)}", errors, self.stuck
        )
