"""Audit set-ups of the examples and trainings of tests/audit_trainings.py, in processes that have imported all libraries."""

import contextlib
import gc
import importlib
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from contrastive_zoo.testing import mistakes
from contrastive_zoo.testing._rank import prepared_forkserver
from contrastive_zoo.testing.auditing import diagnosis
from contrastive_zoo.testing.auditing.launch import environment, judged, record_script, wait_for_records
from contrastive_zoo.testing.auditing.running import audit
from contrastive_zoo.testing.report import AuditReport, WorldReport

TIMEOUT = 60.0
"""Seconds after which the audit of a set-up is ended."""

STEPS = {"no set_epoch": 6, "one rank has fewer batches": 7}
"""Mistakes that show only after three steps."""


class Runner:
    """Run audits one after another, on processes forked from one that has imported these modules."""

    def __init__(self, modules: Iterable[str]) -> None:
        context = mp.get_context("forkserver")
        self.pipe, end = context.Pipe()
        self.server = context.Process(target=_serve, args=(end, list(modules)))
        with prepared_forkserver([]):
            self.server.start()

    def close(self) -> None:
        """End the process that has imported all libraries."""
        self.server.kill()
        self.server.join()

    def __call__(self, module: str, name: str, *, processes: int = 2, steps: int = 0) -> WorldReport:
        """Audit the training ``name`` of a module: of an example, or of ``tests.audit_trainings``."""
        start, steps = time.monotonic(), steps or STEPS.get(name, 3)
        with tempfile.TemporaryDirectory() as folder:

            def run(names: list[str]) -> None:
                store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # where torch has distributed
                jobs = [(folder, x, rank, len(names), store.port, module, name, steps) for rank, x in enumerate(names)]
                self.pipe.send(jobs)
                assert self.pipe.poll(2 * TIMEOUT), "the server does not answer"
                self.pipe.recv()

            run([f"rank{rank}" for rank in range(processes)])
            report = judged(Path(folder), processes, run)
        report.seconds = time.monotonic() - start
        return report


def _serve(pipe: Connection, modules: list[str]) -> None:
    """Import the modules; then fork the ranks of one audit after another, until the parent is gone."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()
    with contextlib.suppress(EOFError):
        while True:
            jobs = pipe.recv()
            ranks = [mp.get_context("fork").Process(target=_rank, args=job, daemon=True) for job in jobs]
            for process in ranks:
                process.start()
            names = [name for _, name, *_ in jobs]
            wait_for_records(Path(jobs[0][0]), names, lambda index: not ranks[index].is_alive(), TIMEOUT)  # noqa: B023
            for process in ranks:
                process.kill()
                process.join()
            pipe.send(None)


def _rank(folder: str, file: str, rank: int, world_size: int, port: int, module: str, name: str, steps: int) -> None:
    for variable in set(os.environ) - set(variables := environment(rank, world_size, port, file.startswith("rank"))):
        del os.environ[variable]
    os.environ |= variables
    log = os.open(Path(folder, f"{file}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    record_script(Path(folder), file, steps, (), training(module, name))


def training(module: str, name: str) -> Callable[[], object]:
    """Return a set-up of an example, or a training of ``tests.audit_trainings``."""
    found = importlib.import_module(module)
    setups = {x.name: x.train for x in getattr(found, "SETUPS", ())}
    return setups.get(name, lambda: found.run(name))


def audit_here(module: str, name: str, without: str = "") -> AuditReport:
    """Audit a training on this rank of a pool, with a process group; without the probe or signature of a name."""
    probes = tuple(x for x in diagnosis.PROBES if x.__name__ != without)
    signatures = {
        stage: {name: fits for name, fits in of_stage.items() if name != without}
        for stage, of_stage in mistakes.SIGNATURES.items()
    }
    of_samples = (lambda records: ()) if without == "of_samples" else diagnosis.of_samples
    with (
        patch.object(dist, "init_process_group"),
        patch.object(diagnosis, "of_samples", of_samples),
        patch.object(diagnosis, "PROBES", probes),
        patch.object(mistakes, "SIGNATURES", signatures),
    ):
        return audit(training(module, name), name=name)
