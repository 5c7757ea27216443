"""A world in this process: ranks are threads that take turns, each with a process group of its own.

A rank runs until it waits for a message. So a job runs in the same order each time, and what a process has once (torch's
generator, the default dtype) is exchanged from turn to turn. Time passes only where all ranks wait: a message that never
comes is noticed at once.
"""

from __future__ import annotations

import copy
import ctypes
import io
import math
import pickle
import queue
import random
import sys
import threading
import time
import traceback
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from contrastive_zoo.testing import _rank
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.messages import Message
from contrastive_zoo.testing.stacks import Where, locate
from contrastive_zoo.testing.thread_group import BACKEND, Collective, threads_are_ranks
from contrastive_zoo.wrapper import call_history

MOST_RANKS = 64
ENDING = 1.0  # seconds for a rank that ends before its job
LOOK = 0.5  # seconds after which Ctrl-C is heard
_SPLITTING: Any = splitting(always=True)
_COUNTED: list[tuple[Any, str]] = [(call_history, "_made"), (call_history, "JOINED")]
_PATCHED: list[tuple[Any, str]] = [
    *((warnings, name) for name in ("filters", "showwarning", "_showwarnmsg_impl")),
    (torch.nn.Module, "_call_impl"),
    (_SPLITTING.getter(), _SPLITTING.attribute),
]
"""Attributes of this process that each rank has for itself: as it left them, or at each job as the caller has them."""


def _state() -> tuple[Any, ...]:
    kept = [getattr(of, name) for of, name in (*_COUNTED, *_PATCHED)]
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), torch.get_default_dtype(), kept


def _set_state(state: tuple[Any, ...]) -> None:
    generator, of_numpy, of_python, dtype, kept = state
    torch.set_rng_state(generator)
    np.random.set_state(of_numpy)
    random.setstate(of_python)
    torch.set_default_dtype(dtype)
    for (of, name), value in zip((*_COUNTED, *_PATCHED), kept, strict=True):
        setattr(of, name, value)


@contextmanager
def _state_kept() -> Iterator[None]:
    state = _state()
    try:
        yield
    finally:
        _set_state(state)


class _Copier(cloudpickle.Pickler):
    """Copies objects, but not classes, modules and their functions; tensors of a result are detached."""

    def __init__(self, file: io.BytesIO, kept: list[Any], *, is_result: bool) -> None:
        super().__init__(file)
        self.kept, self.is_result = kept, is_result

    def persistent_id(self, x: Any) -> int | None:
        if self.is_result and type(x) is torch.Tensor and x.layout is torch.strided:
            x = x.detach().clone()
        elif isinstance(x, types.FunctionType):
            if _rank.lookup(x.__module__, x.__qualname__) is not x:
                return None
        elif not isinstance(x, (type, types.ModuleType, types.CodeType)):
            return None
        self.kept.append(x)
        return len(self.kept) - 1


def copier(x: Any, *, is_result: bool = False) -> Callable[[], Any]:
    """Return a function that returns copies of an object, as another process would get them."""
    kept: list[Any] = []
    with io.BytesIO() as file:
        _Copier(file, kept, is_result=is_result).dump(x)
        pickled = file.getvalue()

    def copied() -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(pickled))
        unpickler.persistent_load = kept.__getitem__  # type: ignore[method-assign]  # of this object's table
        return unpickler.load()

    return copied


