"""Exact search and evaluation on W ranks beside faiss' flat search on one process (Linux).

python benchmarks/retrieval.py [--rows 1000000] [--queries 10000] [--width 128] [--k 100] [--rounds 3] [--docs]

Whole calls alternate in the same processes, in rotated order, so that both meet the same minutes of a machine whose speed
changes; times are medians. faiss has all cores and an index that exists already, the ranks share the cores.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import faiss
import torch
import torch.distributed as dist
from suite.harness import in_rounds, on_new_ranks, peak, program, progress, slowest

import contrastive_zoo as cz
from tools.pages import table

HEAD = ("", "W", "seconds", "faiss in turns with it", "ratio", "additional MB per rank (rows: MB)")
CLASSES = 10_000
CORES = os.cpu_count() or 1


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


def data(given: argparse.Namespace, rank: int = 0, world_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    def of_rank(total: int, seed: int) -> torch.Tensor:
        return unit_rows(total * rank // world_size, total * (rank + 1) // world_size, given.width, seed)

    return of_rank(given.queries, seed=1), of_rank(given.rows, seed=0)


def faiss_flat(given: argparse.Namespace) -> Callable[[], object]:
    queries, gallery = (x.numpy() for x in data(given))
    index = faiss.IndexFlatIP(given.width)
    index.add(gallery)

    def search() -> None:
        faiss.omp_set_num_threads(CORES)
        index.search(queries, given.k)

    return search


def our_search(queries: torch.Tensor, gallery: torch.Tensor, given: argparse.Namespace) -> Callable[[], object]:
    return lambda: cz.metrics.top_k(queries, gallery, k=given.k)


def our_metrics(queries: torch.Tensor, gallery: torch.Tensor, given: argparse.Namespace) -> Callable[[], object]:
    labels, of_rows = (torch.arange(len(x)) % CLASSES for x in (queries, gallery))
    names = [f"{name}@{given.k}" for name in ("precision", "recall", "hit_rate", "ndcg")]
    return lambda: cz.metrics.evaluate(queries, gallery, labels=labels, gallery_labels=of_rows, metrics=names)


CASES = {"top_k": our_search, "evaluate, four metrics at k": our_metrics}


def measured(case: str, given: argparse.Namespace) -> tuple[float, float, float, float]:
    """Return seconds, those of faiss in turns with it, additional MB of the largest rank, and MB of its embeddings."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    queries, gallery = data(given, rank, world_size)
    run = CASES[case](queries, gallery, given)
    cz.metrics.top_k(queries[:64], gallery[:256], k=min(given.k, 100))  # libraries are loaded
    extra = slowest(peak(run)[0])
    runners: dict[str, Any] = {case: run, "faiss": faiss_flat(given) if rank == 0 else lambda: None}
    rounds = in_rounds(runners, rounds=given.rounds)
    ours, bare = (statistics.median(x[name] for x in rounds) for name in runners)
    return ours, bare, extra, gallery.nbytes / 2**20


def measure(given: argparse.Namespace) -> dict[str, str]:
    lines = []
    for case in CASES:
        for world_size in (1, 2):
            threads = max(1, CORES // world_size)
            seconds, bare, extra, rows = on_new_ranks(world_size, measured, case, given, threads=threads)[0]
            times = f"{seconds:.1f}", f"{bare:.1f}", f"{seconds / bare:.2f}"
            lines.append([case, str(world_size), *times, f"{extra:.0f} ({rows:.0f})"])
            progress(*lines[-1])
    return {"search": table(HEAD, lines, texts=1)}


if __name__ == "__main__":
    program(measure, __doc__, page="measurements.md", rows=1_000_000, queries=10_000, width=128, k=100, rounds=3)
