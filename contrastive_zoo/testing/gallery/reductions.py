"""Recipes that differ in what they reduce over ranks: statistics, exponentials, gradients."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.ranks.collectives import all_reduce
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.gallery.recipe import DenseInfoNCE, rank_and_size, recipe
from contrastive_zoo.wrapper.distributed import DistributedLoss


def _correlations(view1: Tensor, view2: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    count = World.of().shards(len(view1)).total
    c = total(F.normalize(view1, dim=1).T @ F.normalize(view2, dim=1)) / count
    return (c - torch.eye(len(c))).square().sum()


@recipe("statistic without gradient", mistake="statistic without gradient")
def _() -> Any:
    """a cross-correlation all-reduced in place (Barlow Twins): right value, gradient of the local term"""

    def total(c: Tensor) -> Tensor:
        reduced = c.detach().clone()
        if rank_and_size()[1] > 1:
            dist.all_reduce(reduced)
        return c + (reduced - c.detach())

    return lambda view1, view2: _correlations(view1, view2, total)


@recipe("statistic with gradient", mistake=None)
def _() -> Any:
    """the same through a differentiable all_reduce"""
    return lambda view1, view2: _correlations(view1, view2, all_reduce)


@recipe("naive softmax", mistake="overflow", call="labels")
def _() -> Any:
    """sums of exponentials all-reduced over ranks without a common maximum"""

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        squares = embeddings.square().sum(1)
        if rank_and_size()[1] == 1:
            return torch.logsumexp(squares, 0)
        return all_reduce(squares.exp().sum()).log()

    return loss


@recipe("mean assumed, trainer sums", mistake="trainer sums", grad_reduction="sum")
def _() -> Any:
    """written for a trainer that averages, used under one that sums"""
    return DistributedLoss(DenseInfoNCE())


@recipe("sum assumed, trainer averages", mistake="trainer averages")
def _() -> Any:
    """written for a trainer that sums, used under one that averages"""
    return DistributedLoss(DenseInfoNCE(), grad_reduction="sum")
