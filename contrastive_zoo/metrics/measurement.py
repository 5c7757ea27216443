"""Retrieval metrics of the queries and the gallery of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.metrics.checks import EvaluationInputs, Settings, agreed
from contrastive_zoo.metrics.exact import ExactMean, prepared
from contrastive_zoo.metrics.faiss_search import ApproximateIndex
from contrastive_zoo.metrics.local_search import Gallery
from contrastive_zoo.metrics.names import KNN, Metric
from contrastive_zoo.metrics.passes import nearest_ranking, totals_of, whole_ranking
from contrastive_zoo.metrics.ranking_metrics import Ties, knn_accuracy
from contrastive_zoo.metrics.relevance import Labels
from contrastive_zoo.metrics.rounds import rounds
from contrastive_zoo.metrics.task import task_of
from contrastive_zoo.ranks.compiling import uncompiled
from contrastive_zoo.ranks.world import Processes, World


@uncompiled
@torch.no_grad()
def evaluate(
    queries: Float[Tensor, "n d"],
    gallery: Float[Tensor, "m d"] | None = None,
    *,
    metrics: Sequence[str] = ("precision@1", "r_precision", "map@r"),
    labels: Int[Tensor, " n"] | None = None,
    gallery_labels: Int[Tensor, " m"] | None = None,
    judgements: tuple[Tensor, Tensor, Tensor] | None = None,
    ids: Int[Tensor, " n"] | None = None,
    gallery_ids: Int[Tensor, " m"] | None = None,
    ignore_label: int | None = None,
    ties: Ties = "pessimistic",
    normalize: bool = True,
    index: ApproximateIndex | None = None,
    process_group: Processes = None,
) -> dict[str, float]:
    """Return retrieval metrics of the queries and the gallery of all ranks, the same number on every rank.

    Equal to the metrics of one process with all rows, bit for bit, for every split of the rows over ranks and every order of
    them. Each metric is a mean over queries. What is relevant to query i:

    - ``evaluate(queries, gallery)``: row i of the gallery of all ranks, its partner.
    - ``labels`` and ``gallery_labels``: every row of the gallery with its label. Grades are 1.
    - ``labels`` without a gallery: every other row with its label (leave one out).
    - ``judgements``: rows of the gallery by id, with a grade.

    A query without a relevant row does not count, except for ``knn_accuracy``.

    Metrics, k being a number (sources beside the functions in :mod:`contrastive_zoo.metrics.ranking_metrics`):

    - ``precision@k``: relevant rows among the first k, divided by k.
    - ``recall@k``: relevant rows among the first k, divided by R, the number of relevant rows.
    - ``hit_rate@k``: whether one of the first k is relevant; metric learning calls this recall@k.
    - ``r_precision``: precision at R.
    - ``map``, ``map@k``, ``map@r``: precision at each relevant row (within the first k or R), summed and divided by R.
    - ``mrr``, ``mrr@k``: 1 / position of the first relevant row.
    - ``ndcg``, ``ndcg@k``: Σ grade / log2(1 + position), divided by the largest possible value.
    - ``knn_accuracy@k``: whether most of the k nearest rows have the label of the query.

    Metrics with a k alone need one faiss search. The others compare every query with every row in float64, which takes
    about ten times as long.

    Args:
        queries: this rank's queries; ranks may hold different numbers of rows, including zero.
        gallery: this rank's rows to search in; None: among the queries themselves, of which none finds itself.
        metrics: names.
        labels: one integer per query.
        gallery_labels: one integer per row of the gallery.
        judgements: query ids [j], gallery ids [j], and grades [j] of this rank's queries. A grade above 0 is relevant, 0 is
            not, and below 0 means that the row is ignored for this query. Needs ``ids`` and ``gallery_ids``.
        ids: one integer per query. A row that repeats the id of an earlier row is dropped, as those of padded samplers.
        gallery_ids: one integer per row of the gallery, of which repetitions are dropped, too.
        ignore_label: rows with this label are neither queries nor in the gallery.
        ties: ``"pessimistic"``: of equal scores irrelevant rows come first; ``"optimistic"``: relevant ones come first;
            ``"expected"``: the mean over all orders of equal scores.
        normalize: compare cosines; otherwise dot products.
        index: search approximately, for metrics with a k.
        process_group: who holds rows.

    Returns:
        The metrics by name, from 0 to 1; NaN if no query counts.

    Raises:
        ValueError: on every rank alike: arguments that do not belong together, rows that are not finite, a k beyond the
            gallery, judgements whose ids are unknown, ranks that disagree on settings, or faiss is not installed or cannot
            build the index of some rank's rows.

    Examples:
        >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.3]])
        >>> evaluate(rows, labels=torch.tensor([0, 0, 1, 1]), metrics=["hit_rate@1", "map"])
        {'hit_rate@1': 0.75, 'map': 0.8333333333333333}
    """
    arguments = EvaluationInputs(queries, gallery, labels, gallery_labels, judgements, ids, gallery_ids, ignore_label)
    settings = Settings(ties, normalize, index)
    return measured("evaluate", arguments, metrics, settings, World.of(process_group, "evaluate"))


def measured(
    caller: str, inputs: EvaluationInputs, names: Sequence[str], settings: Settings, world: World
) -> dict[str, float]:
    """Return what :func:`evaluate` returns; ``caller`` is the first word of errors.

    Raises:
        ValueError: what :func:`evaluate` raises.
    """
    shards = agreed(caller, inputs, names, settings, world)
    task = task_of(caller, inputs, *shards, world)
    wanted = [metric for name in names if (metric := Metric.of(name))]
    depth = max(metric.k or 0 for metric in wanted)
    candidates = max(0, task.gallery_shards.total - (inputs.gallery is None))
    if depth > candidates:
        raise ValueError(f"{caller}: k is between 1 and the {candidates} rows to search in, got {depth}.")
    means = ExactMean(names)
    local = Gallery.build(caller, task.gallery, normalize=settings.normalize, index=settings.index, world=world)
    rows = prepared(task.queries, normalize=settings.normalize)
    totals, most = totals_of(task.relevance, task.query_shards, world)
    if near := [metric for metric in wanted if not metric.whole]:
        for block in rounds(task.query_shards, world):
            groups, ranking = nearest_ranking(block, local, task.relevance, rows, depth, totals)
            for metric in near:
                if metric.kind == KNN and isinstance(task.relevance, Labels):
                    own = task.relevance.queries[block.local].numpy()
                    means.add(metric.name, knn_accuracy(groups, own, metric.k or depth, settings.ties))
                else:
                    means.add(metric.name, metric.values(ranking, settings.ties)[ranking.total > 0])
    if whole := [metric for metric in wanted if metric.whole]:
        for block in rounds(task.query_shards, world, size=max(1, min(_QUERIES, _PAIRS // max(1, most)))):
            ranking = whole_ranking(block, local, task.relevance, rows, totals)
            for metric in whole:
                means.add(metric.name, metric.values(ranking, settings.ties)[ranking.total > 0])
    return means.over_ranks(world)


_QUERIES = 1024
"""Largest number of queries of a round that counts all positions."""

_PAIRS = 2**20
"""Largest number of relevant pairs of such a round, unless one query has more."""
