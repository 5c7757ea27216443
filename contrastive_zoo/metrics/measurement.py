"""Retrieval metrics of the queries and the gallery of all ranks, and recall: of neighbours, of modalities."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from contrastive_zoo.metrics.exact import means_over_ranks, prepared
from contrastive_zoo.metrics.ranking import Graded, Groups, Ranking, Ties, changes, levels_of, parts_of
from contrastive_zoo.metrics.rounds import Round, exchanged, rounds
from contrastive_zoo.metrics.search import ApproximateIndex, Gallery
from contrastive_zoo.metrics.task import DEFAULT, Evaluation, Question, Reduction, Relevance, agreed_task, expanded
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.row_checks import described, is_integer
from contrastive_zoo.ranks.session import refuse
from contrastive_zoo.ranks.world import Processes, World

_QUERIES = 1024  # largest number of queries of a round that counts all positions
_PAIRS = 2**20  # largest number of relevant pairs of such a round, unless one query has more
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
    ignore_label: int | None = None,
    ties: Ties = "pessimistic",
    reduction: Reduction = "mean",
    normalize: bool = True,
    index: ApproximateIndex | None = None,
    process_group: Processes = None,
) -> dict[str, Any]:
    """Return retrieval metrics of all ranks' queries and gallery: the same bits as one process.

    Each is a mean over the queries that have R > 0 relevant items; ``knn_accuracy`` counts every query:

    - ``precision@k``, ``r_precision``: relevant items among the first k (or R), divided by k (or R).
    - ``recall@k``: relevant items among the first k, divided by R.
    - ``hit_rate@k``: whether one of the first k is relevant (recall@k in metric learning).
    - ``map``, ``map@k``, ``map@r``: precisions at relevant items (of the first k or R), summed, divided by R.
    - ``mrr``, ``mrr@k``: 1 / position of the first relevant item.
    - ``ndcg``, ``ndcg@k``: Σ grade / log2(1 + position), divided by its largest value.
    - ``knn_accuracy@k``: whether most of the k nearest have the query's label.

    Args:
        queries: this rank's, [n, d].
        gallery: this rank's items, [m, d]; None: the other queries.
        metrics: names.
        labels: [n] integers; items with the query's label are relevant. None: item i belongs to query i.
        gallery_labels: [m].
        judgements: query ids, item ids and grades, [j] each; relevant above 0, ignored below.
        ids: [n] integers; repetitions are dropped.
        gallery_ids: [m]. With labels, a query does not find the item of its id.
        ignore_label: drop samples with this label.
        ties: order of equal scores: ``"pessimistic"`` (relevant last), ``"optimistic"``, or ``"expected"``, the mean.
        reduction: ``"none"`` returns this rank's values, [n]; NaN does not count.
        normalize: compare cosines.
        index: search approximately, for metrics with a k.
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
    metrics, ties = evaluation.valid_metrics, evaluation.ties
    depth = max(metric.k or 0 for metric in metrics)
    candidates = max(0, items.shards.total - (evaluation.gallery is None))
    if depth > candidates:
        raise ValueError(
            f"{caller}: k is between 1 and the {candidates} rows to search in, got {depth}. Lower k; for a sanity check of "
            "Lightning on few batches, pass Trainer(num_sanity_val_steps=0)."
        )
    with reported(world):
        local = Gallery(caller, items.rows, evaluation.normalize, evaluation.index, world)
        rows = prepared(queries.rows, normalize=evaluation.normalize)
        totals = relevance.totals(world)
        most = int(np.bincount(totals.where, weights=totals.number).max(initial=0))  # relevant items of one query
        values = {metric.name: np.empty(len(rows)) for metric in metrics}
        near, whole = ([metric for metric in metrics if metric.whole is which] for which in (False, True))
        for block in rounds(queries.shards, world) if near else ():
            ranking = nearest_ranking(block, local, relevance, rows, depth, totals)
            for metric in near:
                values[metric.name][block.local] = metric.values(ranking, ties)
        size = max(1, min(_QUERIES, _PAIRS // max(1, *(x for (x,) in world.exchange([most])))))
        for block in rounds(queries.shards, world, size=size) if whole else ():
            ranking = whole_ranking(block, local, relevance, rows, totals)
            for metric in whole:
                values[metric.name][block.local] = metric.values(ranking, ties)
    if evaluation.reduction == "mean":
        return means_over_ranks(values, world)
    nothing = torch.full((len(queries.kept),), torch.nan, dtype=torch.float64)
    return {name: nothing.masked_scatter(queries.kept, torch.from_numpy(x)) for name, x in values.items()}


def hit_rate_at_k(
    queries: Float[Tensor, "n d"],
    gallery: Float[Tensor, "m d"] | None = None,
    *,
    k: int = 1,
    labels: Int[Tensor, " n"] | None = None,
    gallery_labels: Int[Tensor, " m"] | None = None,
    normalize: bool = True,
    process_group: Processes = None,
) -> float:
    """Return the share of queries that find a relevant item among their k nearest: ``hit_rate@k`` of :func:`evaluate`.

    Ties count against the query, so a constant embedding scores 0.

    Args:
        k: how many neighbours are looked at; the other arguments are those of :func:`evaluate`.

    Raises:
        ValueError: on every rank alike, what :func:`evaluate` raises.

    Examples:
        >>> queries = torch.tensor([[1.0, 0.0], [0.8, 0.2]])
        >>> hit_rate_at_k(queries, torch.eye(2))   # both are nearest to row 0: query 1 misses its partner, row 1
        0.5
        >>> hit_rate_at_k(queries, torch.ones(2, 2))   # all rows are just as near
        0.0
        >>> hit_rate_at_k(queries, labels=torch.tensor([3, 3]))
        1.0
    """
    world = World.of(process_group, "hit_rate_at_k")
    if not is_integer(k, at_least=1):
        refuse("hit_rate_at_k", f"k is between 1 and the rows to search in, got {described(k)}.", world=world)
    name = f"hit_rate@{k}"
    evaluation = Evaluation(
        queries, gallery, [name], labels, gallery_labels, normalize=normalize, process_group=process_group
    )
    return measured("hit_rate_at_k", evaluation)[name]


def cross_modal_recall(
    first: Float[Tensor, "n d"],
    second: Float[Tensor, "m d"],
    *,
    k: Sequence[int] = (1, 5, 10),
    labels: Int[Tensor, " n"] | None = None,
    second_labels: Int[Tensor, " m"] | None = None,
    ties: Ties = "pessimistic",
    normalize: bool = True,
    process_group: Processes = None,
) -> dict[str, float]:
    """Return hit rates of image-text retrieval in both directions, which its papers name recall@k.

    Args:
        first: this rank's embeddings of one modality, such as images.
        second: this rank's embeddings of the other, such as captions.
        k: the cutoffs.
        labels: one integer per embedding of ``first``, such as the number of the image; None: row i belongs to row i.
        second_labels: one integer per embedding of ``second``. The other arguments are those of :func:`evaluate`.

    Returns:
        ``"first_to_second@k"`` and ``"second_to_first@k"`` for each k.

    Raises:
        ValueError: as :func:`evaluate`.

    Examples:
        >>> images, captions = torch.eye(2), torch.tensor([[1.0, 0.1], [0.2, 1.0], [1.0, 0.2]])
        >>> cross_modal_recall(images, captions, k=[1], labels=torch.arange(2), second_labels=torch.tensor([0, 1, 1]))
        {'first_to_second@1': 1.0, 'second_to_first@1': 0.6666666666666666}
    """
    world = World.of(process_group, "cross_modal_recall")
    if not (isinstance(k, (list, tuple)) and all(is_integer(x, at_least=1) for x in k)):
        refuse("cross_modal_recall", f"k is a list of integers from 1, got {described(k)}.", world=world)
    names = [f"hit_rate@{number}" for number in k]
    result: dict[str, float] = {}
    shared: dict[str, Any] = {"ties": ties, "normalize": normalize, "process_group": process_group}
    there, back = (first, second, names, labels, second_labels), (second, first, names, second_labels, labels)
    for direction, sides in (("first_to_second", there), ("second_to_first", back)):
        values = measured("evaluate", Evaluation(*sides, **shared))
        result |= {f"{direction}@{number}": values[name] for number, name in zip(k, names, strict=True)}
    return result


def nearest_ranking(
    block: Round, gallery: Gallery, relevance: Relevance, queries: Tensor, k: int, totals: Graded
) -> Ranking:
    """Return the nearest items for a round's local queries; levels are complete where fewer than k items score higher."""
    question = relevance.question(block)
    parts = block.answered_unevenly(*_nearest_groups(block, gallery, relevance, question, block.gathered(queries), k))
    groups = Groups.joined([Groups(*(x.numpy() for x in part)) for part in parts])
    grade = relevance.grades(block, torch.from_numpy(groups.query), torch.from_numpy(groups.value)).numpy()
    levels, where = levels_of(groups)
    kept = grade > 0
    relevant = Graded(where[kept], grade[kept], groups.size[kept])
    return Ranking.of(levels, relevant, _of_round(totals, block), relevance.labels(block), groups)


def _nearest_groups(
    block: Round, gallery: Gallery, relevance: Relevance, question: Question, queries: Float[Tensor, "g d"], k: int
) -> list[Tensor]:
    """Return query, score, value, count of this rank's items among the k nearest, or tied with the k-th, by query."""
    scores, positions, complete = gallery.nearest(block, queries, k, question.excluded)
    depth = min(k, len(gallery))
    kth = scores[:, depth - 1] if depth else torch.empty(len(queries), dtype=torch.float64)
    scanned = (~complete & (kth > -torch.inf)) if gallery.index is None else torch.zeros_like(complete)
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


def whole_ranking(block: Round, gallery: Gallery, relevance: Relevance, queries: Tensor, totals: Graded) -> Ranking:
    """Return the positions of all relevant items: owners send scores round, ranks count what is higher or equal."""
    question, rows = relevance.question(block), block.gathered(queries)
    pairs = relevance.pairs(question)
    scores = gallery.pair_scores(rows, pairs.query, pairs.position[:, None])[:, 0]
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
    relevant = Graded(parts_of(first, len(query)), grade, np.ones(len(query), dtype=np.int64))
    return Ranking.of((query[first], higher, tied), relevant, _of_round(totals, block), relevance.labels(block))


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


def _of_round(totals: Graded, block: Round) -> Graded:
    query, grade, count = totals
    begin, end = np.searchsorted(query, [block.local.start, block.local.stop])
    return Graded(query[begin:end] - block.local.start, grade[begin:end], count[begin:end])
