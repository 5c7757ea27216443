"""Faults of one rank, and what every rank says: processes over gloo that really raise, die, stop or come late.

python benchmarks/faults.py             # the table fault × seconds × what each rank says
python benchmarks/faults.py --world 3 --only "SIGKILL in the loss"
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.small_batch import splitting

TIMEOUT = 3.0
"""Seconds of the process group."""

FAULTY_STEP, STEPS = 3, 5


class Training:
    """Five steps of a small training without DDP; subclasses are its parts that fail.

    Args:
        rank: this rank.
        guilty: whether the fault is this rank's.
    """

    timeout = TIMEOUT

    def __init__(self, rank: int, guilty: bool) -> None:
        torch.manual_seed(0)
        self.rank, self.guilty, self.step = rank, guilty, 0
        self.encoder = nn.Linear(8, 4)
        self.loss_fn = cz.DistributedLoss(self.loss())

    @property
    def now(self) -> bool:
        """Whether the fault happens in this step of this rank."""
        return self.guilty and self.step == FAULTY_STEP

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
        """Train."""
        generator = torch.Generator().manual_seed(1 + self.rank)
        for self.step in range(1, self.steps() + 1):  # noqa: B020 - steps() is not what it assigns
            a, b = (self.encoder(torch.randn(6, 8, generator=generator)) for _ in range(2))
            self.before()
            loss = self.loss_fn(a, b)
            self.after()
            loss.backward()
            cz.average_gradients(self.encoder)


def act_before(action: Callable[[], object]) -> type[Training]:
    """The training whose guilty rank acts before the loss."""

    class Before(Training):
        def before(self) -> None:
            if self.now:
                action()

    return Before


def act_inside(action: Callable[[], object]) -> type[Training]:
    """The training whose guilty rank acts inside of a third-party loss of this rank."""

    class Inside(Training):
        def loss(self) -> Any:
            def third_party(embeddings: Tensor, ref_emb: Tensor) -> Tensor:
                if self.now:
                    action()
                return (embeddings - ref_emb).square().mean()

            return third_party

    return Inside


def act_between_messages(action: Callable[[], object]) -> type[Training]:
    """The training whose guilty rank acts inside of a loss of this library, whose other ranks wait for its rows."""

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

    def __init__(self, rank: int, guilty: bool) -> None:
        super().__init__(rank, guilty)
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
        return FAULTY_STEP - 1 if self.guilty else STEPS

    def run(self) -> None:
        super().run()
        if self.guilty:
            time.sleep(2 * self.timeout)


class InWorker(Training):
    """A worker of a DataLoader, forked from the rank, calls the loss."""

    def before(self) -> None:
        if self.step == FAULTY_STEP:  # on every rank: the workers would wait for each other
            loader = torch.utils.data.DataLoader(
                [0], num_workers=1, collate_fn=self.collate, multiprocessing_context="fork"
            )
            next(iter(loader))

    def collate(self, batch: list[int]) -> Tensor:
        """Compute the loss of a batch in the worker."""
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
    "one call more than elsewhere": ExtraCall,
    "one call more than elsewhere, under DDP": ExtraCallUnderDDP,
    "a shorter epoch": ShorterEpoch,
    "the loss in a forked worker": InWorker,
}
"""The fault by name, as the training that has it on the last rank."""


@dataclass
class Outcome:
    """How a rank ended.

    Args:
        seconds: since the fault; None if the rank was still alive when the others had ended.
        text: its error, or its exit code.
        kind: the class of the error; empty if there is none.
    """

    seconds: float | None
    text: str
    kind: str = ""


@dataclass
class Run:
    """The processes of one fault.

    Args:
        outcomes: by rank.
        guilty: the rank with the fault.
    """

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    guilty: int = 1


def rank_main(name: str, rank: int, world_size: int, directory: str, timeout: float, pipe: Connection) -> None:
    """Train with the fault; send the error, and let the process end as it would."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - tracebacks of planned faults
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.FileStore(os.path.join(directory, "store"), world_size)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        Training.timeout = timeout
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
    dist.barrier()
    training = FAULTS[name](rank, guilty=rank == world_size - 1)
    try:
        training.run()
    except BaseException as error:
        pipe.send((time.time(), type(error).__name__, str(error)))
        raise
    pipe.send((time.time(), "", "ended without an error"))


def run_fault(name: str, world_size: int = 2, timeout: float = TIMEOUT) -> Run:
    """Run the training with a fault on its last rank; end what is still alive after four time-outs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "contrastive_zoo.distributed", "contrastive_zoo.losses.nt_xent", __name__])
    run = Run(guilty=world_size - 1)
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=rank_main, args=(name, rank, world_size, directory, timeout, theirs), daemon=False
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        started, others = time.time(), set(range(world_size))
        raised: dict[int, tuple[float, str, str]] = {}
        while others - {run.guilty} and time.time() < started + 4 * timeout:
            for ready in wait([pipes[rank] for rank in others], timeout=0.1):
                rank = pipes.index(ready)
                try:
                    raised[rank] = ready.recv()
                except EOFError:
                    others.discard(rank)
        for process in processes:
            process.join(0.3)
            if process.is_alive():
                process.kill()
                process.join()
        for rank, process in enumerate(processes):
            if rank in raised:
                when, kind, text = raised[rank]
                run.outcomes[rank] = Outcome(when - started, text, kind)
            else:
                run.outcomes[rank] = Outcome(None, f"killed, exit code {process.exitcode}")
    return run


def main() -> None:
    """Print a row for each rank of each fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(
        f"W = {options.world}, gloo, time-out of the process group {TIMEOUT:g} s; seconds since the processes started\n"
    )
    print("| fault | rank | seconds | what it says |\n|---|---|---|---|")
    for name in FAULTS:
        if options.only in name:
            run = run_fault(name, options.world)
            for rank, x in sorted(run.outcomes.items()):
                seconds = "" if x.seconds is None else f"{x.seconds:.1f}"
                last = x.text.strip().splitlines()[-1] if x.text.startswith("Caught") else x.text  # of a worker
                text = " ".join(f"{x.kind}: {last}".removeprefix(": ").split())
                who = f"{rank} (guilty)" if rank == run.guilty else str(rank)
                print(f"| {name} | {who} | {seconds} | {text} |", flush=True)


if __name__ == "__main__":
    main()
