"""Approximate search with an index of faiss, and exact search where faiss is faster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ApproximateIndex:
    """An index that finds most of the nearest neighbours, faster than an exact search.

    Every rank builds one of its own rows of the gallery, so what it misses depends on how the gallery is split over ranks.
    The scores of what it finds are exact. :func:`contrastive_zoo.metrics.recall.index_recall` measures what it misses.

    Args:
        factory: faiss' description, such as ``"IVF1024,Flat"`` or ``"HNSW32"``
            (https://github.com/facebookresearch/faiss/wiki/The-index-factory).
        parameters: search parameters as faiss' ``ParameterSpace`` reads them, such as ``"nprobe=16"``.

    Examples:
        >>> ApproximateIndex("IVF1024,Flat", "nprobe=16")
        ApproximateIndex(factory='IVF1024,Flat', parameters='nprobe=16')
    """

    factory: str
    parameters: str = ""

    def built(self, rows: Tensor) -> Any:
        """Return a trained faiss index of inner products that holds the rows; on all GPUs if faiss has some."""
        import faiss

        vectors = rows.float().numpy()
        index = faiss.index_factory(rows.shape[1], self.factory, faiss.METRIC_INNER_PRODUCT)
        if getattr(faiss, "get_num_gpus", int)():
            index = faiss.index_cpu_to_all_gpus(index)
        with threads_of_torch(faiss):
            index.train(vectors)
            index.add(vectors)
        if self.parameters:
            faiss.ParameterSpace().set_index_parameters(index, self.parameters)  # type: ignore[arg-type]  # wrong stub
        return index


def faiss_problem() -> str | None:
    """Return what to do where faiss is not installed, in words; None if it is."""
    try:
        import faiss  # noqa: F401 - whether it can be imported
    except ImportError:
        return "searches with faiss, which is not installed: pip install contrastive_zoo[faiss]."
    return None


@contextmanager
def threads_of_torch(faiss: Any) -> Iterator[None]:
    """Let faiss use as many threads as torch: the ranks of one machine share its cores."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(torch.get_num_threads())
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def flat_search(queries: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and positions of the k rows of largest inner product, [n, k] each, best first, in float32."""
    import faiss

    with threads_of_torch(faiss):
        scores, positions = faiss.knn(queries.float().numpy(), rows.float().numpy(), k, faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(scores), torch.from_numpy(positions)


def index_search(queries: Tensor, index: Any, k: int) -> Tensor:
    """Return the positions that an index finds, [n, k]; −1 where it finds fewer."""
    import faiss

    with threads_of_torch(faiss):
        _, positions = index.search(np.ascontiguousarray(queries.float().numpy()), k)
    return torch.from_numpy(positions)
