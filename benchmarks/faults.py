"""Faults of one rank, and what every rank says: processes over gloo that really raise, die, stop, come late or are cut off.

python benchmarks/faults.py             # the table fault × seconds × what each rank says
python benchmarks/faults.py --world 3 --only "SIGKILL in the loss"
python benchmarks/faults.py --docs      # the table of docs/pages/when-a-rank-fails.md; needs root, for the two hosts
"""

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hosts import CUT, INTERFACE, Host, two_hosts
from suite.harness import command_line
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.wrapper.step import splitting
from tools.pages import PAGES, fill, table

PAGE = PAGES / "when-a-rank-fails.md"
LONGEST = 220  # characters of a text in the page's table
TIMEOUT = 3.0  # seconds of the process group

FAULTY_STEP, STEPS = 3, 5


class Training:
    """Five steps of a small training without DDP, on this rank, which may be the failing one; subclasses fail."""

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

    def run(self, steps: int = STEPS) -> None:
        generator = torch.Generator().manual_seed(1 + self.rank)
        for self.step in range(1, steps + 1):
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

        def run(self, steps: int = STEPS) -> None:
            rows = cz.DistributedLoss(Rows())
            with splitting(always=True):
                for self.step in range(1, steps + 1):
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

    def run(self, steps: int = STEPS) -> None:
        generator = torch.Generator().manual_seed(1 + self.rank)
        for self.step in range(1, steps + 1):
            a, b = self.encoder(torch.randn(12, 8, generator=generator)).chunk(2)
            loss = self.loss_fn(a, b)
            self.after()
            loss.backward()


class ShorterEpoch(Training):
    """One rank has fewer batches, and waits for the others at the end, as trainers do."""

    def run(self, steps: int = STEPS) -> None:
        super().run(FAULTY_STEP - 1 if self.failing_rank else steps)
        if self.failing_rank:
            time.sleep(2 * self.timeout)


class LinkCut(Training):
    """The ranks are on two hosts, and the failing_rank one is cut off."""

    two_hosts = True

    def before(self) -> None:
        if self.now:
            subprocess.run(CUT, check=True)


class InWorker(Training):
    """A worker of a DataLoader, forked from the rank, calls the loss."""

    def before(self) -> None:
        if self.step == FAULTY_STEP:  # on every rank: the workers would wait for each other
            how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
            next(iter(torch.utils.data.DataLoader([0], collate_fn=self.loss_in_worker, **how)))

    def loss_in_worker(self, batch: list[int]) -> Tensor:
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


# ------------------------------------------------------------------------------------------------------------ processes


class Outcome(NamedTuple):
    """How a rank ended: with which error, of which class, or with which exit code; and whether by itself."""

    seconds: float | None  # since the fault; None if the rank was still alive when the others had ended
    text: str
    kind: str
    ended: bool


class Run(NamedTuple):
    """How the ranks of one fault ended, by rank, and which has the fault."""

    outcomes: dict[int, Outcome]
    failing_rank: int


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
        Training.timeout = timeout
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    dist.barrier()
    training = FAULTS[name](rank, failing_rank=rank == world_size - 1)
    try:
        training.run()
    except BaseException as error:
        pipe.send((time.time(), type(error).__name__, str(error)))
        raise
    pipe.send((time.time(), "", "ended without an error"))


def run_fault(name: str, world_size: int = 2, timeout: float = TIMEOUT) -> Run:
    """Run the training with a fault on its last rank; end what is still alive after four time-outs.

    Raises:
        OSError: the fault needs two hosts, and they are not permitted here.
    """
    with two_hosts() if FAULTS[name].two_hosts else nullcontext(()) as hosts:
        return _run(name, world_size, timeout, hosts)


def _run(name: str, world_size: int, timeout: float, hosts: Sequence[Host]) -> Run:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["contrastive_zoo.wrapper.distributed", "contrastive_zoo.losses.nt_xent", __name__])
    run = Run({}, failing_rank=world_size - 1)
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
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
        while others - {run.failing_rank} and time.time() < started + 4 * timeout:
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
                run.outcomes[rank] = Outcome(when - started, text, kind, ended)
            else:
                run.outcomes[rank] = Outcome(None, f"killed, exit code {process.exitcode}", "", ended)
    return run


def rows(name: str, world_size: int) -> Iterator[tuple[str, str, str, str]]:
    """Run a fault, and yield for each rank the fault, the rank, the seconds, and what it says."""
    run = run_fault(name, world_size)
    for rank, x in sorted(run.outcomes.items()):
        seconds = "" if x.seconds is None else f"{x.seconds:.1f}"
        last = x.text.strip().splitlines()[-1] if x.text.startswith("Caught") else x.text  # of a worker
        text = " ".join(f"{x.kind}: {last}".removeprefix(": ").split())
        yield name, f"{rank} (failing_rank)" if rank == run.failing_rank else str(rank), seconds, text


def shortened(text: str) -> str:
    """Return what happened, without what usually causes it, and without the name of the usual error."""
    text = text.removeprefix("CommunicationError: ")
    happened, _, causes = text.partition(" Usually ")
    long = len(happened) > LONGEST
    return happened[:LONGEST].rpartition(" ")[0] + " …" if long else happened + (" …" if causes else "")


def page_table(found: Sequence[tuple[str, str, str, str]]) -> str:
    pairs = zip(found[::2], found[1::2], strict=True)
    lines = [(name, f"{seconds} s", shortened(text), shortened(other[3])) for (name, _, seconds, text), other in pairs]
    return table(["fault on rank 1", "rank 0 ends after", "rank 0 says", "rank 1 says"], lines, texts=4)


def main() -> None:
    parser = command_line(__doc__, world=2, only="", docs=False)
    options = parser.parse_args()
    if options.docs and (options.world != 2 or options.only):
        parser.error("--docs is a table of all faults of two ranks: give neither --world nor --only")
    limit = f"time-out of the process group {TIMEOUT:g} s"
    print(f"W = {options.world}, gloo, {limit}; seconds since the processes started")
    print("\n| fault | rank | seconds | what it says |\n|---|---|---|---|")
    found: list[tuple[str, str, str, str]] = []
    for name in (x for x in FAULTS if options.only in x):
        for row in rows(name, options.world):
            found.append(row)
            print(f"| {' | '.join(row)} |", flush=True)
    if options.docs:
        fill(PAGE, {"faults": page_table(found)})


if __name__ == "__main__":
    main()
