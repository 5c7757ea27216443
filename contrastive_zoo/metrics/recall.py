"""Recall of metric learning, of image-text retrieval, and of an approximate index."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.metrics.checks import EvaluationInputs, Settings
from contrastive_zoo.metrics.exact import ExactMean
from contrastive_zoo.metrics.faiss_search import ApproximateIndex
from contrastive_zoo.metrics.measurement import evaluate, measured
from contrastive_zoo.metrics.ranking_metrics import Ties
from contrastive_zoo.metrics.search import top_k
from contrastive_zoo.ranks.compiling import uncompiled
from contrastive_zoo.ranks.row_checks import described, is_integer
from contrastive_zoo.ranks.session import refuse
from contrastive_zoo.ranks.world import Processes, World


@uncompiled
@torch.no_grad()
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
    """Return the share of queries that find a relevant row among their k nearest: ``hit_rate@k`` of :func:`evaluate`.

    What is relevant to query i:

    - ``recall_at_k(queries, gallery)``: row i of the gallery of all ranks, its partner.
    - ``recall_at_k(queries, gallery, labels=…, gallery_labels=…)``: every row of the gallery with its label.
    - ``recall_at_k(rows, labels=…)``: every other row with its label. A row never finds itself, and one whose label
      no other row has does not count.

    Ties count against the query: it finds a relevant row if fewer than k irrelevant ones score as high or higher. So a
    constant embedding scores 0, and the order of the gallery does not matter.

    Args:
        queries: this rank's queries; ranks may hold different numbers of rows, including zero.
        gallery: this rank's rows to search in; None: among the queries themselves.
        k: how many neighbours are looked at.
        labels: one integer per query.
        gallery_labels: one integer per row of the gallery.
        normalize: compare cosines; otherwise dot products.
        process_group: who holds rows.

    Returns:
        A share between 0 and 1, the same on every rank and for every split; NaN if no query counts.

    Raises:
        ValueError: on every rank alike: shapes or labels that do not belong together, rows that are not finite, or k
            outside of 1 … rows to search in; faiss is not installed.

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
    arguments = EvaluationInputs(queries, gallery, labels, gallery_labels)
    return measured("recall_at_k", arguments, [f"hit_rate@{k}"], Settings(normalize=normalize), world)[f"hit_rate@{k}"]


@uncompiled
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
        labels: one integer per row of ``first``, such as the number of the image; None: row i belongs to row i.
        second_labels: one integer per row of ``second``, such as the number of the caption's image.
        ties: as in :func:`evaluate`.
        normalize: compare cosines; otherwise dot products.
        process_group: who holds rows.

    Returns:
        ``"first_to_second@k"`` and ``"second_to_first@k"`` for each k.

    Raises:
        ValueError: as :func:`evaluate`.

    Examples:
        >>> images, captions = torch.eye(2), torch.tensor([[1.0, 0.1], [0.2, 1.0], [1.0, 0.2]])
        >>> cross_modal_recall(images, captions, k=[1], labels=torch.arange(2), second_labels=torch.tensor([0, 1, 1]))
        {'first_to_second@1': 1.0, 'second_to_first@1': 0.6666666666666666}
    """
    result: dict[str, float] = {}
    if not (isinstance(k, (list, tuple)) and all(is_integer(x, at_least=1) for x in k)):
        world = World.of(process_group, "cross_modal_recall")
        refuse("cross_modal_recall", f"k is a list of integers from 1, got {described(k)}.", world=world)
    names = {number: f"hit_rate@{number}" for number in k}
    sides = ((first, labels), (second, second_labels))
    for direction, ((queries, own), (gallery, other)) in (("first_to_second", sides), ("second_to_first", sides[::-1])):
        values = evaluate(
            queries, gallery, metrics=list(names.values()), labels=own, gallery_labels=other,
            ties=ties, normalize=normalize, process_group=process_group,
        )  # fmt: skip
        result |= {f"{direction}@{number}": values[name] for number, name in names.items()}
    return result


@uncompiled
def index_recall(
    queries: Float[Tensor, "n d"],
    gallery: Float[Tensor, "m d"],
    *,
    k: int,
    index: ApproximateIndex,
    normalize: bool = True,
    process_group: Processes = None,
) -> float:
    """Return the share of the k exact nearest neighbours that an approximate index finds.

    Args:
        queries: this rank's queries; a sample of them is enough.
        gallery: this rank's rows to search in.
        k: number of neighbours.
        index: the index.
        normalize: compare cosines; otherwise dot products.
        process_group: who holds rows.

    Raises:
        ValueError: as :func:`top_k`.

    Examples:
        >>> rows = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
        >>> index_recall(rows, rows, k=3, index=ApproximateIndex("HNSW32")) > 0.9
        True
    """
    world = World.of(process_group, "index_recall")
    exact, result = (
        top_k(queries, gallery, k=k, normalize=normalize, index=how, process_group=world).indices
        for how in (None, index)
    )
    shares = [torch.isin(x, y).double().mean() for x, y in zip(exact, result, strict=True)]
    means = ExactMean(["recall"])
    means.add("recall", torch.tensor(shares, dtype=torch.float64).numpy())
    return means.over_ranks(world)["recall"]
