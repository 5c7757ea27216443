"""Small evaluations whose inputs are drawn to break bounds, each a function of one integer, and their metrics by hand."""

import math

import torch

from tests.evaluation import by_hand

TIES = ("pessimistic", "optimistic", "expected")


def awkward(seed):
    """Return arguments of ``evaluate`` on one process, and the scores and grades of its queries.

    Rows have few different scores, as integers of any size or as one collapsed direction of any length. Queries are judged
    about themselves, ignore rows, or have no relevant row.
    """
    draw = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw)

    def one_of(*values):
        return values[integers(0, len(values)).item()]

    leave_one_out = one_of(False, True)
    n, m = integers(2, 9).item(), integers(2, 9).item()
    m = n if leave_one_out else m
    sizes = (n,) if leave_one_out else (n, m)
    if collapsed := one_of(False, True):
        dtype, direction = one_of(torch.float32, torch.float64), torch.randn(1, 9, generator=draw)
        signs = [integers(-1, 2, size, 1).double() for size in sizes]
        rows = [(x * direction * 10 ** (8 * torch.rand(x.shape, generator=draw) - 4)).to(dtype) for x in signs]
    else:
        signs = [integers(-1, 2, size, 3).double() for size in sizes]
        rows = [x * one_of(1.0, 2.0**-480, 2.0**500) for x in signs]
    scores = signs[0] @ signs[-1].T
    if one_of(False, True):
        labels, others = integers(0, 3, n), integers(0, 3, m)
        of = {"labels": labels} if leave_one_out else {"labels": labels, "gallery_labels": others}
        grades = (labels[:, None] == (labels if leave_one_out else others)).double()
    else:
        grades = torch.tensor([-1.0, 0.0, 0.0, 1.0, 2.5])[integers(0, 5, n, m)].double()
        query, item = (grades != 0).nonzero(as_tuple=True)
        ids = integers(-5, 5).item() + torch.randperm(n, generator=draw)
        others = ids if leave_one_out else torch.randperm(m, generator=draw)
        of = {"ids": ids, "judgements": (ids[query], others[item], grades[query, item])}
        of |= {} if leave_one_out else {"gallery_ids": others}
        grades[grades < 0] = math.nan
    if leave_one_out:
        grades.fill_diagonal_(math.nan)
    k = [integers(1, m - leave_one_out + 1).item() for _ in range(6)]
    names = [
        f"{name}@{x}" for name, x in zip(("precision", "recall", "hit_rate", "map", "mrr", "ndcg"), k, strict=True)
    ]
    names += ["r_precision", "map", "map@r", "mrr", "ndcg"]
    of |= {"queries": rows[0], "metrics": names, "ties": one_of(*TIES[: 3 if m < 6 else 2]), "normalize": collapsed}
    return of | ({} if leave_one_out else {"gallery": rows[1]}), scores, grades


def metrics_by_hand(arguments, scores, grades):
    """Return the metrics that ``evaluate`` must find."""
    return {name: by_hand.metric(name, scores, grades, arguments["ties"]) for name in arguments["metrics"]}
