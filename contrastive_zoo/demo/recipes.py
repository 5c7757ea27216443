"""The trainings of the demo: three right ones, and two with a wrong hand-written gather."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz

Rows = tuple[Tensor, ...]


class TwoTowers(nn.Module):
    """Two views of a digit, its even and its odd pixel rows, each through an encoder of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = mlp(32, 384, 64), mlp(32, 384, 64)

    def forward(self, images: Tensor) -> Rows:
        return self.even(images[:, 0::2].flatten(1)), self.odd(images[:, 1::2].flatten(1))


class OneTower(nn.Module):
    """A whole digit through one encoder, into few enough dimensions that a random start is not good already."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = mlp(64, 128, 6)

    def forward(self, images: Tensor) -> Rows:
        return (self.tower(images.flatten(1)),)


def mlp(*widths: int) -> nn.Sequential:
    """Two layers. No batch statistics, no dropout: those would differ between one process and two."""
    first, hidden, last = widths
    return nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, last))


# --- the wrong recipes, as people write them ---------------------------------------------------------------


class _KeepsOwnSlice(torch.autograd.Function):
    """Gather all rows; the backward pass returns the local slice of their gradient, which DDP then divides by W."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.local = cz.World.of().shards(rows).mine
        return cz.all_gather(rows.detach())

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
        return cz.DistributedLoss(cz.InfoNCE(temperature=self.temperature, symmetric=True))


class KeepsOwnSlice(WrongInfoNCE):
    """The right value; the encoder's gradient is 1/W of the true one."""

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        gathered = _KeepsOwnSlice.apply(queries), _KeepsOwnSlice.apply(keys)
        return cz.info_nce(*gathered, temperature=self.temperature(), symmetric=True)


class DetachedColumns(WrongInfoNCE):
    """Local anchors against detached candidates: the gradient of other ranks' anchors is lost.

    DDP averages the means over the local anchors: on uneven shards samples of the smaller shard have a larger weight.
    """

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        q, k = F.normalize(queries, dim=1), F.normalize(keys, dim=1)
        all_q, all_k = cz.all_gather(q.detach()), cz.all_gather(k.detach())
        partner = torch.arange(len(all_q))[cz.World.of().shards(q).mine]
        logits = torch.stack([q @ all_k.T, k @ all_q.T]) / self.temperature()
        return (F.cross_entropy(logits[0], partner) + F.cross_entropy(logits[1], partner)) / 2


# --- the jobs -------------------------------------------------------------------------------------------------------


def info_nce() -> nn.Module:
    """InfoNCE between the towers, its temperature learnt."""
    return cz.DistributedLoss(cz.InfoNCE(temperature=cz.LearnableTemperature(0.1), symmetric=True))


def sup_con() -> nn.Module:
    """SupCon on the digits' classes."""
    return cz.DistributedLoss(cz.SupCon(temperature=0.1))


def pml_triplet() -> nn.Module:
    """A third-party loss and miner: triplets of pytorch-metric-learning."""
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import TripletMarginMiner

    miner = TripletMarginMiner(margin=0.2, type_of_triplets="semihard")
    return cz.DistributedLoss(TripletMarginLoss(margin=0.2), miner=miner)


@dataclass(frozen=True)
class Job:
    """What is trained and how.

    Attributes:
        title: its name in the table.
        encoder: makes the encoder, images to one or two tensors of rows.
        loss: makes the loss.
        trainer: what averages the encoder's gradients over ranks.
        labelled: whether the loss compares rows by their class, rather than two views.
        batch: images in a global batch.
        steps: optimizer steps.
        rate: the encoder's learning rate. SGD with momentum: Adam would hide a gradient that is W times too small.
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
    replace(CROSS_VIEW, title="keeps own slice", loss=KeepsOwnSlice),
    replace(CROSS_VIEW, title="detached candidates", loss=DetachedColumns),
)
