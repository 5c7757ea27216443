"""Audit set-ups of the examples and trainings of tests/audit_trainings.py."""

import importlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from contrastive_zoo.testing import mistakes
from contrastive_zoo.testing.auditing import diagnosis
from contrastive_zoo.testing.auditing.launch import environment, judged, local_store, record_script, wait_for_records
from contrastive_zoo.testing.auditing.running import audit
from contrastive_zoo.testing.report import AuditReport, WorldReport
from tests.interpreter import forked

TIMEOUT = 60.0
"""Seconds after which the audit of a set-up is ended."""

STEPS = {"no set_epoch": 6, "one rank has fewer batches": 7}
"""Mistakes that show only after three steps."""


def audit_apart(module: str, name: str, *, processes: int = 2, steps: int = 0) -> WorldReport:
    """Audit the training ``name`` of a module, an example or ``tests.audit_trainings``, in processes of their own."""
    start, steps = time.monotonic(), steps or STEPS.get(name, 3)
    with tempfile.TemporaryDirectory() as folder:

        def run(names: list[str]) -> None:
            store = local_store()
            jobs = [(folder, x, rank, len(names), store.port, module, name, steps) for rank, x in enumerate(names)]
            with forked(_rank, jobs) as ranks:
                wait_for_records(Path(folder), names, lambda index: not ranks[index].is_alive(), TIMEOUT)

        run([f"rank{rank}" for rank in range(processes)])
        report = judged(Path(folder), processes, run)
    report.seconds = time.monotonic() - start
    return report


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
    of_samples = (lambda records: ()) if without == "_of_samples" else diagnosis._of_samples
    with (
        patch.object(dist, "init_process_group"),
        patch.object(diagnosis, "_of_samples", of_samples),
        patch.object(diagnosis, "PROBES", probes),
        patch.object(mistakes, "SIGNATURES", signatures),
    ):
        return audit(training(module, name), name=name)
