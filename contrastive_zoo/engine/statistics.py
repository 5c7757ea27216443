"""Statistics of the embeddings of all ranks: moments, spectra, balanced assignments, potentials."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Candidates
from contrastive_zoo.engine.implementation import is_dense
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.softmax import log_sum_exps
from contrastive_zoo.engine.tiling import tile_bytes
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


def off_diagonal(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    return matrix - matrix.diagonal().diag()


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
