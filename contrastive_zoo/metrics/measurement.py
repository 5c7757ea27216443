"""Retrieval metrics of the queries and the gallery of all ranks, and recall: of neighbours, of modalities."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.metrics.exact import means_over_ranks, prepared
from contrastive_zoo.metrics.local_search import ApproximateIndex, Gallery
from contrastive_zoo.metrics.passes import nearest_ranking, whole_ranking
from contrastive_zoo.metrics.ranking import Floats, Ties
from contrastive_zoo.metrics.rounds import rounds
from contrastive_zoo.metrics.task import DEFAULT, Evaluation, agreed_task
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.row_checks import described, is_integer
from contrastive_zoo.ranks.session import refuse
from contrastive_zoo.ranks.world import Processes, World

_QUERIES = 1024  # largest number of queries of a round that counts all positions

_PAIRS = 2**20  # largest number of relevant pairs of such a round, unless one query has more


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
    normalize: bool = True,
    index: ApproximateIndex | None = None,
    process_group: Processes = None,
) -> dict[str, float]:
    """Return retrieval metrics of the queries and the gallery of all ranks, the same number on every rank.

    Equal to the metrics of one process with all embeddings, bit for bit, for every split over ranks and every order of
    them. Each metric is a mean over queries. What is relevant to query i:

    - ``evaluate(queries, gallery)``: item i of the gallery of all ranks, its partner.
    - ``labels`` and ``gallery_labels``: every item of the gallery with its label. Grades are 1.
    - ``labels`` without a gallery: every other query with its label (leave one out).
    - ``judgements``: items of the gallery by id, with a grade. Without a gallery, a judgement of a query about itself
      does not count.

    A query without a relevant item does not count, except for ``knn_accuracy``.

    Metrics, k being a number:

    - ``precision@k``: relevant items among the first k, divided by k.
    - ``recall@k``: relevant items among the first k, divided by R, the number of relevant items.
    - ``hit_rate@k``: whether one of the first k is relevant; metric learning calls this recall@k.
    - ``r_precision``: precision at R.
    - ``map``, ``map@k``, ``map@r``: precision at each relevant item (within the first k or R), summed and divided by R.
    - ``mrr``, ``mrr@k``: 1 / position of the first relevant item.
    - ``ndcg``, ``ndcg@k``: Σ grade / log2(1 + position), divided by the largest possible value. For the exponential gain of
      Burges et al. 2005 pass ``2^grade − 1`` as grades.
    - ``knn_accuracy@k``: whether most of the k nearest items have the label of the query.

    Metrics with a k alone need one faiss search. The others compare every query with every item in float64, which takes
    about ten times as long.

    Args:
        queries: this rank's queries; ranks may hold different numbers, including zero.
        gallery: this rank's embeddings to search in; None: among the queries themselves, of which none finds itself.
        metrics: names.
        labels: one integer per query.
        gallery_labels: one integer per item of the gallery.
        judgements: query ids [j], gallery ids [j], and grades [j] of this rank's queries. A grade above 0 is relevant, 0 is
            not, and below 0 means that the item is ignored for this query. Needs ``ids`` and ``gallery_ids``.
        ids: one integer per query. One that repeats the id of an earlier one is dropped, as those of padded samplers.
        gallery_ids: one integer per item of the gallery, of which repetitions are dropped, too.
        ignore_label: samples with this label are neither queries nor in the gallery.
        ties: ``"pessimistic"``: of equal scores irrelevant items come first; ``"optimistic"``: relevant ones come first;
            ``"expected"``: the mean over all orders of equal scores. Cosines are equal if they round to the same multiple
            of 2^-21, or of 2^-40 for float64: embeddings of one direction and several lengths differ by the rounding of
            their normalisation, by which a collapsed encoder must not be ranked. Dot products are equal in every bit.
        normalize: compare cosines; otherwise dot products.
        index: search approximately, for metrics with a k.
        process_group: who holds embeddings.

    Returns:
        The metrics by name, from 0 to 1; NaN if no query counts.

    Raises:
        ValueError: on every rank alike: arguments that do not belong together, embeddings that are not finite or whose
            dot products overflow float64, a k beyond the gallery, judgements whose ids are unknown, ranks that disagree on
            settings, or faiss is not installed or cannot build the index of some rank's embeddings.

    Examples:
        >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.3]])
        >>> evaluate(rows, labels=torch.tensor([0, 0, 1, 1]), metrics=["hit_rate@1", "map"])
        {'hit_rate@1': 0.75, 'map': 0.8333333333333333}

    Source: ``mrr``: Voorhees 1999, https://trec.nist.gov/pubs/trec8/papers/qa_report.pdf; ``map@r``: Musgrave et al. 2020,
    https://arxiv.org/abs/2003.08505; ``ndcg``: Järvelin & Kekäläinen 2002, https://doi.org/10.1145/582415.582418; ties:
    McSherry & Najork 2008, https://doi.org/10.1007/978-3-540-78646-7_38
    """
    evaluation = Evaluation(
        queries, gallery, metrics, labels, gallery_labels, judgements, ids, gallery_ids, ignore_label,
        ties, normalize, index,
    )  # fmt: skip
    return measured("evaluate", evaluation, World.of(process_group, "evaluate"))


def evaluate_queries(
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
    normalize: bool = True,
    index: ApproximateIndex | None = None,
    process_group: Processes = None,
) -> dict[str, Float[Tensor, " n"]]:
    """Return the metrics of each of this rank's queries, whose means over all ranks are those of :func:`evaluate`.

    To compare two encoders, see :func:`contrastive_zoo.metrics.paired_bootstrap`. The arguments are those of
    :func:`evaluate`.

    Returns:
        The values of each metric in float64, on the CPU; NaN for a query that does not count.

    Raises:
        ValueError: on every rank alike, what :func:`evaluate` raises.

    Examples:
        >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.3]])
        >>> evaluate_queries(rows, labels=torch.tensor([0, 0, 1, 1]), metrics=["hit_rate@1"])
        {'hit_rate@1': tensor([1., 1., 1., 0.], dtype=torch.float64)}
    """
    world = World.of(process_group, "evaluate_queries")
    evaluation = Evaluation(
        queries, gallery, metrics, labels, gallery_labels, judgements, ids, gallery_ids, ignore_label,
        ties, normalize, index,
    )  # fmt: skip
    kept, values = measured_queries("evaluate_queries", evaluation, world)
    nothing = torch.full((len(queries),), torch.nan, dtype=torch.float64)
    return {name: nothing.masked_scatter(kept, torch.from_numpy(x)) for name, x in values.items()}


def measured(caller: str, evaluation: Evaluation, world: World) -> dict[str, float]:
    """Return what :func:`evaluate` returns; ``caller`` is the first word of errors."""
    return means_over_ranks(measured_queries(caller, evaluation, world)[1], world)


@torch.no_grad()
def measured_queries(caller: str, evaluation: Evaluation, world: World) -> tuple[Bool[Tensor, " n"], dict[str, Floats]]:
    """Return which of this rank's queries are kept, and the metrics of each of these; NaN where a query does not count."""
    task = agreed_task(caller, evaluation, world)
    metrics, ties = evaluation.valid_metrics, evaluation.ties
    depth = max(metric.k or 0 for metric in metrics)
    candidates = max(0, task.gallery_shards.total - (evaluation.gallery is None))
    if depth > candidates:
        raise ValueError(f"{caller}: k is between 1 and the {candidates} rows to search in, got {depth}.")
    with reported(world):
        local = Gallery(caller, task.gallery, evaluation.normalize, evaluation.index, world, ties=True)
        rows = prepared(task.queries, normalize=evaluation.normalize)
        totals = task.relevance.totals(world)
        most = int(np.bincount(totals.where, weights=totals.number).max(initial=0))  # relevant items of one query
        values = {metric.name: np.empty(len(rows)) for metric in metrics}
        near, whole = ([metric for metric in metrics if metric.whole is which] for which in (False, True))
        for block in rounds(task.query_shards, world) if near else ():
            ranking = nearest_ranking(block, local, task.relevance, rows, depth, totals)
            for metric in near:
                values[metric.name][block.local] = metric.values(ranking, ties)
        size = max(1, min(_QUERIES, _PAIRS // max(1, *(x for (x,) in world.exchange([most])))))
        for block in rounds(task.query_shards, world, size=size) if whole else ():
            ranking = whole_ranking(block, local, task.relevance, rows, totals)
            for metric in whole:
                values[metric.name][block.local] = metric.values(ranking, ties)
    return task.kept, values


def recall_at_k(
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

    What is relevant is what :func:`evaluate` says of the same arguments. Ties count against the query: it finds a relevant
    item if fewer than k irrelevant ones score as high or higher. So a constant embedding scores 0, and the order of the
    gallery does not matter.

    Args:
        k: how many neighbours are looked at; the other arguments are those of :func:`evaluate`.

    Returns:
        A share between 0 and 1, the same on every rank and for every split; NaN if no query counts.

    Raises:
        ValueError: on every rank alike: shapes or labels that do not belong together, embeddings that are not finite, or k
            outside of 1 … embeddings to search in; faiss is not installed.

    Examples:
        >>> queries = torch.tensor([[1.0, 0.0], [0.8, 0.2]])
        >>> recall_at_k(queries, torch.eye(2))   # both are nearest to row 0: query 1 misses its partner, row 1
        0.5
        >>> recall_at_k(queries, torch.ones(2, 2))   # all rows are just as near
        0.0
        >>> recall_at_k(queries, labels=torch.tensor([3, 3]))
        1.0
    """
    world = World.of(process_group, "recall_at_k")
    if not is_integer(k, at_least=1):
        refuse("recall_at_k", f"k is between 1 and the rows to search in, got {described(k)}.", world=world)
    name = f"hit_rate@{k}"
    evaluation = Evaluation(queries, gallery, [name], labels, gallery_labels, normalize=normalize)
    return measured("recall_at_k", evaluation, world)[name]


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
    """Return recall@k of image-text retrieval in both directions: whether one of the k nearest is relevant.

    Args:
        first: this rank's embeddings of one modality, such as images.
        second: this rank's embeddings of the other, such as captions.
        k: the cutoffs.
        labels: one integer per embedding of ``first``, such as the number of the image; None: row i belongs to row i.
        second_labels: one integer per embedding of ``second``, such as the number of the caption's image.
        ties: this and the other arguments are those of :func:`evaluate`.

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
    for direction, sides in (
        ("first_to_second", (first, second, names, labels, second_labels)),
        ("second_to_first", (second, first, names, second_labels, labels)),
    ):
        values = measured("evaluate", Evaluation(*sides, ties=ties, normalize=normalize), world)
        result |= {f"{direction}@{number}": values[name] for number, name in zip(k, names, strict=True)}
    return result
