"""The table of losses under test: a row buys every conformance test."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.trial import Call, Case, GradReduction


@dataclass(frozen=True)
class Entry:
    """A loss, its call form, and its definition in plain torch on one process (given temperature and labels)."""

    name: str
    make: Callable[..., Any]
    dense: Callable[..., Tensor]
    call: Call = "views"
    views: int = 2

    def case(self, grad_reduction: GradReduction = "mean", **settings: Any) -> Case:
        """Return the loss under DistributedLoss as a case."""
        make = self.make
        return Case(
            lambda: cz.DistributedLoss(make(**settings), grad_reduction=grad_reduction),
            call=self.call,
            grad_reduction=grad_reduction,
            views=self.views,
            name=self.name,
        )

    def __str__(self) -> str:
        return self.name


def dense_nt_xent(*views: Tensor, temperature: Any) -> Tensor:
    """Return NT-Xent, written from the paper, pair by pair."""
    z = F.normalize(torch.cat(views), dim=1)
    n, self_pair = len(views[0]), torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.T / temperature).masked_fill(self_pair, -torch.inf)
    positive = torch.eye(n).bool().repeat(len(views), len(views)) & ~self_pair
    log_p = logits.log_softmax(1).where(positive, 0)
    return -(log_p.sum(1) / (len(views) - 1)).mean()


def dense_info_nce(queries: Tensor, keys: Tensor, temperature: Any) -> Tensor:
    logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(logits)))


def dense_clip(queries: Tensor, keys: Tensor, temperature: Any) -> Tensor:
    return (dense_info_nce(queries, keys, temperature) + dense_info_nce(keys, queries, temperature)) / 2


def dense_sup_con(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    z, self_pair = F.normalize(z, dim=1), torch.eye(len(z), dtype=torch.bool)
    log_p = (z @ z.T / temperature).masked_fill(self_pair, -torch.inf).log_softmax(1)
    positive = (labels[:, None] == labels) & ~self_pair
    losses = -log_p.where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)
    return losses.sum() / positive.any(1).sum().clamp(min=1)


class Tempered(cz.RowLoss):
    """A user's loss with a submodule, which may change its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = cz.LearnableTemperature(0.3)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        logits = similarity / self.temperature()
        return torch.logsumexp(logits, 1) - logits.where(positive, 0).sum(1), positive.any(1)


class BatchHard(cz.RowLoss):
    """A user's loss: batch-hard triplets with a learnable margin."""

    def __init__(self, temperature: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.margin = nn.Parameter(torch.tensor(0.25))

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        farthest = similarity.masked_fill(~positive, 2).amin(1)
        nearest = similarity.masked_fill(~negative, -2).amax(1)
        return F.softplus(nearest - farthest + self.margin), positive.any(1) & negative.any(1)


def dense_batch_hard(z: Tensor, labels: Tensor, temperature: Any = None) -> Tensor:
    z, self_pair = F.normalize(z, dim=1), torch.eye(len(z), dtype=torch.bool)
    losses = []
    for anchor in range(len(z)):
        s = z @ z[anchor]
        positives, negatives = s[(labels == labels[anchor]) & ~self_pair[anchor]], s[labels != labels[anchor]]
        if len(positives) and len(negatives):
            losses.append(F.softplus(negatives.max() - positives.min() + 0.25))
    return torch.stack(losses).mean() if losses else 0 * z.sum()


ZOO = [
    Entry("NTXent", cz.NTXent, dense_nt_xent),
    Entry("NTXent, three views", cz.NTXent, dense_nt_xent, views=3),
    Entry("InfoNCE", cz.InfoNCE, dense_info_nce),
    Entry("CLIP", lambda **settings: cz.InfoNCE(symmetric=True, **settings), dense_clip),
    Entry("SupCon", cz.SupCon, dense_sup_con, call="labels"),
    Entry("RowLoss, labels", BatchHard, dense_batch_hard, call="labels"),
]
