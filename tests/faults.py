"""Faults of one rank, and what every rank says: processes over gloo that raise, die, stop or come late."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.settings import field
from contrastive_zoo.testing.interventions import splitting

EXPIRES = timedelta(seconds=2)  # time-out of the process group from the fault on, if a rank will not come in time
PATIENCE = 120.0  # seconds for a rank to end; only one that hears of no fault needs them

FAULTY_STEP, STEPS = 3, 5


class Rows(cz.RowLoss):
    """A loss of this library, whose other ranks wait for the rows of one that does not come."""

    act: Any = field(init=False)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        self.act()
        return (similarity * negative).sum(1), negative.any(1)


class Training:
    def __init__(self, fault: "Fault", rank: int, failing_rank: bool) -> None:
        torch.manual_seed(0)
        self.fault, self.rank, self.failing_rank, self.step = fault, rank, failing_rank, 0
        self.encoder = nn.Linear(8, 4)
        self.loss_fn = cz.DistributedLoss(self.loss())

    def loss(self) -> Any:
        if self.fault.where == IN_ROWS:
            rows = Rows()
            rows.act = functools.partial(self.act, IN_ROWS)
            return rows

        def third_party(embeddings: Tensor, ref_emb: Tensor) -> Tensor:
            self.act(IN_THIRD_PARTY)
            return (embeddings - ref_emb).square().mean()

        return third_party if self.fault.where == IN_THIRD_PARTY else cz.NTXent()

    def act(self, where: str) -> None:
        if self.step != FAULTY_STEP or where != self.fault.where:
            return
        if self.fault.late:
            dist.distributed_c10d._set_pg_timeout(EXPIRES)
        if self.failing_rank:
            self.fault.action(self)

    def run(self) -> None:
        generator = torch.Generator().manual_seed(1 + self.rank)
        with splitting(always=self.fault.where == IN_ROWS):
            for self.step in range(1, STEPS + 1):
                a, b = self.encoder(torch.randn(12, 8, generator=generator)).chunk(2)
                self.act(BEFORE)
                loss = self.loss_fn(a, b)
                self.act(AFTER)
                loss.backward()
                cz.average_gradients(self.encoder)

    def call_again(self) -> None:
        self.loss_fn(torch.randn(6, 4), torch.randn(6, 4))


BEFORE, IN_THIRD_PARTY, IN_ROWS, AFTER = "before", "in a third-party loss", "between messages", "after"


class Fault(NamedTuple):
    """What happens on the last rank before, in or after the loss of a step."""

    where: str
    action: Callable[[Training], object]
    late: bool = False  # whether nothing but a time-out tells the others


def fail(_: Training) -> None:
    raise FileNotFoundError("no such file: cat.jpg")


def stop(_: Training) -> None:
    """As a debugger or a scheduler stops a process."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die(_: Training) -> None:
    """As the kernel kills a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(_: Training) -> None:
    """Ctrl-C at this rank's terminal."""
    signal.raise_signal(signal.SIGINT)


def stay_away(_: Training) -> None:
    """As after the end of a shorter epoch: alive, and in no loss."""
    threading.Event().wait()


FAULTS: dict[str, Fault] = {
    "exception before the loss": Fault(BEFORE, fail),
    "exception in a third-party loss": Fault(IN_THIRD_PARTY, fail),
    "exception between two messages of a loss": Fault(IN_ROWS, fail),
    "exception after the loss": Fault(AFTER, fail),
    "SIGKILL before the loss": Fault(BEFORE, die),
    "SIGKILL in the loss": Fault(IN_ROWS, die),
    "SIGSTOP before the loss": Fault(BEFORE, stop, late=True),
    "SIGSTOP in the loss": Fault(IN_ROWS, stop, late=True),
    "Ctrl-C in the loss": Fault(IN_ROWS, interrupt),
    "one call more than elsewhere": Fault(AFTER, Training.call_again),
    "a shorter epoch": Fault(BEFORE, stay_away, late=True),
}


class Outcome(NamedTuple):
    """How a rank ended: the class and the text of its error, and whether its process ended by itself."""

    kind: str
    text: str
    ended: bool


def rank_main(name: str, rank: int, world_size: int, directory: str, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - tracebacks of planned faults
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.FileStore(os.path.join(directory, "store"), world_size)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    training = Training(FAULTS[name], rank, rank == world_size - 1)
    try:
        training.run()
    except BaseException as error:
        pipe.send((type(error).__name__, str(error)))
        raise
    pipe.send(("", "ended without an error"))


def run_fault(name: str, world_size: int = 2) -> list[Outcome]:
    """Return how the ranks end that hear of the fault: all but the last, which fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["contrastive_zoo.wrapper.distributed", "contrastive_zoo.losses.nt_xent", __name__])
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes, outcomes = [], [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            arguments = (name, rank, world_size, directory, theirs)
            process = context.Process(target=rank_main, args=arguments, daemon=False)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        for pipe, process in zip(pipes[:-1], processes, strict=False):
            with contextlib.suppress(EOFError):  # a rank that was killed has said nothing
                said = pipe.recv() if pipe.poll(PATIENCE) else ("", "no word")
                process.join(PATIENCE)
                outcomes.append(Outcome(*said, ended=not process.is_alive()))
        for process in processes:
            process.kill()
            process.join()
    return outcomes
