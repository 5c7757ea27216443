"""Audit set-ups of the examples and trainings of tests/audit_trainings.py, in processes that have imported all libraries."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contrastive_zoo.audit.launch import collected, environment
from contrastive_zoo.audit.rank import Rank
from contrastive_zoo.audit.report import WorldReport

TIMEOUT = 60.0
"""Seconds after which the audit of a set-up is ended."""

STEPS = {"no set_epoch": 6, "one rank has fewer batches": 7}
"""Mistakes that show only after three steps."""


class Runner:
    """Run audits one after another.

    Args:
        modules: what the processes import once.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.audit_runner", *modules])

    def __call__(self, module: str, name: str, *, processes: int = 2, steps: int = 0) -> WorldReport:
        """Audit the training ``name`` of a module: of an example, or of ``tests.audit_trainings``."""
        start, steps = time.monotonic(), steps or STEPS.get(name, 3)
        with tempfile.TemporaryDirectory() as folder:
            store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            started: list[Any] = []
            for rank in range(processes):
                job = (folder, module, name, rank, processes, store.port, steps)
                started.append(self.context.Process(target=_rank, args=job, daemon=True))
                started[-1].start()
            started[0].join(TIMEOUT)
            for process in started:
                process.kill()
                process.join()
            print(Path(folder,"rank0.log").read_text()); print(time.time(), "ended")
            report = collected(Path(folder), processes)
        report.seconds = time.monotonic() - start
        return report


def _rank(folder: str, module: str, name: str, rank: int, world_size: int, port: int, steps: int) -> None:
    os.environ |= environment(rank, world_size, port)
    log = os.open(Path(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    print(time.time(), "start", flush=True)
    found = importlib.import_module(module)
    print(time.time(), "imported", flush=True)
    setups = {x.name: x.train for x in getattr(found, "SETUPS", ())}
    Rank(Path(folder), rank, world_size, steps).run(setups.get(name, lambda: found.run(name)))
