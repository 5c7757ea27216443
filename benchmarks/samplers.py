"""Batch samplers: random cases tested on all invariants, and samples per second beside other libraries' samplers.

python benchmarks/samplers.py [--search 10000] [--samples 1000000] [--classes 5000] [--world-size 4]

Without --search it measures only, with --samples 0 it searches only.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.samplers import MPerClassSampler
from suite.harness import command_line
from torch.utils.data import BatchSampler, DistributedSampler, TensorDataset

from contrastive_zoo import World
from contrastive_zoo.data import (
    GlobalBatchSampler,
    HardNegativeBatchSampler,
    MPerClassBatchSampler,
    NoDuplicatesBatchSampler,
)
from contrastive_zoo.testing.invariant import Broken
from tests.sampling.cases import random_trial
from tests.sampling.invariants import SAMPLER_INVARIANTS

M, CLASSES_PER_BATCH, REPEATS = 4, 64, 3
BATCH = M * CLASSES_PER_BATCH


def search(cases: int) -> None:
    """Test all invariants on random samplers, datasets, world sizes and seeds; exit with status 1 at a violation."""
    tested: Counter[str] = Counter()
    for seed in range(cases):
        for invariant in SAMPLER_INVARIANTS:
            try:
                tested[invariant.name] += invariant(random_trial(seed))
            except Broken as error:
                sys.exit(f"random_trial({seed}), {invariant.name}: {error}")
    print(f"{cases:,} random cases, no violation. Cases to which an invariant applies:")
    for name, number in tested.items():
        print(f"  {name:24s} {number:,}")


def makers(size: int, classes: int, world_size: int) -> dict[str, Callable[[], Iterable[Any]]]:
    """Return functions that construct the sampler of one rank; its batches are those of one epoch."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, size)
    neighbours = (np.arange(size)[:, None] + rng.integers(1, 100, (size, 8))) % size
    data, rank = TensorDataset(torch.arange(size)), World(1 % world_size, world_size)
    share = BATCH // world_size
    by_class = MPerClassSampler(labels, M, batch_size=share, length_before_new_iter=size // world_size)
    theirs = DistributedSampler(data, world_size, rank.rank)
    plain = GlobalBatchSampler(size, batch_size=BATCH, process_group=rank)
    mine = MPerClassBatchSampler(labels, m=M, classes_per_batch=CLASSES_PER_BATCH, process_group=rank)
    unique = NoDuplicatesBatchSampler(labels, batch_size=BATCH, process_group=rank)
    two = NoDuplicatesBatchSampler(rng.permutation(size) // 2, size + labels, batch_size=BATCH, process_group=rank)
    near = HardNegativeBatchSampler(neighbours, batch_size=BATCH, group_size=8, process_group=rank)
    return {
        "torch DistributedSampler + BatchSampler": lambda: BatchSampler(theirs, share, drop_last=False),
        "GlobalBatchSampler": lambda: plain,
        "PML MPerClassSampler + BatchSampler": lambda: BatchSampler(by_class, share, drop_last=False),
        "MPerClassBatchSampler": lambda: mine,
        "NoDuplicatesBatchSampler, one column": lambda: unique,
        "NoDuplicatesBatchSampler, two columns": lambda: two,
        "HardNegativeBatchSampler": lambda: near,
    }


def throughput(size: int, classes: int, world_size: int) -> None:
    """Print the seconds of an epoch on one rank, and the samples of the global epoch per second."""
    print(f"\nOne rank of W = {world_size}, {size:,} samples, {classes:,} classes, global batches of {BATCH}.")
    print("| sampler | s per epoch | million samples per s |\n|---|---:|---:|")
    seconds: dict[str, list[float]] = {}
    for epoch in range(REPEATS):
        for name, make in makers(size, classes, world_size).items():
            sampler = make()
            getattr(sampler, "set_epoch", lambda _: None)(epoch)
            start = time.perf_counter()
            drawn = sum(map(len, sampler))
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            assert drawn >= 0.99 * size // world_size
    for name, found in seconds.items():
        print(f"| {name} | {statistics.median(found):.2f} | {size / statistics.median(found) / 1e6:.1f} |")


def main() -> None:
    given = command_line(__doc__, search=0, samples=1_000_000, classes=5000, world_size=4).parse_args()
    if given.search:
        search(given.search)
    if given.samples:
        throughput(given.samples, given.classes, given.world_size)


if __name__ == "__main__":
    main()
