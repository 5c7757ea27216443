"""Wrong losses of several processes, as people write them, with the mistake that the doctor names; and right ones."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.ranks.collectives import all_gather, all_reduce
from contrastive_zoo.testing.measurement import Call
from tools.gallery.recipe import (
    dense_sup_con,
    gather_detached,
    rank_and_size,
    scale_gradient,
    shard_sizes,
    symmetric_cross_entropy,
    world_size,
)
from tools.peer_losses.arguments import WIDTH
from tools.peer_losses.losses import PeerLoss, table


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


def in_words(name: str) -> str:
    return re.sub(r"_|(?<=.)(?=[A-Z])", " ", name).strip().lower()


def _wrong(mistake: str, call: Call = "views") -> Callable[[Any], Any]:
    def register(made: Any) -> Any:
        make = made if isinstance(made, type) else lambda: made
        WRONG_LOSSES.append(Known(in_words(made.__name__), make, call, mistake))
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


def local_anchors(a, b, candidates, start=None):
    targets = torch.arange(len(a)) + (offset(a) if start is None else start)
    return F.cross_entropy(3.0 * a @ candidates.T, targets, reduction="sum")


def in_rank_order(embeddings, labels):
    """Return the samples and labels of all ranks, and those of this rank among these."""
    z, y = all_gather(embeddings), all_gather(labels)
    return z, y, z[offset(labels) : offset(labels) + len(labels)]


def global_mean(total, count):
    return all_reduce(total) / all_reduce(torch.tensor(float(count)))


def without_gradient(x):
    """Gather as accelerate does: on one process x itself, on several tensors without gradient."""
    return torch.cat(gather_detached(x)) if world_size() > 1 else x


@_wrong("detached candidates")
def candidates_from_accelerate(view1, view2):
    a, b = unit(view1, view2)
    return local_anchors(a, b, without_gradient(b)) / max(len(a), 1)


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
def own_rows_first_with_labels_in_rank_order(embeddings, labels):
    z = scale_gradient(world_size(), own_first(embeddings))
    return dense_sup_con(z, torch.cat(gather_detached(labels)))


@_wrong("own rank first")
def own_queries_first_with_documents_in_rank_order(queries, documents):
    a, b = unit(queries, documents)
    return symmetric_cross_entropy(3.0 * scale_gradient(world_size(), own_first(a)) @ all_gather(b).T)


@_wrong("own rank first", "labels")
def own_rows_first_and_the_first_positive_of_a_tie(embeddings, labels):
    z, y = scale_gradient(world_size(), own_first(embeddings)), own_first(labels)
    positive = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    first = positive.float().argmax(1)
    return F.softplus((z - z[first]).square().sum(1)[positive.any(1)]).sum() / len(z)


def sup_con_of_local_anchors(embeddings, labels, start):
    """Return a SupCon loss whose anchors take the candidates from ``start`` on for themselves."""
    z, y, local = in_rank_order(F.normalize(embeddings, dim=1), labels)
    self_pair = torch.arange(len(local))[:, None] + start == torch.arange(len(z))
    positive = (labels[:, None] == y) & ~self_pair
    log_p = F.log_softmax((local @ z.T).masked_fill(self_pair, -30.0), 1)
    return global_mean(-(log_p * positive).sum(), len(local))


@_wrong("mask without offset", "labels")
def self_mask_without_offset(embeddings, labels):
    return sup_con_of_local_anchors(embeddings, labels, 0)


@_wrong("mask without offset", "labels")
def self_mask_with_an_offset_of_equal_shards(embeddings, labels):
    return sup_con_of_local_anchors(embeddings, labels, rank_and_size()[0] * len(labels))


@_wrong("mask without offset")
def offset_of_the_next_rank(view1, view2):
    a, b = unit(view1, view2)
    rank, size = rank_and_size()
    start = sum(shard_sizes(a)[: (rank + 1) % size])
    targets = (torch.arange(len(a)) + start) % sum(shard_sizes(a))
    total = F.cross_entropy(3.0 * a @ all_gather(b).T, targets, reduction="sum")
    return global_mean(total, len(a))


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


def balanced(b, prototypes, gather):
    """Return the assignments of samples to prototypes, balanced over those that are gathered."""
    with torch.no_grad():
        q = (gather(b) @ prototypes / 0.3).exp()
        for _ in range(3):
            q = q / q.sum(0, keepdim=True)
            q = q / q.sum(1, keepdim=True)
    return q


@_wrong("local negatives")
def assignments_balanced_on_this_rank(view1, view2):
    a, b = unit(view1, view2)
    prototypes = torch.eye(a.shape[1])
    q = balanced(b, prototypes, lambda x: x)
    return -(q * F.log_softmax(a @ prototypes / 0.3, 1)).sum() / max(len(a), 1)


@_wrong("mean of means", "labels")
def means_of_ranks_averaged(embeddings, labels):
    return all_reduce(embeddings.square().sum() / max(len(labels), 1)) / world_size() * 1.0


@_wrong("times W", "labels")
def means_of_ranks_added(embeddings, labels):
    return all_reduce(embeddings.square().sum() / max(len(labels), 1))


@_wrong("divided by W")
def divided_as_well_as_the_trainer(view1, view2):
    a, b = (all_gather(x) for x in unit(view1, view2))
    return symmetric_cross_entropy(3.0 * a @ b.T) / world_size()


@_wrong("scaled by local count")
def count_of_this_rank_times_world_size(view1, view2):
    a, b = unit(view1, view2)
    return all_reduce(local_anchors(a, b, all_gather(b))) / max(len(a) * world_size(), 1)


@_wrong("local normalisation")
def standardised_by_this_rank(view1, view2):
    def standardised(x):
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 0.1) if len(x) else x

    c = all_reduce(standardised(view1).T @ standardised(view2)) / sum(shard_sizes(view1))
    return (c - torch.eye(len(c))).square().sum()


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


@_wrong("state")
class CenterUpdatedOnRank0Only(Centred):
    def batch_center(self, teacher):
        return super().batch_center(teacher) * (rank_and_size()[0] == 0)


class Queue(nn.Module):
    """A queue in a plain attribute, filled with the keys of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: Any = None

    def forward(self, view1, view2):
        a, b = (all_gather(x) for x in unit(view1, view2))
        queue = b.detach()[:0] if self.queue is None else self.queue
        logits = 3.0 * a @ torch.cat([b, queue]).T
        self.queue = torch.cat([self.keys(unit(view2)[0].detach()), queue])[:4]
        return F.cross_entropy(logits, torch.arange(len(a)))

    def keys(self, local):
        return all_gather(local)


