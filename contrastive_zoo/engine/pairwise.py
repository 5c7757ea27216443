"""Compute dot products and distances of anchors and candidates; the backward pass uses the sparsity of mined losses.

A mined loss selects few pairs. The backward pass takes its sparse gradient if the candidates are those of a sweep over
blocks, as their node of the graph says: they pass through the user's ``RowLoss.similarity``.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from contrastive_zoo.engine.implementation import is_dense
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.compiling import Function

# In float64 on a CPU, points whose squared distance is below this part of ‖a‖² + ‖b‖² are near, see `_difference_near`.
_NEAR = 1e-3
_PAIRS_AT_ONCE = 2**14

# squared distances below so many units of rounding of ‖a‖² + ‖b‖² count as 0: a matmul does not resolve them
_ROUNDING_UNITS = 8


def share_across_blocks(candidates: Tensor) -> Tensor:
    """Return candidates at which the graphs of many blocks of anchors end."""
    with torch.enable_grad():
        return _Shared.apply(candidates.detach().requires_grad_())


class _Shared(Function):
    """Candidates of many blocks: squared norms are computed once, gradients may be sparse."""

    @staticmethod
    def forward(ctx: Any, candidates: Tensor) -> Tensor:
        ctx.squared_norms = candidates.square().sum(1)
        return candidates.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _shared_norms(candidates: Tensor) -> Tensor | None:
    """Return the squared norms of candidates of :func:`share_across_blocks`, None of others."""
    return getattr(candidates.grad_fn, "squared_norms", None)  # grad_fn is its ctx


@torch.no_grad()
def first_of_equals(rows: Float[Tensor, "N d"]) -> Int[Tensor, " N"] | None:
    """Return for each row the index of the first row that equals it; None if no two are equal, or on an accelerator."""
    if not devices.on_cpu(rows) or not rows.numel():
        return None
    # rows that differ usually differ in their first element already; others are compared whole
    _, group, counts = rows[:, 0].unique(return_inverse=True, return_counts=True)
    if len(counts) == len(rows):
        return None
    index = (counts[group] > 1).nonzero()[:, 0]
    different, group = rows[index].unique(dim=0, return_inverse=True)
    if len(different) == len(index):
        return None
    first = index.new_full((len(different),), len(rows)).scatter_reduce_(0, group, index, "amin")
    return torch.arange(len(rows), device=rows.device).index_copy_(0, index, first[group])


def with_equal_columns(matrix: Float[Tensor, "c N"], first: Int[Tensor, " N"] | None) -> Float[Tensor, "c N"]:
    """Return the matrix with equal columns for equal candidates, whose :func:`first_of_equals` these are.

    A matmul may round the same product differently at other places, and which of equal candidates is the hardest would
    depend on the split over ranks. Each column keeps its own gradient.
    """
    return matrix if first is None else _EqualColumns.apply(matrix, first)


class _EqualColumns(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, first: Tensor) -> Tensor:
        return matrix[:, first]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def takes_sparse_gradient(matrix: Tensor) -> bool:
    """Return whether the backward pass of a matrix takes a sparse gradient. On a GPU a dense matmul is faster."""
    return getattr(matrix.grad_fn, "of_shared_candidates", False) and devices.on_cpu(matrix)


def dot_products(anchors: Float[Tensor, "c d"], candidates: Float[Tensor, "N d"]) -> Float[Tensor, "c N"]:
    """Return ``anchors @ candidates.T``, whose backward pass skips the zeros of a sparse gradient."""
    if is_dense():
        return anchors @ candidates.T
    return _DotProducts.apply(anchors, candidates)


class _DotProducts(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, anchors: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(anchors, candidates)
        ctx.of_shared_candidates = _shared_norms(candidates) is not None
        return anchors @ candidates.T

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        anchors, candidates = ctx.saved_tensors
        if (entries := _sparse_entries(gradient, anchors.shape[1])) is not None:
            i, j, w = entries
            dcandidates = _row_sums(j, w * anchors[i], candidates, sparse=ctx.of_shared_candidates)
            return _row_sums(i, w * candidates[j], anchors), dcandidates
        return gradient @ candidates, gradient.t() @ anchors


def shifted(
    anchors: Float[Tensor, "c d"], candidates: Float[Tensor, "N d"]
) -> tuple[Float[Tensor, "c d"], Float[Tensor, "N d"]]:
    """Return points seen from the first candidate: far from 0 a matmul loses the digits of distances that differences keep.

    The mean would be as good, but equal distances of points such as integers would not stay equal.
    """
    origin = candidates[:1].detach()
    return anchors - origin, candidates - origin


def distances(
    anchors: Float[Tensor, "c d"], candidates: Float[Tensor, "N d"], *, squared: bool = False
) -> Float[Tensor, "c N"]:
    """Return ‖a − b‖ of every anchor and candidate, or its square; 0, without gradient, below a matmul's rounding."""
    if not is_dense():
        return _Euclidean.apply(anchors, candidates, squared)
    norms = anchors.square().sum(1)[:, None] + candidates.square().sum(1)
    distance = torch.addmm(norms, anchors, candidates.T, alpha=-2)
    distinct = distance > _ROUNDING_UNITS * torch.finfo(distance.dtype).eps * norms.detach()
    return distance.where(distinct, 0) if squared else distance.where(distinct, 1).sqrt().where(distinct, 0)


