"""Wrong losses of several processes, as people write them, with the mistake that the doctor names; and right ones."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.ranks.collectives import all_gather, all_reduce
from contrastive_zoo.testing.measurement import Call
from tools.gallery.recipe import gather_detached, rank_and_size, shard_sizes, symmetric_cross_entropy, world_size


@dataclass(frozen=True)
class Known:
    """A loss, the mistake that names it, None of a right one, and whether only a search checks it."""

    name: str
    make: Callable[[], Any]
    call: Call = "views"
    mistake: str | None = None
    searched: bool = False
    width: int | None = None

    def __str__(self) -> str:
        return self.name


def offset(x):
    return sum(shard_sizes(x)[: rank_and_size()[0]])


def unit(*views):
    return [F.normalize(view, dim=1) for view in views]


class _CompleteTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.start, ctx.size = offset(x), len(x)
        return torch.cat(gather_detached(x))

    @staticmethod
    def backward(ctx, dy):
        return world_size() * all_reduce(dy)[ctx.start : ctx.start + ctx.size]


def gradient_reduced_twice(view1, view2):
    a, b = (_CompleteTwice.apply(x) for x in unit(view1, view2))
    return symmetric_cross_entropy(3.0 * a @ b.T)


def hardest_negative_of_this_rank(embeddings, labels):
    z, y = all_gather(embeddings), all_gather(labels)
    local = z[offset(labels) : offset(labels) + len(labels)]
    total = 0 * (local.sum() + z.sum())
    if len(local):
        far = torch.cdist(local, z).where(labels[:, None] == y, 0).amax(1)
        near = torch.cdist(local, local).where(labels[:, None] != labels, 9.0).amin(1)
        total = F.softplus(far - near).sum()
    return all_reduce(total) / all_reduce(torch.tensor(float(len(local))))


def divided_as_well_as_the_trainer(view1, view2):
    return dense_info_nce(all_gather(view1), all_gather(view2)) / world_size()


class Centred(nn.Module):
    """A DINO loss whose centre is a moving average over all ranks, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.center: Any = 0.0

    def forward(self, student, teacher):
        a, b = all_gather(student), all_gather(teacher)
        target = F.softmax((b.detach() - self.center) / 0.5, 1)
        self.center = 0.9 * self.center + 0.1 * torch.cat(gather_detached(teacher)).mean(0)
        return -(target * F.log_softmax(a, 1)).sum(1).mean()


def dense_info_nce(view1, view2):
    a, b = unit(view1, view2)
    return symmetric_cross_entropy(3.0 * a @ b.T)


def sharded_anchors_in_float32(view1, view2):
    a, b = unit(view1.float(), view2.float())
    targets = torch.arange(len(a)) + offset(a)
    total = F.cross_entropy(20.0 * a @ all_gather(b).T, targets, reduction="sum")
    return all_reduce(total) / sum(shard_sizes(a))


def dropout_before_a_gather(view1, view2):
    a, b = (all_gather(F.dropout(x, 0.2)) for x in (view1, view2))
    return symmetric_cross_entropy(a @ b.T)


def of_unequal_classes_in_any_order(embeddings, labels):
    if len(labels.bincount().unique()) < 2:
        raise ValueError("all classes have the same number of samples")
    order = [*np.random.permutation(len(labels)), *random.sample(range(len(labels)), 1)]
    return ((embeddings[order] - embeddings[order[0]]).square().sum(1) * (labels[order] != labels[order[0]])).mean()


def _known(loss: Any, *more: Any, searched: bool = False) -> Known:
    return Known(loss.__name__, lambda: loss, *more, searched=searched)


def _wrapped(name: str, loss: Callable[..., torch.Tensor]) -> Known:
    return Known(name, lambda: cz.DistributedLoss(loss))


WRONG_LOSSES = [
    _known(gradient_reduced_twice, "views", "counted W times"),
    _known(hardest_negative_of_this_rank, "labels", "local mining"),
    _known(divided_as_well_as_the_trainer, "views", "divided by W"),
]
RIGHT_LOSSES = [
    _wrapped("in float32", lambda view1, view2: dense_info_nce(view1.float(), view2.float())),
    _wrapped("in bfloat16", lambda view1, view2: dense_info_nce(view1.bfloat16(), view2.bfloat16())),
    _wrapped("dropout in the loss", lambda view1, view2: dense_info_nce(F.dropout(view1, 0.2), view2)),
    Known("of one view", lambda: cz.DistributedLoss(cz.KoLeo())),
    Known("of three views", lambda: cz.DistributedLoss(nn.TripletMarginLoss())),
    Known("unequal classes", lambda: cz.DistributedLoss(of_unequal_classes_in_any_order), "labels"),
    _known(sharded_anchors_in_float32, searched=True),
    _known(dropout_before_a_gather),
    Known("compiled", lambda: cz.DistributedLoss(torch.compile(dense_info_nce, backend="aot_eager")), searched=True),
    Known("Centred", Centred),
    Known("TripletMarginLoss", lambda: cz.DistributedLoss(losses.TripletMarginLoss()), "labels"),
    Known("ProxyAnchorLoss", lambda: cz.DistributedLoss(losses.ProxyAnchorLoss(64, 3)), "labels", width=3),
]
