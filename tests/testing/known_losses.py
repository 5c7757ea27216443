"""Wrong losses of several processes, as people write them, with the mistake that the doctor names; and right ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.ranks.collectives import all_gather, all_reduce
from contrastive_zoo.testing.measurement import Call
from tools.gallery.recipe import (
    gather_detached,
    rank_and_size,
    scale_gradient,
    shard_sizes,
    symmetric_cross_entropy,
    world_size,
)


@dataclass(frozen=True)
class Known:
    """A loss, the mistake that names it, None of a right one, and whether only a search checks it."""

    name: str
    make: Callable[[], Any]
    call: Call
    mistake: str | None = None
    searched: bool = False
    width: int | None = None

    def __str__(self) -> str:
        return self.name


WRONG_LOSSES: list[Known] = []


def _wrong(mistake: str, call: Call = "views") -> Callable[[Any], Any]:
    def register(made: Any) -> Any:
        make = made if isinstance(made, type) else lambda: made
        WRONG_LOSSES.append(Known(made.__name__, make, call, mistake))
        return made

    return register


def own_first(x):
    gathered = gather_detached(x)
    local = gathered.pop(rank_and_size()[0])
    return torch.cat([x if x.requires_grad else local, *gathered])


def offset(x):
    return sum(shard_sizes(x)[: rank_and_size()[0]])


def unit(*views):
    return [F.normalize(view, dim=1) for view in views]


def in_rank_order(embeddings, labels):
    """Return the samples and labels of all ranks, and those of this rank among these."""
    z, y = all_gather(embeddings), all_gather(labels)
    return z, y, z[offset(labels) : offset(labels) + len(labels)]


def global_mean(total, count):
    return all_reduce(total) / all_reduce(torch.tensor(float(count)))


class _CompleteTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.start, ctx.size = offset(x), len(x)
        return torch.cat(gather_detached(x))

    @staticmethod
    def backward(ctx, dy):
        return world_size() * all_reduce(dy)[ctx.start : ctx.start + ctx.size]


@_wrong("counted W times")
def gradient_reduced_twice(view1, view2):
    a, b = (_CompleteTwice.apply(x) for x in unit(view1, view2))
    return symmetric_cross_entropy(3.0 * a @ b.T)


@_wrong("own rank first", "labels")
def own_rows_first_and_the_first_positive_of_a_tie(embeddings, labels):
    z, y = scale_gradient(world_size(), own_first(embeddings)), own_first(labels)
    positive = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    first = positive.float().argmax(1)
    return F.softplus((z - z[first]).square().sum(1)[positive.any(1)]).sum() / len(z)


@_wrong("mask without offset", "labels")
def self_mask_with_an_offset_of_equal_shards(embeddings, labels):
    z, y, local = in_rank_order(F.normalize(embeddings, dim=1), labels)
    self_pair = torch.arange(len(local))[:, None] + rank_and_size()[0] * len(labels) == torch.arange(len(z))
    positive = (labels[:, None] == y) & ~self_pair
    log_p = F.log_softmax((local @ z.T).masked_fill(self_pair, -30.0), 1)
    return global_mean(-(log_p * positive).sum(), len(local))


def hardest(local, labels, positives, negatives):
    if not len(local):
        return global_mean(0 * (local.sum() + positives[0].sum() + negatives[0].sum()), 0)
    (p, of_p), (n, of_n) = positives, negatives
    far = torch.cdist(local, p).where(labels[:, None] == of_p, 0).amax(1)
    near = torch.cdist(local, n).where(labels[:, None] != of_n, 9.0).amin(1)
    return global_mean(F.softplus(far - near).sum(), len(local))


@_wrong("local mining", "labels")
def hardest_positive_of_this_rank(embeddings, labels):
    z, y, local = in_rank_order(embeddings, labels)
    return hardest(local, labels, (local, labels), (z, y))


@_wrong("local mining", "labels")
def hardest_negative_of_this_rank(embeddings, labels):
    z, y, local = in_rank_order(embeddings, labels)
    return hardest(local, labels, (z, y), (local, labels))


@_wrong("times W", "labels")
def means_of_ranks_added(embeddings, labels):
    return all_reduce(embeddings.square().sum() / max(len(labels), 1))


@_wrong("divided by W")
def divided_as_well_as_the_trainer(view1, view2):
    a, b = (all_gather(x) for x in unit(view1, view2))
    return symmetric_cross_entropy(3.0 * a @ b.T) / world_size()


class Centred(nn.Module):
    """A DINO loss whose centre is a moving average over all ranks, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.center: Any = 0.0

    def forward(self, student, teacher):
        a, b = all_gather(student), all_gather(teacher)
        target = F.softmax((b.detach() - self.center) / 0.5, 1)
        self.center = 0.9 * self.center + 0.1 * self.batch_center(teacher.detach())
        return -(target * F.log_softmax(a, 1)).sum(1).mean()

    def batch_center(self, teacher):
        return torch.cat(gather_detached(teacher)).mean(0)


