"""Retrieval metrics of the queries and the gallery of all ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from contrastive_zoo.metrics.exact import means_over_ranks, prepared
from contrastive_zoo.metrics.ranking import Groups, Levels, Ranking, Runs, changes, parts_of
from contrastive_zoo.metrics.rounds import Round, exchanged, rounds
from contrastive_zoo.metrics.search import Gallery
from contrastive_zoo.metrics.task import DEFAULT, Evaluation, Question, Reduction, Relevance, agreed_task, expanded
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.world import Processes, World

_QUERIES = 1024  # largest number of queries of a round that counts all positions
_PAIRS = 2**20  # largest number of relevant pairs of such a round, unless one query has more
_PAIR_COST = 128  # a pair's score by itself takes as long as so many in a matmul
_AT_ONCE = 256  # queries that are compared with a block of items at once where every score is needed


def evaluate(
    queries: Float[Tensor, "n d"],
    gallery: Float[Tensor, "m d"] | None = None,
    *,
    metrics: Sequence[str] = DEFAULT,
    labels: Int[Tensor, " n"] | None = None,
    gallery_labels: Int[Tensor, " m"] | None = None,
    judgements: tuple[Tensor, Tensor, Tensor] | None = None,
    ids: Int[Tensor, " n"] | None = None,
    gallery_ids: Int[Tensor, " m"] | None = None,
    reduction: Reduction = "mean",
    normalize: bool = True,
    process_group: Processes = None,
) -> dict[str, Any]:
    """Return retrieval metrics of all ranks' queries and gallery: the same bits as one process.

    Each is a mean over the queries that have R > 0 relevant items; ``knn_accuracy`` counts every query. Of items with equal
    scores irrelevant ones come first:

    - ``precision@k``, ``r_precision``: relevant items among the first k (or R), divided by k (or R).
    - ``recall@k``: relevant items among the first k, divided by R.
    - ``hit_rate@k``: whether one of the first k is relevant (recall@k in metric learning).
    - ``map``, ``map@k``, ``map@r``: precisions at relevant items (of the first k or R), summed, divided by R.
    - ``mrr``, ``mrr@k``: 1 / place of the first relevant item.
    - ``ndcg``, ``ndcg@k``: Σ grade / log2(1 + place), divided by its largest value.
    - ``knn_accuracy@k``: whether more of the k nearest have the query's label than any other label; items that tie for the
      last place count, too.

    Args:
        queries: this rank's, [n, d].
        gallery: this rank's items, [m, d]; None: the other queries.
        metrics: names.
        labels: [n] integers; items with the query's label are relevant. None: item i belongs to query i.
        gallery_labels: [m].
        judgements: query ids, item ids and grades, [j] each; relevant above 0, ignored below.
        ids: [n] integers; repetitions are dropped.
        gallery_ids: [m]. With labels, a query does not find the item of its id.
        reduction: ``"none"`` returns this rank's values, [n]; NaN does not count.
        normalize: compare cosines.
        process_group: the ranks.

    Raises:
        ValueError: on every rank: arguments that do not fit or differ, embeddings that are not finite, a k beyond the
            gallery, or faiss is missing.

    Examples:
        >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.3]])
        >>> evaluate(rows, labels=torch.tensor([0, 0, 1, 1]), metrics=["hit_rate@1", "map"])
        {'hit_rate@1': 0.75, 'map': 0.8333333333333333}

    Source: https://arxiv.org/abs/2003.08505, https://doi.org/10.1145/582415.582418
    """
    return measured("evaluate", Evaluation(**dict(locals())))


@torch.no_grad()
def measured(caller: str, evaluation: Evaluation) -> dict[str, Any]:
    """Return what :func:`evaluate` returns; ``caller`` is the first word of errors."""
    world = World.of(evaluation.process_group, caller)
    queries, items, relevance = agreed_task(caller, evaluation, world)
    metrics = evaluation.valid_metrics
    depth = max(metric.k or 0 for metric in metrics)
    candidates = max(0, items.shards.total - (evaluation.gallery is None))
    if depth > candidates:
        raise ValueError(
            f"{caller}: k is between 1 and the {candidates} rows to search in, got {depth}. Lower k; for a sanity check of "
            "Lightning on few batches, pass Trainer(num_sanity_val_steps=0)."
        )
    with reported(world), torch.device("cpu"):
        local = Gallery(items.rows, evaluation.normalize)
        rows = prepared(queries.rows, normalize=evaluation.normalize)
        totals = relevance.totals(world)
        most = int(np.bincount(totals.query, weights=totals.number).max(initial=0))  # relevant items of one query
        values = {metric.name: np.empty(len(rows)) for metric in metrics}
        # those without k count the places of relevant items wherever they are
        near, whole = [metric for metric in metrics if metric.k], [metric for metric in metrics if not metric.k]
        for block in rounds(queries.shards, world) if near else ():
            ranking = nearest_ranking(block, local, relevance, rows, depth, totals)
            for metric in near:
                values[metric.name][block.local] = metric.values(ranking)
        size = max(1, min(_QUERIES, _PAIRS // max(1, *(x for (x,) in world.exchange([most])))))
        for block in rounds(queries.shards, world, size=size) if whole else ():
            ranking = whole_ranking(block, local, relevance, rows, totals)
            for metric in whole:
                values[metric.name][block.local] = metric.values(ranking)
    if evaluation.reduction == "mean":
        return means_over_ranks(values, world)
    nothing = torch.full((len(queries.kept),), torch.nan, dtype=torch.float64, device="cpu")
    return {name: nothing.masked_scatter(queries.kept, torch.from_numpy(x)) for name, x in values.items()}


def nearest_ranking(
    block: Round, gallery: Gallery, relevance: Relevance, queries: Tensor, k: int, totals: Runs
) -> Ranking:
    """Return the nearest items for a round's local queries; levels are complete where fewer than k items score higher."""
    question = relevance.question(block)
    parts = block.answered_unevenly(*_nearest_groups(block, gallery, relevance, question, block.gathered(queries), k))
    groups = Groups.joined([Groups(*(x.numpy() for x in part)) for part in parts])
    grade = relevance.grades(block, torch.from_numpy(groups.query), torch.from_numpy(groups.value)).numpy()
    relevant = groups.levels().runs(grade, groups.size)
    return Ranking(relevant, _of_round(totals, block), relevance.queries[block.local].numpy(), groups)