@_wrong("state")
class QueueWithOwnKeysFirst(Queue):
    def keys(self, local):
        return own_first(local)


@_wrong("different random numbers")
class DirectionsFromASeedPerRank(nn.Module):
    """A statistic of random projections, as SIGReg's, whose directions are others on every rank."""

    def forward(self, view1, view2):
        generator = torch.Generator().manual_seed(rank_and_size()[0])
        directions = torch.randn(view1.shape[1], 4, generator=generator)
        return (all_reduce((view1 @ directions).sum(0)) / sum(shard_sizes(view1))).square().sum()


@_wrong("different random numbers", "labels")
class ProxiesFromASeedPerRank(nn.Module):
    """Proxies that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank_and_size()[0]))

    def forward(self, embeddings, labels):
        z = all_gather(embeddings)
        return F.cross_entropy(z @ self.proxies[:, : z.shape[1]].T, all_gather(labels))


@_wrong("different random numbers")
def keys_shuffled_by_every_rank_for_itself(view1, view2):
    a, b = (all_gather(x) for x in unit(view1, view2))
    order = torch.randperm(len(b))
    shuffled = b[order][offset(view2) : offset(view2) + len(view2)]  # as for shuffled BatchNorm
    back = all_gather(shuffled)[order.argsort()]
    return symmetric_cross_entropy(3.0 * a @ back.T)


@_wrong("hang", "labels")
def ranks_without_pairs_return_early(embeddings, labels):
    if len(labels) < 2:
        return 0 * embeddings.sum()
    return dense_sup_con(all_gather(embeddings), all_gather(labels))


RIGHT_LOSSES: list[Known] = []


def _right(call: Call = "views", *, searched: bool = False, wrap: bool = False) -> Callable[[Any], Any]:
    """Register a loss that communicates by itself, or one of one process that DistributedLoss wraps."""

    def register(made: Any) -> Any:
        make = made if isinstance(made, type) else lambda: made
        name = in_words(made.__name__)
        RIGHT_LOSSES.append(Known(name, (lambda: cz.DistributedLoss(make())) if wrap else make, call, None, searched))
        return made

    return register


@_right(wrap=True)
def in_float32(view1, view2):
    a, b = unit(view1.float(), view2.float())
    return symmetric_cross_entropy(3.0 * a @ b.T)


@_right("labels", searched=True, wrap=True)
def classes_in_float32(embeddings, labels):
    return dense_sup_con(embeddings.float(), labels)


@_right()
def gathered_in_float32(view1, view2):
    a, b = (all_gather(x.float()) for x in (view1, view2))
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


@_right(searched=True, wrap=True)
def under_autocast(view1, view2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = 3.0 * F.normalize(view1.float(), dim=1) @ F.normalize(view2.float(), dim=1).T
    return symmetric_cross_entropy(logits.float())


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


@_right("labels", searched=True)
def noise_of_every_rank(embeddings, labels):
    z = all_gather(embeddings + 0.1 * torch.randn_like(embeddings))
    return dense_sup_con(z, all_gather(labels))


_right()(Centred)
_right()(Queue)


@_right(searched=True)
class CenterInABuffer(Centred):
    def __init__(self) -> None:
        super().__init__()
        del self.center
        self.register_buffer("center", torch.zeros(()))


@_right(searched=True)
def assignments_balanced_over_all_ranks(view1, view2):
    prototypes = torch.eye(view1.shape[1])
    q = balanced(F.normalize(view2, dim=1), prototypes, lambda x: torch.cat(gather_detached(x)))
    q = q[offset(view1) : offset(view1) + len(view1)]
    total = -(q * F.log_softmax(F.normalize(view1, dim=1) @ prototypes / 0.3, 1)).sum()
    return all_reduce(total) / sum(shard_sizes(view1))


@_right(searched=True)
def hardest_negative_of_all_ranks(view1, view2):
    a, b = (all_gather(x) for x in unit(view1, view2))
    similarity = a @ b.T
    return F.softplus(similarity.fill_diagonal_(-9.0).amax(1) - (a * b).sum(1)).mean()


@_right(searched=True)
def mean_of_a_sum(view1, view2):
    return all_reduce((view1 - view2).square().sum()) / (sum(shard_sizes(view1)) if world_size() > 1 else len(view1))


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


TAKEN = "rows", "unit rows", "rows without gradient", "rows of probabilities", "labels", "pair labels", "number"


class OfPeer(nn.Module):
    def __init__(self, peer: PeerLoss) -> None:
        super().__init__()
        self.peer, self.loss = peer, cz.DistributedLoss(peer.construct(), **peer.options)

    def forward(self, first, second):
        other = second if second.is_floating_point() else 0.5 * first + first.square()
        views = [first, other, first + other, first - other]
        numbers = {"scale": torch.tensor(2.0), "bias": torch.tensor(2.0)}
        batch: Any = SimpleNamespace(embeddings=lambda i: views[i % 4], index=lambda: second, numbers=numbers)
        taken = enumerate(self.peer.takes.items())
        return self.loss(**{name: argument.value(batch, position) for position, (name, argument) in taken})


def _is_usable(peer: PeerLoss) -> bool:
    names = [x.name for x in peer.takes.values()]
    are_known = all(x in TAKEN or (x.startswith("list of") and x.endswith((" rows", "dicts of rows"))) for x in names)
    return are_known and peer.name != "CO2Regularizer"  # it returns a copy of its value


PEERS = [
    Known(
        f"{peer.package} {peer}",
        partial(OfPeer, peer),
        "labels" if any("labels" in x.name for x in peer.takes.values()) else "views",
        searched=True,
        width=WIDTH,
    )
    for peer in table()
    if _is_usable(peer)
]
"""The losses of other libraries; making one needs its package."""
