"""Losses of annotated pairs, of all pairs' means, and of a teacher's scores, each written out pair by pair."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.losses.annotated_pairs import CoSENT, OnlineContrastive
from contrastive_zoo.losses.distillation import MarginMSE, ScoreDistillation
from contrastive_zoo.losses.pair_margins import IntraPairVariance
from contrastive_zoo.losses.ranking import Histogram
from contrastive_zoo.losses.triplet import MegaBatchMargin
from tests.losses import zoo_softmax
from tests.zoo import row, unit


class CoSENTOfLabels(CoSENT):
    """Some pairs have equal scores."""

    def inputs(self, z: Tensor, labels: Tensor) -> Inputs:
        return super().inputs(z, zoo_softmax.second_tower(z), labels / 3)


def angle(q: Tensor, k: Tensor) -> Tensor:
    """The product of complex numbers, q times the conjugate of k."""
    q, k = (unit(F.pad(x, (0, x.shape[1] % 2))) for x in (q, k))
    m = q.shape[1] // 2
    real = q[:, :m] * k[:, :m] + q[:, m:] * k[:, m:]
    imaginary = q[:, m:] * k[:, :m] - q[:, :m] * k[:, m:]
    return (real + imaginary).sum(1).abs()


def dense_cosent(z: Tensor, labels: Tensor, temperature: Any = 0.05, similarity: str = "cosine") -> Tensor:
    q, k = z, zoo_softmax.second_tower(z)
    s = ((unit(q) * unit(k)).sum(1) if similarity == "cosine" else angle(q, k)) / temperature
    n = len(z)
    terms = [s[i] - s[j] for i in range(n) for j in range(n) if labels[i] < labels[j]]
    return torch.stack([0 * s.sum(), *terms]).logsumexp(0)


class OnlineContrastiveOfLabels(OnlineContrastive):
    """Pairs of odd labels are positive."""

    def inputs(self, z: Tensor, labels: Tensor) -> Inputs:
        return super().inputs(z, zoo_softmax.second_tower(z), labels % 2)


def dense_online_contrastive(z: Tensor, labels: Tensor) -> Tensor:
    distance = 1 - (unit(z) * unit(zoo_softmax.second_tower(z))).sum(1)
    positives, negatives = distance[labels % 2 == 1], distance[labels % 2 == 0]
    near = (negatives.min() if len(negatives) else positives.mean()).detach()
    far = (positives.max() if len(positives) else negatives.mean()).detach()
    loss = sum((x**2 for x in positives if x > near), 0 * z.sum())
    return loss + sum(((0.5 - x).relu() ** 2 for x in negatives if x < far), torch.zeros(()))


def dense_mega_batch_margin(q: Tensor, k: Tensor) -> Tensor:
    s, n = unit(q) @ unit(k).T, len(q)
    loss = sum((0.8 - s[i, i]).relu() for i in range(n))
    others = [torch.stack([s[i, j] for j in range(n) if j != i]).amax() for i in range(n) if n > 1]
    return (loss + sum((x - 0.3).relu() for x in others)) / n


def dense_intra_pair_variance(z: Tensor, labels: Tensor) -> Tensor:
    z, n = unit(z), len(z)
    loss = 0 * z.sum()
    for sign, same in ((1, True), (-1, False)):
        found = [z[i] @ z[j] for i in range(n) for j in range(n) if i != j and bool(labels[i] == labels[j]) == same]
        if found:
            s = torch.stack(found)
            loss = loss + (sign * ((1 - sign * 0.01) * s.mean() - s)).relu().square().mean()
    return loss


def dense_histogram(z: Tensor, labels: Tensor) -> Tensor:
    """With triangular kernels at every node."""
    s, n = unit(z) @ unit(z).T, len(z)
    nodes = torch.linspace(-1, 1, 8, dtype=torch.float64)
    found = {True: [], False: []}
    for i in range(n):
        for j in (j for j in range(n) if j != i):
            found[bool(labels[i] == labels[j])].append(s[i, j].clamp(-1, 1))
    if not (found[True] and found[False]):
        return 0 * z.sum()
    h = {kind: (1 - (torch.stack(x)[:, None] - nodes).abs() * 3.5).relu().mean(0) for kind, x in found.items()}
    return (h[False] * h[True].cumsum(0)).sum()


def scores_of(*rows: Tensor) -> Tensor:
    """A teacher's score for each of several tensors of embeddings."""
    return torch.stack([x[:, 0] for x in zoo_softmax.teacher(*rows)], 1)


class MarginMSEOfViews(MarginMSE):
    """Each view after the second is a negative."""

    def inputs(self, query: Tensor, positive: Tensor, *negatives: Tensor) -> Inputs:
        margins = scores_of(positive, positive).to(torch.float64) - scores_of(*negatives)
        return super().inputs(query, positive, torch.stack(negatives, 1), margins)


def dense_margin_mse(q: Tensor, p: Tensor, first: Tensor, second: Tensor) -> Tensor:
    y, losses = scores_of(p, first, second), []
    for i in range(len(q)):
        losses += [(q[i] @ (p[i] - x[i]) - (y[i, 0] - y[i, k])) ** 2 for k, x in ((1, first), (2, second))]
    return torch.stack(losses).mean()


class ScoreDistillationOfViews(ScoreDistillation):
    """Each view after the first is a candidate."""

    def inputs(self, query: Tensor, *candidates: Tensor) -> Inputs:
        return super().inputs(query, torch.stack(candidates, 1), scores_of(*candidates))


def dense_score_distillation(q: Tensor, *candidates: Tensor, temperature: Any = 1.0) -> Tensor:
    student = torch.stack([(q * c).sum(1) for c in candidates], 1) / temperature
    teacher = (scores_of(*candidates) / 0.7).softmax(1)
    each = teacher * (teacher.log() - student.log_softmax(1))
    return each.sum(1).mean() * temperature**2


ENTRIES = [
    row("CoSENT", CoSENTOfLabels, dense_cosent, "labels"),
    row("AnglE", CoSENTOfLabels, dense_cosent, "labels", similarity="angle"),
    row("OnlineContrastive", OnlineContrastiveOfLabels, dense_online_contrastive, "labels", reduction="sum"),
    row("MegaBatchMargin", MegaBatchMargin, dense_mega_batch_margin),
    row("IntraPairVariance", IntraPairVariance, dense_intra_pair_variance, "labels"),
    row("Histogram", Histogram, dense_histogram, "labels", num_bins=7),
    row("MarginMSE", MarginMSEOfViews, dense_margin_mse, views=4),
    row("ScoreDistillation", ScoreDistillationOfViews, dense_score_distillation, views=4, teacher_temperature=0.7),
]