class _Rank(threading.Thread):
    """The thread of a rank. It runs in its turns, and announces their end."""

    def __init__(self, rank: int, world: ThreadWorld, torch_threads: int) -> None:
        super().__init__(daemon=True, name=f"rank {rank}")
        self.rank, self.world, self.torch_threads = rank, world, torch_threads
        self.turns: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False ends the rank
        self.job: Callable[[], Any] | None = None  # None once it has ended
        self.answer: Any = None
        self.sent: list[Message] = []
        self.has_begun = False
        self.may_run: Callable[[], bool] = lambda: True
        self.wakes = math.inf  # on the world's clock
        for seed in (torch.default_generator.manual_seed, np.random.seed, random.seed):
            seed(rank)
        self.state = _state()
        self.state[-1][:] = map(copy.copy, self.state[-1])

    def begin(self, job: Callable[[], Any]) -> None:
        """Hand the rank a job; call it in no turn."""
        patched = [copy.copy(getattr(of, name)) for of, name in _PATCHED]
        if self.rank > 0 and not sys.warnoptions:
            patched[0] = [("ignore", None, Warning, None, 0)]  # rank 0 shows the same warning
        self.state[-1][len(_COUNTED) :] = patched
        self.job, self.has_begun = job, False

    def run(self) -> None:
        torch.set_num_threads(self.torch_threads)
        while self.turns.get():
            assert self.job is not None
            try:
                self.answer = _rank.Answer(copier(self.job(), is_result=True)(), _rank.step())
            except BaseException as error:  # SystemExit and KeyboardInterrupt, too, are errors of the job
                raised = _rank.raised(error)._replace(pickled=error)
                self.answer = _rank.Answer(raised, _rank.step())
                error.__traceback__ = None
            self.job = None
            self.world.ended_turns.put(None)

    def wait(self, arrived: Callable[[], bool], seconds: float) -> None:
        assert threading.current_thread() is self, "the thread of a rank sends messages, not one that it starts"
        self.may_run, self.wakes = arrived, self.world.clock + seconds
        self.world.ended_turns.put(None)
        if not self.turns.get():
            self.turns.put(False)  # for a wait while the job ends
            raise SystemExit("the job has ended")
        self.may_run, self.wakes = lambda: True, math.inf

    def where(self) -> Where:
        if not self.has_begun:
            return Where(None, "the start of the job")
        calls = traceback.extract_stack(sys._current_frames()[self.ident or 0])
        return locate([[(x.filename, str(x.lineno), x.name) for x in reversed(calls)]])


class ThreadWorld:
    """W threads that share a table of messages, with the methods of a world of processes."""

    def __init__(self, world_size: int) -> None:
        if world_size > MOST_RANKS:
            raise ValueError(f"Worlds(threads=True): a world has at most {MOST_RANKS} ranks, got W={world_size}.")
        self.world_size, self.clock = world_size, 0.0
        self.collectives: dict[Any, Collective] = {}  # by group, number and kind: one of another kind is never met
        self.letters: defaultdict[Any, deque[torch.Tensor]] = defaultdict(deque)  # by group, sender, receiver and tag
        self.ended_turns: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.ranks: list[_Rank] = []
        self.running: _Rank | None = None  # the rank that did not end its turn in time

    def launch(self, pool: Any) -> None:
        store, join = dist.HashStore(), dist.init_process_group  # type: ignore[attr-defined]  # torch's stub lacks it
        with _state_kept():
            self.ranks = [_Rank(rank, self, pool.torch_threads) for rank in range(self.world_size)]
        for x in self.ranks:
            x.begin(partial(join, BACKEND, store=store, rank=x.rank, world_size=self.world_size))
            x.start()

    def is_idle(self) -> bool:
        return all(x.is_alive() for x in self.ranks)

    def send(self, job: Callable[[], Any], local_args: Sequence[Callable[[], Any]]) -> None:
        for x in self.ranks:
            x.begin(partial(_rank.call, job, local_args[x.rank % len(local_args)]))

    def collect(self, outcome: Any, grace: float) -> None:
        """Let ranks take turns until all have answered or the timeout ends, and ``grace`` more seconds after a failure."""
        pending, deadline = list(self.ranks), outcome.timeout
        start, self.clock = time.monotonic(), 0.0
        with _state_kept(), threads_are_ranks():
            while pending:
                rank = next((x for x in pending if x.may_run()), None)
                if rank is None:
                    rank = min(pending, key=lambda x: x.wakes)
                    self.clock = rank.wakes
                left = deadline - (time.monotonic() - start) - self.clock
                if not left > 0 or not self._turn(rank, left):  # inf - inf is no number
                    break
                pending.remove(rank)
                if rank.job is not None:
                    pending.append(rank)
                    continue
                outcome.add(rank.rank, rank.answer)
                if rank.rank in outcome.failures:
                    deadline = min(deadline, time.monotonic() - start + self.clock + grace)
            for x in sorted(pending, key=lambda x: x.rank):
                outcome.stuck[x.rank] = x.where()

    def _turn(self, rank: _Rank, seconds: float) -> bool:
        """Let a rank run; return whether its turn has ended in time."""
        _set_state(rank.state)
        self.running, rank.has_begun = rank, True
        rank.turns.put(True)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self.ended_turns.get(timeout=min(left, LOOK))
                rank.state, self.running = _state(), None
                return True
        return False

    def kill(self) -> None:
        """End the threads; one that runs ends at its next instruction in Python."""
        with _state_kept(), threads_are_ranks():
            for x in self.ranks:
                _set_state(x.state)
                x.turns.put(False)
                if x is self.running:
                    ended = ctypes.c_ulong(x.ident or 0), ctypes.py_object(SystemExit)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(*ended)
                x.join(ENDING)
