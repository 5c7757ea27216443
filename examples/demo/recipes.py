"""The jobs of the demo: three right ones, and two with a wrong hand-written gather."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz

Rows = tuple[Tensor, ...]


class TwoTowers(nn.Module):
    """Two encoders: one of the even pixel rows of a digit, one of the odd pixel rows. These are its two views."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = mlp(32, 384, 64), mlp(32, 384, 64)

    def forward(self, images: Tensor) -> Rows:
        return self.even(images[:, 0::2].flatten(1)), self.odd(images[:, 1::2].flatten(1))


class OneTower(nn.Module):
    """One encoder of a whole digit. Its 6 dimensions are few, so that random parameters give a low recall."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = mlp(64, 128, 6)

    def forward(self, images: Tensor) -> Rows:
        return (self.tower(images.flatten(1)),)


def mlp(*widths: int) -> nn.Sequential:
    """Return two layers, without batch statistics and dropout, which would differ between one process and two."""
    first, hidden, last = widths
    return nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, last))


# --- wrong recipes ---------------------------------------------------------------


class _LocalSlice(torch.autograd.Function):
    """Gather all embeddings; the backward pass returns the local slice of the gradient, which DDP then divides by W."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.local = cz.World.of().shards(rows).local
        return cz.collectives.all_gather(rows.detach())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy[ctx.local]


class WrongInfoNCE(nn.Module):
    """InfoNCE with a hand-written gather; the held-out loss is the true loss at its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = cz.LearnableTemperature(0.1)

    @property
    def truth(self) -> nn.Module:
        """Return the right loss with the same temperature."""
        return cz.DistributedLoss(cz.InfoNCE(temperature=self.temperature, symmetric=True))


class LocalSliceInfoNCE(WrongInfoNCE):
    """The right value; the encoder's gradient is 1/W of the true one."""

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        gathered = _LocalSlice.apply(queries), _LocalSlice.apply(keys)
        return cz.InfoNCE(temperature=self.temperature, symmetric=True).forward(*gathered, world=cz.World())


class DetachedCandidatesInfoNCE(WrongInfoNCE):
    """Local anchors against detached candidates: the gradient of other ranks' anchors is lost.

    DDP averages the means over the local anchors: on uneven shards samples of the smaller shard have a larger weight.
    """

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        q, k = F.normalize(queries, dim=1), F.normalize(keys, dim=1)
        all_q, all_k = cz.collectives.all_gather(q.detach()), cz.collectives.all_gather(k.detach())
        positive = torch.arange(len(all_q))[cz.World.of().shards(q).local]
        logits = torch.stack([q @ all_k.T, k @ all_q.T]) / self.temperature()
        return (F.cross_entropy(logits[0], positive) + F.cross_entropy(logits[1], positive)) / 2


# --- the jobs -------------------------------------------------------------------------------------------------------


def info_nce() -> nn.Module:
    return cz.DistributedLoss(cz.InfoNCE(temperature=cz.LearnableTemperature(0.1), symmetric=True))


def sup_con() -> nn.Module:
    return cz.DistributedLoss(cz.SupCon(temperature=0.1))


def pml_triplet() -> nn.Module:
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import TripletMarginMiner

    miner = TripletMarginMiner(margin=0.2, type_of_triplets="semihard")
    return cz.DistributedLoss(TripletMarginLoss(margin=0.2), miner=miner)


@dataclass(frozen=True)
class Job:
    """A training. The encoder returns one or two tensors; the trainer averages its gradients over ranks.

    SGD with momentum: Adam would hide a gradient that is W times too small.
    """

    title: str
    encoder: Callable[[], nn.Module]
    loss: Callable[[], nn.Module]
    trainer: Literal["DDP", "average_gradients"]
    labelled: bool
    batch: int
    steps: int
    rate: float


CROSS_VIEW = Job("InfoNCE, two views", TwoTowers, info_nce, "DDP", False, batch=256, steps=200, rate=0.01)
SUP_CON = Job("SupCon", OneTower, sup_con, "DDP", True, batch=256, steps=80, rate=0.02)
TRIPLET = Job("pml triplet, mined", OneTower, pml_triplet, "average_gradients", True, batch=96, steps=60, rate=0.1)
RIGHT = (CROSS_VIEW, SUP_CON, TRIPLET)
WRONG = (
    replace(CROSS_VIEW, title="keeps own slice", loss=LocalSliceInfoNCE),
    replace(CROSS_VIEW, title="detached candidates", loss=DetachedCandidatesInfoNCE),
)
