"""The process of one rank, which runs the jobs of :mod:`contrastive_zoo.testing.worlds`, and what it sends and receives."""

import contextlib
import faulthandler
import functools
import gc
import io
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import operator
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.ranks.suggestions import needed
from contrastive_zoo.testing.interrupts import uninterrupted

with needed("contrastive_zoo.testing", "contrastive_zoo[testing]"):
    import cloudpickle


class Raised(NamedTuple):
    summary: str
    traceback: str
    pickled: bytes | BaseException | None  # that of a thread is not pickled; None if pickling fails


class Answer(NamedTuple):
    """What a rank sends when a job has ended."""

    value: Any  # what the job returned, or a Raised
    step: int | None  # number of collectives begun so far; None after the process group was destroyed


context = multiprocessing.get_context("forkserver")

_OF_RANKS = [os.path.join(os.path.dirname(__file__), name) for name in ("_rank.py", "threads.py", "pytest_plugin.py")]
"""Files in which jobs are called."""


@contextlib.contextmanager
def prepared_forkserver(imports: Sequence[str] = ()) -> Iterator[None]:
    """Hide the caller's script from the ranks, and let a fork server that starts now import what every rank needs."""
    # dynamo: DDP and dispatch modes import it at first use, which takes each rank a second
    needed = ["torch._dynamo", "contrastive_zoo.wrapper.distributed", "contrastive_zoo.testing.check"]
    context.set_forkserver_preload([*needed, __name__, *imports])
    # A fork server with BLAS threads would fork with threads running; python < 3.13 ignores sys.path when preloading.
    settings = {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OPENBLAS_NUM_THREADS": "1"}
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # multiprocessing would run the caller's in each rank
    try:
        with patch.dict(os.environ, settings):
            multiprocessing.resource_tracker.ensure_running()  # it unmasks signals
            with uninterrupted():  # a fork server that is interrupted while it imports prints a traceback
                multiprocessing.forkserver.ensure_running()
            yield
    finally:
        sys.modules["__main__"] = main


def main(
    pipe: connection.Connection, rank: int, world_size: int, directory: str, threads: int, environment: dict[str, str]
) -> None:
    """Join the world whose store is in ``directory``, answer, and run jobs until the parent is gone."""
    gc.freeze()  # a collection would visit what the fork server has imported, and copy its pages
    os.environ.clear()  # the fork server's environment is as old as the fork server
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # of the fork server
    threading.Thread(target=_exit_with_parent, args=(directory,), daemon=True).start()
    if not os.path.isdir(directory):  # the caller was interrupted while this rank started
        os._exit(1)
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


def stack_file(directory: str, rank: int) -> str:
    """Return the path to which a rank writes its stack when it receives SIGUSR1."""
    return os.path.join(directory, f"rank{rank}.stack")


def _exit_with_parent(directory: str) -> NoReturn:
    # A rank that waits in a collective does not read its pipe, so a thread of its own waits for the parent's end.
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(directory, ignore_errors=True)  # a parent that was killed has not removed it
    os._exit(1)


def _join(rank: int, world_size: int, directory: str) -> None:
    # Some builds of gloo print a line for each peer to stdout, from C++.
    stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        store = dist.FileStore(os.path.join(directory, "store"), world_size)  # type: ignore[attr-defined]  # as TCPStore
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def _run_job(header: bytes, job: bytes) -> Any:
    sys.path[:], local_args = pickle.loads(header)
    return call(functools.partial(pickle.loads, job), functools.partial(pickle.loads, local_args))


def call(job: Callable[[], Any], local_args: Callable[[], Any]) -> Any:
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    fn, args, kwargs = job()
    return fn(*args, *local_args(), **kwargs)


def _answer(work: functools.partial[Any]) -> bytes:
    try:
        return dump_result(Answer(work(), step()))
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too, are errors of the job
        return dump_result(Answer(raised(error), step()))
    finally:
        with contextlib.suppress(OSError, ValueError):  # a closed stdout is no error of the job
            sys.stdout.flush()
            sys.stderr.flush()


def raised(error: BaseException) -> Raised:
    pickled = None
    with contextlib.suppress(Exception):
        pickled = dump_result(error)
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename in _OF_RANKS:
        shown = shown.tb_next  # the first frames belong to the library and say nothing about the job
    text = "".join(traceback.format_exception(type(error), error, shown))
    return Raised(f"{type(error).__name__}: {error}".removesuffix(": "), text, pickled)


def step() -> int | None:
    group: Any = dist.group.WORLD
    return None if group is None else group._get_sequence_number_for_group()


def dump_job(job: Any, pickler: type[cloudpickle.Pickler] | None = None) -> bytes:
    """Pickle a job for the ranks. Code that they cannot import, and test modules, are pickled by value."""
    with io.BytesIO() as file:
        (pickler or _JobPickler)(file).dump(job)
        return file.getvalue()


def dump_result(result: Any) -> bytes:
    """Pickle what a rank sends to the caller: tensors detached, classes that the caller has by name."""
    return dump_job(result, _ResultPickler)


class _JobPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):  # cloudpickle 3.1.3 leaves out the file that tracebacks and warnings name
            _, parts = self.dispatch_table[types.CodeType](obj)
            return _code_of_file, (obj.co_filename, *parts)
        if isinstance(obj, (types.FunctionType, type)) and _pickled_by_value(obj.__module__):
            cloudpickle.register_pickle_by_value(sys.modules[obj.__module__])
        return super().reducer_override(obj)


class _ResultPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided:
            is_view = obj.untyped_storage().nbytes() > obj.nbytes  # of which only its part is sent
            return (obj.detach().clone() if is_view else obj.detach()).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, type) and lookup(obj.__module__, obj.__qualname__) is not obj:
            # A class that was sent by value is returned by name: cloudpickle would overwrite the original's attributes.
            return _original_class, (obj.__module__, obj.__qualname__, cloudpickle.dumps(obj))
        return super().reducer_override(obj)


def _code_of_file(file: str, *parts: Any) -> types.CodeType:
    return types.CodeType(*parts).replace(co_filename=file)


def _original_class(module: str, qualname: str, pickled: bytes) -> Any:
    result = lookup(module, qualname)
    return result if isinstance(result, type) else pickle.loads(pickled)


def lookup(module: str, qualname: str) -> Any:
    try:
        return operator.attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


@functools.cache
def _pickled_by_value(name: str | None) -> bool:
    """Whether code of a module is pickled by value: test modules, which must not run again, and those not importable."""
    module = sys.modules.get(name or "")
    package = (name or "").partition(".")[0]
    if module is None or package in ("__main__", "contrastive_zoo"):  # cloudpickle pickles __main__ by value anyway
        return False
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if type(loader).__module__.startswith("_pytest") and "site-packages" not in (getattr(module, "__file__", "") or ""):
        return True
    return not any(finder.find_spec(package, None) for finder in sys.meta_path)
