"""Faults of one rank, and what every rank says: processes over gloo that really raise, die, stop, come late or are cut off.

python benchmarks/faults.py             # the table fault × seconds × what each rank says
python benchmarks/faults.py --world 3 --only "SIGKILL in the loss"
python benchmarks/faults.py --docs      # the table of docs/pages/when-a-rank-fails.md; needs root, for the two hosts
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from faulty_trainings import FAULTS, LINK_CUT, TIMEOUT, Training
from hosts import INTERFACE, Host, two_hosts

from tools.pages import PAGES, fill, table

__all__ = ["FAULTS", "LINK_CUT", "Run", "run_fault"]

PAGE = PAGES / "when-a-rank-fails.md"
LONGEST = 220
"""Characters of a text in the page's table."""


@dataclass
class Outcome:
    """How a rank ended.

    Args:
        seconds: since the fault; None if the rank was still alive when the others had ended.
        text: its error, or its exit code.
        kind: the class of the error; empty if there is none.
        ended: whether its process ended by itself.
    """

    seconds: float | None
    text: str
    kind: str = ""
    ended: bool = True


@dataclass
class Run:
    """The processes of one fault.

    Args:
        outcomes: by rank.
        failing_rank: the rank with the fault.
    """

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    failing_rank: int = 1


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
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
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
    context.set_forkserver_preload(
        ["torch", "contrastive_zoo.wrapper.distributed", "contrastive_zoo.losses.nt_xent", __name__]
    )
    run = Run(failing_rank=world_size - 1)
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
    lines = [
        (name, f"{seconds} s", shortened(text), shortened(failing_rank))
        for (name, _, seconds, text), (_, _, _, failing_rank) in zip(found[::2], found[1::2], strict=True)
    ]
    return table(["fault on rank 1", "rank 0 ends after", "rank 0 says", "rank 1 says"], lines, texts=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--docs", action="store_true", help=f"write the table of all faults of two ranks into {PAGE.name}"
    )
    options = parser.parse_args()
    if options.docs and (options.world != 2 or options.only):
        parser.error("--docs is a table of all faults of two ranks: give neither --world nor --only")
    print(
        f"W = {options.world}, gloo, time-out of the process group {TIMEOUT:g} s; seconds since the processes started"
    )
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
