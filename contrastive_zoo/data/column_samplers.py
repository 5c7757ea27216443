"""Batch samplers by columns of a dataset: m samples of each of several classes, no value twice, or a budget of tokens."""

import math
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from typing_extensions import Unpack

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches, SamplerOptions, even_bounds, size_problem
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
        for x in {type(x): x for x in _values(column)}.values():
            if type(x).__hash__ in _NOT_BY_CONTENT and x is not None:
                fix = "Pass a number or a word for each sample."
                return f"labels and columns hold values that are equal by their content, got {described(x)}. {fix}"
    return None


_NOT_BY_CONTENT: tuple[Any, ...] = (None, object.__hash__, Tensor.__hash__)  # equal objects would be different values


def _values(column: Column) -> Sequence[Any]:
    """Return one value per sample; a tensor or array of one element is its number."""
    if isinstance(column, (Tensor, np.ndarray)):
        column = column.tolist()
    return [x.item() if isinstance(x, (Tensor, np.ndarray)) and math.prod(x.shape) == 1 else x for x in column]


def codes(columns: Sequence[Column]) -> tuple[list[NDArray[np.int64]], list[Hashable]]:
    """Return the columns with equal values as equal integers, 0, 1, … in order of appearance, and the distinct values."""
    known: dict[Hashable, int] = {}
    numbers = ([known.setdefault(value, len(known)) for value in _values(column)] for column in columns)
    return [np.array(x, dtype=np.int64) for x in numbers], list(known)


def grouped(batch_of: NDArray[np.int64], keys: NDArray[np.uint64]) -> Batches:
    """Return the samples of each batch in the order of their keys, given each sample's batch; −1 is in none."""
    order = np.lexsort((keys, batch_of))
    counts = np.bincount(batch_of + 1)
    return np.split(order[counts[0] :], np.cumsum(counts[1:])[:-1])


Singletons = Literal["raise", "keep", "drop"]


