"""Where relevant items are in rankings, and the metrics that :func:`evaluate` defines, [n] each.

Ties count against the query: of items with equal scores those of the lowest grade come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
KNN = "knn_accuracy"


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

    def levels(self) -> Levels:
        """Return the levels of groups that hold every item of a score."""
        first = changes(self.query, self.score)
        query, tied = self.query[first], sums_between(self.size, first)
        return Levels(query, running_before(query, tied), tied, parts_of(first, len(self.query)))


NO_GROUPS = Groups(*np.zeros((4, 0), np.int64))


class Levels(NamedTuple):
    """Items of a query with equal scores; a group of items belongs to one level."""

    query: Ints
    higher: Ints  # items that score higher
    tied: Ints  # these items
    of_group: Ints  # [groups], the level of each group

    def runs(self, grade: Floats, number: Ints) -> Runs:
        """Return the places of relevant items, given the ascending grades and sizes of groups; a grade of 0 is none."""
        relevant = grade > 0
        level, grade, number = self.of_group[relevant], grade[relevant], number[relevant]
        irrelevant = self.tied - whole_sums(level, number, len(self.query))
        start = (self.higher + irrelevant)[level] + running_before(level, number)
        return Runs(self.query[level], start, number, grade)


class Runs(NamedTuple):
    """Relevant items of one grade at the places ``start + 1`` … ``start + number``, ordered by query and place."""

    query: Ints
    start: Ints
    number: Ints
    grade: Floats

    def within(self, cutoff: Ints) -> tuple[Ints, Ints, Floats]:
        """Return query, place and grade of each item up to the cutoff of its query."""
        inside = np.clip(cutoff[self.query] - self.start, 0, self.number)
        run = np.repeat(np.arange(len(inside)), inside)
        number = np.arange(len(run)) - np.repeat(inside.cumsum() - inside, inside) + 1
        return self.query[run], self.start[run] + number, self.grade[run]

    def gained(self, cutoff: Ints) -> Floats:
        """Return Σ grade / log2(1 + place) of each query."""
        query, place, grade = self.within(cutoff)
        return _sums(query, grade / np.log2(place + 1), len(cutoff))


@dataclass(frozen=True)
class Ranking:
    """The relevant items of n queries."""

    relevant: Runs
    ideal: Runs  # in the best order, with all relevant items of the whole gallery
    labels: Ints  # [n], labels of the queries, which the values of ``nearest`` are compared with; any with judgements
    nearest: Groups = NO_GROUPS  # all items that score at least the k-th of a query; none in a ranking of all places

    @property
    def total(self) -> Ints:
        """[n], relevant items of each query in the whole gallery."""
        return whole_sums(self.ideal.query, self.ideal.number, len(self.labels))


def changes(*columns: NDArray[np.generic]) -> Ints:
    """Return where a new combination of values begins."""
    new = np.logical_or.reduce([x[1:] != x[:-1] for x in columns])
    return np.concatenate([[0], np.flatnonzero(new) + 1]).astype(np.int64)[: len(columns[0])]


def parts_of(first: Ints, size: int) -> Ints:
    """Return for each of ``size`` elements the number of its part, given where parts begin."""
    return np.repeat(np.arange(len(first)), np.diff(np.append(first, size)))


def sums_between(x: Ints, first: Ints) -> Ints:
    """Return the sums of the parts of x that begin at ``first``."""
    return np.add.reduceat(x, first) if len(first) else x[:0]


def whole_sums(where: Ints, x: NDArray[Any], size: int) -> Ints:
    return _sums(where, x, size).astype(np.int64)  # exact below 2^53


def _sums(where: Ints, x: NDArray[Any], size: int) -> Floats:
    """Return the sums of x with equal ``where``, added in the order of x: the same bits for every split."""
    return np.asarray(np.bincount(where, weights=x, minlength=size), dtype=np.float64)


def running_before(where: Ints, x: Ints) -> Ints:
    """Return for each element the sum of earlier elements with the same ``where``, which is in ascending order."""
    before = x.cumsum() - x
    first = changes(where)
    return before - before[first][parts_of(first, len(x))]


def hits(ranking: Ranking, cutoff: Ints) -> Ints:
    """Return the number of relevant items among the first ``cutoff`` items."""
    return np.bincount(ranking.relevant.within(cutoff)[0], minlength=len(cutoff))


def reciprocal_rank(ranking: Ranking, cutoff: Ints) -> Floats:
    """Return 1 / place of the first relevant item; 0 if it is beyond the cutoff."""
    query, place, _ = ranking.relevant.within(cutoff)
    first, values = changes(query), np.zeros(len(cutoff))
    values[query[first]] = 1.0 / place[first]
    return values


def average_precision(ranking: Ranking, cutoff: Ints) -> Floats:
    """Return the sum of precisions at the relevant items within the cutoff, divided by the number of relevant items."""
    query, place, _ = ranking.relevant.within(cutoff)
    number = running_before(query, np.ones_like(query)) + 1
    return _sums(query, number / place, len(cutoff)) / np.maximum(ranking.total, 1)


def ndcg(ranking: Ranking, cutoff: Ints) -> Floats:
    """Return Σ grade / log2(1 + place) over the first ``cutoff`` items, divided by that of the best possible order."""
    best = ranking.ideal.gained(cutoff)
    return ranking.relevant.gained(cutoff) / np.where(best > 0, best, 1.0)


def knn_accuracy(ranking: Ranking, cutoff: Ints) -> Floats:
    """Return whether the label of the query has more votes than any other; all items that tie for the last place vote."""
    groups, labels = ranking.nearest, ranking.labels
    levels = groups.levels()
    votes = groups.size * (levels.higher < cutoff[levels.query])[levels.of_group]
    order = np.lexsort((groups.value, groups.query))
    query, value = groups.query[order], groups.value[order]
    first = changes(query, value)
    query, right, votes = query[first], (value == labels[query])[first], sums_between(votes[order], first)
    of_others = np.zeros(len(labels), dtype=np.int64)
    np.maximum.at(of_others, query[~right], votes[~right])
    return (whole_sums(query[right], votes[right], len(labels)) > of_others).astype(np.float64)


_AT_CUTOFF: dict[str, Callable[[Ranking, Ints], Floats]] = {
    "precision": lambda ranking, cutoff: hits(ranking, cutoff) / np.maximum(cutoff, 1),
    "recall": lambda ranking, cutoff: hits(ranking, cutoff) / np.maximum(ranking.total, 1),
    "hit_rate": lambda ranking, cutoff: (hits(ranking, cutoff) > 0).astype(np.float64),
    "map": average_precision,
    "mrr": reciprocal_rank,
    "ndcg": ndcg,
    KNN: knn_accuracy,
}

# metrics of all places: kind and cutoff, as of a Metric
_WHOLE = {"r_precision": ("precision", 0), "map@r": ("map", 0)} | {x: (x, None) for x in ("map", "mrr", "ndcg")}

NAMES = "precision@k, recall@k, hit_rate@k, r_precision, map, map@k, map@r, mrr, mrr@k, ndcg, ndcg@k, knn_accuracy@k"


@dataclass(frozen=True)
class Metric:
    """A metric by its name: ``kind`` without the cutoff k; k is None for all items, 0 for all relevant ones."""

    name: str
    kind: str
    k: int | None

    @classmethod
    def of(cls, name: str) -> Metric | None:
        if name in _WHOLE:
            return cls(name, *_WHOLE[name])
        kind, _, cutoff = str(name).partition("@")
        valid = kind in _AT_CUTOFF and cutoff.isdecimal() and int(cutoff) > 0
        return cls(name, kind, int(cutoff)) if valid else None

    def values(self, ranking: Ranking) -> Floats:
        """Return the value for each query of a ranking; NaN for a query without a relevant item, but for its neighbours."""
        beyond_all = np.iinfo(np.int64).max // 2
        total = ranking.total
        cutoff = total if self.k == 0 else np.full(len(total), self.k or beyond_all)
        values = _AT_CUTOFF[self.kind](ranking, cutoff).clip(0.0, 1.0)  # rounding may have moved some outside
        return np.where((total > 0) | (self.kind == KNN), values, np.nan)


def names_problem(names: Sequence[str]) -> str | None:
    if not isinstance(names, Sequence) or isinstance(names, (str, bytes)) or len(names) == 0:
        return f"metrics are a list of names, got {names!r}. Metrics: {NAMES}."
    unknown = [str(name) for name in names if not isinstance(name, str) or Metric.of(name) is None]
    return f"there is no metric {', '.join(unknown)}. Metrics: {NAMES}." if unknown else None
