"""What an approximate index misses."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.evaluation.exact_mean import ExactMean
from contrastive_zoo.evaluation.faiss_search import ApproximateIndex
from contrastive_zoo.evaluation.search import top_k
from contrastive_zoo.world import Processes, World


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
    exact, found = (
        top_k(queries, gallery, k=k, normalize=normalize, index=how, process_group=world).indices
        for how in (None, index)
    )
    shares = [torch.isin(x, y).double().mean() for x, y in zip(exact, found, strict=True)]
    means = ExactMean(["recall"])
    means.add("recall", torch.tensor(shares, dtype=torch.float64).numpy())
    return means.over_ranks(world)["recall"]
