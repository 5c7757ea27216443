"""Batch samplers by columns of a dataset: m samples of each of several classes, no value twice, or a budget of tokens."""

import heapq
import warnings
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from typing_extensions import Unpack

from contrastive_zoo.data.batch_sampler import (
    BaseBatchSampler,
    Batches,
    SamplerOptions,
    grouped,
    rank_bounds,
    size_problem,
)
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import described, tensor_problem, word_problem
from contrastive_zoo.ranks.world import World
from contrastive_zoo.wrapper.token_chunks import chunk_ends, lengths_problem

Column: TypeAlias = Tensor | NDArray[np.generic] | Sequence[Hashable]  # one integer or string per sample


def columns_problem(columns: Sequence[Column]) -> str | None:
    for column in columns:
        if isinstance(column, Tensor) and (problem := tensor_problem("labels and columns", column)):
            return problem
        if isinstance(column, (Tensor, np.ndarray)):
            if column.ndim != 1:
                return f"labels and columns have one value per sample, [n], got shape {list(column.shape)}."
        elif not isinstance(column, Sequence) or isinstance(column, (str, bytes)):
            return f"labels and columns are tensors, arrays or lists, got {described(column)}."
        elif not all(isinstance(x, Hashable) for x in column):
            return f"labels and columns hold numbers, words or other hashable values, got {described(column)}."
    return None


def codes(columns: Sequence[Column]) -> tuple[list[NDArray[np.int64]], list[Hashable]]:
    """Return the columns with equal values as equal integers, 0, 1, … in order of appearance, and the distinct values."""
    known: dict[Hashable, int] = {}
    result = []
    for column in columns:
        values = column.tolist() if isinstance(column, (Tensor, np.ndarray)) else column
        result.append(np.fromiter((known.setdefault(value, len(known)) for value in values), np.int64, len(values)))
    return result, list(known)


Singletons = Literal["raise", "keep", "drop"]


