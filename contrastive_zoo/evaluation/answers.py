"""What a rank finds in its own rows for the queries of a round: the nearest, or where the relevant ones are."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.evaluation.local_search import Gallery
from contrastive_zoo.evaluation.relevance import Judgements, Labels, Question, expanded
from contrastive_zoo.evaluation.rounds import Round

_QUERIES = 256
"""Queries that are compared with a block of rows at once where every score is needed."""


def nearest_groups(
    round_: Round,
    gallery: Gallery,
    relevance: Labels | Judgements,
    question: Question,
    queries: Float[Tensor, "g d"],
    k: int,
) -> tuple[Int[Tensor, " p"], Float[Tensor, " p"], Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return this rank's rows among the k nearest of all ranks, and all that tie with the k-th: query, score, value, count.

    Other rows may be among them. Rows of one query with one score and value may be counted together.
    The result is ordered by query.
    """
    depth = min(k, len(gallery))
    proposals = gallery.proposals(queries, depth, question.excluded)
    floor = round_.floors(proposals.reached(k))
    scores, positions, complete = gallery.top(queries, depth, question.excluded, proposals, floor)
    kth = scores[:, depth - 1] if depth else torch.empty(len(queries), dtype=torch.float64)
    scanned = (~complete & (kth > -torch.inf)) if gallery.index is None else torch.zeros_like(complete)
    kept = (scores > kth[:, None]) | ((scores == kth[:, None]) & ~scanned[:, None])
    query, column = (kept & (scores > -torch.inf)).nonzero(as_tuple=True)
    values = relevance.values(question, query, positions[query, column])
    parts = [(query, scores[query, column], values, torch.ones_like(query))]
    for some in scanned.nonzero().flatten().split(_QUERIES):
        for start, block in gallery.score_blocks(queries[some], question.excluded[some]):
            which, position = (block == kth[some, None]).nonzero(as_tuple=True)
            values = relevance.values(question, some[which], position + start)
            which, values, count = _counted(which, values)
            parts.append((some[which], kth[some[which]], values, count))
    query, score, value, count = (torch.cat(x) for x in zip(*parts, strict=True))
    order = query.argsort(stable=True)
    return query[order], score[order], value[order], count[order]


def _counted(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the different pairs of query and value, and how often each occurs."""
    values, code = value.unique(return_inverse=True)
    pairs, count = (query * len(values) + code).unique(return_counts=True)
    return pairs // max(1, len(values)), values[pairs % max(1, len(values))], count


def counts_at(
    gallery: Gallery, question: Question, queries: Float[Tensor, "g d"], query: Tensor, thresholds: Tensor
) -> Int[Tensor, "t 2"]:
    """Return how many rows of this rank score higher than a threshold, and how many equal it.

    Args:
        gallery: the rows of this rank.
        question: whose excluded rows do not count.
        queries: prepared rows.
        query: [t], the query of each threshold, in ascending order.
        thresholds: [t], different scores of each query, falling.
    """
    sizes = torch.bincount(query, minlength=len(queries))
    found = torch.zeros(len(query), 2, dtype=torch.int64)
    ends = sizes.cumsum(0)
    for some in torch.arange(len(queries)).split(_QUERIES):
        first, last = int(ends[some[0]] - sizes[some[0]]), int(ends[some[-1]])
        owner, column = expanded(sizes[some])
        width = int(sizes[some].max())
        column = width - 1 - column  # ascending, and padded on the left
        ladder = torch.full((len(some), width), -torch.inf, dtype=torch.float64)
        ladder[owner, column] = thresholds[first:last]
        lower = torch.zeros(len(some), width + 1, dtype=torch.int64)
        equal = torch.zeros_like(lower)
        for _, scores in gallery.score_blocks(queries[some], question.excluded[some]):
            below = torch.searchsorted(ladder, scores)
            same = torch.nn.functional.pad(ladder, (0, 1), value=torch.inf).gather(1, below) == scores
            lower.scatter_add_(1, below, torch.ones_like(below))
            equal.scatter_add_(1, below, same.long())
        # a score is higher than threshold j if more than j thresholds are below it
        higher = lower.flip(1).cumsum(1).flip(1)[:, 1:]
        found[first:last, 0] = higher[owner, column]
        found[first:last, 1] = equal[owner, column]
    return found
