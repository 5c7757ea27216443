"""Watch the data loaders of a training, and list the samples that each of them yields in an epoch."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

SECONDS, BATCHES = 2.0, 20_000
"""Limits of the part of an epoch whose indices are listed."""


@dataclass
class Epoch:
    """The samples of an epoch of one loader on one rank.

    Attributes:
        batches: indices into the dataset.
        complete: whether these are all batches of the epoch.
        size: number of samples of the dataset.
        sampler: class of the sampler.
        shuffles: whether ``set_epoch`` chooses the order of the samples.
        first: digest of the first sample of the dataset: ranks with the same dataset have the same digest.
    """

    batches: list[list[int]]
    complete: bool
    size: int
    sampler: str
    shuffles: bool
    first: str


class LoaderWatch:
    """Notice which data loaders a training starts, and how often.

    Args:
        is_watching: whether a loader that is started now belongs to the training.

    Examples:
        >>> watch, loader = LoaderWatch(), DataLoader(range(5), batch_size=2)
        >>> watch.on_start(loader), watch.on_start(loader)
        (None, None)
        >>> watch.epochs, watch.listed()[0].batches
        (2, [[0, 1], [2, 3], [4]])
    """

    def __init__(self, is_watching: Callable[[], bool] = lambda: True) -> None:
        self.is_watching = is_watching
        self.loaders: list[DataLoader[Any]] = []
        self.epochs = 0

    def on_start(self, loader: DataLoader[Any]) -> None:
        """Note that a loader begins an epoch."""
        if self.is_watching() and torch.is_grad_enabled():  # not a validation
            self.epochs += 1
            if not any(loader is x for x in self.loaders):
                self.loaders.append(loader)

    def listed(self) -> list[Epoch]:
        """List an epoch of every loader over a dataset with indices; of the dataset, one sample is read."""
        with torch.random.fork_rng(devices=[]):
            return [epoch for loader in self.loaders if (epoch := _listed(loader)) is not None]


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
    sampler = _innermost(loader)
    size, name = len(loader.dataset), type(sampler).__name__
    return Epoch(batches, complete, size, name, hasattr(sampler, "set_epoch"), _first_digest(loader.dataset))


def _first_digest(dataset: Any) -> str:
    """Return a digest of the first sample, whose augmentation draws the same random numbers on every rank."""
    states = random.getstate(), np.random.get_state()
    torch.manual_seed(0)  # the caller restores torch's state
    random.seed(0)
    np.random.seed(0)
    try:
        return hashlib.sha256(pickle.dumps(tree_map(_plain, dataset[0]))).hexdigest()
    except Exception:  # a dataset may raise anything, and a sample may not be picklable
        return ""
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _plain(x: Any) -> Any:
    return x.tolist() if isinstance(x, Tensor) else x


def _batches(loader: DataLoader[Any]) -> Iterator[Any]:
    if loader.batch_sampler is not None:
        yield from loader.batch_sampler
        return
    for result in loader.sampler:  # batch_size=None: the sampler yields batches or single samples
        yield result if isinstance(result, list) else [result]


def _innermost(loader: DataLoader[Any]) -> Any:
    """Return the sampler that chooses the order of samples."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        sampler = inner
    return sampler
