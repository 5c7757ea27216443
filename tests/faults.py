"""Faults of one rank, and what every rank says: processes over gloo that raise, die, stop, come late or are cut off."""

import contextlib
import functools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.settings import field
from contrastive_zoo.testing.interventions import splitting
from tests.hosts import CUT, INTERFACE, Host, two_hosts

TIMEOUT = 3.0  # seconds of the process group

FAULTY_STEP, STEPS = 3, 5


class Rows(cz.RowLoss):
    """A loss of this library, whose other ranks wait for the rows of one that does not come."""

    act: Any = field(init=False)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        self.act()
        return (similarity * negative).sum(1), negative.any(1)


class Training:
    def __init__(self, fault: "Fault", rank: int, failing_rank: bool, timeout: float) -> None:
        torch.manual_seed(0)
        self.fault, self.rank, self.failing_rank, self.timeout, self.step = fault, rank, failing_rank, timeout, 0
        self.encoder: nn.Module = nn.Linear(8, 4)
        if fault.ddp:
            self.encoder = nn.parallel.DistributedDataParallel(self.encoder)
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

    def act(self, where: str) -> bool:
        is_now = self.step == FAULTY_STEP and where == self.fault.where and (self.failing_rank or self.fault.everywhere)
        return bool(is_now and self.fault.action(self) is ENDS)

    def run(self) -> None:
        generator = torch.Generator().manual_seed(1 + self.rank)
        with splitting(always=self.fault.where == IN_ROWS):
            for self.step in range(1, STEPS + 1):
                a, b = self.encoder(torch.randn(12, 8, generator=generator)).chunk(2)
                if self.act(BEFORE):
                    return
                loss = self.loss_fn(a, b)
                self.act(AFTER)
                loss.backward()
                if not self.fault.ddp:
                    cz.average_gradients(self.encoder)

    def call_again(self) -> None:
        self.loss_fn(torch.randn(6, 4), torch.randn(6, 4))

    def call_in_worker(self) -> None:
        def collate(batch: list[int]) -> Tensor:
            return self.loss_fn(torch.randn(6, 4), torch.randn(6, 4)).detach()

        how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
        next(iter(torch.utils.data.DataLoader([0], collate_fn=collate, **how)))

    def wait_for_others(self) -> object:
        time.sleep(2 * self.timeout)
        return ENDS


BEFORE, IN_THIRD_PARTY, IN_ROWS, AFTER = "before", "in a third-party loss", "between messages", "after"
ENDS = object()


class Fault(NamedTuple):
    """What happens on the last rank, or everywhere, before, in or after the loss of a step."""

    where: str
    action: Callable[[Training], object]
    ddp: bool = False  # whether DDP reduces gradients, in the same process group
    everywhere: bool = False
    two_hosts: bool = False  # whether half of the ranks are on another host


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
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


def exhaust_memory(_: Training) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**36, resource.RLIM_INFINITY))
    torch.ones(2**40)


LINK_CUT = "the link between two hosts is cut"

FAULTS: dict[str, Fault] = {
    "exception before the loss": Fault(BEFORE, fail),
    "exception in a third-party loss": Fault(IN_THIRD_PARTY, fail),
    "exception between two messages of a loss": Fault(IN_ROWS, fail),
    "exception after the loss": Fault(AFTER, fail),
    "out of memory between two messages": Fault(IN_ROWS, exhaust_memory),
    "out of memory in a third-party loss": Fault(IN_THIRD_PARTY, exhaust_memory),
    "SIGKILL before the loss": Fault(BEFORE, die),
    "SIGKILL in the loss": Fault(IN_ROWS, die),
    "os._exit before the loss": Fault(BEFORE, lambda _: os._exit(3)),
    "SIGSTOP before the loss": Fault(BEFORE, stop),
    "SIGSTOP in the loss": Fault(IN_ROWS, stop),
    "sleep beyond the time-out": Fault(BEFORE, lambda training: time.sleep(2 * training.timeout)),
    "Ctrl-C in the loss": Fault(IN_ROWS, interrupt),
    LINK_CUT: Fault(BEFORE, lambda _: subprocess.run(CUT, check=True), two_hosts=True),
    "one call more than elsewhere": Fault(AFTER, Training.call_again),
    "one call more than elsewhere, under DDP": Fault(AFTER, Training.call_again, ddp=True),
    "a shorter epoch": Fault(BEFORE, Training.wait_for_others),
    # on every rank: the workers would wait for each other
    "the loss in a forked worker": Fault(BEFORE, Training.call_in_worker, everywhere=True),
}


class Outcome(NamedTuple):
    """How a rank ended: with which error, of which class, or with which exit code; and whether by itself."""

    seconds: float | None  # since the fault; None if the rank was still alive when the others had ended
    text: str
    kind: str
    ended: bool


def rank_main(
    name: str, rank: int, world_size: int, directory: str, timeout: float, host: Host | None, pipe: Connection
) -> None:
    if host:
        host.enter()
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - tracebacks of planned faults
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.FileStore(os.path.join(directory, "store"), world_size)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    dist.barrier()
    training = Training(FAULTS[name], rank, rank == world_size - 1, timeout)
    try:
        training.run()
    except BaseException as error:
        pipe.send((time.time(), type(error).__name__, str(error)))
        raise
    pipe.send((time.time(), "", "ended without an error"))


def run_fault(name: str, world_size: int = 2, timeout: float = TIMEOUT) -> list[Outcome]:
    with two_hosts() if FAULTS[name].two_hosts else nullcontext(()) as hosts:
        return _run(name, world_size, timeout, hosts)


def _run(name: str, world_size: int, timeout: float, hosts: Sequence[Host]) -> list[Outcome]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["contrastive_zoo.wrapper.distributed", "contrastive_zoo.losses.nt_xent", __name__])
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes, outcomes = [], [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            host = hosts[2 * rank // world_size] if hosts else None
            arguments = (name, rank, world_size, directory, timeout, host, theirs)
            process = context.Process(target=rank_main, args=arguments, daemon=False)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        started, others = time.time(), set(range(world_size))
        raised: dict[int, tuple[float, str, str]] = {}
        while others - {world_size - 1} and time.time() < started + 4 * timeout:
            for ready in wait([pipes[rank] for rank in others], timeout=0.1):
                rank = pipes.index(ready)
                try:
                    raised[rank] = ready.recv()
                except EOFError:
                    others.discard(rank)
        for rank, process in enumerate(processes):
            process.join(0.3)
            if not (ended := not process.is_alive()):
                process.kill()
                process.join()
            if rank in raised:
                when, kind, text = raised[rank]
                outcomes.append(Outcome(when - started, text, kind, ended))
            else:
                outcomes.append(Outcome(None, f"killed, exit code {process.exitcode}", "", ended))
    return outcomes
