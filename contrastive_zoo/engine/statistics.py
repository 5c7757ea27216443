"""Statistics of the embeddings of all ranks: moments, spectra, balanced assignments, potentials."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock, BatchLayout
from contrastive_zoo.engine.batch import Batch, Candidates
from contrastive_zoo.engine.implementation import is_dense
from contrastive_zoo.engine.pairwise import row_sums
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.rowwise import BlockLoss, reduce_rows
from contrastive_zoo.engine.softmax import log_sum_exps
from contrastive_zoo.engine.tiling import row_blocks, tile_bytes
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.ranks.compiling import Function, differentiable_once


@without_autocast
def centered(batch: Batch, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return x - batch.sum(x.sum(0), gradient="partial") / max(1, batch.total)


@without_autocast
def second_moments(batch: Batch, x: Float[Tensor, "n d"], y: Float[Tensor, "n e"]) -> Float[Tensor, "d e"]:
    """Return ``X.T @ Y``, summed over the rows of all ranks, not divided; every rank must derive the same value from it."""
    return batch.sum(matmul(x.T, y), gradient="complete")


@without_autocast
def squared_sums(batch: Batch, x: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """Return the diagonal of ``second_moments(batch, x, x)``."""
    return batch.sum(x.square().sum(0), gradient="complete")


@without_autocast
def divided_by_norms(batch: Batch, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return embeddings whose features are divided by their norms over all ranks; a feature of zeros stays zero."""
    squares = batch.sum(x.square().sum(0), gradient="partial")
    return x / squares.clamp(min=LEAST_SQUARE).sqrt()


LEAST_SQUARE = 1e-24  # of the smallest norm by which torch.nn.functional.normalize divides


