"""How people make a contrastive loss distributed, each way in a few lines: the right ones and the well-known mistakes.

Every invariant names a mistake from here, or from :mod:`contrastive_zoo.testing.gallery_steps`, that it catches. All recipes
compute InfoNCE in both directions with a learnable scale (views), or a supervised contrastive loss (labels); on one
process all give the same number.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.collectives import all_gather, all_reduce, replicated
from contrastive_zoo.distributed import DistributedLoss
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.loss_base.temperature import LearnableTemperature
from contrastive_zoo.losses.info_nce import InfoNCE
from contrastive_zoo.testing.gallery_steps import DistributedByHand  # and its recipes are hung
from contrastive_zoo.testing.recipe import (
    GALLERY,
    Pairs,
    Recipe,
    make,
    parts,
    ranks,
    recipe,
    sizes,
    supervised,
    times,
    two_way,
)
from contrastive_zoo.world import World

# ------------------------------------------------------------------------------------------------------- the right ones


@recipe("DistributedLoss, own loss", mistake=None)
def _() -> Any:
    """`DistributedLoss(InfoNCE(...))`"""
    return DistributedLoss(InfoNCE(temperature=LearnableTemperature(1 / 3), symmetric=True))


@recipe("DistributedLoss, any loss", mistake=None)
def _() -> Any:
    """`DistributedLoss(any_loss)`"""
    return DistributedLoss(Pairs())


@recipe("DistributedLoss, labels", mistake=None, call="labels")
def _() -> Any:
    """`DistributedLoss(any_loss)` of embeddings and labels"""
    return DistributedLoss(supervised)


@recipe("DistributedLoss, sum trainer", mistake=None, trainer="sum")
def _() -> Any:
    """`DistributedLoss(loss, grad_reduction="sum")` under a sum hook"""
    return DistributedLoss(Pairs(), grad_reduction="sum")


@recipe("gather with reduce-scatter", mistake=None)
def _() -> Any:
    """all ranks compute the whole loss from a gather whose backward sums over ranks"""
    return Pairs(gathered=all_gather)


@recipe("torch functional all_gather", mistake="uneven shards")
def _() -> Any:
    """functional all_gather of equal shards, whole loss on every rank"""

    def equal(x: Tensor) -> Tensor:
        if len(set(sizes(x))) > 1:
            raise RuntimeError("tensors must have the same size on every rank")
        return all_gather(x)

    return Pairs(gathered=equal)


# ---------------------------------------------------------------------------------------------------------- the mistakes


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.start, ctx.size = sum(sizes(x)[: ranks()[0]]), len(x)
        return torch.cat(parts(x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy[ctx.start : ctx.start + ctx.size]


@recipe("own slice", mistake="own slice")
def _() -> Any:
    """an autograd.Function whose backward keeps this rank's slice"""
    return Pairs(gathered=_OwnSlice.apply)


@recipe("overwritten slice", mistake="own slice")
def _() -> Any:
    """gather, then put the live tensor in this rank's place"""

    def gathered(x: Tensor) -> Tensor:
        gathered = parts(x)
        gathered[ranks()[0]] = x
        return torch.cat(gathered)

    return Pairs(gathered=gathered)


@recipe("own slice × W", mistake="times W")
def _() -> Any:
    """the same, loss × W"""
    return Pairs(gathered=_OwnSlice.apply, factor=lambda: ranks()[1])


@recipe("detached gather", mistake="detached")
def _() -> Any:
    """accelerate's gather, or a plain all_gather: no gradient at all"""
    return Pairs(gathered=lambda x: torch.cat(parts(x)) + 0 * x.sum() if ranks()[1] > 1 else x)


class _MaxAdjoint(_OwnSlice):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return all_reduce(dy, "max")[ctx.start : ctx.start + ctx.size]


class _Sharded(nn.Module):
    """The local rows against all columns, then global sum / global count; ``shared`` replicates the scale."""

    def __init__(self, columns: Callable[[Tensor], Tensor], shared: Callable[[Tensor], Tensor] = replicated) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.columns, self.shared = columns, shared

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        world, scale = World.of(), self.shared(self.scale)
        a, b = (F.normalize(times(world.size, view), dim=1) for view in (view1, view2))
        partner = torch.arange(len(a)) + sum(sizes(a)[: world.rank])
        to_b = F.cross_entropy(scale * a @ self.columns(b).T, partner, reduction="none")
        to_a = F.cross_entropy(scale * b @ self.columns(a).T, partner, reduction="none")
        return reduce_anchors((to_a + to_b) / 2, world=world)


