"""Recipes whose ranks diverge in later steps, random numbers, settings, state or messages."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.ranks.collectives import all_gather, all_reduce
from contrastive_zoo.wrapper.distributed import DistributedLoss
from tools.gallery.recipe import (
    DenseInfoNCE,
    dense_sup_con,
    loss_recipe,
    rank_and_size,
    recipe,
    scale_gradient,
    shard_sizes,
    world_size,
)

MAX_WIDTH, CLASSES = 8, 64
"""Largest width of embeddings for which the sharded weights are drawn, and the number of classes."""


@recipe("scaled from call 3", mistake="later steps")
class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss, self.calls = DistributedLoss(DenseInfoNCE()), 0

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        self.calls += 1
        value: Tensor = self.loss(view1, view2)
        return world_size() * value if self.calls > 2 else value


def _projected(embeddings: Tensor, directions: Tensor) -> Tensor:
    count = sum(shard_sizes(embeddings))
    return (all_reduce((embeddings @ directions).sum(0)) / count).square().mean()


@loss_recipe("own random stream", mistake="different random numbers", call="labels")
def _local_directions(embeddings: Tensor, labels: Tensor) -> Tensor:
    return _projected(embeddings, torch.randn(embeddings.shape[1], 64))


class _ShardedClasses(nn.Module):
    """A classifier whose weights are sharded by class; every rank computes the whole loss."""

    sharded = True

    def __init__(self, factor: float) -> None:
        super().__init__()
        rank, size = rank_and_size()
        whole = torch.randn(CLASSES, MAX_WIDTH, generator=torch.Generator().manual_seed(3))
        self.weight = nn.Parameter(whole.tensor_split(size)[rank])
        self.factor = factor

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        z = scale_gradient(world_size(), all_gather(embeddings, gradient="complete"))
        weight = scale_gradient(self.factor, all_gather(self.weight, gradient="complete"))
        return F.cross_entropy(z @ weight[:, : z.shape[1]].T, all_gather(labels))


recipe("sharded weights", call="labels")(lambda: _ShardedClasses(1))
recipe("sharded weights, W×", mistake="sharded parameters", call="labels")(lambda: _ShardedClasses(world_size()))


@recipe("one message more", mistake="messages differ")
class _ExtraCollective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = DistributedLoss(DenseInfoNCE())

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        rank, size = rank_and_size()
        if size > 1 and rank == size - 1:
            group = dist.new_group([rank], use_local_synchronization=True)
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
        value: Tensor = self.loss(view1, view2)
        return value


@loss_recipe("early return", mistake="hang", call="labels")
def _early_return(embeddings: Tensor, labels: Tensor) -> Tensor:
    if len(labels) < 2:
        return 0 * embeddings.sum()
    return dense_sup_con(all_gather(embeddings), all_gather(labels))


@recipe("rank's own queue", mistake="state", call="labels")
class _Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8))
        self.queue: Tensor

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            local = embeddings.detach().sum(1)
            self.queue = torch.cat([local, self.queue])[: len(self.queue)]
        return dense_sup_con(all_gather(embeddings), all_gather(labels))


@recipe("proxies seeded per rank", mistake="unequal parameters", call="labels")
class _Proxies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank_and_size()[0])
        self.proxies = nn.Parameter(torch.randn(CLASSES, MAX_WIDTH, generator=generator))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        z = all_gather(embeddings)
        return F.cross_entropy(z @ self.proxies[:, : z.shape[1]].T, all_gather(labels))
