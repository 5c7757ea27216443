"""Where relevant items are in rankings, up to the order of ties, and the metrics that :func:`evaluate` defines, [n] each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
KNN = "knn_accuracy"
Ties: TypeAlias = Literal["pessimistic", "optimistic", "expected"]


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


# of items of a query with equal score: the query, items that score higher, these items
Levels = tuple[Ints, Ints, Ints]
NO_GROUPS = Groups(*np.zeros((4, 0), np.int64))


def levels_of(groups: Groups) -> tuple[Levels, Ints]:
    """Return the levels of groups that hold every item of a score, and the level of each group."""
    first = changes(groups.query, groups.score)
    query, tied = groups.query[first], sums_between(groups.size, first)
    return (query, running_before(query, tied), tied), parts_of(first, len(groups.query))


class Graded(NamedTuple):
    """Relevant items with one grade, counted: the query or the level that they are of, the grade, and their number."""

    where: Ints
    grade: Floats
    number: Ints

    def ordered(self, *, best_first: bool) -> Graded:
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
    nearest: Groups  # all items that score at least the k-th of a query; none in a ranking of all positions
    labels: Ints  # [n], labels of the queries, which the values of ``nearest`` are compared with; none with judgements

    @classmethod
    def of(cls, levels: Levels, relevant: Graded, ideal: Graded, labels: Ints, nearest: Groups = NO_GROUPS) -> Ranking:
        used, where = np.unique(relevant.where, return_inverse=True)
        groups, total = Graded(where, *relevant[1:]), whole_sums(ideal.where, ideal.number, len(labels))
        query, higher, tied = (x[used] for x in levels)
        return cls(total, query, higher, tied, groups, ideal, nearest, labels)

    @cached_property
    def relevant(self) -> Ints:
        """[l], relevant items at each level."""
        return whole_sums(self.groups.where, self.groups.number, len(self.query))


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


def running_before(where: Ints, x: Ints) -> Ints:
    """Return for each element the sum of earlier elements with the same ``where``, which is in ascending order."""
    before = x.cumsum() - x
    first = changes(where)
    return before - before[first][parts_of(first, len(x))]


def hits(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return the number of relevant items among the first ``cutoff`` items."""
    if ties == "expected":
        at_level = ranking.relevant * _places(ranking, cutoff) / ranking.tied
    else:
        at_level = np.clip(cutoff[ranking.query] - _before(ranking, ties), 0, ranking.relevant).astype(np.float64)
    return _sums(ranking.query, at_level, len(ranking.total))