def off_diagonal(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    return matrix - matrix.diagonal().diag()


@without_autocast
def inverse_cholesky(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Return L⁻¹ of ``matrix = L Lᵀ`` with L lower triangular; NaN if the matrix is not positive definite."""
    inverse: Tensor = _InverseCholesky.apply(matrix)
    return inverse


class _InverseCholesky(Function):
    """Compute W = L⁻¹, and dA = sym(Wᵀ Φ(−dW Wᵀ) W), where Φ takes the lower triangle with half of the diagonal.

    This is Murray 2016, eq. 10, https://arxiv.org/abs/1602.07527, for dL = −Wᵀ dW Wᵀ.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(factor, eye, upper=False).masked_fill(failed > 0, torch.nan)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        inner = matmul(-gradient, inverse.mT).tril()
        inner = inner - inner.diagonal().diag() / 2
        outer = matmul(matmul(inverse.mT, inner), inverse)
        return (outer + outer.mT) / 2


@without_autocast
def eigenvalues(matrix: Float[Tensor, "... d d"]) -> Float[Tensor, "... d"]:
    result: Tensor = _Eigenvalues.apply(matrix)
    return result


class _Eigenvalues(Function):
    """Compute λ, and dA = V diag(dλ) Vᵀ."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        if not ctx.needs_input_grad[0]:
            return torch.linalg.eigvalsh(matrix)
        values, vectors = torch.linalg.eigh(matrix)
        ctx.save_for_backward(matrix, vectors)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        matrix, vectors = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a second derivative, in which vectors depend on the matrix
            vectors = torch.linalg.eigh(matrix).eigenvectors
        return matmul(vectors * gradient.unsqueeze(-2), vectors.mT)


@torch.no_grad()
@without_autocast
def balanced_assignment(
    batch: Batch, scores: Float[Tensor, "... n K"], *, epsilon: float | Tensor, iterations: int
) -> Float[Tensor, "... n K"]:
    """Return the local rows of Sinkhorn's iterations on ``exp(scores / epsilon)`` of all ranks; views share the messages."""
    log_q = scores / epsilon  # exponentials of a small epsilon would overflow
    for _ in range(iterations):
        share = batch.log_sum_exp(torch.logsumexp(log_q, -2, keepdim=True), gradient="complete")
        log_q = (log_q - share).log_softmax(-1)
    return log_q.softmax(-1)


def waves(x: Float[Tensor, "n m"], t: Float[Tensor, " k"]) -> Float[Tensor, "2 k m"]:
    return _wave_sums(t, x) if is_dense() else _Waves.apply(x, t)


def _wave_sums(t: Tensor, x: Tensor) -> Tensor:
    angles = t[:, None, None] * x
    return torch.stack([angles.cos().sum(1), angles.sin().sum(1)])


class _Waves(Function):
    """Compute :func:`_wave_sums`, and dx_i = Σ_j t_j (dS_j cos(t_j x_i) − dC_j sin(t_j x_i)), some points at a time."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
        ctx.save_for_backward(x, t)
        return torch.cat([_wave_sums(points, x) for points in t.split(_points_at_once(x))], 1)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        x, t = ctx.saved_tensors
        count, total = _points_at_once(x), torch.zeros_like(x)
        for points, of_points in zip(t.split(count), (gradient * t[:, None]).split(count, 1), strict=True):
            angles, (of_cos, of_sin) = points[:, None, None] * x, of_points.unsqueeze(2)
            total += (angles.cos().mul_(of_sin) - angles.sin().mul_(of_cos)).sum(0)
        return differentiable_once(total, x), None


def _points_at_once(x: Tensor) -> int:
    return max(1, tile_bytes(x) // max(1, x.nbytes))


def log_potentials(batch: Batch, views: Sequence[Candidates], scale: float | Tensor) -> Float[Tensor, " v"]:
    """Return of each view ``log Σ_{i≠j} exp(scale · z_i·z_j)`` over the pairs of all ranks' embeddings, two or more."""
    settings: Any = {"scale": scale, "unit_norm": True, "row_shards": batch.samples, "world": batch.world}
    settings["arithmetic"] = batch.plan.arithmetic
    sums = [log_sum_exps(z.local, gathered=z.gathered(), **settings)[0].logsumexp(0) for z in views]
    return batch.log_sum_exp(torch.stack(sums), gradient="complete")


def histogram_overlap(batch: Batch, z: Tensor, ids: Tensor, num_bins: int) -> Float[Tensor, ""]:
    """Return the probability that a negative pair is more similar than a positive one: Σ_n h⁻_n Σ_{m≤n} h⁺_m."""
    with torch.set_grad_enabled(batch.plan.is_plain and torch.is_grad_enabled()):
        positives, negatives = pair_histograms(batch, z, ids, num_bins)
        below = positives.cumsum(0)
        value = (negatives * below).sum()
    if batch.plan.is_plain:
        return value
    # the loss is linear in either histogram: its gradient is that of the means of two fixed functions of similarity
    above = negatives.flip(0).cumsum(0).flip(0)
    loss = BlockLoss(_interpolated, terms=2, of_negatives=below, of_positives=above)
    linear = reduce_rows(batch, loss, z, ids)
    return value + (linear - linear.detach())


@without_autocast
def pair_histograms(
    batch: Batch, z: Float[Tensor, "n d"], ids: Int[Tensor, " n"], num_bins: int
) -> tuple[Float[Tensor, " nodes"], Float[Tensor, " nodes"]]:
    """Return histograms of positive and of negative pairs of all ranks, each with sum 1, or 0 without a pair."""
    shards, world = batch.samples, batch.world
    candidates = all_gather(z, shards=shards, process_group=world)
    layout = BatchLayout(ids, batch.gather_detached(ids), (), shards, world, batch.indices())
    total = z.new_zeros(2, num_bins + 1)
    # an empty block connects the candidates, whose backward pass is a message, with an empty shard
    for rows in [slice(0, len(z))] if batch.plan.is_plain else row_blocks(len(z), 4 * len(candidates), z.dtype):
        block = layout.block(rows, z[rows], candidates)
        lower, share = nearest_nodes(matmul(block.anchors, candidates.T), num_bins)
        nodes, weights = torch.stack([lower, lower + 1]), torch.stack([1 - share, share])
        result = [_sums_by_node(nodes, weights, mask, num_bins) for mask in (block.positive, block.negative)]
        total = total + torch.stack(result)
    total = batch.sum(total, gradient="complete")
    pairs = total.detach().sum(1, keepdim=True)
    positives, negatives = total / pairs.where(pairs > 0, 1)
    return positives, negatives


def nearest_nodes(similarity: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """Return the node below each similarity, and the share of the next one."""
    position = (similarity + 1) * (num_bins / 2)
    lower = position.detach().long().clamp_(0, num_bins - 1)
    return lower, position - lower


def _sums_by_node(nodes: Tensor, weights: Tensor, mask: Tensor, num_bins: int) -> Tensor:
    if devices.on_cpu(mask):
        nodes, weights = nodes[:, mask], weights[:, mask]
    else:  # the number of pairs would have to be read
        weights = weights.where(mask, 0)
    return weights.new_zeros(num_bins + 1).index_add(0, nodes.flatten(), weights.flatten())


def _interpolated(block: AnchorBlock, of_negatives: Tensor, of_positives: Tensor) -> tuple[Tensor, Tensor]:
    lower, share = nearest_nodes(block.anchors @ block.candidates.T, len(of_negatives) - 1)
    at_pairs = [(1 - share) * table[lower] + share * table[lower + 1] for table in (of_positives, of_negatives)]
    positive, negative = (x.where(mask, 0) for x, mask in zip(at_pairs, (block.positive, block.negative), strict=True))
    return row_sums(positive, negative), row_sums(block.positive, block.negative)
