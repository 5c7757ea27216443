"""The k nearest embeddings of all ranks, for the queries of all ranks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.metrics.exact import prepared
from contrastive_zoo.metrics.local_search import ApproximateIndex, Gallery, faiss_problem, ordered
from contrastive_zoo.metrics.rounds import local_positions, rounds
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.row_checks import described, flag_problem, is_integer, tensor_problem
from contrastive_zoo.ranks.session import agree_on_shards
from contrastive_zoo.ranks.world import Processes, World


class Neighbors(NamedTuple):
    """The nearest embeddings of each query, best first.

    Examples:
        >>> top_k(torch.eye(2), torch.tensor([[0.0, 2.0], [3.0, 0.0]]), k=1, normalize=False)
        Neighbors(scores=tensor([[3.],
                [2.]], dtype=torch.float64), indices=tensor([[1],
                [0]]))
    """

    scores: Float[Tensor, "n k"]
    """Dot products in float64; −∞ where a query has fewer than k that are not excluded."""
    indices: Int[Tensor, "n k"]
    """Indices into the gallery of all ranks, in rank order; −1 where there is none."""


@torch.no_grad()
def top_k(
    queries: Float[Tensor, "n d"],
    gallery: Float[Tensor, "m d"] | None = None,
    *,
    k: int,
    excluded: Int[Tensor, "n e"] | None = None,
    normalize: bool = True,
    index: ApproximateIndex | None = None,
    process_group: Processes = None,
) -> Neighbors:
    """Return the k nearest embeddings of the gallery of all ranks, for this rank's queries.

    Equal to ``torch.topk(queries @ all_gather(gallery).T, k)`` in float64, where equal scores are ordered by index, and the
    same bits for every split. Each rank holds its own embeddings, k numbers per query, and blocks of constant size.

    Args:
        queries: this rank's queries; ranks may hold different numbers, including zero.
        gallery: this rank's embeddings to search in; None for the other queries. A memory map is read block by block.
        k: number of neighbours.
        excluded: indices into the gallery of all ranks that a query must not find; −1 for none. The same e on every rank.
        normalize: compare cosines; otherwise dot products. float64 embeddings are normalised in float64, others in float32.
        index: search approximately; None for an exact search.
        process_group: who holds embeddings.

    Raises:
        ValueError: on every rank alike: shapes, dtypes or widths that do not belong together, embeddings that are not
            finite or whose dot products overflow float64, or k outside of 1 … number of embeddings to search in; faiss is
            not installed, or cannot build the index of some rank.

    Examples:
        >>> found = top_k(torch.tensor([[1.0, 0.1]]), torch.eye(3)[:, :2], k=2)
        >>> found.indices
        tensor([[0, 1]])
    """
    world = World.of(process_group, "top_k")
    rows = queries if gallery is None else gallery
    arguments = {"queries": queries, "gallery": rows} | ({} if excluded is None else {"excluded": excluded})
    problem = faiss_problem() or rows_problem(queries, rows) or _excluded_problem(excluded, queries)
    problem = problem or settings_problem(k=k, normalize=normalize, index=index)
    problem = problem or overflow_problem(normalize, queries=queries, gallery=rows)
    settings = {"k": k, "normalize": normalize, "index": index, "leave one out": gallery is None}
    shards = agree_on_shards("top_k", detached(arguments), world=world, problem=problem, settings=settings)
    candidates = max(0, shards[1].total - (gallery is None))
    if not 1 <= k <= candidates:
        raise ValueError(f"top_k: k is between 1 and the {candidates} rows to search in, got {k}.")
    excluded = torch.empty(len(queries), 0, dtype=torch.int64) if excluded is None else excluded.cpu()
    if gallery is None:
        self_indices = torch.arange(shards[0].start, shards[0].start + shards[0].size)
        excluded = torch.cat([excluded, self_indices[:, None]], 1)
    shape, start = (len(queries), k), shards[1].start
    result = Neighbors(torch.empty(shape, dtype=torch.float64), torch.empty(shape, dtype=torch.int64))
    with reported(world):
        prepared_queries = prepared(queries, normalize=normalize)
        local = Gallery("top_k", rows.detach(), normalize, index, world, ties=False)
        for block in rounds(shards[0], world):
            outside = local_positions(block.gathered(excluded), start, len(local))
            scores, positions, _ = local.nearest(block, block.gathered(prepared_queries), k, outside)
            scores, positions = ordered(scores, positions, k)
            indices = positions + start * (positions >= 0)
            scores, indices = (torch.cat(block.answered(x), 1) for x in (scores, indices))
            result.scores[block.local], result.indices[block.local] = ordered(scores, indices, k)
    return result


def detached(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in arguments.items()}


def rows_problem(queries: Tensor, rows: Tensor, name: str = "gallery") -> str | None:
    if problem := tensor_problem("queries", queries) or tensor_problem(name, rows):
        return problem
    valid = all(x.ndim == 2 and x.is_floating_point() for x in (queries, rows))
    if valid and queries.shape[1] == rows.shape[1] and queries.dtype == rows.dtype:
        return None
    return (
        f"queries [n, d] and {name} [m, d] are floating-point rows of one width and dtype, got {described(queries)} and "
        f"{described(rows)}."
    )


def overflow_problem(normalize: bool, **rows: Tensor) -> str | None:
    """Return which embeddings may have dot products, or norms, that float64 does not hold, in words; None if none have."""
    for name, x in rows.items():
        limit = 2.0 ** (1022 if normalize else 511) / max(1, x.shape[1]) ** 0.5
        if x.dtype == torch.float64 and x.numel():
            largest = max(abs(bound.item()) for bound in x.detach().aminmax())
            if limit < largest < torch.inf:
                what = "norms" if normalize else "dot products"
                return f"{name} must be below {limit:.3g}, as their {what} overflow, got {largest:.3g}. Scale them."
    return None


def settings_problem(*, k: object = 1, normalize: object, index: object) -> str | None:
    if not is_integer(k):
        return f"k is an integer, got {described(k)}."
    right = index is None or isinstance(index, ApproximateIndex)
    problem = None if right else f"index is an ApproximateIndex or None, got {described(index)}."
    return flag_problem(normalize=normalize) or problem


def _excluded_problem(excluded: Tensor | None, queries: Tensor) -> str | None:
    if excluded is None:
        return None
    if problem := tensor_problem("excluded", excluded):
        return problem
    if excluded.ndim == 2 and excluded.dtype == torch.int64 and len(excluded) == len(queries):
        return None
    return f"excluded are int64 [n, e], indices for each of the {len(queries)} queries, got {described(excluded)}."
