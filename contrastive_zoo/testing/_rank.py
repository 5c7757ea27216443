"""The process of one rank, which runs the jobs of :mod:`contrastive_zoo.testing.worlds` one after another."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import itertools
import multiprocessing
import operator
import os
import pickle
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor


class Answer(NamedTuple):
    """A message of a rank: any number of ``message``, then one ``returned`` or ``raised``."""

    kind: str  # "message", "returned" or "raised"
    value: Any
    step: int | None = None  # collectives begun so far; None when there is no process group left to begin them in


class Raised(NamedTuple):
    """An exception sent to the parent process. The object may not be picklable; its text always is."""

    summary: str
    traceback: str
    pickled: bytes | None


_pipe: connection.Connection | None = None  # set in a rank, None in every other process


def report(message: Any) -> None:
    """Send ``message`` from inside a job to the ``on_message`` callback of the :meth:`Worlds.run` that started it.

    Outside a job it does nothing, so a training loop may always call it. Call it from the job's own thread.

    Raises:
        TypeError: the message cannot be pickled.

    Example:
        >>> report({"step": 1})   # nobody waits here
    """
    if _pipe is not None:
        _pipe.send_bytes(_dumps_home(Answer("message", message)))


# --- pickling -------------------------------------------------------------------------------------------------------


def dumps(job: Any) -> bytes:
    """Pickle a job for the ranks. Code that they cannot import, and test modules, are pickled by value."""
    return _dumps(_Outbound, job)


def _dumps_home(answer: Answer) -> bytes:
    return _dumps(_Homebound, answer)


def _dumps(pickler: type[cloudpickle.Pickler], value: Any) -> bytes:
    with io.BytesIO() as file:
        pickler(file).dump(value)
        return file.getvalue()


class _Outbound(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.FunctionType, type)) and _goes_by_value(obj.__module__):
            cloudpickle.register_pickle_by_value(sys.modules[obj.__module__])
        return super().reducer_override(obj)


class _Homebound(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided:
            return _compact(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, type) and _lookup(obj.__module__, obj.__qualname__) is not obj:
            # A class that was sent by value is returned by name: cloudpickle would overwrite the original's attributes.
            return _original_class, (obj.__module__, obj.__qualname__, cloudpickle.dumps(obj))
        return super().reducer_override(obj)


def _compact(tensor: Tensor) -> Tensor:
    """The values alone: no graph, no hooks, and not the megabytes that a small slice is a view of."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _original_class(module: str, qualname: str, pickled: bytes) -> Any:
    found = _lookup(module, qualname)
    return found if isinstance(found, type) else pickle.loads(pickled)


def _lookup(module: str, qualname: str) -> Any:
    try:
        return operator.attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


@functools.cache
def _goes_by_value(name: str | None) -> bool:
    """Test modules (importing one again runs it again) and what no finder finds; all else the ranks import."""
    module = sys.modules.get(name or "")
    package = (name or "").partition(".")[0]
    if module is None or package in ("__main__", "contrastive_zoo"):  # cloudpickle sends __main__ by value unasked
        return False
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if type(loader).__module__.startswith("_pytest") and "site-packages" not in (getattr(module, "__file__", "") or ""):
        return True
    return not any(finder.find_spec(package, None) for finder in sys.meta_path)


# --- where a rank stands --------------------------------------------------------------------------------------------

STACK_TIMEOUT = 1.0  # seconds a rank may take to write down its stack

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_OURS = tuple(os.path.join(folder, "") for folder in (*torch.__path__, os.path.dirname(__file__)))
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")


@dataclass(frozen=True)
class Where:
    """Where a rank was when the timeout ended.

    Attributes:
        collective: the collective it waited in, as ``torch.distributed`` names it; None outside of any.
        place: the line of the user's code, as in ``"loss.py:12 in my_loss"``.
    """

    collective: str | None
    place: str

    def __str__(self) -> str:
        return f"is at {self.place}" if self.collective is None else f"waits in {self.collective} ({self.place})"


def stack_file(directory: str, rank: int) -> str:
    """Where a rank writes its stack when it receives SIGUSR1."""
    return os.path.join(directory, f"rank{rank}.stack")


def read_stack(directory: str, rank: int) -> Where:
    """Read the stack of a rank that has just received SIGUSR1."""
    path, deadline, text = Path(stack_file(directory, rank)), time.monotonic() + STACK_TIMEOUT, ""
    while time.monotonic() < deadline:
        before, text = text, path.read_text(errors="replace") if path.exists() else ""
        if text and text == before:  # faulthandler marks no end; it writes within microseconds
            break
        time.sleep(0.02)
    return parse_stack(text)


def parse_stack(text: str) -> Where:
    """Read what faulthandler wrote: one stack per thread, the innermost frame first, the main thread last."""
    stacks = [
        frames for chunk in re.split(r"^(?:Current t|T)hread ", text, flags=re.M) if (frames := _FRAME.findall(chunk))
    ]
    for frames in stacks:
        # Outwards up to the user: all_gather_object is what was called, the all_gather that it is made of is not.
        calls = itertools.takewhile(lambda frame: not _is_the_users(frame[0]), frames)
        names = [name for file, _, name in calls if file.endswith(_COLLECTIVES) and not name.startswith(("_", "<"))]
        if names:
            return Where(names[-1], _place(frames))
    return Where(None, _place(stacks[-1]) if stacks else "an unknown place")


