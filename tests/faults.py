"""Faults of one rank, and what every rank says: processes over gloo that raise, die, stop or come late."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
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
from tests.interpreter import forked

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
    def __init__(self, fault: "Fault", rank: int) -> None:
        torch.manual_seed(0)
        self.fault, self.rank, self.step = fault, rank, 0
        self.encoder = nn.Linear(8, 4)
        loss: Any = Rows() if fault.where == IN_ROWS else cz.NTXent()
        loss.act = functools.partial(self.act, IN_ROWS)
        self.loss_fn = cz.DistributedLoss(loss)

    def act(self, where: str) -> None:
        if self.step != FAULTY_STEP or where != self.fault.where:
            return
        if self.fault.late:
            dist.distributed_c10d._set_pg_timeout(EXPIRES)
        if self.rank == 1:
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


BEFORE, IN_ROWS, AFTER = "before", "between messages", "after"


class Fault(NamedTuple):
    """What happens on rank 1 before, in or after the loss of a step, and what rank 0 then says."""

    where: str
    action: Callable[[Training], object]
    says: str
    late: bool = False  # whether nothing but a time-out tells the others


def fail(_: Training) -> None:
    raise FileNotFoundError("no such file: cat.jpg")


def signalled(number: int) -> Callable[[Training], None]:
    """As a debugger or a scheduler stops a process, or the kernel kills one that takes too much memory."""
    return lambda _: os.kill(os.getpid(), number)


LOST = "lost the connection to another rank in"

FAULTS: dict[str, Fault] = {
    "exception before the loss": Fault(BEFORE, fail, f"NTXent, call 3: rank 0 … {LOST} … the handshake"),
    "exception between two messages of a loss": Fault(
        IN_ROWS,
        fail,
        "Rows, call 3: rank 0 waited in an exchange of rows … "
        "Rank 1 failed in Rows, call 3: FileNotFoundError: no such file: cat.jpg",
    ),
    "SIGKILL inside": Fault(IN_ROWS, signalled(signal.SIGKILL), f"Rows, call 3: rank 0 … {LOST} … an exchange of rows"),
    "SIGSTOP before the loss": Fault(
        BEFORE,
        signalled(signal.SIGSTOP),
        "NTXent, call 3: rank 0 waited … s in the handshake … and not all ranks came … epochs of different length",
        late=True,
    ),
    "one call more than elsewhere": Fault(
        AFTER,
        lambda x: x.loss_fn(torch.randn(6, 4), torch.randn(6, 4)),
        "out of step: rank 0 is in average_gradients; rank 1 is in NTXent, call",
    ),
}
"""One of each kind. To the others an exception is as SIGKILL, a stopped rank as one whose epoch is shorter."""


class Outcome(NamedTuple):
    """How a rank ended: the class and the text of its error, and whether its process ended by itself."""

    kind: str
    text: str
    ended: bool


def rank_main(name: str, rank: int, directory: str, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - tracebacks of planned faults
    store = dist.FileStore(os.path.join(directory, name), 2)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    training, said = Training(FAULTS[name], rank), ("", "ended without an error")
    try:
        training.run()
    except BaseException as error:
        said = type(error).__name__, str(error)
        raise
    finally:
        if rank == 0:
            pipe.send(said)


def run_faults() -> dict[str, Outcome]:
    """Return how rank 0 of each world ends, which hears of the fault of rank 1. They run at once: most ranks wait."""
    pipes, found = {name: multiprocessing.Pipe(duplex=False) for name in FAULTS}, {}
    with tempfile.TemporaryDirectory() as directory:
        jobs = [(name, rank, directory, pipe) for name, (_, pipe) in pipes.items() for rank in range(2)]
        with forked(rank_main, jobs) as processes:
            for (name, (pipe, _)), process in zip(pipes.items(), processes[::2], strict=True):
                said = pipe.recv() if pipe.poll(PATIENCE) else ("", "no word")
                process.join(PATIENCE)
                found[name] = Outcome(*said, ended=not process.is_alive())
    return found