@recipe("sharded rows", mistake=None)
def _() -> Any:
    """the local rows against a differentiable gather of columns, global sum / global count"""
    return _Sharded(all_gather)


@recipe("wrong adjoint", mistake="wrong direction")
def _() -> Any:
    """the same, with a gather whose backward reduces with MAX"""
    return _Sharded(_MaxAdjoint.apply)


@recipe("local parameters", mistake="local parameters")
def _() -> Any:
    """the same, where each rank's temperature gets its own part of the gradient only"""
    return _Sharded(all_gather, shared=lambda scale: times(ranks()[1], scale))


class _Local(nn.Module):
    """The local rows against all columns, as OpenCLIP's local_loss; ``columns`` says how these come."""

    def __init__(self, columns: Callable[[Tensor], Tensor], *, offset: bool = True, average: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.columns, self.offset, self.average = columns, offset, average

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        a, b = F.normalize(view1, dim=1), F.normalize(view2, dim=1)
        partner = torch.arange(len(a)) + (sum(sizes(a)[: ranks()[0]]) if self.offset else 0)
        to_b = F.cross_entropy(self.scale * a @ self.columns(b).T, partner, reduction="sum")
        to_a = F.cross_entropy(self.scale * b @ self.columns(a).T, partner, reduction="sum")
        mean = (to_b + to_a) / 2 / max(len(a), 1)
        return all_reduce(mean, "mean") if self.average else mean


@recipe("detached columns", mistake="detached columns")
def _() -> Any:
    """local rows against detached gathered columns (`local_loss`)"""
    return _Local(_overwritten_columns)


def _overwritten_columns(x: Tensor) -> Tensor:
    gathered = parts(x)
    gathered[ranks()[0]] = x
    return torch.cat(gathered)


@recipe("local loss", mistake="local loss")
def _() -> Any:
    """local rows, gather with gradient (`gather_with_grad`): each rank returns its own mean"""
    return _Local(all_gather)


@recipe("mean of means", mistake="mean of means")
def _() -> Any:
    """the same, means averaged over ranks"""
    return _Local(all_gather, average=True)


@recipe("mask without offset", mistake="mask without offset")
def _() -> Any:
    """local rows against gathered columns, targets `arange(n)` on every rank"""
    return _Local(all_gather, offset=False)


@recipe("local negatives", mistake="local negatives")
def _() -> Any:
    """no gather: each rank's loss of its own rows"""
    return Pairs()


@recipe("views misread", mistake="views misread")
def _() -> Any:
    """`[view1; view2]` gathered at once and cut in half: P N P N read as P P N N"""

    def loss(view1: Tensor, view2: Tensor) -> Tensor:
        both = all_gather(F.normalize(torch.cat([view1, view2]), dim=1))
        return two_way(3.0 * both[: len(both) // 2] @ both[len(both) // 2 :].T)

    return loss


@recipe("[W, n, d] folded wrongly", mistake="views misread")
def _() -> Any:
    """Lightning's `all_gather` returns [W, n, d]; of one view samples are interleaved, of the other not"""

    def loss(view1: Tensor, view2: Tensor) -> Tensor:
        a, b = (all_gather(F.normalize(view, dim=1)) for view in (view1, view2))
        ranks_of_rows = [index for n in sizes(view2) for index in range(n)]
        interleaved = torch.tensor(sorted(range(len(b)), key=lambda row: ranks_of_rows[row]), dtype=torch.int64)
        return two_way(3.0 * a @ b[interleaved].T)

    return loss


@recipe("own rank first", mistake="own rank first", call="labels")
def _() -> Any:
    """`[local, others]`: what depends on the order of rows differs from rank to rank"""

    def own_first(x: Tensor) -> Tensor:
        gathered = parts(x)
        local = gathered.pop(ranks()[0])
        return torch.cat([local if not x.requires_grad else x, *gathered])

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        z, y = own_first(embeddings), own_first(labels)
        z = times(ranks()[1], z)
        weight = 1 / torch.arange(1, len(z) + 1)  # stands for a miner, a queue, a tie: whatever reads the order
        return supervised(z, y) + weight @ z.square().sum(1)

    return loss


@recipe("labels not gathered", mistake="labels not gathered", call="labels")
def _() -> Any:
    """embeddings gathered, labels not: every rank's rows get this rank's labels"""

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        z = all_gather(embeddings)
        repeated = labels.repeat(len(z) // max(len(labels), 1) + 1)[: len(z)] if len(labels) else torch.zeros(len(z))
        return supervised(z, repeated)

    return loss


@recipe("labels by position", mistake="labels by position")
def _() -> Any:
    """ids from `arange(n)` on every rank: first samples of all ranks become positives"""

    def loss(view1: Tensor, view2: Tensor) -> Tensor:
        ids = torch.arange(len(view1)).repeat(2)
        return supervised(all_gather(torch.cat([view1, view2])), all_gather(ids))

    return loss


def _correlations(view1: Tensor, view2: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    count = World.of().shards(len(view1)).total
    c = total(F.normalize(view1, dim=1).T @ F.normalize(view2, dim=1)) / count
    return (c - torch.eye(len(c))).square().sum()


@recipe("statistic without gradient", mistake="statistic without gradient")
def _() -> Any:
    """a cross-correlation all-reduced in place (Barlow Twins): right value, gradient of my own term"""

    def total(c: Tensor) -> Tensor:
        every = c.detach().clone()
        if ranks()[1] > 1:
            dist.all_reduce(every)
        return c + (every - c.detach())

    return lambda view1, view2: _correlations(view1, view2, total)


@recipe("statistic with gradient", mistake=None)
def _() -> Any:
    """the same through a differentiable all_reduce"""
    return lambda view1, view2: _correlations(view1, view2, all_reduce)


class _Deaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0]


@recipe("ignored grad_output", mistake="ignored grad_output", call="labels")
def _() -> Any:
    """an autograd.Function that returns its gradient whatever comes in"""
    return DistributedLoss(lambda embeddings, labels: _Deaf.apply(embeddings))


class _OneSlot(torch.autograd.Function):
    saved: Tensor

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        _OneSlot.saved = z.detach()
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy * _OneSlot.saved


@recipe("one slot for two batches", mistake="one slot for two batches", call="labels")
def _() -> Any:
    """an autograd.Function that keeps what backward needs on the class"""
    return DistributedLoss(lambda embeddings, labels: _OneSlot.apply(embeddings))


@recipe("early return", mistake="hang", call="labels")
def _() -> Any:
    """a rank without a valid pair returns before the collective"""

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        if len(labels) < 2:
            return 0 * embeddings.sum()
        return supervised(all_gather(embeddings), all_gather(labels))

    return loss


class _Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8))
        self.queue: Tensor

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            local = embeddings.detach().sum(1)
            self.queue = torch.cat([local, self.queue])[: len(self.queue)]
        return supervised(all_gather(embeddings), all_gather(labels))


@recipe("rank's own queue", mistake="state", call="labels")
def _() -> Any:
    """a queue or running statistic fed with this rank's rows"""
    return _Queue()


@recipe("naive softmax", mistake="overflow", call="labels")
def _() -> Any:
    """sums of exponentials all-reduced over ranks without a common maximum"""

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        squares = embeddings.square().sum(1)
        if ranks()[1] == 1:
            return torch.logsumexp(squares, 0)
        return all_reduce(squares.exp().sum()).log()

    return loss


@recipe("mean assumed, trainer sums", mistake="trainer sums", trainer="sum")
def _() -> Any:
    """made for a trainer that averages, run under one that sums"""
    return DistributedLoss(Pairs())


@recipe("sum assumed, trainer averages", mistake="trainer averages")
def _() -> Any:
    """made for a trainer that sums, run under one that averages"""
    return DistributedLoss(Pairs(), grad_reduction="sum")


def mistakes() -> Iterator[Recipe]:
    """Those that break an invariant on some batch of whatever size."""
    return (x for x in GALLERY.values() if x.mistake is not None)


__all__ = ["GALLERY", "DistributedByHand", "Pairs", "Recipe", "make", "mistakes", "recipe", "two_way"]