def _difference_near(distance: Tensor, norms: Tensor, anchors: Tensor, candidates: Tensor) -> None:
    """In float64, take squared distances of near points from their difference: a matmul errs by more than 1e-10."""
    if distance.dtype != torch.float64 or not devices.on_cpu(distance):
        return
    for pairs in (distance < _NEAR * norms).nonzero().split(_PAIRS_AT_ONCE):
        i, j = pairs.unbind(1)
        distance[i, j] = (anchors[i] - candidates[j]).square().sum(1)


class _Euclidean(Function):
    """Distances D with da_i = Σ_j w_ij (a_i − b_j); w = dD / D, or 2 dD if they are squared; 0 where D = 0."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, anchors: Tensor, candidates: Tensor, squared: bool) -> Tensor:
        squares = _shared_norms(candidates)
        ctx.of_shared_candidates = squares is not None
        squares = candidates.square().sum(1) if squares is None else squares
        norms = anchors.square().sum(1)[:, None] + squares
        distance = torch.addmm(norms, anchors, candidates.T, alpha=-2)
        _difference_near(distance, norms, anchors, candidates)
        distance *= torch.gt(distance, norms.mul_(_ROUNDING_UNITS * torch.finfo(distance.dtype).eps), out=norms)
        if not squared:
            distance.sqrt_()
        ctx.save_for_backward(anchors, candidates, distance)
        ctx.squared = squared
        return distance

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        anchors, candidates, distance = ctx.saved_tensors

        def weights(g: Tensor, d: Tensor) -> Tensor:
            w = torch.gt(d, 0, out=torch.empty_like(d)).mul_(g)
            return w.mul_(2) if ctx.squared else w.div_(d.clamp(min=torch.finfo(d.dtype).tiny))

        if (entries := _sparse_entries(gradient, anchors.shape[1])) is not None:
            i, j, g = entries
            difference = weights(g, distance[i, j, None]) * (anchors[i] - candidates[j])
            dcandidates = _row_sums(j, -difference, candidates, sparse=ctx.of_shared_candidates)
            return _row_sums(i, difference, anchors), dcandidates, None
        w = weights(gradient, distance)
        danchors = w @ candidates.new_ones(len(candidates), 1) * anchors
        dcandidates = w.t() @ anchors.new_ones(len(anchors), 1) * candidates
        return danchors.addmm_(w, candidates, alpha=-1), dcandidates.addmm_(w.t(), anchors, alpha=-1), None


def _sparse_entries(gradient: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return row indices, column indices and values [k, 1] of a gradient's non-zero entries; None if it is not sparse."""
    if not gradient.is_sparse:
        if not _is_sparse_enough(gradient, width):
            return None
        gradient = gradient.to_sparse()
    i, j = gradient._indices()
    return i, j, gradient._values()[:, None]


def _row_sums(index: Tensor, rows: Tensor, like: Tensor, *, sparse: bool = False) -> Tensor:
    """Return a tensor like ``like`` that holds at row ``index[k]`` the sum of the matching rows k, and 0 elsewhere."""
    if sparse:
        return torch.sparse_coo_tensor(index[None], rows, like.shape, check_invariants=False)
    return torch.zeros_like(like).index_add_(0, index, rows)


def _is_sparse_enough(weights: Tensor, width: int) -> bool:
    """Return whether the rows of the non-zero entries are smaller than the matrix; a sample of rows is counted first."""
    return devices.on_cpu(weights) and all(
        int(x.count_nonzero()) * width <= x.numel() for x in (weights[::16], weights)
    )


Metric = Literal["distance", "squared distance", "similarity"]


def dissimilarities(anchors: Tensor, candidates: Tensor, metric: Metric) -> Float[Tensor, "c N"]:
    """Return distances, or negative similarities: values that grow as embeddings move apart."""
    if metric == "similarity":
        return dot_products(-anchors, candidates)
    return distances(anchors, candidates, squared=metric == "squared distance")


def row_sums(*terms: Shaped[Tensor, "c _"]) -> Shaped[Tensor, "c k"]:
    """Return the sums of the rows of k matrices, one column per matrix."""
    return torch.stack([x.sum(1) for x in terms], 1)
