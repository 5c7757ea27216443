"""Right losses of several processes, as people write them and with their defaults: the doctor has nothing to say of them."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.ranks.collectives import all_gather, all_reduce
from contrastive_zoo.testing.measurement import Call
from tests.testing.wrong_losses import Centred, Known, Queue, balanced, in_words, offset, unit
from tools.gallery.recipe import (
    dense_sup_con,
    gather_detached,
    shard_sizes,
    symmetric_cross_entropy,
    world_size,
)
from tools.peer_losses.arguments import WIDTH
from tools.peer_losses.losses import PeerLoss, table

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
