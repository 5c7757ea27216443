"""Retrieval metrics of one query each, as functions of a ranking with ties.

Each takes the ranking of n queries, a cutoff per query where it has one, and what ties mean: ``"pessimistic"`` (irrelevant
items come first), ``"optimistic"`` (relevant ones first, the most relevant before) or ``"expected"`` (the mean over all
orders of ties). Each returns [n] values from 0 to 1; where a query has no relevant item the value has no meaning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Optional, TypeAlias

import numpy as np

from contrastive_zoo.metrics.ranking import Floats, Groups, Ints, Ranking, changes, running_before, whole_sums

Ties: TypeAlias = Literal["pessimistic", "optimistic", "expected"]


def hits(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return the number of relevant items among the first ``cutoff`` items."""
    places = _places(ranking, cutoff)
    result = ranking.relevant
    if ties == "pessimistic":
        at_level = np.maximum(0, places - (ranking.tied - result)).astype(np.float64)
    elif ties == "optimistic":
        at_level = np.minimum(places, result).astype(np.float64)
    else:
        at_level = result * places / ranking.tied
    return _sums(ranking.query, at_level, ranking.queries)


def precision(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return the share of relevant items among the first ``cutoff`` items.

    Examples:
        >>> ranking = Ranking.of_items(scores=[0.9, 0.5, 0.5], grades=[0, 1, 0])
        >>> [precision(ranking, np.array([2]), ties).item() for ties in ("pessimistic", "optimistic", "expected")]
        [0.0, 0.5, 0.25]
    """
    return hits(ranking, cutoff, ties) / np.maximum(cutoff, 1)


def recall(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return the share of the relevant items that are among the first ``cutoff`` items.

    Examples:
        >>> recall(Ranking.of_items(scores=[0.9, 0.5, 0.1], grades=[0, 1, 1]), np.array([2]), "pessimistic")
        array([0.5])
    """
    return hits(ranking, cutoff, ties) / np.maximum(ranking.total, 1)


def hit_rate(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return whether a relevant item is among the first ``cutoff`` items: the "recall@k" of metric learning.

    Its expected value over the orders of t ties, r of them relevant and p of them within the cutoff, is
    ``1 − C(t − r, p) / C(t, p)``.

    Examples:
        >>> ranking = Ranking.of_items(scores=[0.9, 0.5, 0.5], grades=[0, 1, 0])
        >>> [hit_rate(ranking, np.array([2]), ties).item() for ties in ("pessimistic", "optimistic", "expected")]
        [0.0, 1.0, 0.5]
    """
    if ties != "expected":
        return (hits(ranking, cutoff, ties) > 0).astype(np.float64)
    places, result = _places(ranking, cutoff), ranking.relevant
    few, many = np.minimum(places, result), np.maximum(places, result)
    none = np.ones(len(places))
    for i in range(int(few.max(initial=0))):
        none *= np.where(i < few, np.maximum(0, ranking.tied - many - i) / np.maximum(1, ranking.tied - i), 1.0)
    miss = np.ones(ranking.queries)
    np.multiply.at(miss, ranking.query, none)
    return 1.0 - miss


def reciprocal_rank(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return 1 / position of the first relevant item; 0 if it is beyond the cutoff.

    Examples:
        >>> reciprocal_rank(Ranking.of_items(scores=[0.9, 0.5, 0.1], grades=[0, 1, 1]), np.array([3]), "pessimistic")
        array([0.5])

    Source: Voorhees 1999, The TREC-8 question answering track report, https://trec.nist.gov/pubs/trec8/papers/qa_report.pdf
    """
    first = changes(ranking.query)
    query, higher, tied = ranking.query[first], ranking.higher[first], ranking.tied[first]
    result, limit = ranking.relevant[first], cutoff[query]
    value = np.zeros(ranking.queries)
    if ties != "expected":
        position = higher + 1 + (tied - result) * (ties == "pessimistic")
        value[query] = np.where(position <= limit, 1.0 / position, 0.0)
        return value
    cases, which = np.unique(
        np.stack([higher, tied, result, np.minimum(limit, higher + tied)]), axis=1, return_inverse=True
    )
    by_case = np.array([_expected_reciprocal(*map(int, case)) for case in cases.T])
    value[query] = by_case[which.reshape(-1)] if len(query) else 0.0
    return value


def average_precision(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return the sum of precisions at the relevant items within the cutoff, divided by the number of relevant items.

    With ``cutoff`` R, the number of relevant items, this is MAP@R (Musgrave et al. 2020); without a cutoff, MAP. The
    expected value over the orders of ties is that of McSherry and Najork 2008, equation 7
    (https://doi.org/10.1007/978-3-540-78646-7_38).

    Examples:
        >>> ranking = Ranking.of_items(scores=[0.9, 0.5, 0.1, 0.0], grades=[0, 1, 0, 1])
        >>> average_precision(ranking, np.array([4]), "pessimistic")   # (1/2 + 2/4) / 2
        array([0.5])

    Source: MAP@R: Musgrave et al. 2020, https://arxiv.org/abs/2003.08505
    """
    result, higher = ranking.relevant, ranking.higher
    above = running_before(ranking.query, result)
    total = np.maximum(ranking.total, 1)
    if ties != "expected":
        start = higher + (ranking.tied - result) * (ties == "pessimistic")
        level, number = _within(start, result, cutoff[ranking.query])
        values = (above[level] + number) / (start[level] + number)
        return _sums(ranking.query[level], values, ranking.queries) / total
    places = _places(ranking, cutoff)
    harmonic = _inverse_sums(higher, places)
    others = (result - 1) / np.maximum(1, ranking.tied - 1)
    values = result / ranking.tied * ((above + 1) * harmonic + others * (places - (higher + 1) * harmonic))
    return _sums(ranking.query, values, ranking.queries) / total


def ndcg(ranking: Ranking, cutoff: Ints, ties: Ties) -> Floats:
    """Return Σ grade / log2(1 + position) over the first ``cutoff`` items, divided by that of the best possible order.

    Grades are used as they are; for the exponential gain of Burges et al. 2005 pass ``2^grade − 1`` as grades.

    Examples:
        >>> ndcg(Ranking.of_items(scores=[0.9, 0.5], grades=[0, 1]), np.array([2]), "pessimistic")   # 1 / log2(3)
        array([0.63092975])

    Source: Järvelin & Kekäläinen 2002, https://doi.org/10.1145/582415.582418
    """
    limit = cutoff[ranking.query]
    if ties == "expected":
        gain = _sums(ranking.level, ranking.grade * ranking.count, len(ranking.query)) / ranking.tied
        owner, number = _within(ranking.higher, ranking.tied, limit)
        gained = _sums(ranking.query[owner], gain[owner] / np.log2(ranking.higher[owner] + number + 1), ranking.queries)
    else:
        order = np.lexsort((ranking.grade if ties == "pessimistic" else -ranking.grade, ranking.level))
        level, grade, count = ranking.level[order], ranking.grade[order], ranking.count[order]
        worst = (ranking.tied - ranking.relevant) * (ties == "pessimistic")
        start = (ranking.higher + worst)[level] + running_before(level, count)
        gained = _gained(ranking.query[level], grade, start, count, limit[level], ranking.queries)
    order = np.lexsort((-ranking.ideal_grade, ranking.ideal_query))
    query, grade, count = ranking.ideal_query[order], ranking.ideal_grade[order], ranking.ideal_count[order]
    best = _gained(query, grade, running_before(query, count), count, cutoff[query], ranking.queries)
    return gained / np.where(best > 0, best, 1.0)


def knn_accuracy(groups: Groups, labels: Ints, k: int, ties: Ties) -> Floats:
    """Return whether most of the k nearest items have the label of the query.

    Items that tie for the last places share them equally, whatever ``ties`` says. Of labels with equally many votes
    ``"pessimistic"`` chooses a wrong one, ``"optimistic"`` the right one, ``"expected"`` each with the same probability.

    Args:
        groups: the groups of all items whose score is at least the k-th.
        labels: [n], of the queries.
        k: number of neighbours.
        ties: what ties mean.

    Examples:
        >>> one = np.ones(3, dtype=np.int64)
        >>> groups = Groups(query=0 * one, score=np.array([0.9, 0.8, 0.7]), value=np.array([5, 7, 7]), size=one)
        >>> knn_accuracy(groups, np.array([7]), 3, "pessimistic")
        array([1.])
    """
    first = changes(groups.query, groups.score)
    sizes = np.diff(np.append(first, len(groups.query)))
    tied = np.add.reduceat(groups.size, first) if len(first) else first
    higher = running_before(groups.query[first], tied)
    places = np.clip(k - higher, 0, tied)
    # votes are counted in units of 1 / (items that tie for the last places), so that they are integers
    unit = np.ones(len(labels), dtype=np.int64)
    partial = (places > 0) & (places < tied)
    unit[groups.query[first][partial]] = tied[partial]
    share = np.repeat(np.where(partial, places, (places > 0) * unit[groups.query[first]]), sizes)
    order = np.lexsort((groups.value, groups.query))
    query, value, votes = groups.query[order], groups.value[order], (groups.size * share)[order]
    start = changes(query, value)
    voter, label = query[start], value[start]
    votes = np.add.reduceat(votes, start) if len(start) else votes
    most = np.zeros(len(labels), dtype=np.int64)
    np.maximum.at(most, voter, votes)
    winners = whole_sums(voter, (votes == most[voter]).astype(np.int64), len(labels))
    right = whole_sums(voter, ((votes == most[voter]) & (label == labels[voter])).astype(np.int64), len(labels))
    if ties == "pessimistic":
        return ((right == 1) & (winners == 1)).astype(np.float64)
    chosen: Floats = right / (np.maximum(winners, 1) if ties == "expected" else 1)
    return chosen


def _places(ranking: Ranking, cutoff: Ints) -> Ints:
    """Return how many items of each level are within the cutoff."""
    return np.clip(cutoff[ranking.query] - ranking.higher, 0, ranking.tied)


def _sums(where: Ints, x: Floats, size: int) -> Floats:
    """Return the sums of x with equal ``where``, added in the order of x: the same bits for every split."""
    return np.asarray(np.bincount(where, weights=x, minlength=size), dtype=np.float64)


def _within(start: Ints, count: Ints, cutoff: Ints) -> tuple[Ints, Ints]:
    """Return owner and number, from 1, of all items at positions ``start + 1 … start + count`` up to the cutoff."""
    inside = np.clip(cutoff - start, 0, count)
    owner = np.repeat(np.arange(len(inside)), inside)
    return owner, np.arange(len(owner)) - np.repeat(inside.cumsum() - inside, inside) + 1


def _gained(query: Ints, grade: Floats, start: Ints, count: Ints, cutoff: Ints, queries: int) -> Floats:
    """Return the discounted gain of each query: groups of items with one grade, at the positions after ``start``."""
    owner, number = _within(start, count, cutoff)
    return _sums(query[owner], grade[owner] / np.log2(start[owner] + number + 1), queries)


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
    "precision": precision,
    "recall": recall,
    "hit_rate": hit_rate,
    "map": average_precision,
    "mrr": reciprocal_rank,
    "ndcg": ndcg,
}
"""Functions of a ranking and a cutoff per query, by name."""

KNN = "knn_accuracy"

NAMES = "precision@k, recall@k, hit_rate@k, r_precision, map, map@k, map@r, mrr, mrr@k, ndcg, ndcg@k, knn_accuracy@k"
"""What users may write, k being a number."""


@dataclass(frozen=True)
class Metric:
    """A metric by its name: ``kind`` without the cutoff k; k is None for all items, 0 for all relevant ones."""

    name: str
    kind: str
    k: int | None

    @classmethod
    def of(cls, name: str) -> Optional["Metric"]:
        kind, at, cutoff = str(name).partition("@")
        if name == "r_precision":
            return cls(name, "precision", 0)
        if not at:
            return cls(name, kind, None) if kind in ("map", "mrr", "ndcg") else None
        if cutoff == "r":
            return cls(name, kind, 0) if kind == "map" else None
        valid = (kind in _AT_CUTOFF or kind == KNN) and cutoff.isdecimal() and int(cutoff) > 0
        return cls(name, kind, int(cutoff)) if valid else None

    @property
    def whole(self) -> bool:
        """Whether the positions of relevant items count wherever they are."""
        return not self.k

    def values(self, ranking: Ranking, ties: Ties) -> Floats:
        """Return the value for each query of a ranking; NaN for a query without a relevant item."""
        if self.k is None:
            cutoff = np.full(ranking.queries, np.iinfo(np.int64).max // 2)
        else:
            cutoff = np.full(ranking.queries, self.k) if self.k else ranking.total
        values, counts = _AT_CUTOFF[self.kind](ranking, cutoff, ties), ranking.total > 0
        return np.where(counts, bounded(self.name, np.where(counts, values, 0.0)), np.nan)


def bounded(name: str, values: Floats) -> Floats:
    """Return values of a metric from 0 to 1, of which rounding may have moved some outside.

    Raises:
        AssertionError: a value is further outside, or NaN: the library has computed it wrongly.
    """
    if not (inside := np.abs(values - 0.5) <= 0.5 + 1e-9).all():
        raise AssertionError(f"{name} of a query must be 0 to 1, got {values[~inside][0]}. Please report this.")
    return values.clip(0.0, 1.0)


def names_problem(names: Sequence[str]) -> str | None:
    if not isinstance(names, (list, tuple)) or len(names) == 0:
        return f"metrics are a list of names, got {names!r}. Metrics: {NAMES}."
    unknown = [str(name) for name in names if not isinstance(name, str) or Metric.of(name) is None]
    return f"there is no metric {', '.join(unknown)}. Metrics: {NAMES}." if unknown else None
