"""Statistics of the embeddings of all ranks: moments, spectra, balanced assignments, potentials."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Candidates
from contrastive_zoo.engine.pairwise import first_of_equals, with_equal_columns
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.softmax import log_sum_exps
from contrastive_zoo.engine.tiling import by_blocks, tile_bytes
from contrastive_zoo.ranks.collectives import all_gather


@without_autocast
def centered(batch: Batch, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return x - batch.sum(x.sum(0), gradient="partial") / max(1, batch.total)


@without_autocast
def second_moments(batch: Batch, x: Float[Tensor, "n d"], y: Float[Tensor, "n e"]) -> Float[Tensor, "d e"]:
    """Return ``X.T @ Y``, summed over the rows of all ranks, not divided; every rank must derive the same value from it."""
    return batch.sum(matmul(x.T, y), gradient="complete")


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
    """Return Σ_i cos(t_j x_i) and Σ_i sin(t_j x_i), some points at a time; the backward pass computes them again."""
    count = _points_at_once(x)
    sums = _wave_sums(t, x) if len(t) <= count else by_blocks(_wave_sums, count, [t], [x])
    return sums.transpose(0, 1)


def _wave_sums(t: Tensor, x: Tensor) -> Tensor:
    angles = t[:, None, None] * x
    return torch.stack([angles.cos().sum(1), angles.sin().sum(1)], 1)


def _points_at_once(x: Tensor) -> int:
    return max(1, tile_bytes(x) // max(1, x.nbytes))


def sliced_distance(
    batch: Batch, z: Float[Tensor, "n v d"], directions: Float[Tensor, "d m"], expected: Callable[[Tensor], Tensor]
) -> Float[Tensor, ""]:
    """Return the mean squared difference of sorted projections of all ranks' embeddings and of ``expected(directions)``.

    Views are sorted each by itself. Each rank takes a part of the directions, some at a time.
    """
    world, unit = batch.world, F.normalize(directions.to(z), dim=0).T
    local, views = unit[world.rank :: world.size], all_gather(z, shards=batch.samples, process_group=world).unbind(1)
    row_bytes = _SORTED_MATRICES * len(views) * len(views[0]) * z.element_size()
    height = max(1, tile_bytes(z) // row_bytes)
    errors = partial(_sorted_errors, expected, [first_of_equals(x.detach()) for x in views])
    of_all = errors(local, *views) if len(local) <= height else by_blocks(errors, height, [local], views)
    return batch.sum(of_all.sum(), gradient="complete") / (len(unit) * len(views))


_SORTED_MATRICES = 6  # as large as a view's projections: sorted ones, their indices, expected ones, differences


@without_autocast
def _sorted_errors(
    expected: Callable[[Tensor], Tensor],
    first: Sequence[Tensor | None],
    directions: Float[Tensor, "h d"],
    *views: Float[Tensor, "N d"],
) -> Float[Tensor, " h"]:
    """Return the sum over views; ``first`` are the :func:`first_of_equals` of each."""
    goal, projected = expected(directions), [matmul(directions, x.T) for x in views]
    ordered = (with_equal_columns(x, y).sort(dim=1, stable=True).values for x, y in zip(projected, first, strict=True))
    return torch.stack([(x - goal).square().mean(1) for x in ordered]).sum(0)


def log_potentials(batch: Batch, views: Sequence[Candidates], scale: float | Tensor) -> Float[Tensor, " v"]:
    """Return of each view ``log Σ_{i≠j} exp(scale · z_i·z_j)`` over the pairs of all ranks' embeddings, two or more."""
    settings: Any = {"scale": scale, "unit_norm": True, "row_shards": batch.samples, "world": batch.world}
    settings["arithmetic"] = batch.plan.arithmetic
    sums = [log_sum_exps(z.local, gathered=z.gathered(), **settings)[0].logsumexp(0) for z in views]
    return batch.log_sum_exp(torch.stack(sums), gradient="complete")