def _nearest_groups(
    block: Round, gallery: Gallery, relevance: Relevance, question: Question, queries: Float[Tensor, "g d"], k: int
) -> list[Tensor]:
    """Return query, score, value, count of this rank's items among the k nearest, or tied with the k-th, by query."""
    scores, positions, complete = gallery.nearest(block, queries, k, question.excluded)
    depth = min(k, len(gallery))
    kth = scores[:, depth - 1] if depth else torch.empty(len(queries), dtype=torch.float64)
    scanned = ~complete & (kth > -torch.inf)
    kept = (scores > kth[:, None]) | ((scores == kth[:, None]) & ~scanned[:, None])
    query, column = (kept & (scores > -torch.inf)).nonzero(as_tuple=True)
    values = relevance.values(question, query, positions[query, column])
    parts = [(query, scores[query, column], values, torch.ones_like(query))]
    for some in scanned.nonzero().flatten().split(_AT_ONCE):
        for start, of_block in gallery.score_blocks(queries[some], question.excluded[some]):
            which, position = (of_block == kth[some, None]).nonzero(as_tuple=True)
            values = relevance.values(question, some[which], position + start)
            which, values, count = _counted(which, values)
            parts.append((some[which], kth[some[which]], values, count))
    columns = [torch.cat(x) for x in zip(*parts, strict=True)]
    order = columns[0].argsort(stable=True)
    return [x[order] for x in columns]