def hit_rate(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    if ties != "expected":
        return (hits(ranking, cutoff, ties) > 0).astype(np.float64)
    # of t ties, r of them relevant and p of them within the cutoff, none is with probability C(t − r, p) / C(t, p)
    places, result = _places(ranking, cutoff), ranking.relevant
    few, many = np.minimum(places, result), np.maximum(places, result)
    none = np.ones(len(places))
    for i in range(int(few.max(initial=0))):
        none *= np.where(i < few, np.maximum(0, ranking.tied - many - i) / np.maximum(1, ranking.tied - i), 1.0)
    miss = np.ones(len(ranking.total))
    np.multiply.at(miss, ranking.query, none)
    return 1.0 - miss


def reciprocal_rank(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return 1 / position of the first relevant item; 0 if it is beyond the cutoff."""
    first = changes(ranking.query)
    query, value = ranking.query[first], np.zeros(len(ranking.total))
    if ties != "expected":
        position = _before(ranking, ties)[first] + 1
        value[query] = np.where(position <= cutoff[query], 1.0 / position, 0.0)
    elif len(query):
        higher, tied, result = ranking.higher[first], ranking.tied[first], ranking.relevant[first]
        cases = np.stack([higher, tied, result, np.minimum(cutoff[query], higher + tied)])
        cases, which = np.unique(cases, axis=1, return_inverse=True)
        value[query] = np.array([_expected_reciprocal(*map(int, case)) for case in cases.T])[which.reshape(-1)]
    return value


def average_precision(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return the sum of precisions at the relevant items within the cutoff, divided by the number of relevant items."""
    result, higher = ranking.relevant, ranking.higher
    above = running_before(ranking.query, result)
    if ties != "expected":
        start = _before(ranking, ties)
        level, number = _within(start, result, cutoff[ranking.query])
        query, values = ranking.query[level], (above[level] + number) / (start[level] + number)
    else:
        # McSherry & Najork 2008, equation 7, https://doi.org/10.1007/978-3-540-78646-7_38
        query, places = ranking.query, _places(ranking, cutoff)
        harmonic = _inverse_sums(higher, places)
        others = (result - 1) / np.maximum(1, ranking.tied - 1)
        values = result / ranking.tied * ((above + 1) * harmonic + others * (places - (higher + 1) * harmonic))
    return _sums(query, values, len(ranking.total)) / np.maximum(ranking.total, 1)


def ndcg(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return Σ grade / log2(1 + position) over the first ``cutoff`` items, divided by that of the best possible order."""
    level, grade, count = ranking.groups.ordered(best_first=ties == "optimistic")
    if ties == "expected":
        mean = _sums(level, grade * count, len(ranking.query)) / ranking.tied
        gained = _gained(ranking.query, mean, ranking.higher, ranking.tied, cutoff)
    else:
        start = _before(ranking, ties)[level] + running_before(level, count)
        gained = _gained(ranking.query[level], grade, start, count, cutoff)
    query, grade, count = ranking.ideal.ordered(best_first=True)
    best = _gained(query, grade, running_before(query, count), count, cutoff)
    return gained / np.where(best > 0, best, 1.0)


def knn_accuracy(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return whether most of the k nearest items have the label of the query.

    Items that tie for the last places share them equally. Of labels with equally many votes ``"pessimistic"`` chooses a
    wrong one, ``"optimistic"`` the right one, ``"expected"`` each with the same probability.
    """
    groups, labels = ranking.nearest, ranking.labels
    (of_level, higher, tied), level = levels_of(groups)
    places = np.clip(cutoff[of_level] - higher, 0, tied)
    # votes are counted in units of 1 / (items that tie for the last places), so that they are integers
    unit = np.ones(len(labels), dtype=np.int64)
    partial = (places > 0) & (places < tied)
    unit[of_level[partial]] = tied[partial]
    share = np.where(partial, places, (places > 0) * unit[of_level])[level]
    order = np.lexsort((groups.value, groups.query))
    query, value, votes = groups.query[order], groups.value[order], (groups.size * share)[order]
    start = changes(query, value)
    voter, label, votes = query[start], value[start], sums_between(votes, start)
    most = np.zeros(len(labels), dtype=np.int64)
    np.maximum.at(most, voter, votes)
    wins = votes == most[voter]
    winners = whole_sums(voter, wins, len(labels))
    right = whole_sums(voter, wins & (label == labels[voter]), len(labels))
    if ties == "pessimistic":
        return ((right == 1) & (winners == 1)).astype(np.float64)
    chosen: Floats = right / (np.maximum(winners, 1) if ties == "expected" else 1)
    return chosen


def _places(ranking: Ranking, cutoff: Ints) -> Ints:
    """Return how many items of each level are within the cutoff."""
    return np.clip(cutoff[ranking.query] - ranking.higher, 0, ranking.tied)


def _before(ranking: Ranking, ties: Ties) -> Ints:
    """Return how many items are before the first relevant one of each level."""
    return ranking.higher + (ranking.tied - ranking.relevant) * (ties == "pessimistic")


def _sums(where: Ints, x: NDArray[Any], size: int) -> Floats:
    """Return the sums of x with equal ``where``, added in the order of x: the same bits for every split."""
    return np.asarray(np.bincount(where, weights=x, minlength=size), dtype=np.float64)


def _within(start: Ints, count: Ints, cutoff: Ints) -> tuple[Ints, Ints]:
    """Return owner and number, from 1, of all items at positions ``start + 1 … start + count`` up to the cutoff."""
    inside = np.clip(cutoff - start, 0, count)
    owner = np.repeat(np.arange(len(inside)), inside)
    return owner, np.arange(len(owner)) - np.repeat(inside.cumsum() - inside, inside) + 1


def _gained(query: Ints, grade: Floats, start: Ints, count: Ints, cutoff: Ints) -> Floats:
    """Return the discounted gain of each query: groups of items with one grade, at the positions after ``start``."""
    owner, number = _within(start, count, cutoff[query])
    return _sums(query[owner], grade[owner] / np.log2(start[owner] + number + 1), len(cutoff))


def _inverse_sums(higher: Ints, places: Ints) -> Floats:
    """Return Σ 1 / (higher + i) over i = 1 … places."""
    cases, which = np.unique(np.stack([higher, places]), axis=1, return_inverse=True)
    owner, number = _within(cases[0], cases[1], cases[0] + cases[1])
    return _sums(owner, 1.0 / (cases[0][owner] + number), cases.shape[1])[which.reshape(-1)]


def _expected_reciprocal(higher: int, tied: int, relevant: int, limit: int) -> float:
    """Return the mean of 1 / position of the first of ``relevant`` relevant items among ``tied`` in random order."""
    last = min(tied - relevant + 1, limit - higher)
    if last < 1:
        return 0.0
    i = np.arange(last)
    none_before = np.concatenate([[1.0], np.cumprod((tied - relevant - i[:-1]) / (tied - i[:-1]))])
    return float(np.sum(none_before * relevant / (tied - i) / (higher + i + 1)))


_AT_CUTOFF: dict[str, Callable[[Ranking, Ints, Ties], Floats]] = {
    "precision": lambda ranking, cutoff, ties: hits(ranking, cutoff, ties) / np.maximum(cutoff, 1),
    "recall": lambda ranking, cutoff, ties: hits(ranking, cutoff, ties) / np.maximum(ranking.total, 1),
    "hit_rate": hit_rate,
    "map": average_precision,
    "mrr": reciprocal_rank,
    "ndcg": ndcg,
    KNN: knn_accuracy,
}

# metrics of all positions: kind and cutoff, as of a Metric
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

    @property
    def whole(self) -> bool:
        """Whether the positions of relevant items count wherever they are."""
        return not self.k

    def values(self, ranking: Ranking, ties: Ties) -> Floats:
        """Return the value for each query of a ranking; NaN for a query without a relevant item, but for its neighbours."""
        beyond_all = np.iinfo(np.int64).max // 2
        cutoff = ranking.total if self.k == 0 else np.full(len(ranking.total), self.k or beyond_all)
        values = _AT_CUTOFF[self.kind](ranking, cutoff, ties).clip(0.0, 1.0)  # rounding may have moved some outside
        return np.where((ranking.total > 0) | (self.kind == KNN), values, np.nan)


def names_problem(names: Sequence[str]) -> str | None:
    if not isinstance(names, (list, tuple)) or len(names) == 0:
        return f"metrics are a list of names, got {names!r}. Metrics: {NAMES}."
    unknown = [str(name) for name in names if not isinstance(name, str) or Metric.of(name) is None]
    return f"there is no metric {', '.join(unknown)}. Metrics: {NAMES}." if unknown else None
