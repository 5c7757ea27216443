"""Metrics by enumerating orders of ties, one query at a time, in plain Python."""

import itertools
import math
from collections import Counter


def value_of(name, ranked):
    """Return a metric of one ranking: the grades of its items, best score first."""
    kind, _, cutoff = name.partition("@")
    relevant = [position for position, grade in enumerate(ranked, 1) if grade > 0]
    total = len(relevant)
    k = total if cutoff == "r" or kind == "r_precision" else int(cutoff or len(ranked))
    inside = [position for position in relevant if position <= k]
    if kind in ("precision", "r_precision"):
        return len(inside) / k
    if kind == "recall":
        return len(inside) / total
    if kind == "hit_rate":
        return float(bool(inside))
    if kind == "map":
        return sum(number / position for number, position in enumerate(inside, 1)) / total
    if kind == "mrr":
        return 1 / inside[0] if inside else 0.0
    assert kind == "ndcg"
    gained, best = (
        sum(grade / math.log2(position + 1) for position, grade in enumerate(order[:k], 1))
        for order in (ranked, sorted(ranked, reverse=True))
    )
    return gained / best


def orders(scores, grades, ties):
    """Yield the orders that count: all orders of ties, or the worst or best one."""
    sign = {"pessimistic": 1, "optimistic": -1, "expected": 0}[ties]
    items = sorted(zip(scores, grades, strict=True), key=lambda x: (-x[0], sign * x[1]))
    levels = [[grade for _, grade in level] for _, level in itertools.groupby(items, key=lambda x: x[0])]
    choices = [levels] if sign else itertools.product(*map(itertools.permutations, levels))
    return ([grade for level in choice for grade in level] for choice in choices)


def metric(name, scores, grades, ties="pessimistic"):
    """Return the mean over the queries with a relevant item; a grade of NaN is an item that does not count."""
    values = []
    for row, of_row in zip(scores.tolist(), grades.tolist(), strict=True):
        counted = [(score, grade) for score, grade in zip(row, of_row, strict=True) if not math.isnan(grade)]
        if any(grade > 0 for _, grade in counted):
            found = [value_of(name, ranked) for ranked in orders(*zip(*counted, strict=True), ties)]
            values.append(sum(found) / len(found))
    return sum(values) / len(values) if values else math.nan


def knn_accuracy(scores, labels, own, k, ties):
    """Return the share of queries whose k nearest mostly have the right label; −∞ is an item that does not count."""
    right = {
        "pessimistic": lambda winners, label: float(winners == [label]),
        "optimistic": lambda winners, label: float(label in winners),
        "expected": lambda winners, label: (label in winners) / len(winners),
    }
    values = []
    for row, label in zip(scores.tolist(), own.tolist(), strict=True):
        kth = sorted(row, reverse=True)[k - 1]
        above = Counter(y for s, y in zip(row, labels.tolist(), strict=True) if s > kth)
        tied = Counter(y for s, y in zip(row, labels.tolist(), strict=True) if s == kth)
        # votes times the number of ties, so that they are integers
        votes = {y: above[y] * tied.total() + tied[y] * (k - above.total()) for y in above | tied}
        winners = [y for y in votes if votes[y] == max(votes.values())]
        values.append(right[ties](winners, label))
    return sum(values) / len(values) if values else math.nan
