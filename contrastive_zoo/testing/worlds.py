"""A pool of live process groups of any size, for tests, the command line and the demo: real processes over gloo."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from contrastive_zoo.ranks.messages import CommunicationError
from contrastive_zoo.testing import _rank
from contrastive_zoo.testing._rank import Answer, Raised, dump_job
from contrastive_zoo.testing.stacks import Where, explain_hang, where_are

R = TypeVar("R")
LONGEST_WAIT = 3600.0  # seconds of one wait for answers: an infinite timeout is not accepted by the operating system
START_TIMEOUT = 600.0  # seconds of a world's start: the first one imports torch, possibly from a disk with a cold cache


class Worlds(contextlib.AbstractContextManager["Worlds"]):
    """A pool of live worlds, one for each size used so far.

    The first job of a size starts its world, in about 0.1 s; later jobs use it again. If a job leaves its ranks out of
    step, the world is killed and the next job gets a new one. No process outlives :meth:`close`, or the caller, however
    it ends. A pool runs one job at a time: do not share it between threads. Ranks have the environment of its creation.

    Args:
        timeout: seconds for a job, unless :meth:`run` gets another; ``math.inf`` for no limit.
        grace: seconds that the other ranks have to answer after one has failed.
        threads: ranks are threads of this process, which take turns, up to 64 of them. They have their own process group,
            random state, default dtype and copies of a job's arguments; what a module holds they share.
        torch_threads: threads that torch uses in each rank.

    Raises:
        ValueError: ``threads`` with a torch that lacks groups of threads.

    Examples:
        >>> import torch.distributed as dist
        >>> with Worlds() as worlds:
        ...     worlds.run(2, lambda: (dist.get_rank(), dist.get_world_size()))
        [(0, 2), (1, 2)]
    """

    def __init__(
        self, *, timeout: float = 30.0, grace: float = 1.0, threads: bool = False, torch_threads: int = 1
    ) -> None:
        self.timeout, self.grace, self.threads, self.torch_threads = timeout, grace, threads, torch_threads
        self.environment = dict(os.environ)
        self._new: Any = _World
        self._dump: Callable[[Any], Any] = dump_job
        if threads:  # torch may lack what they need
            from contrastive_zoo.testing.threads import ThreadWorld, copier

            self._new, self._dump = ThreadWorld, copier
        self._live: dict[int, Any] = {}
        self._finalizer = weakref.finalize(self, _kill_all, self._live, os.getpid())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pool of worlds belongs to the process that made it")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every rank. A pool may be closed twice; it cannot run jobs afterwards."""
        self._finalizer()

    def start(self, *sizes: int) -> None:
        """Start worlds of these sizes now, concurrently, instead of with their first job."""
        if not self._finalizer.alive:
            raise ValueError("Worlds: this pool is closed. Run the job inside the with block, or make a new pool.")
        if (smallest := min(sizes, default=1)) < 1:
            raise ValueError(f"Worlds: a world has at least one rank, got W={smallest}.")
        for size in sizes:
            if size in self._live and not self._live[size].is_idle():
                self._discard(size)  # a rank died between two jobs, for example by the OOM killer
        new = [size for size in dict.fromkeys(sizes) if size not in self._live]
        try:
            for size in new:
                self._live[size] = self._new(size)
                self._live[size].launch(self)
            for size in new:
                outcome = Outcome(size, START_TIMEOUT)
                self._live[size].collect(outcome, self.grace)
                outcome.results()
        except BaseException:
            for size in new:
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
        **kwargs: Any,
    ) -> list[R]:
        """Call ``fn(*args, *each[rank], **kwargs)`` once on every rank of a world.

        Functions, closures and lambdas are pickled by value if the ranks cannot import them. Tensors are returned by
        value and detached. Every job begins with gradients enabled and float32 as the default dtype; each rank has its
        own random state.

        Args:
            world_size: W >= 1. A world of one, too, is another process with a process group.
            fn: the job of a rank; inside, ``torch.distributed`` is initialised.
            each: one tuple or list of further positional arguments per rank.
            timeout: seconds; the pool's by default.

        Returns:
            The results in rank order.

        Raises:
            ValueError: ``world_size`` is below 1, ``each`` does not hold one tuple per rank, or the pool is closed.
            TypeError: the job cannot be pickled.
            RankError: a rank raised or died.
            WorldTimeout: the job was not done in time.

        Examples:
            >>> with Worlds() as worlds:
            ...     worlds.run(2, lambda base, offset: base + offset, 10, each=[(1,), (2,)])
            [11, 12]
        """
        if each is not None and [isinstance(x, (tuple, list)) for x in each] != [True] * world_size:
            got = [type(x).__name__ for x in each]
            raise ValueError(f"Worlds.run: each needs a tuple per rank: [(1,), (2,)]; got {got} for W={world_size}.")
        try:
            job = self._dump((fn, args, kwargs))
            local_args = [self._dump(tuple(of_rank)) for of_rank in each or [()]]
        except Exception as error:  # pickling calls __reduce__ of any object
            raise TypeError(
                f"Worlds.run: {getattr(fn, '__qualname__', fn)} or its arguments cannot be pickled: {error}. "
                "What lives in one process (a lock, a file, a pool of worlds) must be made inside the function."
            ) from error
        self.start(world_size)
        world = self._live[world_size]
        try:
            world.send(job, local_args)
            outcome = Outcome(world_size, self.timeout if timeout is None else timeout)
            world.collect(outcome, self.grace)
            if not outcome.in_step():
                self._discard(world_size)
        except BaseException:  # Ctrl-C: the ranks have not finished the job
            self._discard(world_size)
            raise
        return outcome.results()

    def _discard(self, size: int) -> None:
        if size in self._live:
            self._live.pop(size).kill()


