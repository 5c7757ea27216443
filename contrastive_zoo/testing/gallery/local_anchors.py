"""Recipes in which each rank computes the loss of its local anchors against the candidates of all ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.engine.batch import reduce_anchors
from contrastive_zoo.ranks.collectives import all_gather, all_reduce, replicated
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.gallery.gather import GatherLayer, LocalSlice, overwritten_slice
from contrastive_zoo.testing.gallery.recipe import rank_and_size, recipe, scale_gradient, shard_sizes


class _MaxAdjoint(LocalSlice):
    """Gather; the backward pass reduces the gradient with MAX instead of SUM."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return all_reduce(dy, "max")[ctx.start : ctx.start + ctx.size]


class ShardedAnchors(nn.Module):
    """InfoNCE of the local anchors, global sum / global count; ``gather`` and ``replicate`` are collectives."""

    def __init__(self, gather: Callable[[Tensor], Tensor], replicate: Callable[[Tensor], Tensor] = replicated) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.gather, self.replicate = gather, replicate

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        world, scale = World.of(), self.replicate(self.scale)
        a, b = (F.normalize(scale_gradient(world.size, view), dim=1) for view in (view1, view2))
        positive = torch.arange(len(a)) + sum(shard_sizes(a)[: world.rank])
        to_b = F.cross_entropy(scale * a @ self.gather(b).T, positive, reduction="none")
        to_a = F.cross_entropy(scale * b @ self.gather(a).T, positive, reduction="none")
        return reduce_anchors((to_a + to_b) / 2, world=world)


@recipe("sharded anchors", mistake=None)
def _() -> Any:
    """local anchors against a differentiable gather of candidates, global sum / global count"""
    return ShardedAnchors(all_gather)


@recipe("wrong adjoint", mistake="wrong direction")
def _() -> Any:
    """the same, with a gather whose backward reduces with MAX"""
    return ShardedAnchors(_MaxAdjoint.apply)


@recipe("local parameters", mistake="local parameters")
def _() -> Any:
    """the same, where the temperature of each rank gets only the gradient of the local anchors"""
    return ShardedAnchors(all_gather, replicate=lambda scale: scale_gradient(rank_and_size()[1], scale))


class _Local(nn.Module):
    """Mean over the local anchors, as OpenCLIP's local_loss; ``gather`` returns the candidates of all ranks."""

    def __init__(
        self,
        gather: Callable[[Tensor], Tensor],
        *,
        offset: bool = True,
        average: bool = False,
        keys_too: bool = True,
        factor: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.gather, self.offset, self.average, self.keys_too, self.factor = gather, offset, average, keys_too, factor

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        a, b = F.normalize(view1, dim=1), F.normalize(view2, dim=1)
        positive = torch.arange(len(a)) + (sum(shard_sizes(a)[: rank_and_size()[0]]) if self.offset else 0)
        to_b = F.cross_entropy(self.scale * a @ self.gather(b).T, positive, reduction="sum")
        total = to_b
        if self.keys_too:
            total = (to_b + F.cross_entropy(self.scale * b @ self.gather(a).T, positive, reduction="sum")) / 2
        mean = self.factor() * total / max(len(a), 1)
        return all_reduce(mean, "mean") if self.average else mean


@recipe("detached candidates", mistake="detached candidates")
def _() -> Any:
    """local anchors against detached gathered candidates (`local_loss`)"""
    return _Local(overwritten_slice)


@recipe("local loss", mistake="local loss")
def _() -> Any:
    """local anchors, gather with gradient (`gather_with_grad`): each rank returns its local mean"""
    return _Local(all_gather)


@recipe("GatherLayer, local anchors", mistake="local loss")
def _() -> Any:
    """the same with a `GatherLayer` whose backward all-reduces (lightly, solo-learn)"""
    return _Local(GatherLayer.apply)


@recipe("GatherLayer of own slice, local anchors", mistake="detached candidates")
def _() -> Any:
    """the same with a `GatherLayer` whose backward keeps this rank's slice"""
    return _Local(LocalSlice.apply)


@recipe("local loss × W", mistake="local loss × W")
def _() -> Any:
    """local anchors, right offsets, gather with gradient, loss × W (PyLate 1.6)"""
    return _Local(all_gather, factor=lambda: rank_and_size()[1])


@recipe("queries only, × W", mistake="local loss × W")
def _() -> Any:
    """local queries as the only anchors, documents gathered with gradient, loss × W (sentence-transformers, formerly)"""
    return _Local(GatherLayer.apply, keys_too=False, factor=lambda: rank_and_size()[1])


@recipe("mean of means", mistake="mean of means")
def _() -> Any:
    """local anchors, gather with gradient, and the local means averaged over ranks"""
    return _Local(all_gather, average=True)


@recipe("mask without offset", mistake="mask without offset")
def _() -> Any:
    """local anchors against gathered candidates, targets `arange(n)` on every rank"""
    return _Local(all_gather, offset=False)
