"""Small evaluations whose inputs are drawn to break bounds, each a function of one integer, and their metrics by hand."""

import math

import torch

from tests.evaluation import by_hand

TIES = ("pessimistic", "optimistic", "expected")
AT_K = ("precision", "recall", "hit_rate", "map", "mrr", "ndcg")
WHOLE = ("r_precision", "map", "map@r", "mrr", "ndcg")


def awkward(seed):
    """Return arguments of ``evaluate`` on one process, and the metrics that it must find.

    Rows have few different scores, as integers of any size or as one collapsed direction of any length. Queries are judged
    about themselves, ignore rows, or have no relevant row. Labels are ignored, and samples repeated.
    """
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
    expected = {name: by_hand.metric(name, scores, grades, of["ties"]) for name in names}
    if k and relevant == "labels":
        votes = scores.masked_fill(grades.isnan(), -math.inf), others[kept[1]], labels[kept[0]]
        expected[f"knn_accuracy@{k[0]}"] = by_hand.knn_accuracy(*votes, k[0], of["ties"])
    return of | {"metrics": list(expected)}, expected
