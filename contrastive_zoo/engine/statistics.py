"""Statistics of the embeddings of all ranks: moments, spectra, balanced assignments, potentials."""

from collections.abc import Callable, Sequence
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


def waves(batch: Batch, x: Float[Tensor, "n m"], t: Float[Tensor, " k"]) -> Float[Tensor, "2 k m"]:
    """Return Σ_i cos(t_j x_i) and Σ_i sin(t_j x_i), some points at a time; the backward pass computes them again."""

    def sums(t: Tensor, x: Tensor) -> Tensor:
        angles = t[:, None, None] * x
        return torch.stack([angles.cos().sum(1), angles.sin().sum(1)], 1)

    height = max(1, tile_bytes(on_cpu=x.is_cpu) // max(1, x.nbytes))
    return by_blocks(sums, height, [t], [x], plain=batch.plan.is_plain).transpose(0, 1)


def sliced_distance(
    batch: Batch, z: Float[Tensor, "n v d"], directions: Float[Tensor, "d m"], expected: Callable[[Tensor], Tensor]
) -> Float[Tensor, ""]:
    """Return the mean squared difference of sorted projections of all ranks' embeddings and of ``expected(directions)``.

    Views are sorted each by itself. Each rank takes a part of the directions, some at a time.
    """
    world, unit = batch.world, F.normalize(directions.to(z), dim=0).T
    local, views = unit[world.rank :: world.size], all_gather(z, shards=batch.samples, process_group=world).unbind(1)
    first = [first_of_equals(x.detach()) for x in views]

    @without_autocast
    def errors(directions: Tensor, *views: Tensor) -> Tensor:
        goal, projected = expected(directions), [matmul(directions, x.T) for x in views]
        equal = (with_equal_columns(x, y) for x, y in zip(projected, first, strict=True))
        return torch.stack([(x.sort(dim=1, stable=True).values - goal).square().mean(1) for x in equal]).sum(0)

    matrices = 6 * len(views)  # of the projections' size: sorted ones, their indices, expected ones, differences
    height = max(1, tile_bytes(on_cpu=z.is_cpu) // (matrices * batch.total * z.element_size()))
    total = by_blocks(errors, height, [local], views, plain=batch.plan.is_plain).sum()
    return batch.sum(total, gradient="complete") / (len(unit) * len(views))


def log_potentials(batch: Batch, views: Sequence[Candidates], scale: float | Tensor) -> Float[Tensor, " v"]:
    """Return of each view ``log Σ_{i≠j} exp(scale · z_i·z_j)`` over the pairs of all ranks' embeddings, two or more."""
    settings: Any = {"scale": scale, "unit_norm": True, "row_shards": batch.samples, "world": batch.world}
    settings["arithmetic"] = batch.plan.arithmetic
    sums = [log_sum_exps(z.local, gathered=z.gathered(), **settings)[0].logsumexp(0) for z in views]
    return batch.log_sum_exp(torch.stack(sums), gradient="complete")
