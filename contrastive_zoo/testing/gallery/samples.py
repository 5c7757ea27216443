"""Recipes that gather the wrong samples, reduce a statistic wrongly, or have an error in a backward pass."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.ranks.collectives import all_gather, all_reduce
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.gallery.recipe import (
    DenseInfoNCE,
    dense_sup_con,
    gather_detached,
    loss_recipe,
    rank_and_size,
    recipe,
    scale_gradient,
    shard_sizes,
    symmetric_cross_entropy,
    world_size,
)
from contrastive_zoo.wrapper.distributed import DistributedLoss

# --- samples and labels -----------------------------------------------------------------------------------------------

recipe("local negatives", mistake="local negatives")(DenseInfoNCE)


@loss_recipe("views split wrongly", mistake="views split wrongly")
def _split_in_half(view1: Tensor, view2: Tensor) -> Tensor:
    both = all_gather(F.normalize(torch.cat([view1, view2]), dim=1))
    return symmetric_cross_entropy(3.0 * both[: len(both) // 2] @ both[len(both) // 2 :].T)


@loss_recipe("[W, n, d] folded wrongly", mistake="views split wrongly")
def _interleaved(view1: Tensor, view2: Tensor) -> Tensor:
    a, b = (all_gather(F.normalize(view, dim=1)) for view in (view1, view2))
    local_index = [index for n in shard_sizes(view2) for index in range(n)]
    interleaved = torch.tensor(sorted(range(len(b)), key=lambda row: local_index[row]), dtype=torch.int64)
    return symmetric_cross_entropy(3.0 * a @ b[interleaved].T)


@loss_recipe("own rank first", mistake="own rank first", call="labels")
def _own_rank_first(embeddings: Tensor, labels: Tensor) -> Tensor:
    def local_first(x: Tensor) -> Tensor:
        gathered = gather_detached(x)
        local = gathered.pop(rank_and_size()[0])
        return torch.cat([x if x.requires_grad else local, *gathered])

    z = scale_gradient(world_size(), local_first(embeddings))
    weight = 1 / torch.arange(1, len(z) + 1)  # stands for a miner, a queue or a tie, which depend on the order
    return dense_sup_con(z, local_first(labels)) + weight @ z.square().sum(1)


@loss_recipe("labels not gathered", mistake="labels not gathered", call="labels")
def _local_labels(embeddings: Tensor, labels: Tensor) -> Tensor:
    z = all_gather(embeddings)
    repeated = labels.repeat(len(z) // max(len(labels), 1) + 1)[: len(z)] if len(labels) else torch.zeros(len(z))
    return dense_sup_con(z, repeated)


@loss_recipe("labels by position", mistake="labels by position")
def _local_ids(view1: Tensor, view2: Tensor) -> Tensor:
    ids = torch.arange(len(view1)).repeat(2)
    return dense_sup_con(all_gather(torch.cat([view1, view2])), all_gather(ids))


# --- what is reduced over ranks ---------------------------------------------------------------------------------------


def _correlations(view1: Tensor, view2: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    count = World.of().shards(len(view1)).total
    c = total(F.normalize(view1, dim=1).T @ F.normalize(view2, dim=1)) / count
    return (c - torch.eye(len(c))).square().sum()


@loss_recipe("statistic without gradient", mistake="statistic without gradient")
def _reduced_in_place(view1: Tensor, view2: Tensor) -> Tensor:
    def total(c: Tensor) -> Tensor:
        reduced = c.detach().clone()
        if world_size() > 1:
            dist.all_reduce(reduced)
        return c + (reduced - c.detach())

    return _correlations(view1, view2, total)


@loss_recipe("statistic with gradient")
def _reduced_with_gradient(view1: Tensor, view2: Tensor) -> Tensor:
    return _correlations(view1, view2, all_reduce)


@loss_recipe("naive softmax", mistake="overflow", call="labels")
def _sum_of_exponentials(embeddings: Tensor, labels: Tensor) -> Tensor:
    squares = embeddings.square().sum(1)
    return torch.logsumexp(squares, 0) if world_size() == 1 else all_reduce(squares.exp().sum()).log()


recipe("mean assumed, trainer sums", mistake="trainer sums", grad_reduction="sum")(
    lambda: DistributedLoss(DenseInfoNCE())
)
recipe("sum assumed, trainer averages", mistake="trainer averages")(
    lambda: DistributedLoss(DenseInfoNCE(), grad_reduction="sum")
)


# --- backward passes written by hand ----------------------------------------------------------------------------------


class _IgnoresGradOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0]


class _RescalesGradient(torch.autograd.Function):
    """The identity; the backward pass multiplies the gradient by √(B/τ), with the local batch size B."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: float) -> Tensor:
        ctx.factor = (len(z) / temperature) ** 0.5
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * dy, None


class _SavesOnClass(torch.autograd.Function):
    saved: Tensor

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        _SavesOnClass.saved = z.detach()
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy * _SavesOnClass.saved


@recipe("ignored grad_output", mistake="ignored grad_output", call="labels")
def _ignored_grad_output() -> DistributedLoss:
    return DistributedLoss(lambda embeddings, labels: _IgnoresGradOutput.apply(embeddings))


@recipe("gradient × √(B/τ)", mistake="rescaled by batch size", call="labels")
def _rescaled() -> Callable[[Tensor, Tensor], Tensor]:
    loss = DistributedLoss(dense_sup_con)
    return lambda embeddings, labels: loss(_RescalesGradient.apply(embeddings, 0.5), labels)


@recipe("overwritten tensors", mistake="overwritten tensors", call="labels")
def _overwritten_tensors() -> DistributedLoss:
    return DistributedLoss(lambda embeddings, labels: _SavesOnClass.apply(embeddings))