class MPerClassBatchSampler(BaseBatchSampler):
    """Global batches with m samples of each of p classes, each sample once per epoch.

    In every epoch the samples of a class are shuffled and cut into groups of m. Two or more that remain are a group of their
    own; a single one joins another group. So every sample of a class with at least two has a positive in its global batch.

    A batch holds groups of p different classes, as long as p classes have groups left: frequent classes come first. If one
    class has more groups than such batches, the last ones of the epoch have fewer; a warning on rank 0 says how many.

    Args:
        labels: the class of each sample: integers or strings.
        m: samples per class in a batch, at least 2.
        classes_per_batch: p; a batch has m · p samples, all ranks together, up to the groups of another size.
        singletons: what to do with classes of one sample, which has no positive: ``"raise"`` an error, ``"keep"`` them as
            negatives of the others, in groups of 1, or ``"drop"`` them.
        options: ``seed``, ``drop_last`` and ``process_group`` of :class:`BaseBatchSampler`.

    Raises:
        ValueError: labels or settings that are not as above, more classes than there are, or what the base class refuses.

    Examples:
        >>> labels = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])
        >>> sampler = MPerClassBatchSampler(labels, m=2, classes_per_batch=2, process_group=World())
        >>> [sorted(labels[batch].tolist()) for batch in sampler]
        [[1, 1, 2, 2], [0, 0, 0, 2, 2]]

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
        self._group_classes = np.repeat(np.arange(len(counts)), self._groups)
        classes = np.bincount(self._batches_of_groups(0))
        fewer, largest = int((classes < classes_per_batch).sum()), int(self._groups.argmax())
        if fewer > 1 and not self._drop_last and World.of(self.process_group).rank == 0:
            warnings.warn(
                f"MPerClassBatchSampler: the last {fewer} of {len(classes)} batches have fewer than {classes_per_batch=} "
                f"classes, because class {values[largest]!r} needs {self._groups[largest]} batches, with {m=} samples in "
                "each. Pass drop_last=True to leave these batches out, or raise m.",
                stacklevel=2,
            )

    def is_full(self, batch: NDArray[np.int64]) -> bool:
        return len(np.unique(self._classes[batch])) == self.classes_per_batch

    def _batches_of_groups(self, epoch: int) -> NDArray[np.int64]:
        return _spread(self._group_classes, self.classes_per_batch, self.seed, epoch)

    def global_batches(self, epoch: int) -> Batches:
        keys = random_keys(self.seed, epoch, np.arange(len(self._classes)))
        groups = self._groups
        order = np.lexsort((keys, self._classes))  # class after class, shuffled
        classes = self._classes[order]
        place = np.arange(len(order)) - np.searchsorted(classes, classes)  # within the class
        group = np.cumsum(groups)[classes] - groups[classes] + np.minimum(place // self.m, groups[classes] - 1)
        batch_of, used = np.full(len(order), -1), groups[classes] > 0
        batch_of[order[used]] = self._batches_of_groups(epoch)[group[used]]
        return grouped(batch_of, keys)


def _spread(values: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a batch for each item, none with a value twice: the fewest batches, of which as many as possible are full."""
    counts, number = np.bincount(values), np.arange(len(values))
    full = bisect_left(range(1, len(values) // size + 1), True, key=lambda b: np.minimum(counts, b).sum() < b * size)
    order = np.lexsort((random_keys(seed, epoch, number, 1), values, random_keys(seed, epoch, values, 2)))
    values = values[order]  # value after value, in random order
    place = number - np.maximum.accumulate(np.where(np.diff(values, prepend=-1), number, 0))  # among those of its value
    filling = place < full
    surplus = np.flatnonzero((place == 0) & (counts[values] <= full))[: filling.sum() - full * size]
    filling[surplus] = False
    batch_of, rest = np.empty(len(values), np.int64), np.flatnonzero(~filling)
    batch_of[rest] = full + np.arange(len(rest)) % max(1, counts.max() - full)
    before = rest[:0]
    # each turn gives every full batch one item, at random; a value that begins in one turn may go on in the next
    for turn, items in enumerate(np.flatnonzero(filling).reshape(size, full) if full else ()):
        shuffled = np.argsort(random_keys(seed, epoch, np.arange(full), 3 + turn))
        taken = np.isin(shuffled, batch_of[before[values[before] == values[items[0]]]])
        batch_of[items] = np.concatenate([shuffled[~taken], shuffled[taken]])
        before = items
    return batch_of[np.argsort(order)]


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

    Batches are full as long as enough different values are left. An epoch has ⌈samples / batch_size⌉ batches, or as many as
    the most frequent value has samples, and with several columns perhaps more; its last batches are then small.

    Args:
        columns: one value per sample each: integers or strings. Pass the queries, or queries and documents.
        batch_size: the most samples of a global batch, on all ranks together.
        options: ``seed``, ``drop_last`` and ``process_group`` of :class:`BaseBatchSampler`.

    Raises:
        ValueError: columns of different lengths or without samples, a bad batch size, or what the base class refuses.

    Examples:
        >>> queries = ["a", "a", "a", "b", "c"]
        >>> sampler = NoDuplicatesBatchSampler(queries, batch_size=4, process_group=World())
        >>> [sorted(queries[index] for index in batch) for batch in sampler]
        [['a', 'c'], ['a', 'b'], ['a']]
    """

    def __init__(self, *columns: Column, batch_size: int, **options: Unpack[SamplerOptions]) -> None:
        shape_problem = columns_problem(columns)
        result, _ = codes(columns if shape_problem is None else [])
        lengths = [len(column) for column in result]
        problem = shape_problem or size_problem("batch_size", batch_size)
        if problem is None and (len(set(lengths)) != 1 or not lengths[0]):
            problem = f"columns have one value per sample, and equal lengths of at least 1, got lengths {lengths}."
        self.batch_size = batch_size
        settings = {"columns": np.concatenate([*result, lengths]), "batch_size": batch_size}
        super().__init__(settings, problem, **options)
        self._values = np.stack(result, 1)

    def global_batches(self, epoch: int) -> Batches:
        keys = random_keys(self.seed, epoch, np.arange(len(self._values)))
        if self._values.shape[1] == 1:
            return grouped(_spread(self._values[:, 0], self.batch_size, self.seed, epoch), keys)
        frequency = np.bincount(self._values.flat)[self._values].max(1)
        order = np.lexsort((keys, -frequency))
        batch_of = np.empty(len(order), np.int64)
        batch_of[order] = _first_fit(self._values[order], self.batch_size)
        sizes = np.bincount(batch_of)
        shuffled = np.lexsort((random_keys(self.seed, epoch, np.arange(len(sizes)), 1), -sizes))
        return grouped(np.argsort(shuffled)[batch_of], keys)


def _first_fit(values: NDArray[np.int64], size: int) -> list[int]:
    """Return a batch for each sample in turn: the first one that is not full, behind all that have a value of it."""
    behind, sizes, batch_of, first = [0] * (int(values.max()) + 1), list[int](), list[int](), 0
    for row in values.tolist():
        batch = max(first, *(behind[x] for x in row))
        while batch < len(sizes) and sizes[batch] == size:
            batch += 1
        sizes += [0] * (batch == len(sizes))
        sizes[batch] += 1
        for x in row:
            behind[x] = batch + 1
        while first < len(sizes) and sizes[first] == size:
            first += 1
        batch_of.append(batch)
    return batch_of


class TokenBatchSampler(BaseBatchSampler):
    """Global batches of ``chunks_per_batch`` chunks of at most ``chunk_tokens`` padded tokens, each sample once per epoch.

    Each batch takes as many samples of the epoch's random order as :func:`token_chunks` packs into ``chunks_per_batch``
    chunks, its longest samples first. Ranks share whole chunks, ⌈``chunks_per_batch`` / W⌉ at most, so they have different
    numbers of samples.

    Args:
        lengths: tokens of each sample, [n], the same on every rank.
        chunk_tokens: the most padded tokens of a chunk, which is (its samples) · (its longest sample).
        chunks_per_batch: chunks of a global batch, on all ranks together; the last batch may have fewer.
        options: ``seed``, ``drop_last`` and ``process_group`` of :class:`BaseBatchSampler`.

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
        tokens, budget = np.append(0.0, np.cumsum(lengths, dtype=np.float64)), self.chunk_tokens * self.chunks_per_batch
        batches, start = [], 0
        while start < len(order):
            sizes = range(1, int(np.searchsorted(tokens, tokens[start] + budget, "right")) - start)
            size = bisect_right(sizes, self.chunks_per_batch, key=lambda k: self._chunks(lengths[start:][:k]))
            batch = order[start : start + max(size, 1)]
            batches.append(batch[np.argsort(-self.lengths[batch], kind="stable")])
            start += len(batch)
        return batches

    def is_full(self, batch: NDArray[np.int64]) -> bool:
        return self._chunks(self.lengths[batch]) == self.chunks_per_batch

    def _chunks(self, lengths: NDArray[np.int64]) -> int:
        return len(chunk_ends(-np.sort(-lengths), self.chunk_tokens))

    def bounds(self, batch: NDArray[np.int64], world_size: int) -> list[int]:
        ends = [0, *chunk_ends(self.lengths[batch], self.chunk_tokens)]
        return [ends[index] for index in even_bounds(len(ends) - 1, world_size)]
