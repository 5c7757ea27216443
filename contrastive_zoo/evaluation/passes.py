"""One round of an evaluation: ranks answer for their own rows, owners build the ranking of their queries."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from contrastive_zoo.evaluation.answers import counts_at, nearest_groups
from contrastive_zoo.evaluation.local_search import Gallery
from contrastive_zoo.evaluation.ranking import Floats, Groups, Ints, Levels, Ranking, Relevant, changes, levels_of
from contrastive_zoo.evaluation.relevance import Judgements, Labels
from contrastive_zoo.evaluation.rounds import Round, exchanged, rounds
from contrastive_zoo.world import Shards, World

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
    found = Relevant(groups.query[relevant], groups.score[relevant], grade[relevant], groups.size[relevant])
    return groups, Ranking.of(levels_of(groups), found, _of_round(totals, block), block.shards.size)


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
