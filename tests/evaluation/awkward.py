"""Small evaluations whose inputs are drawn to break bounds, each a function of one integer, and their metrics by hand."""

import itertools
import math
from collections import Counter

import torch

TIES = ("pessimistic", "optimistic", "expected")
AT_K = ("precision", "recall", "hit_rate", "map", "mrr", "ndcg")
WHOLE = ("r_precision", "map", "map@r", "mrr", "ndcg")


def awkward(seed):
    draw = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw)

    def one_of(*values):
        return values[integers(0, len(values)).item()]

    relevant, alone = one_of("labels", "labels", "judgements", "judgements", "partners"), one_of(False, True)
    alone = alone and relevant != "partners"
    n, m = integers(2, 9).item(), integers(2, 9).item()
    m = n if alone or relevant == "partners" else m
    sizes = (n,) if alone else (n, m)
    if collapsed := one_of(False, True):
        dtype, direction = one_of(torch.float32, torch.float64), torch.randn(1, 9, generator=draw)
        signs = [integers(-1, 2, size, 1).double() for size in sizes]
        rows = [(x * direction * 10 ** (8 * torch.rand(x.shape, generator=draw) - 4)).to(dtype) for x in signs]
    else:
        signs = [integers(-1, 2, size, 3).double() for size in sizes]
        rows = [x * one_of(1.0, 2.0**-480, 2.0**500) for x in signs]
    scores, grades = signs[0] @ signs[-1].T, torch.eye(n, m).double()
    labels, ids = integers(0, 3, n), integers(-5, 5).item() + torch.randperm(n, generator=draw)
    others, items = (labels, ids) if alone else (integers(0, 3, m), torch.randperm(m, generator=draw))
    of, ignored = {"queries": rows[0], "gallery": rows[-1]}, None
    if relevant == "labels":
        grades, ignored = (labels[:, None] == others).double(), one_of(None, 2)
        of |= {"labels": labels, "gallery_labels": others}
    elif relevant == "judgements":
        grades = torch.tensor([-1.0, 0.0, 0.0, 1.0, 2.5])[integers(0, 5, n, m)].double()
        query, item = (grades != 0).nonzero(as_tuple=True)
        judgements = ids[query], items[item], grades[query, item]
        grades[grades < 0] = math.nan
    if alone:
        grades.fill_diagonal_(math.nan)
    if relevant == "judgements" or (relevant == "labels" and one_of(False, True)):
        of |= {"ids": ids, "gallery_ids": items}
        again = [torch.cat([torch.arange(size), integers(0, size, 3)]) for size in sizes]
        of = {name: x[again[-1 if "gallery" in name else 0]] for name, x in of.items()}
    if alone:
        of = {name: x for name, x in of.items() if "gallery" not in name}
    of |= {"judgements": judgements} if relevant == "judgements" else {"ignore_label": ignored}
    kept = [x != ignored if ignored else torch.ones_like(x, dtype=torch.bool) for x in (labels, others)]
    scores, grades = (x[kept[0]][:, kept[1]] for x in (scores, grades))
    of |= {"ties": one_of(*TIES[: 3 if m < 6 else 2]), "normalize": collapsed}
    candidates = scores.shape[1] - alone
    k = [integers(1, candidates + 1).item() for _ in AT_K] if candidates > 0 else []
    names = [*WHOLE, *(f"{name}@{number}" for name, number in zip(AT_K, k, strict=bool(k)))]
    expected = {name: metric_by_hand(name, scores, grades, of["ties"]) for name in names}
    if k and relevant == "labels":
        votes = scores.masked_fill(grades.isnan(), -math.inf), others[kept[1]], labels[kept[0]]
        expected[f"knn_accuracy@{k[0]}"] = knn_accuracy_by_hand(*votes, k[0], of["ties"])
    return of | {"metrics": list(expected)}, expected


# Metrics by enumerating orders of ties, one query at a time, in plain Python.


def value_of(name, ranked):
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
    sign = {"pessimistic": 1, "optimistic": -1, "expected": 0}[ties]
    items = sorted(zip(scores, grades, strict=True), key=lambda x: (-x[0], sign * x[1]))
    levels = [[grade for _, grade in level] for _, level in itertools.groupby(items, key=lambda x: x[0])]
    choices = [levels] if sign else itertools.product(*map(itertools.permutations, levels))
    return ([grade for level in choice for grade in level] for choice in choices)


def metric_by_hand(name, scores, grades, ties="pessimistic"):
    """Return the mean over the queries with a relevant item; a grade of NaN is an item that does not count."""
    values = []
    for row, of_row in zip(scores.tolist(), grades.tolist(), strict=True):
        counted = [(score, grade) for score, grade in zip(row, of_row, strict=True) if not math.isnan(grade)]
        if any(grade > 0 for _, grade in counted):
            found = [value_of(name, ranked) for ranked in orders(*zip(*counted, strict=True), ties)]
            values.append(sum(found) / len(found))
    return sum(values) / len(values) if values else math.nan


def knn_accuracy_by_hand(scores, labels, own, k, ties):
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