def _place(frames: list[tuple[str, str, str]]) -> str:
    file, line, function = next((frame for frame in frames if _is_the_users(frame[0])), frames[0])
    return f"{os.path.basename(file)}:{line} in {function}"


def _is_the_users(file: str) -> bool:
    if file.startswith((*_OURS, "<frozen")) or file.endswith("typing_extensions.py"):  # which wraps what is deprecated
        return False
    return "site-packages" in file or not file.startswith(_STDLIB)  # the one may lie inside the other


def finding(size: int, stuck: Mapping[int, Where]) -> str:
    """Explain why a job hangs, from the places of its stuck ranks."""
    waits = {rank: stuck[rank].collective if rank in stuck else None for rank in range(size)}
    absent = {name: [rank for rank in waits if waits[rank] != name] for name in waits.values() if name is not None}
    if not absent and len(stuck) < size:
        return "No Python frame shows a collective: the job is slow, or waits for a peer in C++ (DDP, Work.wait)."
    if not absent:
        return "No rank waits in a collective: the job loops, or needs a longer timeout."
    if not any(absent.values()):
        return f"Every rank is in {waits[0]}, but not in the same call: a call more, another shape or group."
    return " ".join(
        f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} never entered {name}."
        for name, ranks in absent.items()
    )


# --- the process ----------------------------------------------------------------------------------------------------


_context = multiprocessing.get_context("forkserver")


def launch(rank: int, size: int, directory: str, threads: int) -> tuple[BaseProcess, connection.Connection]:
    """Start one rank of the world that meets in ``directory``; its first answer says that it has joined."""
    ours, theirs = _context.Pipe()
    with theirs:
        args = (theirs, rank, size, directory, threads, dict(os.environ))
        process = _context.Process(target=main, args=args, name=f"rank {rank} of {size}", daemon=True)
        with _nothing_known_of_main():
            process.start()
    return process, ours


@contextlib.contextmanager
def _nothing_known_of_main() -> Iterator[None]:
    """No rank runs the caller's script again, and a fork server not yet up imports what every rank will need."""
    # dynamo: DDP and dispatch modes import it at first use, a second of each rank's time
    needed = [
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "contrastive_zoo.testing.trial",
        "contrastive_zoo.distributed",
    ]
    _context.set_forkserver_preload([*needed, __name__])
    # A fork server with BLAS threads would fork with threads running; python < 3.13 ignores sys.path when preloading.
    ours = {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OPENBLAS_NUM_THREADS": "1"}
    theirs = {name: os.environ.get(name) for name in ours}
    main = sys.modules["__main__"]
    os.environ.update(ours)
    sys.modules["__main__"] = types.ModuleType("__main__")  # multiprocessing reads off it what to run in a child
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in theirs.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def main(
    pipe: connection.Connection, rank: int, size: int, directory: str, threads: int, environment: dict[str, str]
) -> None:
    """Join the world that meets in ``directory``, say so, and work until the parent is gone."""
    global _pipe
    _pipe = pipe
    os.environ.clear()  # the fork server's environment is as old as the fork server
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills its ranks
    threading.Thread(target=_die_with_parent, args=(directory,), daemon=True).start()
    # faulthandler writes from the C handler of the signal: it shows the stack of a rank that is blocked in C++ too.
    stack = open(stack_file(directory, rank), "w")  # noqa: SIM115 - stays open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(threads)
    pipe.send_bytes(_answer(functools.partial(_join, rank, size, directory)))
    while True:
        try:
            header, job = pipe.recv_bytes(), pipe.recv_bytes()
        except (EOFError, OSError):
            _die_with_parent(directory)
        pipe.send_bytes(_answer(functools.partial(_work, header, job)))


def _die_with_parent(directory: str) -> NoReturn:
    # A rank that waits in a collective never reads its pipe, so somebody else has to see the parent go.
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(directory, ignore_errors=True)  # a parent that was killed has not
    os._exit(1)


def _join(rank: int, size: int, directory: str) -> None:
    with _stdout_silenced():
        store = dist.FileStore(os.path.join(directory, "store"), size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _work(header: bytes, job: bytes) -> Any:
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    sys.path[:], own = pickle.loads(header)
    fn, args, kwargs = pickle.loads(job)
    return fn(*args, *pickle.loads(own), **kwargs)


def _answer(work: functools.partial[Any]) -> bytes:
    try:
        return _dumps_home(Answer("returned", work(), _step()))
    except BaseException as error:  # SystemExit and KeyboardInterrupt are news for the parent like any other
        return _dumps_home(Answer("raised", _raised(error), _step()))
    finally:
        with contextlib.suppress(OSError, ValueError):  # a closed stdout is no concern of the job
            sys.stdout.flush()
            sys.stderr.flush()


def _raised(error: BaseException) -> Raised:
    pickled = None
    with contextlib.suppress(Exception):
        pickled = _dumps(_Homebound, error)
    theirs = error.__traceback__
    while theirs is not None and theirs.tb_frame.f_code.co_filename == __file__:
        theirs = theirs.tb_next  # the first frames are ours and say nothing
    text = "".join(traceback.format_exception(type(error), error, theirs))
    return Raised(f"{type(error).__name__}: {error}".removesuffix(": "), text, pickled)


def _step() -> int | None:
    group: Any = dist.group.WORLD
    return None if group is None else group._get_sequence_number_for_group()


@contextlib.contextmanager
def _stdout_silenced() -> Iterator[None]:
    # Some builds of gloo greet every peer on stdout, from C++.
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
