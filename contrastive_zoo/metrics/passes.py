"""One round of an evaluation: ranks answer for their own rows, owners build the ranking of their queries."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.metrics.local_search import Gallery
from contrastive_zoo.metrics.ranking import Floats, Groups, Ints, Levels, Ranking, Relevant, changes, levels_of
from contrastive_zoo.metrics.relevance import Judgements, Labels, Question, expanded
from contrastive_zoo.metrics.rounds import Round, exchanged, rounds
from contrastive_zoo.ranks.world import Shards, World

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

    ``thresholds`` are different scores of each ``query``, falling; queries ascend.
    """
    sizes = torch.bincount(query, minlength=len(queries))
    result = torch.zeros(len(query), 2, dtype=torch.int64)
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
        result[first:last, 0] = higher[owner, column]
        result[first:last, 1] = equal[owner, column]
    return result


Relevance = Labels | Judgements
Totals = tuple[Ints, Floats, Ints]
"""Query, grade, and number of relevant rows with this grade; ordered by query."""


def totals_of(relevance: Relevance, queries: Shards, world: World) -> tuple[Totals, int]:
    """Return the relevant rows of the local queries, counted, and the largest number that a query of any rank has."""
    parts: list[list[Tensor]] = []
    for block in rounds(queries, world):
        answer = relevance.totals(relevance.question(block))
        grades, at = block.answered_unevenly(answer[1], answer[0])
        counts, _ = block.answered_unevenly(answer[2], answer[0])
        parts += [[x + block.local.start, y, z] for x, y, z in zip(at, grades, counts, strict=True)]
    if not parts:
        return (np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64)), 0
    query, grade, count = (np.asarray(torch.cat(x)) for x in zip(*parts, strict=True))
    kept = np.lexsort((grade, query))
    kept = kept[count[kept] > 0]
    most = int(np.bincount(query, weights=count).max(initial=0)) if len(query) else 0
    return (query[kept], grade[kept], count[kept]), max(x[0] for x in world.exchange([most]))


def nearest_ranking(
    block: Round, gallery: Gallery, relevance: Relevance, queries: Tensor, k: int, totals: Totals
) -> tuple[Groups, Ranking]:
    """Return the nearest rows of all ranks for the local queries of a round, and the ranking of their first k places.

    Groups and levels are complete where fewer than k rows score higher.
    """
    question = relevance.question(block)
    query, *answers = nearest_groups(block, gallery, relevance, question, block.gathered(queries), k)
    received = [block.answered_unevenly(x, query) for x in answers]
    parts = zip(received[0][1], *(x for x, _ in received), strict=True)
    groups = Groups.joined([Groups(*(x.numpy() for x in part)) for part in parts])
    values = torch.from_numpy(groups.value)
    grade = relevance.grades(block, torch.from_numpy(groups.query), values).numpy()
    relevant = grade > 0
    result = Relevant(groups.query[relevant], groups.score[relevant], grade[relevant], groups.size[relevant])
    return groups, Ranking.of(levels_of(groups), result, _of_round(totals, block), block.shards.size)


def whole_ranking(block: Round, gallery: Gallery, relevance: Relevance, queries: Tensor, totals: Totals) -> Ranking:
    """Return the positions of all relevant rows of all ranks for the local queries of a round.

    Owners receive the scores of the relevant rows, send the different ones to all ranks, and receive how many rows of each
    rank score higher or the same.
    """
    question, rows = relevance.question(block), block.gathered(queries)
    pairs = relevance.pairs(question)
    scores = gallery.pair_scores(rows, pairs.query, pairs.position)
    received = [block.answered_unevenly(x, pairs.query) for x in (scores, pairs.grade)]
    query, score, grade = (torch.cat(x).numpy() for x in (received[0][1], received[0][0], received[1][0]))
    order = np.lexsort((grade, -score, query))
    query, score, grade = query[order], score[order], grade[order]
    first = changes(query, score)
    owned, thresholds = torch.from_numpy(query[first]), torch.from_numpy(score[first])
    shards = block.world.shards(owned)
    all_owned = block.gathered_unevenly(owned + block.shards.start)
    counts = counts_at(gallery, question, rows, all_owned, block.gathered_unevenly(thresholds))
    by_rank = exchanged(counts, shards.sizes, [shards.size] * block.world.size, block.world)
    higher, tied = by_rank.view(block.world.size, shards.size, 2).sum(0).numpy().T
    levels = Levels(query[first], score[first], higher, tied)
    relevant = Relevant(query, score, grade, np.ones(len(query), dtype=np.int64))
    return Ranking.of(levels, relevant, _of_round(totals, block), block.shards.size)


def _of_round(totals: Totals, block: Round) -> Totals:
    """Return the totals of the local queries of a round."""
    query, grade, count = totals
    begin, end = np.searchsorted(query, [block.local.start, block.local.stop])
    return query[begin:end] - block.local.start, grade[begin:end], count[begin:end]
