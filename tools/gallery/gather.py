"""Recipes of a loss: what it gathers, with which gradient, what it reduces over ranks, and its backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.temperature import LearnableTemperature
from contrastive_zoo.losses.info_nce import InfoNCE
from contrastive_zoo.ranks.collectives import all_gather, all_reduce, replicated
from contrastive_zoo.ranks.world import World
from contrastive_zoo.wrapper.distributed import DistributedLoss
from tools.gallery.recipe import (
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


def equal_shards(x: Tensor) -> Tensor:
    if len(set(shard_sizes(x))) > 1:
        raise RuntimeError("tensors must have the same size on every rank")
    return all_gather(x)


def of_one_size(choose: Callable[[list[int]], int]) -> Callable[[Tensor], Tensor]:
    def gather(x: Tensor) -> Tensor:
        return all_gather(F.pad(x, (0, 0, 0, choose(shard_sizes(x)) - len(x))))  # a negative number cuts

    return gather


def overwritten_slice(x: Tensor) -> Tensor:
    gathered = gather_detached(x)
    gathered[rank_and_size()[0]] = x
    return torch.cat(gathered)


def without_gradient(x: Tensor) -> Tensor:
    return torch.cat(gather_detached(x)) + 0 * x.sum() if world_size() > 1 else x


def gather_layer(reduced: Callable[[Tensor], Tensor] = lambda dy: dy) -> Callable[[Tensor], Tensor]:
    """Return a gather; its backward pass returns the local slice of the gradient, after it is reduced over ranks."""

    class GatherLayer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.start, ctx.size = sum(shard_sizes(x)[: rank_and_size()[0]]), len(x)
            return torch.cat(gather_detached(x))

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return reduced(dy)[ctx.start : ctx.start + ctx.size]

    return GatherLayer.apply


recipe("DistributedLoss, own loss")(
    lambda: DistributedLoss(InfoNCE(temperature=LearnableTemperature(1 / 3), symmetric=True))
)
recipe("DistributedLoss, any loss")(lambda: DistributedLoss(DenseInfoNCE()))
recipe("DistributedLoss, labels", call="labels")(partial(DistributedLoss, dense_sup_con))
recipe("DistributedLoss, sum trainer", grad_reduction="sum")(
    lambda: DistributedLoss(DenseInfoNCE(), grad_reduction="sum")
)
recipe("gather with reduce-scatter")(partial(DenseInfoNCE, all_gather))
recipe("torch functional all_gather", mistake="uneven shards")(partial(DenseInfoNCE, equal_shards))
recipe("cut to one size", mistake="one size")(partial(DenseInfoNCE, of_one_size(min)))
recipe("padded to one size", mistake="one size")(partial(DenseInfoNCE, of_one_size(max)))
recipe("own slice", mistake="own slice")(partial(DenseInfoNCE, gather_layer()))
recipe("overwritten slice", mistake="own slice")(partial(DenseInfoNCE, overwritten_slice))
recipe("own slice × W", mistake="times W")(partial(DenseInfoNCE, gather_layer(), world_size))
recipe("detached gather", mistake="detached")(partial(DenseInfoNCE, without_gradient))


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
        return Batch({}, {}, world=world).reduce((to_a + to_b) / 2)


class _Local(nn.Module):
    """Mean over the local anchors, as OpenCLIP's local_loss; ``gather`` returns the candidates of all ranks."""

    def __init__(
        self,
        gather: Callable[[Tensor], Tensor],
        *,
        offset: bool = True,
        average: bool = False,
        factor: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.gather, self.offset, self.average, self.factor = gather, offset, average, factor

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        a, b = F.normalize(view1, dim=1), F.normalize(view2, dim=1)
        positive = torch.arange(len(a)) + (sum(shard_sizes(a)[: rank_and_size()[0]]) if self.offset else 0)
        total = F.cross_entropy(self.scale * a @ self.gather(b).T, positive, reduction="sum")
        total = total + F.cross_entropy(self.scale * b @ self.gather(a).T, positive, reduction="sum")
        mean = self.factor() * total / max(2 * len(a), 1)
        return all_reduce(mean, "mean") if self.average else mean


recipe("sharded anchors")(partial(ShardedAnchors, all_gather))


def local_parameters() -> ShardedAnchors:
    return ShardedAnchors(all_gather, replicate=partial(scale_gradient, world_size()))


recipe("wrong adjoint", mistake="wrong direction")(
    partial(ShardedAnchors, gather_layer(lambda dy: all_gather(dy[None]).amax(0)))
)
recipe("local parameters", mistake="local parameters")(local_parameters)
recipe("detached candidates", mistake="detached candidates")(partial(_Local, overwritten_slice))
recipe("local loss", mistake="local loss")(partial(_Local, all_gather))
recipe("local loss × W", mistake="local loss × W")(partial(_Local, all_gather, factor=world_size))
recipe("mean of means", mistake="mean of means")(partial(_Local, all_gather, average=True))
recipe("mask without offset", mistake="mask without offset")(partial(_Local, all_gather, offset=False))


recipe("local negatives", mistake="local negatives")(DenseInfoNCE)


def _of_halves(both: Tensor) -> Tensor:
    view1, view2 = F.normalize(both, dim=1).chunk(2)
    return symmetric_cross_entropy(3.0 * view1 @ view2.T)


@loss_recipe("views split wrongly", mistake="views split wrongly")
def _split_in_half(view1: Tensor, view2: Tensor) -> Tensor:
    return _of_halves(all_gather(torch.cat([view1, view2])))


recipe("views joined first", mistake="views split wrongly", views=1)(lambda: DistributedLoss(_of_halves))


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


@loss_recipe("result thrown away", mistake="result thrown away")
def _reduced_for_nothing(view1: Tensor, view2: Tensor) -> Tensor:
    def total(c: Tensor) -> Tensor:
        if world_size() > 1:
            dist.all_reduce(c.detach().clone())  # as torch.distributed.nn.all_reduce, which returns the sum of a copy
        return c

    return _correlations(view1, view2, total)


@recipe("its own process group, wrapped", mistake="raises")
def _holds_a_group() -> DistributedLoss:
    return DistributedLoss(DenseInfoNCE(partial(all_gather, process_group=dist.group.WORLD)))


@loss_recipe("local normalisation", mistake="local normalisation")
def _normalised_locally(view1: Tensor, view2: Tensor) -> Tensor:
    a, b = (view - view.mean(0) if len(view) else view for view in (view1, view2))
    return _correlations(a, b, all_reduce)


@loss_recipe("scaled by local count", mistake="scaled by local count", call="labels")
def _as_if_shards_were_equal(embeddings: Tensor, labels: Tensor) -> Tensor:
    mean = all_reduce(embeddings.cos().sum(0)) / World.of().shards(len(embeddings)).total
    return world_size() * len(embeddings) * mean.square().sum()


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


class _IgnoresGradOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0]


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
    return lambda embeddings, labels: loss(scale_gradient((len(embeddings) / 0.5) ** 0.5, embeddings), labels)


@recipe("overwritten tensors", mistake="overwritten tensors", call="labels")
def _overwritten_tensors() -> DistributedLoss:
    return DistributedLoss(lambda embeddings, labels: _SavesOnClass.apply(embeddings))
