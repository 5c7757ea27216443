"""Exact search and evaluation on W ranks beside faiss' flat search on one process (Linux).

python benchmarks/retrieval.py [--rows 1000000] [--queries 10000] [--width 128] [--k 100] [--approximate] [--docs]

Two programs run in turns of a second or two on a machine whose speed drifts: both meet the same good and bad minutes, so
that the ratio of their times is steady where each time is not. A program is a group of processes that stop themselves at the
start line; one group runs at a time, the others are stopped. --approximate adds an index of inverted lists.
"""

import argparse
import itertools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import faiss
import torch
import torch.distributed as dist
from suite.harness import command_line, peak

import contrastive_zoo as cz
from tools.pages import PAGES, fill, table

HEAD = ("", "W", "seconds", "faiss in turns with it", "ratio", "additional MB per rank (rows: MB)")
CLASSES = 10_000


def unit_rows(start: int, stop: int, width: int, seed: int) -> torch.Tensor:
    """Return items start … stop of the data set: unit vectors around class centres, drawn block by block."""
    centres = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(seed))
    rows = torch.empty(stop - start, width)
    step = 10_000
    for block in range(start // step, -(-stop // step)):
        noise = torch.randn(step, width, generator=torch.Generator().manual_seed(1 + block + 10**6 * seed))
        drawn = torch.nn.functional.normalize(noise + 0.5 * centres[torch.arange(step) % CLASSES], dim=1)
        first, last = max(start, block * step), min(stop, (block + 1) * step)
        rows[first - start : last - start] = drawn[first - block * step : last - block * step]
    return rows


def data(given: argparse.Namespace, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    def of_rank(total: int, seed: int) -> torch.Tensor:
        return unit_rows(total * rank // world_size, total * (rank + 1) // world_size, given.width, seed)

    return of_rank(given.queries, seed=1), of_rank(given.rows, seed=0)


def faiss_flat(queries: torch.Tensor, gallery: torch.Tensor, given: argparse.Namespace) -> Any:
    index = faiss.IndexFlatIP(given.width)
    index.add(gallery.numpy())
    return lambda: index.search(queries.numpy(), given.k)


def our_search(queries: torch.Tensor, gallery: torch.Tensor, given: argparse.Namespace) -> Any:
    return lambda: cz.metrics.top_k(queries, gallery, k=given.k)


def our_metrics(queries: torch.Tensor, gallery: torch.Tensor, given: argparse.Namespace) -> Any:
    labels, of_rows = (torch.arange(len(x)) % CLASSES for x in (queries, gallery))
    names = [f"{name}@{given.k}" for name in ("precision", "recall", "hit_rate", "ndcg")]
    return lambda: cz.metrics.evaluate(queries, gallery, labels=labels, gallery_labels=of_rows, metrics=names)


CASES = {"faiss IndexFlatIP": faiss_flat, "top_k": our_search, "evaluate, four metrics at k": our_metrics}


# -------------------------------------------------------------------------------------------------------------- in turns


@dataclass(frozen=True)
class Group:
    """The processes of one program, and the connection on which the first of them says that the program is done."""

    processes: Sequence[BaseProcess]
    done: Connection

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, number)

    def wait_at_start_line(self, timeout: float) -> None:
        """Wait until every process has stopped itself; raise TimeoutError or RuntimeError if one does not."""
        until = time.monotonic() + timeout
        for process in self.processes:
            while _state(process) != "T":
                if process.exitcode is not None:
                    raise RuntimeError(f"a process ended with {process.exitcode} before its start")
                if time.monotonic() > until:
                    raise TimeoutError(f"a process was not ready in {timeout} s")
                time.sleep(0.05)


def _state(process: BaseProcess) -> str:
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def in_turns(*groups: Group, turn: float = 1.5, timeout: float = 600.0) -> list[float]:
    """Run groups in turns until each is done; return the seconds that each ran."""
    for group in groups:
        group.wait_at_start_line(timeout)
    seconds, running = [0.0] * len(groups), set(range(len(groups)))
    while running:
        for i in sorted(running):
            group, start = groups[i], time.perf_counter()
            group.send(signal.SIGCONT)
            finished = group.done.poll(turn)
            seconds[i] += time.perf_counter() - start
            if finished:
                running.discard(i)
            elif all(process.exitcode is not None for process in group.processes):
                raise RuntimeError("a program ended without a result")
            else:
                group.send(signal.SIGSTOP)
    return seconds


def on_rank(rank: int, case: str, world_size: int, port: int, given: argparse.Namespace, done: Connection) -> None:
    """Run one case on one rank; rank 0 sends when it is done, all send MB of peak memory beyond those of the embeddings."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    if world_size > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    queries, gallery = data(given, rank, world_size)
    run = CASES[case](queries, gallery, given)
    cz.metrics.top_k(queries[:64], gallery[:256], k=min(given.k, 100))
    if world_size > 1:
        dist.barrier()
    os.kill(os.getpid(), signal.SIGSTOP)  # the start line
    extra = torch.tensor(peak(run)[0])
    if world_size > 1:
        dist.all_reduce(extra, dist.ReduceOp.MAX)
    if rank == 0:
        done.send((extra.item(), gallery.nbytes / 2**20))
    if world_size > 1:
        dist.destroy_process_group()


def started(case: str, world_size: int, given: argparse.Namespace) -> Group:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=on_rank, args=(rank, case, world_size, port, given, sender), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return Group(ranks, receiver)


def beside_faiss(case: str, world_size: int, given: argparse.Namespace) -> tuple[float, float, float, float]:
    """Return seconds, those of faiss in turns with it, additional MB of the largest rank, and MB of its embeddings."""
    groups = started(case, world_size, given), started("faiss IndexFlatIP", 1, given)
    ours, bare = in_turns(*groups)
    extra, rows = groups[0].done.recv()
    for group in groups:
        for process in group.processes:
            process.join()
    return ours, bare, extra, rows


def approximate(given: argparse.Namespace, probes: int) -> list[str]:
    """Return a table line of an index of inverted lists: seconds of building and searching, and its recall."""
    queries, gallery = data(given, 0, 1)
    index = cz.metrics.ApproximateIndex("IVF1024,Flat", f"nprobe={probes}")
    start = time.perf_counter()
    cz.metrics.top_k(queries, gallery, k=given.k, index=index)
    seconds = time.perf_counter() - start
    recall = cz.metrics.index_recall(queries[:500], gallery, k=given.k, index=index)
    title = f"`top_k`, {index.factory}, {index.parameters}, with training"
    return [title, "1", f"{seconds:.1f}", "", "", f"recall {recall:.3f}"]


def main() -> None:
    defaults = {"rows": 1_000_000, "queries": 10_000, "width": 128, "k": 100, "docs": False, "approximate": False}
    given = command_line(__doc__, **defaults).parse_args()
    lines = []
    for case, world_size in itertools.product(("top_k", "evaluate, four metrics at k"), (1, 2)):
        seconds, bare, extra, rows = beside_faiss(case, world_size, given)
        times = f"{seconds:.1f}", f"{bare:.1f}", f"{seconds / bare:.2f}"
        lines.append([case, str(world_size), *times, f"{extra:.0f} ({rows:.0f})"])
        print(f"{case}, W = {world_size}: {seconds:.1f} s, faiss {bare:.1f} s", flush=True)
    if given.approximate:
        lines += [approximate(given, probes) for probes in (32, 256)]
    print(table(HEAD, lines, texts=1))
    if given.docs:
        fill(PAGES / "evaluation.md", {"search": table(HEAD, lines, texts=1)})


if __name__ == "__main__":
    main()
