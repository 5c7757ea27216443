"""Where the relevant items of a query are in its ranking, up to the order of ties."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Groups(NamedTuple):
    """Items of a query with equal score and value, such as a label or a grade, counted; one array each."""

    query: Ints
    score: Floats
    value: NDArray[Any]
    size: Ints

    @classmethod
    def joined(cls, parts: list[Groups]) -> Groups:
        """Return the groups of several ranks, merged and ordered by query, falling score, and value."""
        columns = [np.concatenate(x) for x in zip(*parts, strict=True)]
        order = np.lexsort((columns[2], -columns[1], columns[0]))
        query, score, value, count = (x[order] for x in columns)
        first = changes(query, score, value)
        return cls(query[first], score[first], value[first], sums_between(count, first))


class Levels(NamedTuple):
    """Items of a query with equal score: how many score higher, and how many there are."""

    query: Ints
    higher: Ints
    tied: Ints


def levels_of(groups: Groups) -> tuple[Levels, Ints]:
    """Return the levels of groups that hold every item of a score, and the level of each group."""
    first = changes(groups.query, groups.score)
    query, tied = groups.query[first], sums_between(groups.size, first)
    return Levels(query, running_before(query, tied), tied), parts_of(first, len(groups.query))


class Graded(NamedTuple):
    """Relevant items with one grade, counted: the query or the level that they are of, the grade, and their number."""

    where: Ints
    grade: Floats
    number: Ints

    def ordered(self, *, best_first: bool) -> Graded:
        """Return the same by ascending ``where``, and then by grade."""
        order = np.lexsort((-self.grade if best_first else self.grade, self.where))
        return Graded(self.where[order], self.grade[order], self.number[order])


@dataclass(frozen=True)
class Ranking:
    """The levels of n queries: items with one score, of which at least one is relevant; best first, ordered by query."""

    total: Ints  # [n], relevant items of each query in the whole gallery
    query: Ints  # [l], the query of each level
    higher: Ints  # [l], items with a higher score
    tied: Ints  # [l], items with this score
    groups: Graded  # relevant items by level, ascending
    ideal: Graded  # all relevant items by query

    @classmethod
    def of(cls, levels: Levels, relevant: Graded, ideal: Graded, queries: int) -> Ranking:
        """Return the ranking of n queries, given relevant items by level.

        Raises:
            AssertionError: more relevant items than items at a level, or than the query has: they were counted wrongly.
        """
        used, where = np.unique(relevant.where, return_inverse=True)
        groups, total = Graded(where, *relevant[1:]), whole_sums(ideal.where, ideal.number, queries)
        ranking = cls(total, levels.query[used], levels.higher[used], levels.tied[used], groups, ideal)
        ranked = whole_sums(ranking.query, ranking.relevant, queries)
        if (ranking.relevant > ranking.tied).any() or (ranked > total).any():
            raise AssertionError("a query ranks more relevant items than there are. Please report this.")
        return ranking

    @property
    def queries(self) -> int:
        return len(self.total)

    @cached_property
    def relevant(self) -> Ints:
        """[l], relevant items at each level."""
        return whole_sums(self.groups.where, self.groups.number, len(self.query))


def changes(*columns: NDArray[np.generic]) -> Ints:
    """Return where a new combination of values begins."""
    if len(columns[0]) == 0:
        return np.zeros(0, dtype=np.int64)
    new = np.logical_or.reduce([x[1:] != x[:-1] for x in columns])
    return np.concatenate([[0], np.flatnonzero(new) + 1]).astype(np.int64)


def parts_of(first: Ints, size: int) -> Ints:
    """Return for each of ``size`` elements the number of its part, given where parts begin."""
    return np.repeat(np.arange(len(first)), np.diff(np.append(first, size)))


def sums_between(x: Ints, first: Ints) -> Ints:
    """Return the sums of the parts of x that begin at ``first``."""
    return np.add.reduceat(x, first) if len(first) else x[:0]


def whole_sums(where: Ints, x: Ints, size: int) -> Ints:
    return np.bincount(where, weights=x, minlength=size).astype(np.int64)  # exact below 2^53


def running_before(where: Ints, x: Ints) -> Ints:
    """Return for each element the sum of earlier elements with the same ``where``, which is in ascending order."""
    before = x.cumsum() - x
    first = changes(where)
    return before - before[first][parts_of(first, len(x))]
