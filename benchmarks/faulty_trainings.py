"""Trainings over several ranks of which one has a fault: it raises, dies, stops, comes late or is cut off."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import hosts
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.wrapper.step import splitting

TIMEOUT = 3.0
"""Seconds of the process group."""

FAULTY_STEP, STEPS = 3, 5


class Training:
    """Five steps of a small training without DDP; subclasses are its parts that fail.

    Args:
        rank: this rank.
        failing_rank: whether the fault is this rank's.
    """

    timeout = TIMEOUT
    two_hosts = False  # whether half of the ranks are on another host

    def __init__(self, rank: int, failing_rank: bool) -> None:
        torch.manual_seed(0)
        self.rank, self.failing_rank, self.step = rank, failing_rank, 0
        self.encoder = nn.Linear(8, 4)
        self.loss_fn = cz.DistributedLoss(self.loss())

    @property
    def now(self) -> bool:
        """Whether the fault happens in this step of this rank."""
        return self.failing_rank and self.step == FAULTY_STEP

    def loss(self) -> Any:
        """The loss; a third-party one can fail inside."""
        return cz.NTXent()

    def before(self) -> None:
        """What happens before the loss."""

    def after(self) -> None:
        """What happens after the loss."""

    def steps(self) -> int:
        """The number of this rank's steps."""
        return STEPS

    def run(self) -> None:
        generator = torch.Generator().manual_seed(1 + self.rank)
        for self.step in range(1, self.steps() + 1):  # noqa: B020 - steps() is not what it assigns
            a, b = (self.encoder(torch.randn(6, 8, generator=generator)) for _ in range(2))
            self.before()
            loss = self.loss_fn(a, b)
            self.after()
            loss.backward()
            cz.average_gradients(self.encoder)


def act_before(action: Callable[[], object]) -> type[Training]:
    """The training whose failing_rank rank acts before the loss."""

    class Before(Training):
        def before(self) -> None:
            if self.now:
                action()

    return Before


def act_inside(action: Callable[[], object]) -> type[Training]:
    """The training whose failing_rank rank acts inside of a third-party loss of this rank."""

    class Inside(Training):
        def loss(self) -> Any:
            def third_party(embeddings: Tensor, ref_emb: Tensor) -> Tensor:
                if self.now:
                    action()
                return (embeddings - ref_emb).square().mean()

            return third_party

    return Inside


def act_between_messages(action: Callable[[], object]) -> type[Training]:
    """The training whose failing_rank rank acts inside of a loss of this library, whose other ranks wait for its rows."""

    class Rows(cz.RowLoss):
        training_of_rank: Any = None

        def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
            if Rows.training_of_rank.now:
                action()
            return (similarity * negative).sum(1), negative.any(1)

    class Between(Training):
        def loss(self) -> Any:
            Rows.training_of_rank = self
            return cz.NTXent()

        def run(self) -> None:
            rows = cz.DistributedLoss(Rows())
            with splitting(always=True):
                for self.step in range(1, STEPS + 1):
                    z = self.encoder(torch.randn(6, 8, generator=torch.Generator().manual_seed(9 * self.rank)))
                    rows(z, torch.arange(6) % 2).backward()

    return Between


class ExtraCall(Training):
    """One rank calls the loss once more, as for a log on rank 0."""

    def after(self) -> None:
        if self.now:
            self.loss_fn(torch.randn(6, 4), torch.randn(6, 4))


class ExtraCallUnderDDP(ExtraCall):
    """The same; gradients are reduced by DDP, in the same process group."""

    def __init__(self, rank: int, failing_rank: bool) -> None:
        super().__init__(rank, failing_rank)
        self.encoder = nn.parallel.DistributedDataParallel(self.encoder)  # type: ignore[assignment]  # of another class

    def run(self) -> None:
        generator = torch.Generator().manual_seed(1 + self.rank)
        for self.step in range(1, STEPS + 1):
            a, b = self.encoder(torch.randn(12, 8, generator=generator)).chunk(2)
            loss = self.loss_fn(a, b)
            self.after()
            loss.backward()


class ShorterEpoch(Training):
    """One rank has fewer batches, and waits for the others at the end, as trainers do."""

    def steps(self) -> int:
        return FAULTY_STEP - 1 if self.failing_rank else STEPS

    def run(self) -> None:
        super().run()
        if self.failing_rank:
            time.sleep(2 * self.timeout)


class LinkCut(Training):
    """The ranks are on two hosts, and the failing_rank one is cut off."""

    two_hosts = True

    def before(self) -> None:
        if self.now:
            subprocess.run(hosts.CUT, check=True)


class InWorker(Training):
    """A worker of a DataLoader, forked from the rank, calls the loss."""

    def before(self) -> None:
        if self.step == FAULTY_STEP:  # on every rank: the workers would wait for each other
            loader = torch.utils.data.DataLoader(
                [0], num_workers=1, collate_fn=self.collate, multiprocessing_context="fork"
            )
            next(iter(loader))

    def collate(self, batch: list[int]) -> Tensor:
        return self.loss_fn(torch.randn(6, 4), torch.randn(6, 4)).detach()


def fail() -> None:
    """An error of the user's code."""
    raise FileNotFoundError("no such file: cat.jpg")


def stop() -> None:
    """As a debugger or a scheduler stops a process."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    """As the kernel kills a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    """Ctrl-C at this rank's terminal."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


def exhaust_memory() -> None:
    """Allocate more than the process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (2**36, resource.RLIM_INFINITY))
    torch.ones(2**40)


LINK_CUT = "the link between two hosts is cut"

FAULTS: dict[str, type[Training]] = {
    "exception before the loss": act_before(fail),
    "exception in a third-party loss": act_inside(fail),
    "exception between two messages of a loss": act_between_messages(fail),
    "exception after the loss": type("After", (Training,), {"after": lambda self: fail() if self.now else None}),
    "out of memory between two messages": act_between_messages(exhaust_memory),
    "out of memory in a third-party loss": act_inside(exhaust_memory),
    "SIGKILL before the loss": act_before(die),
    "SIGKILL in the loss": act_between_messages(die),
    "os._exit before the loss": act_before(lambda: os._exit(3)),
    "SIGSTOP before the loss": act_before(stop),
    "SIGSTOP in the loss": act_between_messages(stop),
    "sleep beyond the time-out": act_before(lambda: time.sleep(2 * Training.timeout)),
    "Ctrl-C in the loss": act_between_messages(interrupt),
    LINK_CUT: LinkCut,
    "one call more than elsewhere": ExtraCall,
    "one call more than elsewhere, under DDP": ExtraCallUnderDDP,
    "a shorter epoch": ShorterEpoch,
    "the loss in a forked worker": InWorker,
}
"""The fault by name, as the training that has it on the last rank."""
