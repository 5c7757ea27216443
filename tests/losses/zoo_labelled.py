"""The softmax losses over labelled embeddings, each with its paper's equation written out."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.loss import Inputs
from tests.losses.zoo_softmax import second_tower
from tests.zoo import Entry, dense_nt_xent, dense_sup_con, itself, log_sums, masks, mean_over, row, softplus, unit


def dense_sup_con_in(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    s, (positive, negative) = unit(z) @ unit(z).T / temperature, masks(labels)
    shares = log_sums(s, positive, empty=0.0) - log_sums(s, positive | negative, empty=0.0)
    return mean_over((positive.sum(1, dtype=z.dtype).clamp(min=1).log() - shares)[positive.any(1)])


def over_pairs(logits: Tensor, of_positives: Tensor, labels: Tensor, average: str) -> Tensor:
    positive, negative = masks(labels)
    losses = softplus(log_sums(logits, negative)[:, None] - of_positives).where(positive, 0)
    if average == "pairs":
        return mean_over(losses[positive])
    return mean_over((losses.sum(1) / positive.sum(1).clamp(min=1))[positive.any(1)])


def dense_sincere(z: Tensor, labels: Tensor, temperature: Any, average: str = "anchors") -> Tensor:
    logits = unit(z) @ unit(z).T / temperature
    return over_pairs(logits, logits, labels, average)


def dense_tuplet_margin(z: Tensor, labels: Tensor, temperature: Any, margin: float = 5.73) -> Tensor:
    cos, beta = unit(z) @ unit(z).T, math.radians(margin)
    is_line = 1 - cos.detach() ** 2 < 1e-15  # an angle of 0 or 180 degrees, where that of a rounded cosine has 8 digits
    slack = (cos.where(~is_line, 0).acos() - beta).cos().where(~is_line, cos * math.cos(beta))
    return over_pairs(cos / temperature, slack / temperature, labels, "pairs")


def together(*views: Tensor) -> tuple[Tensor]:
    return (torch.stack(views, 1),)


def dense_sup_con_of_views(z: Tensor, temperature: Any) -> Tensor:
    return dense_nt_xent(*z.unbind(1), temperature=temperature) * temperature / 0.07


class SupConOfMask(cz.SupCon):
    """Positives of the same class and of the next one, which is not symmetric; two views of each sample."""

    def inputs(self, z: Tensor, labels: Tensor) -> Inputs:
        return super().inputs(torch.stack([z, second_tower(z)], 1), labels)

    def compute(self, batch: Batch) -> Tensor:
        labels = batch.rows["labels"]
        of_all = batch.gather_detached(labels)
        mask = (labels[:, None] == of_all) | (labels[:, None] + 1 == of_all)
        return super().compute(replace(batch, rows={"embeddings": batch.rows["embeddings"], "mask": mask}))


def dense_sup_con_of_mask(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    rows, steps = unit(torch.cat([z, second_tower(z)])), labels.repeat(2) - labels.repeat(2)[:, None]
    positive = ((steps == 0) | (steps == 1)) & ~itself(rows)
    log_shares = (rows @ rows.T / temperature).masked_fill(itself(rows), -torch.inf).log_softmax(1)
    return -(log_shares.where(positive, 0).sum(1) / positive.sum(1)).mean()


def several_labels(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Three labels, made of classes and values, of which a sample may have none; two views."""
    several = torch.stack([labels % 2 == 0, z.detach()[:, 0] > 0, z.detach()[:, -1] < 0.3], 1).long()
    return torch.stack([z, second_tower(z)], 1), several


def dense_multi_label(z: Tensor, labels: Tensor, temperature: Any, min_jaccard: float = 0.0) -> Tensor:
    """Anchor by anchor, with sets of labels."""
    sets = [{*x.nonzero().flatten().tolist()} for x in labels.repeat_interleave(2, 0)]
    rows, losses = unit(z.flatten(0, 1)), []
    log_shares = (rows @ rows.T / temperature).masked_fill(itself(rows), -torch.inf).log_softmax(1)
    for i, own in enumerate(sets):
        jaccard = {k: len(own & other) / len(own | other) for k, other in enumerate(sets) if k != i and own & other}
        positives = {k: j for k, j in jaccard.items() if j >= min_jaccard}
        if positives:
            losses.append(-sum(j * log_shares[i, k] for k, j in positives.items()) / len(positives))
    return sum(losses, 0 * z.sum()) / max(1, len(losses))