class MPerClassBatchSampler(BaseBatchSampler):
    """Global batches with m samples of each of p classes, each sample once per epoch.

    In every epoch the samples of a class are shuffled and cut into groups of m. Two or more that remain are a group of their
    own; a single one joins another group. So every sample of a class with at least two has a positive in its global batch.

    A batch holds groups of p different classes; only the last batch has fewer. If one class has more groups than there
    would be batches, groups are spread evenly over as many batches as it has groups; a warning on rank 0 says so.

    Args:
        labels: the class of each sample: integers or strings.
        m: samples per class in a batch, at least 2.
        classes_per_batch: p; a batch has m · p samples, all ranks together, up to the groups of another size.
        singletons: what to do with classes of one sample, which has no positive: ``"raise"`` an error, ``"keep"`` them as
            negatives of the others, in groups of 1, or ``"drop"`` them.
        options: ``seed``, ``rank_weights`` and ``process_group`` of :class:`BaseBatchSampler`.

    Raises:
        ValueError: labels or settings that are not as above, more classes than there are, or what the base class refuses.

    Examples:
        >>> labels = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])
        >>> sampler = MPerClassBatchSampler(labels, m=2, classes_per_batch=2, process_group=World())
        >>> [sorted(labels[batch].tolist()) for batch in sampler]
        [[0, 0, 0, 2, 2], [1, 1, 2, 2]]

    Source: batches of p classes with m samples: Hermans et al. 2017, §2, https://arxiv.org/abs/1703.07737
    """

    def __init__(
        self,
        labels: Column,
        *,
        m: int,
        classes_per_batch: int,
        singletons: Singletons = "raise",
        **options: Unpack[SamplerOptions],
    ) -> None:
        shape_problem = columns_problem([labels])
        (self._classes,), values = codes([labels if shape_problem is None else []])
        self.m, self.classes_per_batch, self.singletons = m, classes_per_batch, singletons
        counts = np.bincount(self._classes, minlength=len(values))
        problem = shape_problem or size_problem("m", m, at_least=2)
        problem = problem or size_problem("classes_per_batch", classes_per_batch)
        problem = problem or word_problem("singletons", singletons, Singletons)
        problem = problem or _classes_problem(counts, values, classes_per_batch, singletons)
        settings = {"labels": self._classes, "m": m, "classes_per_batch": classes_per_batch, "singletons": singletons}
        super().__init__(settings, problem, **options)
        counts = np.where(counts > 1, counts, 0) if singletons == "drop" else counts
        self._groups = np.maximum(counts // m + (counts % m >= 2), counts > 0)
        if World.of(self.process_group).rank == 0 and (problem := self._long_tail(values)):
            warnings.warn(f"MPerClassBatchSampler: {problem}", stacklevel=2)

    def _long_tail(self, values: Sequence[object]) -> str | None:
        """Return how many batches have fewer classes than asked for, in words; None if that is the last one only."""
        total, largest = int(self._groups.sum()), int(self._groups.argmax())
        if (most := self._groups[largest]) <= -(-total // self.classes_per_batch):
            return None
        classes = np.bincount(_distinct(self._groups, self.classes_per_batch, random_keys(0, np.arange(total))))
        fewer = int((classes < self.classes_per_batch).sum())
        return (
            f"{fewer} of {len(classes)} batches have fewer than classes_per_batch={self.classes_per_batch} classes, as "
            f"class {values[largest]!r} has {most} of {total} groups of m={self.m}, one in a batch. Leave a part of this "
            "class out, or raise m."
        )

    def global_batches(self, epoch: int) -> Batches:
        keys = random_keys(self.seed, epoch, np.arange(len(self._classes)))
        groups = self._groups
        batches = _distinct(groups, self.classes_per_batch, random_keys(self.seed, epoch, np.arange(groups.sum()), 1))
        order = np.lexsort((keys, self._classes))  # class after class, shuffled
        classes = self._classes[order]
        place = np.arange(len(order)) - np.searchsorted(classes, classes)  # within the class
        group = np.cumsum(groups)[classes] - groups[classes] + np.minimum(place // self.m, groups[classes] - 1)
        batch_of, used = np.full(len(order), -1), groups[classes] > 0
        batch_of[order[used]] = batches[group[used]]
        return grouped(batch_of, keys)


def _distinct(groups: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the batch of each group, class after class, such that no batch holds two groups of a class."""
    # each batch takes the classes with the most groups left, ties at random: the fewest batches that are possible
    total, most = int(groups.sum()), int(groups.max())
    if most > -(-total // size):  # one class decides the number of batches
        size = -(-total // most)
    draws = iter(keys.tolist())
    left = [(-count, next(draws), index) for index, count in enumerate(groups.tolist()) if count]
    heapq.heapify(left)
    ends = np.cumsum(groups).tolist()
    batch_of = np.empty(total, np.int64)
    number, uneven = 0, []
    while left:
        taken = [heapq.heappop(left) for _ in range(min(size, len(left)))]
        for count, _, index in taken:
            batch_of[ends[index] + count] = number
            if count < -1:
                heapq.heappush(left, (count + 1, next(draws), index))
        if len(taken) < size:
            uneven.append(number)
        number += 1
    renamed = np.empty(number, np.int64)
    renamed[np.lexsort((keys[:number], np.isin(np.arange(number), uneven)))] = np.arange(number)
    return renamed[batch_of]


def _classes_problem(
    counts: NDArray[np.int64], values: Sequence[object], per_batch: int, singletons: str
) -> str | None:
    if not len(counts):
        return "labels are one per sample, got none."
    alone = [value for value, count in zip(values, counts.tolist(), strict=True) if count == 1]
    if alone and singletons == "raise":
        some = ", ".join(map(repr, alone[:5])) + (", …" if len(alone) > 5 else "")
        return (
            f"{len(alone)} of {len(counts)} classes have one sample, which has no positive (class {some}). Pass "
            "singletons='keep' to have them as negatives, or singletons='drop' to leave them out."
        )
    classes = len(counts) - (len(alone) if singletons == "drop" else 0)
    if per_batch > classes:
        return f"classes_per_batch is at most the number of classes, {classes}, got {per_batch}."
    return None


class NoDuplicatesBatchSampler(BaseBatchSampler):
    """Global batches in which no two samples share a value, each sample once per epoch.

    In-batch negatives with the same query or document are false negatives. Here all values of a global batch are different,
    also across columns and ranks.

    An epoch has ⌈samples / batch_size⌉ batches, or as many as the most frequent value has samples, and with several columns
    perhaps more. Samples are spread evenly over them.

    Args:
        columns: one value per sample each: integers or strings. Pass the queries, or queries and documents.
        batch_size: the most samples of a global batch, on all ranks together.
        options: ``seed``, ``rank_weights`` and ``process_group`` of :class:`BaseBatchSampler`.

    Raises:
        ValueError: columns of different lengths or without samples, a bad batch size, or what the base class refuses.

    Examples:
        >>> queries = ["a", "a", "a", "b", "c"]
        >>> sampler = NoDuplicatesBatchSampler(queries, batch_size=4, process_group=World())
        >>> [sorted(queries[index] for index in batch) for batch in sampler]
        [['a', 'c'], ['a'], ['a', 'b']]
    """

    def __init__(self, *columns: Column, batch_size: int, **options: Unpack[SamplerOptions]) -> None:
        shape_problem = columns_problem(columns)
        result, values = codes(columns if shape_problem is None else [])
        lengths = [len(column) for column in result]
        problem = shape_problem or size_problem("batch_size", batch_size)
        if problem is None and (len(set(lengths)) != 1 or not lengths[0]):
            problem = f"columns have one value per sample, and equal lengths of at least 1, got lengths {lengths}."
        self.batch_size = batch_size
        settings = {"columns": np.concatenate([*result, lengths]), "batch_size": batch_size}
        super().__init__(settings, problem, **options)
        self._values = np.stack(result, 1)
        # the number of samples with each value; a sample may have a value in two columns
        pairs = np.unique(np.arange(len(self._values))[:, None] * len(values) + self._values)
        self._frequency = np.bincount(pairs % len(values), minlength=len(values))

    def global_batches(self, epoch: int) -> Batches:
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
    held, sizes = [set[int]() for _ in range(number)], [0] * number
    batch_of, cursor = [], 0
    for row in values.tolist():
        places = ((cursor + offset) % len(held) for offset in range(len(held)))
        batch = next((x for x in places if sizes[x] < size and held[x].isdisjoint(row)), len(held))
        if batch == len(held):
            held.append(set())
            sizes.append(0)
        held[batch].update(row)
        sizes[batch] += 1
        batch_of.append(batch)
        cursor = batch + 1
    return np.array(batch_of, np.int64)


class TokenBatchSampler(BaseBatchSampler):
    """Global batches of ``chunks_per_batch`` chunks of at most ``chunk_tokens`` padded tokens, each sample once per epoch.

    Each batch takes as many samples of the epoch's random order as :func:`token_chunks` packs into ``chunks_per_batch``
    chunks, its longest samples first. Ranks share whole chunks, ⌈``chunks_per_batch`` / W⌉ at most, so they have different
    numbers of samples.

    Args:
        lengths: tokens of each sample, [n], the same on every rank.
        chunk_tokens: the most padded tokens of a chunk, which is (its samples) · (its longest sample).
        chunks_per_batch: chunks of a global batch, on all ranks together; the last batch may have fewer.
        options: ``seed``, ``rank_weights`` and ``process_group`` of :class:`BaseBatchSampler`.

    Raises:
        ValueError: lengths or sizes that are not integers of at least 1, a sample that is longer than ``chunk_tokens``, or
            what the base class refuses.

    Examples:
        >>> lengths = np.array([9, 2, 3, 2, 5, 3, 4])
        >>> for rank in range(2):
        ...     sampler = TokenBatchSampler(
        ...         lengths, chunk_tokens=10, chunks_per_batch=2, process_group=World(rank, 2))
        ...     print([lengths[part].tolist() for part in sampler])
        [[9], [5, 4]]
        [[3, 2, 2], [3]]
    """

    def __init__(
        self, lengths: ArrayLike, *, chunk_tokens: int, chunks_per_batch: int, **options: Unpack[SamplerOptions]
    ) -> None:
        problem = lengths_problem(lengths, chunk_tokens) or size_problem("chunks_per_batch", chunks_per_batch)
        array = np.asarray(lengths if problem is None else [], np.int64)
        if problem is None and not len(array):
            problem = "lengths are one per sample, got none."
        self.lengths, self.chunk_tokens, self.chunks_per_batch = array, chunk_tokens, chunks_per_batch
        settings = {"lengths": array, "chunk_tokens": chunk_tokens, "chunks_per_batch": chunks_per_batch}
        super().__init__(settings, problem, **options)

    def global_batches(self, epoch: int) -> Batches:
        order = np.argsort(random_keys(self.seed, epoch, np.arange(len(self.lengths))))
        lengths = self.lengths[order]
        # no batch has more tokens than all its chunks
        tokens, budget = (
            np.cumsum(np.append(0, lengths), dtype=np.float64),
            float(self.chunk_tokens * self.chunks_per_batch),
        )
        batches, start = [], 0
        while start < len(order):
            sizes = range(1, int(np.searchsorted(tokens, tokens[start] + budget, "right")) - start)
            size = bisect_right(sizes, self.chunks_per_batch, key=lambda k: self._chunks(lengths[start:][:k]))
            batch = order[start : start + max(size, 1)]
            batches.append(batch[np.argsort(-self.lengths[batch], kind="stable")])
            start += len(batch)
        return batches

    def _chunks(self, lengths: NDArray[np.int64]) -> int:
        return len(chunk_ends(-np.sort(-lengths), self.chunk_tokens))

    def bounds(self, batch: NDArray[np.int64], weights: tuple[float, ...]) -> list[int]:
        ends = [0, *chunk_ends(self.lengths[batch], self.chunk_tokens)]
        return [ends[index] for index in rank_bounds(len(ends) - 1, weights)]