@_wrong("state")
class CenterOfThisRank(Centred):
    def batch_center(self, teacher):
        return teacher.sum(0) / max(len(teacher), 1)


@_wrong("different random numbers", "labels")
class ProxiesFromASeedPerRank(nn.Module):
    """Proxies that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank_and_size()[0]))

    def forward(self, embeddings, labels):
        z = all_gather(embeddings)
        return F.cross_entropy(z @ self.proxies[:, : z.shape[1]].T, all_gather(labels))


RIGHT_LOSSES: list[Known] = []


def _right(call: Call = "views", *, searched: bool = False, wrap: bool = False) -> Callable[[Any], Any]:
    """Register a loss that communicates by itself, or one of one process that DistributedLoss wraps."""

    def register(made: Any) -> Any:
        make = made if isinstance(made, type) else lambda: made
        RIGHT_LOSSES.append(
            Known(made.__name__, (lambda: cz.DistributedLoss(make())) if wrap else make, call, None, searched)
        )
        return made

    return register


@_right(wrap=True)
def in_float32(view1, view2):
    a, b = unit(view1.float(), view2.float())
    return symmetric_cross_entropy(3.0 * a @ b.T)


@_right(searched=True)
def sharded_anchors_in_float32(view1, view2):
    a, b = unit(view1.float(), view2.float())
    targets = torch.arange(len(a)) + offset(a)
    total = F.cross_entropy(20.0 * a @ all_gather(b).T, targets, reduction="sum")
    return all_reduce(total) / sum(shard_sizes(a))


@_right(wrap=True)
def in_bfloat16(view1, view2):
    a, b = unit(view1.bfloat16(), view2.bfloat16())
    return symmetric_cross_entropy(3.0 * a @ b.T)


@_right(searched=True)
class Compiled(cz.DistributedLoss):
    def __init__(self) -> None:
        super().__init__(torch.compile(dense_info_nce, backend="aot_eager"))


def dense_info_nce(view1, view2):
    a, b = unit(view1, view2)
    return symmetric_cross_entropy(3.0 * a @ b.T)


@_right(wrap=True)
def dropout_in_the_loss(view1, view2):
    return dense_info_nce(F.dropout(view1, 0.2), view2)


@_right()
def dropout_before_a_gather(view1, view2):
    a, b = (all_gather(F.dropout(x, 0.2)) for x in (view1, view2))
    return symmetric_cross_entropy(a @ b.T)


_right()(Centred)


def _of_pml(name: str, **settings: Any) -> Any:
    from pytorch_metric_learning import losses

    return cz.DistributedLoss(getattr(losses, name)(**settings))


PML_LOSSES = """
TripletMarginLoss NTXentLoss SupConLoss MultiSimilarityLoss CircleLoss ContrastiveLoss AngularLoss FastAPLoss
LiftedStructureLoss GeneralizedLiftedStructureLoss SignalToNoiseRatioContrastiveLoss IntraPairVarianceLoss MarginLoss
NCALoss NPairsLoss TupletMarginLoss RankedListLoss
"""

for _name in PML_LOSSES.split():
    _settings = {"margin": 0.4, "Tn": 10} if _name == "RankedListLoss" else {}
    RIGHT_LOSSES.append(
        Known(f"PML {_name}", partial(_of_pml, _name, **_settings), "labels", searched=_name != "TripletMarginLoss")
    )
for _name in ("ProxyAnchorLoss", "ArcFaceLoss", "SoftTripleLoss", "NormalizedSoftmaxLoss", "ProxyNCALoss"):
    _settings = {"num_classes": 64, "embedding_size": 3}
    RIGHT_LOSSES.append(Known(f"PML {_name}", partial(_of_pml, _name, **_settings), "labels", None, True, 3))