def hierarchy(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return z, torch.stack([labels % 2, labels % 4, labels], 1)


def hierarchy_of_views(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return torch.stack([z, second_tower(z)], 1), hierarchy(z, labels)[1]


def dense_hmlc(z, labels, temperature, level_weights=None, constrained=True, one_per_class=True) -> Tensor:
    """As the authors' code, which goes on with the first sample of each class, sorted by its labels."""
    rows, total, losses = z[:, None] if z.ndim == 2 else z, 0 * z.sum(), [z.new_zeros(())]
    for level in range(labels.shape[1], 0, -1):
        classes, ids = labels[:, :level].unique(dim=0, return_inverse=True)
        loss = dense_sup_con(rows.transpose(0, 1).flatten(0, 1), ids.repeat(rows.shape[1]), temperature)
        losses.append(torch.stack([loss, *losses]).max() if constrained else loss)
        weight = math.exp(1 / len(losses[1:])) if level_weights is None else level_weights[level - 1]
        total = total + weight * losses[-1] / labels.shape[1]
        if one_per_class:
            first = [ids.tolist().index(i) for i in range(len(classes))]
            rows, labels = rows[first], labels[first]
    return total


def dense_nca(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    (positive, negative), near = masks(labels), -(unit(z)[:, None] - unit(z)).square().sum(2) / temperature
    losses = log_sums(near, positive | negative, empty=0.0) - log_sums(near, positive, empty=0.0)
    return mean_over(losses[positive.any(1)])


def dense_n_pairs(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    members = [(labels == c).nonzero().flatten().tolist() for c in labels.unique()]
    x, y = ([z[rows[k]] for rows in members if len(rows) > 1] for k in range(2))
    if not x:
        return 0 * z.sum()
    return F.cross_entropy(torch.stack(x) @ torch.stack(y).T / temperature, torch.arange(len(x)))


def dense_ge2e(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    """Embedding by embedding, with a list of centroids."""
    z, losses = unit(z), []
    for i in [i for i, c in enumerate(labels) if (labels == c).sum() > 1]:
        others = [z[labels == c].mean(0) for c in labels.unique() if c != labels[i]]
        mates = (labels == labels[i]) & (torch.arange(len(z)) != i)
        logits = unit(torch.stack([z[mates].mean(0), *others])) @ z[i] / temperature
        losses.append(logits.logsumexp(0) - logits[0])
    return sum(losses, 0 * z.sum()) / max(1, len(losses))


def dense_angular_prototypical(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    classes = [unit(z[labels == c]) for c in labels.unique() if (labels == c).sum() > 1]
    if not classes:
        return 0 * z.sum()
    prototypes = unit(torch.stack([x[:-1].mean(0) for x in classes]))
    queries = torch.stack([x[-1] for x in classes])
    return F.cross_entropy(queries @ prototypes.T / temperature, torch.arange(len(classes)))


T0 = {"base_temperature": 0.07}

ENTRIES: list[Entry] = [
    row("SupCon, in", dense_sup_con_in, "labels", variant="in"),
    row("SupCon, views", dense_sup_con_of_views, "views", together, 3, **T0),
    row("SupCon, mask", dense_sup_con_of_mask, "labels", kind=SupConOfMask),
    row("SupCon, several labels", dense_multi_label, "labels", several_labels),
    row("SupCon, mostly shared labels", dense_multi_label, "labels", several_labels, min_jaccard=0.5),
    row("HMLC", dense_hmlc, "labels", hierarchy),
    row("HMLC, views", dense_hmlc, "labels", hierarchy_of_views, constrained=False),
    row("HMLC, all samples", dense_hmlc, "labels", hierarchy, level_weights=[1.0, 0.5, 2.0], one_per_class=False),
    row("SINCERE", dense_sincere, "labels"),
    row("SINCERE, pairs", dense_sincere, "labels", average="pairs"),
    row("NCA", dense_nca, "labels"),
    row("TupletMargin", dense_tuplet_margin, "labels"),
    row("GE2E", dense_ge2e, "labels"),
]

ORDERED = [row("NPairs", dense_n_pairs, "labels"), row("AngularPrototypical", dense_angular_prototypical, "labels")]
"""Losses that care which of a class's embeddings come first."""
