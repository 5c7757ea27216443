"""Retrieval metrics: the share of queries whose nearest neighbours include a relevant row."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def recall_at_k(
    queries: Float[Tensor, "n d"],
    gallery: Float[Tensor, "m d"] | None = None,
    *,
    k: int = 1,
    labels: Int[Tensor, " n"] | None = None,
    gallery_labels: Int[Tensor, " m"] | None = None,
    normalize: bool = True,
) -> float:
    """Share of the queries that find a relevant row among their k nearest, by an exact faiss search.

    What is relevant to query i:

    - ``recall_at_k(queries, gallery)``: row i of the gallery, its partner.
    - ``recall_at_k(queries, gallery, labels=…, gallery_labels=…)``: every row of the gallery with its label.
    - ``recall_at_k(rows, labels=…)``: every other row with its label. A row never finds itself, and one whose label
      nobody shares does not count.

    Ties count against the query: it finds a relevant row if fewer than k irrelevant ones are as near or nearer. So a
    constant embedding scores 0, and the order of the gallery does not matter.

    Args:
        queries: rows to search for, on one process; compared in float32.
        gallery: rows to search in; None: among the queries themselves.
        k: how many neighbours are looked at.
        labels: one integer per query.
        gallery_labels: one integer per row of the gallery.
        normalize: put rows on the unit sphere first, so that the nearest row has the highest cosine; otherwise it has
            the highest dot product.

    Returns:
        A share between 0 and 1; NaN if no query counts.

    Raises:
        ValueError: shapes or labels that do not belong together, rows that are not finite, or k outside of
            1 … rows to search in.
        ImportError: faiss is not installed.

    Example:
        >>> queries = torch.tensor([[1.0, 0.0], [0.8, 0.2]])
        >>> recall_at_k(queries, torch.eye(2))   # both are nearest to row 0: query 1 misses its partner, row 1
        0.5
        >>> recall_at_k(queries, torch.ones(2, 2))   # all rows are just as near
        0.0
        >>> recall_at_k(queries, labels=torch.tensor([3, 3]))
        1.0
    """
    _check(queries, gallery, k, labels, gallery_labels)
    if gallery is None:
        assert labels is not None  # _check has refused it
        rows, row_labels, query_labels, self_found = queries, labels, labels, 1
    else:
        partners = torch.arange(len(gallery))
        rows, self_found = gallery, 0
        row_labels = partners if gallery_labels is None else gallery_labels
        query_labels = partners if labels is None else labels
    wanted, have = (x.detach().cpu().numpy() for x in (query_labels, row_labels))
    found, own = _vectors(queries, normalize), np.arange(len(queries))
    index = _faiss().IndexFlatIP(rows.shape[1])
    index.add(_vectors(rows, normalize))

    def hits(which: Any, depth: int) -> tuple[Any, Any]:
        """Whether each of these queries is a hit, and whether ``depth`` neighbours were enough to say so."""
        scores, neighbours = index.search(found[which], depth)
        other = (neighbours != own[which, None]) if self_found else np.ones_like(neighbours, dtype=bool)
        relevant = other & (have[neighbours] == wanted[which, None])
        best = np.where(relevant, scores, -np.inf).max(1)
        rivals = (other & ~relevant & (scores >= best[:, None])).sum(1)
        tied_beyond = (depth < len(rows)) & (best == scores[:, -1])
        return relevant.any(1) & (rivals < k), ~tied_beyond

    # One neighbour more than asked for shows a tie across the edge; the rare tie that goes on needs the whole gallery.
    hit, certain = hits(own, min(k + 1 + self_found, len(rows)))
    if not certain.all():
        hit[~certain], _ = hits(own[~certain], len(rows))
    values, sizes = np.unique(have, return_counts=True)
    counts = np.isin(wanted, values[sizes > self_found])
    return float(hit[counts].mean()) if counts.any() else float("nan")


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("recall_at_k searches with faiss. Install it: pip install contrastive_zoo[faiss]") from error
    return faiss


def _vectors(rows: Tensor, normalize: bool) -> Any:
    """Contiguous float32 rows for faiss, normalised in their own precision."""
    rows = rows.detach().cpu()
    rows = F.normalize(rows, dim=1) if normalize else rows
    return np.ascontiguousarray(rows.float().numpy())


def _check(
    queries: Tensor, gallery: Tensor | None, k: int, labels: Tensor | None, gallery_labels: Tensor | None
) -> None:
    rows = queries if gallery is None else gallery
    candidates = len(rows) - (gallery is None)
    shapes = f"queries {list(queries.shape)} and gallery {None if gallery is None else list(gallery.shape)}"
    if queries.ndim != 2 or rows.ndim != 2 or queries.shape[1] != rows.shape[1]:
        raise ValueError(f"recall_at_k: queries [n, d] and gallery [m, d] are rows of one width, got {shapes}.")
    if gallery is None and (labels is None or gallery_labels is not None):
        raise ValueError("recall_at_k: rows that search among themselves need labels: recall_at_k(rows, labels=…).")
    if gallery is not None and (labels is None) != (gallery_labels is None):
        raise ValueError(
            "recall_at_k: labels and gallery_labels come together; without them, partners stand at one index."
        )
    if gallery is not None and labels is None and len(queries) != len(gallery):
        raise ValueError(f"recall_at_k: without labels row i of the gallery is query i's partner, got {shapes}.")
    for name, given, of in (("labels", labels, queries), ("gallery_labels", gallery_labels, rows)):
        if given is not None and given.shape != of.shape[:1]:
            raise ValueError(f"recall_at_k: {name} are one integer per row, got {list(given.shape)} for {shapes}.")
    if not 1 <= k <= candidates:
        raise ValueError(f"recall_at_k: k is between 1 and the {candidates} rows to search in, got {k}.")
    if not (queries.isfinite().all() and rows.isfinite().all()):
        raise ValueError("recall_at_k: rows must be finite, got NaN or infinity.")