def _counted(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, code = value.unique(return_inverse=True)
    pairs, count = (query * len(values) + code).unique(return_counts=True)
    return pairs // max(1, len(values)), values[pairs % max(1, len(values))], count


def whole_ranking(block: Round, gallery: Gallery, relevance: Relevance, queries: Tensor, totals: Runs) -> Ranking:
    """Return the places of all relevant items: owners send scores round, ranks count what is higher or equal."""
    question, rows = relevance.question(block), block.gathered(queries)
    pairs = relevance.pairs(question)
    scores = _pair_scores(gallery, question, rows, pairs.query, pairs.position)
    parts = block.answered_unevenly(pairs.query, scores, pairs.grade)
    query, score, grade = (torch.cat(x).numpy() for x in zip(*parts, strict=True))
    order = np.lexsort((grade, -score, query))
    query, score, grade = query[order], score[order], grade[order]
    first = changes(query, score)
    local_query, thresholds = torch.from_numpy(query[first]), torch.from_numpy(score[first])
    shards = block.world.shards(local_query)
    all_queries = block.gathered_unevenly(local_query + block.shards.start)
    counts = _counts_at(gallery, question, rows, all_queries, block.gathered_unevenly(thresholds))
    by_rank = exchanged(counts, shards.sizes, [shards.size] * block.world.size, block.world)
    higher, tied = by_rank.view(block.world.size, shards.size, 2).sum(0).numpy().T
    levels = Levels(query[first], higher, tied, parts_of(first, len(query)))
    relevant = levels.runs(grade, np.ones(len(query), dtype=np.int64))
    return Ranking(relevant, _of_round(totals, block), relevance.queries[block.local].numpy())


def _pair_scores(
    gallery: Gallery, question: Question, queries: Float[Tensor, "g d"], query: Tensor, position: Tensor
) -> Float[Tensor, " p"]:
    """Return the exact scores of pairs, which are ordered by query; none is excluded."""
    if len(query) * _PAIR_COST < len(queries) * len(gallery):
        return gallery.pair_scores(queries, query, position[:, None])[:, 0]
    scores = torch.empty(len(query), dtype=torch.float64)
    for some in torch.arange(len(queries)).split(_AT_ONCE):
        first, last = torch.searchsorted(query, torch.stack([some[0], some[-1] + 1])).tolist()
        order = position[first:last].argsort()
        ordered = position[first:last][order]
        for start, of_block in gallery.score_blocks(queries[some], question.excluded[some]):
            left, right = torch.searchsorted(ordered, torch.tensor([start, start + of_block.shape[1]])).tolist()
            here = first + order[left:right]
            scores[here] = of_block[query[here] - some[0], position[here] - start]
    return scores


def _counts_at(
    gallery: Gallery, question: Question, queries: Float[Tensor, "g d"], query: Tensor, thresholds: Tensor
) -> Int[Tensor, "t 2"]:
    """Return how many local items score above, and at, each of a query's different, falling thresholds."""
    sizes, result = torch.bincount(query, minlength=len(queries)), torch.zeros(len(query), 2, dtype=torch.int64)
    ends = sizes.cumsum(0)
    for some in torch.arange(len(queries)).split(_AT_ONCE):
        part = slice(int(ends[some[0]] - sizes[some[0]]), int(ends[some[-1]]))
        owner, column = expanded(sizes[some])
        width = int(sizes[some].max())
        column = width - 1 - column  # ascending, and padded on the left
        ladder = torch.full((len(some), width), -torch.inf, dtype=torch.float64)
        ladder[owner, column] = thresholds[part]
        lower = torch.zeros(len(some), width + 1, dtype=torch.int64)
        equal = torch.zeros_like(lower)
        for _, scores in gallery.score_blocks(queries[some], question.excluded[some]):
            below = torch.searchsorted(ladder, scores)
            same = pad(ladder, (0, 1), value=torch.inf).gather(1, below) == scores
            lower.scatter_add_(1, below, torch.ones_like(below))
            equal.scatter_add_(1, below, same.long())
        # a score is higher than threshold j if more than j thresholds are below it
        higher = lower.flip(1).cumsum(1).flip(1)[:, 1:]
        result[part] = torch.stack([higher[owner, column], equal[owner, column]], 1)
    return result


def _of_round(totals: Runs, block: Round) -> Runs:
    begin, end = np.searchsorted(totals.query, [block.local.start, block.local.stop])
    query, start, number, grade = totals
    return Runs(query[begin:end] - block.local.start, start[begin:end], number[begin:end], grade[begin:end])
