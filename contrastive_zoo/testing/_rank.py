"""The process of one rank: it joins a world and runs the jobs of :mod:`contrastive_zoo.testing.worlds` in turn."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from contrastive_zoo.testing import _pickling
from contrastive_zoo.testing._pickling import dump_result
from contrastive_zoo.testing._stack import stack_file


class Answer(NamedTuple):
    """A message of a rank: any number of ``message``, then one ``returned`` or ``raised``."""

    kind: str  # "message", "returned" or "raised"
    value: Any
    step: int | None = None  # number of collectives begun so far; None after the process group was destroyed


class Raised(NamedTuple):
    """An exception sent to the parent process. The object may not be picklable; its text always is."""

    summary: str
    traceback: str
    pickled: bytes | None


_pipe: connection.Connection | None = None  # set in a rank, None in every other process


def report(message: Any) -> None:
    """Send ``message`` from inside a job to the ``on_message`` callback of the :meth:`Worlds.run` that started it.

    Outside a job the call has no effect, so a training loop may always call it. Call it from the job's own thread.

    Raises:
        TypeError: the message cannot be pickled.

    Examples:
        >>> report({"step": 1})   # outside a job
    """
    if _pipe is not None:
        _pipe.send_bytes(dump_result(Answer("message", message)))


# --- the parent's side ----------------------------------------------------------------------------------------------


_context = multiprocessing.get_context("forkserver")


def launch(
    rank: int, world_size: int, directory: str, threads: int, imports: Sequence[str] = ()
) -> tuple[BaseProcess, connection.Connection]:
    """Start one rank of the world whose store is in ``directory``; its first answer says that it has joined.

    If this is the process's first rank, the modules ``imports`` are imported once, before ranks are forked.
    """
    parent_end, rank_end = _context.Pipe()
    with rank_end:
        args = (rank_end, rank, world_size, directory, threads, dict(os.environ))
        process = _context.Process(target=main, args=args, name=f"rank {rank} of {world_size}", daemon=True)
        with prepared_forkserver(imports):
            process.start()
    return process, parent_end


@contextlib.contextmanager
def prepared_forkserver(imports: Sequence[str]) -> Iterator[None]:
    """Hide the caller's script from the ranks, and let a fork server that starts now import what every rank needs."""
    # dynamo: DDP and dispatch modes import it at first use, which takes each rank a second
    needed = [
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "contrastive_zoo.testing.check",
        "contrastive_zoo.testing.probes",
        "contrastive_zoo.testing.trial",
        "contrastive_zoo.wrapper.distributed",
    ]
    _context.set_forkserver_preload([*needed, __name__, *imports])
    # A fork server with BLAS threads would fork with threads running; python < 3.13 ignores sys.path when preloading.
    settings = {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OPENBLAS_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in settings}
    main = sys.modules["__main__"]
    os.environ.update(settings)
    sys.modules["__main__"] = types.ModuleType("__main__")  # multiprocessing would run the caller's in each rank
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


# --- the rank's side ------------------------------------------------------------------------------------------------


def main(
    pipe: connection.Connection, rank: int, world_size: int, directory: str, threads: int, environment: dict[str, str]
) -> None:
    """Join the world whose store is in ``directory``, answer, and run jobs until the parent is gone."""
    global _pipe
    _pipe = pipe
    gc.freeze()  # a collection would visit what the fork server has imported, and copy its pages
    os.environ.clear()  # the fork server's environment is as old as the fork server
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills its ranks
    threading.Thread(target=_exit_with_parent, args=(directory,), daemon=True).start()
    # faulthandler writes from the C handler of the signal: it shows the stack of a rank that is blocked in C++ too.
    stack = open(stack_file(directory, rank), "w")  # noqa: SIM115 - stays open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(threads)
    if rank > 0 and not sys.warnoptions and "PYTHONWARNINGS" not in environment:
        warnings.simplefilter("ignore")  # rank 0 shows the same warning
    pipe.send_bytes(_answer(functools.partial(_join, rank, world_size, directory)))
    while True:
        try:
            header, job = pipe.recv_bytes(), pipe.recv_bytes()
        except (EOFError, OSError):
            _exit_with_parent(directory)
        pipe.send_bytes(_answer(functools.partial(_run_job, header, job)))


def _exit_with_parent(directory: str) -> NoReturn:
    # A rank that waits in a collective does not read its pipe, so a thread of its own waits for the parent's end.
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(directory, ignore_errors=True)  # a parent that was killed has not removed it
    os._exit(1)


def _join(rank: int, world_size: int, directory: str) -> None:
    with _stdout_silenced():
        store = dist.FileStore(os.path.join(directory, "store"), world_size)  # type: ignore[attr-defined]  # as TCPStore
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _run_job(header: bytes, job: bytes) -> Any:
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    sys.path[:], local_args = pickle.loads(header)
    fn, args, kwargs = pickle.loads(job)
    return fn(*args, *pickle.loads(local_args), **kwargs)


def _answer(work: functools.partial[Any]) -> bytes:
    try:
        return dump_result(Answer("returned", work(), _step()))
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too, are errors of the job
        return dump_result(Answer("raised", _raised(error), _step()))
    finally:
        with contextlib.suppress(OSError, ValueError):  # a closed stdout is no error of the job
            sys.stdout.flush()
            sys.stderr.flush()


def _raised(error: BaseException) -> Raised:
    pickled = None
    with contextlib.suppress(Exception):
        pickled = dump_result(error)
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename in (__file__, _pickling.__file__):
        shown = shown.tb_next  # the first frames belong to the library and say nothing about the job
    text = "".join(traceback.format_exception(type(error), error, shown))
    return Raised(f"{type(error).__name__}: {error}".removesuffix(": "), text, pickled)


def _step() -> int | None:
    group: Any = dist.group.WORLD
    return None if group is None else group._get_sequence_number_for_group()


@contextlib.contextmanager
def _stdout_silenced() -> Iterator[None]:
    # Some builds of gloo print a line for each peer to stdout, from C++.
    stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)
