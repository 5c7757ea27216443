"""Batches in which no value occurs twice."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches, Column, codes, columns_problem, grouped
from contrastive_zoo.data.global_batches import size_problem
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.world import Processes


class NoDuplicatesBatchSampler(BaseBatchSampler):
    """Global batches in which no two samples share a value, each sample once per epoch.

    A loss with in-batch negatives takes another sample's positive for a negative; if two samples have the same query or the
    same document, that is a false negative. Here all values of a global batch are different, also across columns and
    across ranks.

    An epoch has ⌈samples / batch_size⌉ batches, or as many as the most frequent value has samples. Samples are spread evenly
    over them, so the sizes differ by few samples and no batch is left with the duplicates. With several columns there may
    be more batches, depending on the epoch.

    Args:
        columns: one value per sample each: integers or strings. Pass the queries, or queries and documents.
        batch_size: the most samples of a global batch, on all ranks together.
        seed: see :class:`BaseBatchSampler`.
        rank_weights: each rank's share of a global batch; None is an even split.
        process_group: see :class:`BaseBatchSampler`.

    Raises:
        ValueError: no columns, columns of different lengths or without samples, a batch size below 1, or what the base
            class refuses.

    Examples:
        >>> from contrastive_zoo import World
        >>> queries = ["a", "a", "a", "b", "c"]
        >>> sampler = NoDuplicatesBatchSampler(queries, batch_size=4, process_group=World())
        >>> [sorted(queries[index] for index in batch) for batch in sampler]
        [['a', 'c'], ['a'], ['a', 'b']]
    """

    def __init__(
        self,
        *columns: Column,
        batch_size: int,
        seed: int = 0,
        rank_weights: Sequence[float] | None = None,
        process_group: Processes = None,
    ) -> None:
        shape_problem = columns_problem(columns)
        result, values = codes(columns if shape_problem is None else [])
        lengths = [len(column) for column in result]
        problem = size_problem("batch_size", batch_size)
        if not lengths or len(set(lengths)) > 1 or not lengths[0]:
            problem = f"columns have one value per sample, and equal lengths of at least 1, got lengths {lengths}."
        problem = shape_problem or problem
        self.batch_size = batch_size
        settings = {"columns": np.concatenate([*result, lengths]), "batch_size": batch_size}
        super().__init__(settings, problem, seed=seed, rank_weights=rank_weights, process_group=process_group)
        self._values = np.stack(result, 1)
        self._frequency = _frequency(self._values, len(values))

    def global_batches(self, epoch: int) -> Batches:
        """Return batches of samples without a common value."""
        samples = np.arange(len(self._values))
        keys = random_keys(self.seed, epoch, samples)
        frequency = self._frequency[self._values]
        value = self._values[samples, frequency.argmax(1)]  # the most frequent one of each sample
        value_key = random_keys(self.seed, epoch, value, 1)
        # samples with frequent values first, then value after value in random order
        order = np.lexsort((keys, value_key, -frequency.max(1)))
        number = max(-(-len(order) // self.batch_size), int(frequency.max()))
        batch_of = np.empty(len(order), np.int64)
        if self._values.shape[1] == 1:  # no value has more samples than there are batches
            batch_of[order] = samples % number
        else:
            batch_of[order] = _first_without_conflict(self._values[order], number, self.batch_size)
        shuffled = np.argsort(random_keys(self.seed, epoch, np.arange(batch_of.max() + 1), 2))
        return grouped(shuffled[batch_of], keys)


def _first_without_conflict(values: NDArray[np.int64], number: int, size: int) -> NDArray[np.int64]:
    """Return a batch for each sample in turn: the next one round that is not full and has none of its values."""
    held: list[set[int]] = [set() for _ in range(number)]
    sizes = [0] * number
    batch_of, cursor = [], 0
    for row in values.tolist():
        for offset in range(len(held)):
            batch = (cursor + offset) % len(held)
            if sizes[batch] < size and held[batch].isdisjoint(row):
                break
        else:
            batch = len(held)
            held.append(set())
            sizes.append(0)
        held[batch].update(row)
        sizes[batch] += 1
        batch_of.append(batch)
        cursor = batch + 1
    return np.array(batch_of, np.int64)


def _frequency(values: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    """Return the number of samples with each value; a sample may have a value in two columns."""
    samples = np.arange(len(values))[:, None]
    return np.bincount(np.unique(samples * number + values) % number, minlength=number)
