"""Recipes that gather all embeddings and compute the whole loss on every rank; they differ in the gather's gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.loss_base.temperature import LearnableTemperature
from contrastive_zoo.losses.info_nce import InfoNCE
from contrastive_zoo.ranks.collectives import all_gather, all_reduce
from contrastive_zoo.testing.gallery.recipe import (
    DenseInfoNCE,
    dense_sup_con,
    gather_detached,
    rank_and_size,
    recipe,
    shard_sizes,
)
from contrastive_zoo.wrapper.distributed import DistributedLoss


@recipe("DistributedLoss, own loss", mistake=None)
def _() -> Any:
    """`DistributedLoss(InfoNCE(...))`"""
    return DistributedLoss(InfoNCE(temperature=LearnableTemperature(1 / 3), symmetric=True))


@recipe("DistributedLoss, any loss", mistake=None)
def _() -> Any:
    """`DistributedLoss(any_loss)`"""
    return DistributedLoss(DenseInfoNCE())


@recipe("DistributedLoss, labels", mistake=None, call="labels")
def _() -> Any:
    """`DistributedLoss(any_loss)` of embeddings and labels"""
    return DistributedLoss(dense_sup_con)


@recipe("DistributedLoss, sum trainer", mistake=None, grad_reduction="sum")
def _() -> Any:
    """`DistributedLoss(loss, grad_reduction="sum")` under a sum hook"""
    return DistributedLoss(DenseInfoNCE(), grad_reduction="sum")


@recipe("gather with reduce-scatter", mistake=None)
def _() -> Any:
    """all ranks compute the whole loss from a gather whose backward sums over ranks"""
    return DenseInfoNCE(gather=all_gather)


@recipe("torch functional all_gather", mistake="uneven shards")
def _() -> Any:
    """functional all_gather of equal shards, whole loss on every rank"""

    def gather_equal_shards(x: Tensor) -> Tensor:
        if len(set(shard_sizes(x))) > 1:
            raise RuntimeError("tensors must have the same size on every rank")
        return all_gather(x)

    return DenseInfoNCE(gather=gather_equal_shards)


class LocalSlice(torch.autograd.Function):
    """Gather; the backward pass returns the local slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.start, ctx.size = sum(shard_sizes(x)[: rank_and_size()[0]]), len(x)
        return torch.cat(gather_detached(x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy[ctx.start : ctx.start + ctx.size]


@recipe("own slice", mistake="own slice")
def _() -> Any:
    """an autograd.Function (`GatherLayer`) whose backward keeps this rank's slice"""
    return DenseInfoNCE(gather=LocalSlice.apply)


class GatherLayer(LocalSlice):
    """Gather; the backward pass sums the gradient over ranks and returns the local slice."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return LocalSlice.backward(ctx, all_reduce(dy))


@recipe("GatherLayer that all-reduces", mistake=None)
def _() -> Any:
    """a `GatherLayer` whose backward sums over ranks, then keeps this rank's slice"""
    return DenseInfoNCE(gather=GatherLayer.apply)


@recipe("GatherLayer of equal shards", mistake="uneven shards")
def _() -> Any:
    """the same with a plain `torch.distributed.all_gather`: the process dies on uneven shards"""
    return DenseInfoNCE(gather=_EqualShards.apply)


class _EqualShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rank, size = rank_and_size()
        gathered = [torch.empty_like(x) for _ in range(size)]
        if size > 1:
            dist.all_gather(gathered, x)
        gathered[rank] = x
        ctx.rank, ctx.size = rank, size
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return all_reduce(dy).chunk(ctx.size)[ctx.rank] if ctx.size > 1 else dy


@recipe("overwritten slice", mistake="own slice")
def _() -> Any:
    """gather, then overwrite this rank's slice with the live tensor"""

    return DenseInfoNCE(gather=overwritten_slice)


def overwritten_slice(x: Tensor) -> Tensor:
    """Gather, then overwrite the local slice with x, which carries a gradient."""
    gathered = gather_detached(x)
    gathered[rank_and_size()[0]] = x
    return torch.cat(gathered)


@recipe("own slice × W", mistake="times W")
def _() -> Any:
    """the same, loss × W"""
    return DenseInfoNCE(gather=LocalSlice.apply, factor=lambda: rank_and_size()[1])


@recipe("detached gather", mistake="detached")
def _() -> Any:
    """accelerate's gather, or a plain all_gather: no gradient at all"""
    return DenseInfoNCE(gather=lambda x: torch.cat(gather_detached(x)) + 0 * x.sum() if rank_and_size()[1] > 1 else x)
