"""Run the set-ups of examples on several processes.

Each set-up runs in new processes with the environment variables that torchrun sets.
"""

import importlib
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple

from torch.multiprocessing import ProcessExitedException, start_processes

from contrastive_zoo.testing.auditing.launch import environment, local_store
from examples.setup import Deviation, Setup, measured

EXAMPLES = (
    "ddp",
    "amp",
    "huggingface",
    "accelerate_loop",
    "lightning_module",
    "fabric",
    "sentence_transformers_trainer",
    "mistakes",
    "huggingface_mistakes",
    "lightning_mistakes",
)
"""Modules of this package that define ``SETUPS``, in the order of the tables."""

TRAINER_OF = {"mistakes": "ddp", "huggingface_mistakes": "huggingface", "lightning_mistakes": "lightning_module"}
"""Modules of mistakes have no page: their rows are on the page of their trainer."""

TIMEOUT = 120.0  # seconds after which a set-up has failed


class Outcome(NamedTuple):
    """What one set-up of an example gave: its deviation, or the error that it raised."""

    example: str
    setup: Setup
    deviation: Deviation | None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether a right set-up is within its bound, and whether a wrong one is refused or far outside."""
        if self.deviation is None:
            return bool(self.setup.mistake) and self.error.startswith("ValueError")
        if self.setup.mistake:
            return max(self.deviation) > 1e-3
        return all(x <= self.setup.bound for x in self.deviation)  # false for NaN

    @property
    def text(self) -> str:
        """The deviations; or the error, in full if it is not the expected one."""
        if self.deviation is None:
            return self.error.splitlines()[0] if self.ok else f"FAILED: {self.error}"
        return f"{self.deviation.encoder:8.1e} {self.deviation.loss:8.1e}{'' if self.ok else '   FAILED'}"


def setups(example: str) -> list[Setup]:
    return importlib.import_module(f"examples.{example}").SETUPS


def recipe_of(example: str) -> str:
    return TRAINER_OF.get(example, example)


def measure(examples: Sequence[str] = EXAMPLES) -> Iterator[Outcome]:
    """Run all set-ups of the examples, one after another; an example whose library is not installed is skipped."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["examples.run", *(f"examples.{x}" for x in examples)])
    for example in examples:
        try:
            available = setups(example)
        except ModuleNotFoundError as error:
            print(f"{example}: {error.name} is not installed", file=sys.stderr)
            continue
        for index, setup in enumerate(available):
            yield _run(context, example, index, setup)


def _run(context: mp.context.ForkServerContext, example: str, index: int, setup: Setup) -> Outcome:
    store, queue, deadline = local_store(), context.SimpleQueue(), time.monotonic() + TIMEOUT
    job = (example, index, setup.processes, store.port, queue)
    started = start_processes(_process, job, setup.processes, join=False, start_method="forkserver")
    with suppress(ProcessExitedException):  # its answer says why
        while not started.join(1) and time.monotonic() < deadline:
            pass
    for process in started.processes:
        process.kill()
    answers: list[Deviation | str] = []
    while not queue.empty():
        answers.append(queue.get())
    error = next((x for x in answers if isinstance(x, str)), "")
    if not error and len(answers) < setup.processes:
        error = f"a process ended without a result, or had none after {TIMEOUT:g} seconds"
    return Outcome(example, setup, *((None, error) if error else (answers[0], "")))


def _process(rank: int, example: str, index: int, world_size: int, port: int, queue: SimpleQueue[Any]) -> None:
    """Set the variables of torchrun, run the set-up, and send its deviation or the text of its error."""
    os.environ |= environment(rank, world_size, port)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # gloo reports every connection
    try:
        queue.put(measured(setups(example)[index]))
    except BaseException as error:
        queue.put(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        os._exit(1)
