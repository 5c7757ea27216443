"""Batches of m samples of each of several classes."""

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches, Column, codes, columns_problem, grouped
from contrastive_zoo.data.global_batches import size_problem
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.world import Processes

Singletons = Literal["raise", "keep", "drop"]


class MPerClassBatchSampler(BaseBatchSampler):
    """Global batches with m samples of each of p classes, each sample once per epoch.

    In every epoch the samples of a class are shuffled and cut into groups of m. Two or more that remain are a group of their
    own; a single one joins another group, which then has m + 1. So every sample of a class with at least two has a positive
    in its global batch, nothing is repeated and nothing is dropped.

    A batch holds groups of p different classes; only the last batch has fewer. If one class has more groups than that
    leaves batches, an epoch has as many batches as that class has groups, and the groups are spread evenly over them: fewer
    than p classes each. Batches of large classes do not all come first: their order is random.

    Args:
        labels: the class of each sample: integers or strings.
        m: samples per class in a batch, at least 2.
        classes_per_batch: p; a batch has m · p samples, all ranks together, up to the groups of another size.
        singletons: what to do with classes of one sample, which has no positive: ``"raise"`` an error, ``"keep"`` them as
            negatives of the others, in groups of 1, or ``"drop"`` them.
        seed: see :class:`BaseBatchSampler`.
        rank_weights: each rank's share of a global batch; None is an even split.
        process_group: see :class:`BaseBatchSampler`.

    Raises:
        ValueError: m below 2, p below 1 or above the number of classes, no labels, singletons that are not to be there, or
            what the base class refuses.

    Examples:
        >>> from contrastive_zoo import World
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
        seed: int = 0,
        rank_weights: Sequence[float] | None = None,
        process_group: Processes = None,
    ) -> None:
        shape_problem = columns_problem([labels])
        (self._classes,), values = codes([labels if shape_problem is None else []])
        self.m, self.classes_per_batch, self.singletons = m, classes_per_batch, singletons
        counts = np.bincount(self._classes, minlength=len(values))
        problem = (
            shape_problem
            or size_problem("m", m, at_least=2)
            or size_problem("classes_per_batch", classes_per_batch)
            or _word_problem(singletons)
            or _classes_problem(counts, values, classes_per_batch, singletons)
        )
        settings = {"labels": self._classes, "m": m, "classes_per_batch": classes_per_batch, "singletons": singletons}
        super().__init__(settings, problem, seed=seed, rank_weights=rank_weights, process_group=process_group)
        self._counts = np.where(counts > 1, counts, 0) if singletons == "drop" else counts

    def global_batches(self, epoch: int) -> Batches:
        """Return batches of groups of different classes."""
        keys = random_keys(self.seed, epoch, np.arange(len(self._classes)))
        groups = np.maximum(self._counts // self.m + (self._counts % self.m >= 2), self._counts > 0)
        batches = _distinct(groups, self.classes_per_batch, random_keys(self.seed, epoch, np.arange(groups.sum()), 1))
        order = np.lexsort((keys, self._classes))  # class after class, shuffled
        classes = self._classes[order]
        starts = np.cumsum(np.bincount(classes, minlength=len(groups))) - np.bincount(classes, minlength=len(groups))
        group = np.minimum((np.arange(len(order)) - starts[classes]) // self.m, groups[classes] - 1)
        first = np.cumsum(groups) - groups
        batch_of = np.full(len(order), -1)
        used = groups[classes] > 0
        batch_of[order[used]] = batches[(first[classes] + group)[used]]
        return grouped(batch_of, keys)


def _distinct(groups: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the batch of each group, class after class, such that no batch holds two groups of a class.

    Each batch takes the classes with the most groups left, ties at random: the fewest batches that are possible. All full
    batches are then shuffled.
    """
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


def _word_problem(singletons: str) -> str | None:
    if singletons in ("raise", "keep", "drop"):
        return None
    return f"singletons is one of 'raise', 'keep', 'drop', got {singletons!r}."


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
