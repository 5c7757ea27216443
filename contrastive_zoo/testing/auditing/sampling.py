"""The samples of the ranks: equal shards, repeated samples, an order that never changes."""

import hashlib
import itertools
import pickle
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.mistakes import Diagnosis

SECONDS, BATCHES = 2.0, 20_000
"""Limits of the part of an epoch whose indices are listed."""


class Epoch(NamedTuple):
    """The samples of an epoch of one loader on one rank."""

    batches: list[list[int]]  # indices into the dataset
    complete: bool  # whether these are all batches of the epoch
    size: int  # of the dataset
    sampler: str
    shuffles: bool  # whether set_epoch chooses the order of the samples
    first: str  # digest of the first sample of the dataset, which is the same for ranks with the same dataset
    seed: Any = None  # of the sampler


def listed(loaders: Sequence[DataLoader[Any]]) -> list[Epoch]:
    """List an epoch of every loader over a dataset with indices; of the dataset, one sample is read."""
    with torch.random.fork_rng(devices=[]):
        return [epoch for loader in loaders if (epoch := _listed(loader)) is not None]


def _listed(loader: DataLoader[Any]) -> Epoch | None:
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return None
    batches: list[list[int]] = []
    end = time.monotonic() + SECONDS
    source = _batches(loader)
    for indices in itertools.islice(source, BATCHES):
        if not all(isinstance(x, int) for x in indices):
            return None
        batches.append(list(indices))
        if time.monotonic() > end:
            break
    complete = next(source, None) is None
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        sampler = inner  # the innermost one chooses the order of samples
    size, name = len(loader.dataset), type(sampler).__name__
    shuffles, seed = hasattr(sampler, "set_epoch"), getattr(sampler, "seed", None)
    return Epoch(batches, complete, size, name, shuffles, _first_digest(loader.dataset), seed)


def _batches(loader: DataLoader[Any]) -> Iterator[Any]:
    if loader.batch_sampler is not None:
        yield from loader.batch_sampler
        return
    for result in loader.sampler:  # batch_size=None: the sampler yields batches or single samples
        yield result if isinstance(result, list) else [result]


def _first_digest(dataset: Any) -> str:
    """Return a digest of the first sample, whose augmentation draws the same random numbers on every rank."""
    states = random.getstate(), np.random.get_state()
    torch.manual_seed(0)  # the caller restores torch's state
    random.seed(0)
    np.random.seed(0)
    try:
        plain = tree_map(lambda x: x.tolist() if isinstance(x, Tensor) else x, dataset[0])
        return hashlib.sha256(pickle.dumps(plain)).hexdigest()
    except Exception:  # a dataset may raise anything, and a sample may not be picklable
        return ""
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def of_samples(records: Sequence[Record]) -> Iterator[Diagnosis]:
    """Yield the mistakes in the ranks' samples, each with what was measured."""
    digests = [[step.samples for step in record.steps] for record in records]
    together = [list(ranks) for ranks in zip(*digests, strict=False)]
    if len(records) > 1 and not records[0].shares_samples:
        if equal := [i for i, x in enumerate(together) if x[0] and all(y == x[0] for y in x)]:
            yield Diagnosis(
                "same shard", f"all ranks have the same {len(together[equal[0]][0])} samples at step {equal[0] + 1}"
            )
            return
        yield from _in_an_epoch(records, together)
    yield from _same_order(records, together)


def _in_an_epoch(records: Sequence[Record], together: Sequence[Sequence[list[bytes]]]) -> Iterator[Diagnosis]:
    """Compare the indices of the ranks' loaders; without these, the contents of the samples of each step."""
    loaders = [
        epochs
        for epochs in zip(*(record.samplers for record in records), strict=False)
        if epochs[0].first and len({(x.first, x.size) for x in epochs}) == 1  # over the same dataset
    ]
    for epochs in loaders:
        each = [[i for batch in epoch.batches for i in batch] for epoch in epochs]
        total, distinct, size = sum(map(len, each)), len(set().union(*each)), epochs[0].size
        if len(seeds := {x.seed for x in epochs if isinstance(x.seed, int)}) > 1 and total > distinct:
            yield Diagnosis("sampler seeded per rank", f"the seeds of {epochs[0].sampler} are {sorted(seeds)}")
        elif all(epoch.complete and len(set(x)) == size for epoch, x in zip(epochs, each, strict=True)):
            yield Diagnosis(
                "not sharded", f"the {epochs[0].sampler} of every rank yields all {size} samples in an epoch"
            )
        elif 0 < total - distinct < total * (1 - 1 / len(records)) / 2:
            repeated = f"{total - distinct} of {total} samples of an epoch are repeated"
            yield Diagnosis("repeated samples", f"{repeated} ({epochs[0].sampler}, {size} samples in the dataset)")
    if not loaders:
        for i, ranks in enumerate(together):
            if shared := sum(map(len, ranks)) - len(set().union(*ranks)):
                yield Diagnosis(
                    "repeated samples", f"{shared} of {sum(map(len, ranks))} samples of step {i + 1} are repeated"
                )
                return


def _same_order(records: Sequence[Record], together: Sequence[Sequence[list[bytes]]]) -> Iterator[Diagnosis]:
    """Compare the first step of every later epoch with the first step."""
    if not any(epoch.shuffles for epoch in records[0].samplers):
        return
    previous = records[0].steps[0].epoch if records[0].steps else 0
    for i, step in enumerate(records[0].steps[: len(together)]):
        if step.epoch > previous and together[i] == together[0] and any(together[i]):
            yield Diagnosis(
                "no set_epoch", f"step {i + 1} begins an epoch with the samples of step 1, in the same order"
            )
            return
        previous = step.epoch