def _kill_all(live: dict[int, Any], owner: int) -> None:
    if os.getpid() == owner:  # a fork of the caller must not kill the caller's ranks when it exits
        while live:
            live.popitem()[1].kill()


class _World:
    """W processes that share a process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.directory = world_size, tempfile.mkdtemp(prefix="contrastive-zoo-")
        self.processes: list[BaseProcess] = []
        self.pipes: list[connection.Connection] = []

    def launch(self, pool: Worlds) -> None:
        """Start the processes; :meth:`collect` then returns when all have joined."""
        with _rank.prepared_forkserver():
            for rank in range(self.world_size):
                pipe, rank_end = _rank.context.Pipe()
                with rank_end:
                    args = (rank_end, rank, self.world_size, self.directory, pool.torch_threads, pool.environment)
                    process = _rank.context.Process(target=_rank.main, args=args, name=f"rank {rank}", daemon=True)
                    process.start()
                self.processes.append(process)
                self.pipes.append(pipe)

    def is_idle(self) -> bool:
        return not connection.wait([*self.pipes, *(process.sentinel for process in self.processes)], timeout=0)

    def send(self, job: bytes, local_args: Sequence[bytes]) -> None:
        """Send a job to all ranks, with arguments that are the same on all ranks or one for each."""
        for rank, pipe in enumerate(self.pipes):
            # sys.path is sent with each job, so that the ranks can import what the caller can import by now.
            header = pickle.dumps((sys.path, local_args[rank % len(local_args)]))
            with contextlib.suppress(OSError):  # collect reports a rank that has died
                pipe.send_bytes(header)
                pipe.send_bytes(job)

    def collect(self, outcome: Outcome, grace: float) -> None:
        """Wait for the answers of all ranks until the timeout ends, and ``grace`` more seconds after a failure."""
        pending, deadline = set(range(self.world_size)), time.monotonic() + outcome.timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            # The sentinel as well: a grandchild may hold the pipe open after the rank has died.
            handles: dict[Any, int] = {x: r for r in pending for x in (self.pipes[r], self.processes[r].sentinel)}
            for rank in sorted({handles[handle] for handle in connection.wait(handles, min(left, LONGEST_WAIT))}):
                pending.discard(rank)
                outcome.add(rank, self._receive(rank))
                if rank in outcome.failures:
                    deadline = min(deadline, time.monotonic() + grace)
        files = {rank: Path(_rank.stack_file(self.directory, rank)) for rank in sorted(pending)}
        outcome.stuck = where_are({rank: (self.processes[rank].pid, file) for rank, file in files.items()})

    def _receive(self, rank: int) -> _rank.Answer | str:
        payload = None
        with contextlib.suppress(EOFError, OSError):
            if self.pipes[rank].poll():
                payload = self.pipes[rank].recv_bytes()
        if payload is None:
            self.processes[rank].join(timeout=10.0)  # the pipe breaks a moment before the exit code is available
            return f"died (exit code {self.processes[rank].exitcode})"
        return pickle.loads(payload)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class RankError(RuntimeError):
    """A job failed on some rank.

    Attributes:
        errors: rank -> the exception raised there, root causes first. ChildProcessError for a rank that died,
            RuntimeError with the same text for an exception that cannot be pickled.
        stuck: rank -> where it waited, for the ranks that had not answered.
        returned: rank -> its result, for the other ranks.
    """

    def __init__(self, message: str, errors: Any = None, stuck: Any = None, returned: Any = None) -> None:
        super().__init__(message)
        self.errors, self.stuck, self.returned = errors or {}, stuck or {}, returned or {}


class WorldTimeout(RankError):
    """A job timed out although no rank failed: usually one rank skipped a collective."""


DIED, RAISED, RAISED_BY_PEER = range(3)
"""Kinds of failure, root causes first. RAISED_BY_PEER: the rank lost its connection because another rank failed."""


class _Failure(NamedTuple):
    kind: int
    summary: str
    traceback: str
    error: BaseException


@dataclass
class Outcome:
    """What the parent process knows of a job."""

    world_size: int
    timeout: float
    returned: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, _Failure] = field(default_factory=dict)
    stuck: dict[int, Where] = field(default_factory=dict)
    steps: set[int | None] = field(default_factory=set)

    def add(self, rank: int, answer: Answer | str) -> None:
        if isinstance(answer, str):
            self.failures[rank] = _Failure(DIED, answer, "", ChildProcessError(f"rank {rank} {answer}"))
            return
        self.steps.add(answer.step)
        if not isinstance(answer.value, Raised):
            self.returned[rank] = answer.value
            return
        summary, traceback, pickled = answer.value
        error: BaseException = RuntimeError(summary)
        with contextlib.suppress(Exception):  # an exception class whose pickle does not load
            error = pickled if isinstance(pickled, BaseException) else pickle.loads(pickled or b"")
        by_peer = "gloo/" in summary or isinstance(error, CommunicationError)  # gloo's contain the path of its source
        kind = RAISED_BY_PEER if by_peer else RAISED
        self.failures[rank] = _Failure(kind, f"raised {summary}", traceback, error)

    def in_step(self) -> bool:
        """Return whether every rank is ready for the next job, with no collective unfinished."""
        if self.stuck or None in self.steps or (self.returned and self.failures):
            return False
        # of jobs that returned, numbers of collectives may differ: they include sends and receives
        return not self.failures or (len(self.steps) == 1 and all(f.kind == RAISED for f in self.failures.values()))

    def results(self) -> list[Any]:
        if not self.failures and not self.stuck:
            return [self.returned[rank] for rank in range(self.world_size)]
        failures = dict(sorted(self.failures.items(), key=lambda item: (item[1].kind, item[0])))
        errors = {rank: failure.error for rank, failure in failures.items()}
        start = f"W={self.world_size}: "
        if not failures:
            why = explain_hang(self.world_size, self.stuck, "has returned")
            raise WorldTimeout(f"{start}no answer within {self.timeout:g} s. {why}", {}, self.stuck, self.returned)
        ranks = [f"rank {rank} {failure.summary.partition(chr(10))[0]}" for rank, failure in failures.items()]
        ranks += [f"rank {rank} {where}" for rank, where in self.stuck.items()]
        tracebacks = [f"\n\nrank {rank}:\n{f.traceback.rstrip()}" for rank, f in failures.items() if f.traceback]
        raise RankError(start + "; ".join(ranks) + "".join(tracebacks), errors, self.stuck, self.returned)
