"""Batch samplers: samples per second on one rank, with global batches of 256, beside other libraries' samplers.

python benchmarks/samplers.py [--samples 1000000] [--classes 5000] [--world-size 4]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.samplers import MPerClassSampler
from suite.harness import program
from torch.utils.data import BatchSampler, DistributedSampler, TensorDataset

from contrastive_zoo import World
from contrastive_zoo.data import (
    GlobalBatchSampler,
    HardNegativeBatchSampler,
    MPerClassBatchSampler,
    NoDuplicatesBatchSampler,
)
from tools.pages import table

M, CLASSES_PER_BATCH, REPEATS = 4, 64, 3
BATCH = M * CLASSES_PER_BATCH


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


def measure(given: argparse.Namespace) -> dict[str, str]:
    """Return the seconds of an epoch on one rank, and the samples of the global epoch per second."""
    size, world_size = given.samples, given.world_size
    seconds: dict[str, list[float]] = {}
    for epoch in range(REPEATS):
        for name, make in makers(size, given.classes, world_size).items():
            sampler = make()
            getattr(sampler, "set_epoch", lambda _: None)(epoch)
            start = time.perf_counter()
            drawn = sum(map(len, sampler))
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            # PML's sampler leaves out the last batch if it is smaller
            assert drawn >= 0.99 * size / world_size - BATCH / world_size
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    lines = [[name, f"{x:.2f}", f"{size / x / 1e6:.1f}"] for name, x in medians.items()]
    return {"samplers": table(("sampler", "s per epoch", "million samples per s"), lines, texts=1)}


if __name__ == "__main__":
    program(measure, __doc__, samples=1_000_000, classes=5000, world_size=4)
