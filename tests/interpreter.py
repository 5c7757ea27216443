"""Programs in processes forked from one that has imported torch: each starts in 0.1 s, a new interpreter in 3 s."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from contrastive_zoo.testing._rank import prepared_forkserver
from contrastive_zoo.testing.auditing.launch import environment, local_store, run_script

_context = multiprocessing.get_context("forkserver")

Finished = subprocess.CompletedProcess[str]


def python(*arguments: str, timeout: float = 600.0) -> Finished:
    return _finished([{}], arguments, timeout)


def torchrun(processes: int, *arguments: str, timeout: float = 600.0) -> Finished:
    store = local_store()
    return _finished([environment(rank, processes, store.port) for rank in range(processes)], arguments, timeout)


def _finished(variables: list[dict[str, str]], arguments: tuple[str, ...], timeout: float) -> Finished:
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(rank)) for rank in range(len(variables))]
        for folder in folders:
            folder.mkdir()
            (folder / "stdout").touch()
            (folder / "stderr").touch()
        jobs = ((x, os.getcwd(), dict(os.environ) | y, arguments) for x, y in zip(folders, variables, strict=True))
        with forked(_main, jobs) as processes:
            _wait(processes, timeout)
            codes = [process.exitcode for process in processes]
        out, error = ("".join((x / stream).read_text() for x in folders) for stream in ("stdout", "stderr"))
    code = next(filter(None, codes), 0)
    assert code or None not in codes, f"{' '.join(arguments)} did not end within {timeout:g} s.\n{out}{error}"
    return Finished(arguments, code, out, error)


@contextmanager
def forked(main: Callable[..., object], jobs: Iterable[tuple[Any, ...]]) -> Iterator[list[Any]]:
    processes: list[Any] = []
    try:
        with prepared_forkserver():
            for job in jobs:
                processes.append(_context.Process(target=main, args=job, daemon=True))
                processes[-1].start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait(processes: list[Any], timeout: float) -> None:
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        running = [x.sentinel for x in processes if x.exitcode is None]
        if not running or any(x.exitcode for x in processes):
            return
        connection.wait(running, left)


def _main(folder: Path, directory: str, variables: dict[str, str], arguments: tuple[str, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(1)
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]
        run_script(rest[0], is_module=True)
    else:
        sys.argv = [first, *rest]
        run_script(first, is_module=False)
